"""Small stores, written without any encoder: values are a function of caption or sample id, so that tests can say what must come out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from cachestore.core.keys import Key, Recipe, digest_text, input_key
from cachestore.encode.families import lookup as families
from cachestore.encode.families import text as text_families
from cachestore.store.format.catalog import Catalog, Cell, make_column
from cachestore.store.write.writer import open_store
from tests.fakes import publish_catalog

SDXL = families.text_family("StableDiffusionXLPipeline")
FLUX = families.text_family("FluxPipeline")
PLAIN = text_families.PLAIN

WIDTHS = {"prompt_embeds": 6, "prompt_embeds.text_encoder": 4, "prompt_embeds.text_encoder_2": 5, "pooled_prompt_embeds": 5}
LENGTH = 7
CHANNELS = 4
VAE = {"scaling_factor": 0.3611, "shift_factor": 0.1159, "latent_channels": CHANNELS, "block_out_channels": [1, 1, 1, 1]}


@dataclass(frozen=True)
class Row:
    id: str
    captions: Sequence[str] = ("a photo",)
    bucket: tuple[int, int] | None = (64, 48)
    """None for a sample without a picture."""
    fails: bool = False
    """Whether its latents could not be made."""
    extras: str = "{}"
    size: tuple[int, int] = (640, 480)
    crop: tuple[int, int, int, int] = (3, 2, 67, 50)
    is_measured: bool = True
    """Whether the catalog knows the sizes of its picture."""
    controls: Sequence[tuple[int, int]] = ()
    """The buckets of its control images."""
    has_mask: bool = False
    control_fails: bool = False
    """Whether the latents of its control images could not be made."""


@dataclass(frozen=True)
class Recipes:
    """Recipes, or None for what the data set does not have."""

    text: Any = None
    latents: Any = None
    masks: Any = None


def recipes(family: Any = SDXL, stored: Any = "moments", **vae) -> Recipes:
    text = Recipe("text", {"model": family.name}, families.text_read(family)) if family is not None else None
    read = families.latents_read(families.vae_family("AutoencoderKL"), {**VAE, **vae}, stored) if stored is not None else None
    return Recipes(text, Recipe("latents", {"vae": 1, "stored": stored}, read) if read is not None else None)


def recipes_of_model(model: Path) -> Recipes:
    """Write the files of a model, and return recipes that say that they made the entries."""
    (model / "vae").mkdir(parents=True)
    (model / "vae/config.json").write_bytes(b"{}")
    files = {"files": {"vae/config.json": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"}}
    plain = recipes()
    return Recipes(*(replace(recipe, make={**recipe.make, **files}) for recipe in (plain.text, plain.latents)))


def noise(*parts, shape, dtype: Any = np.float32):
    seed = int.from_bytes(sha256(repr(parts).encode()).digest()[:8], "little")
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def stored_text(recipe: Recipe, caption: str, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """What an encoder would keep of a caption: as many rows as it has characters, where the family trims."""
    length = len(caption) if recipe.read["pad"] else LENGTH
    names = [name for form in recipe.read["outputs"].values() for name in form.get("join", [form.get("from")])]
    shapes = {name: (WIDTHS[name],) if name.startswith("pooled") else (length, WIDTHS[name]) for name in names}
    return {name: noise(name, caption, shape=shape, dtype=dtype) for name, shape in shapes.items()}


def stored_latents(recipe: Recipe, sample_id: str, bucket: tuple[int, int], dtype: Any = np.float32) -> dict[str, np.ndarray]:
    width, height = bucket
    stored = recipe.read["stored"]
    channels = 2 * CHANNELS if stored == "moments" else CHANNELS
    return {stored: noise(stored, sample_id, shape=(channels, height // 8, width // 8), dtype=dtype)}


def caption_key(recipe: Recipe, caption: str) -> Key:
    return input_key(recipe.fingerprint, {"caption": digest_text(caption)}, {})


def picture_key(recipe: Recipe, sample_id: str) -> Key:
    return input_key(recipe.fingerprint, {"image": digest_text(sample_id)}, {})


def make_store(
    path: Path, rows: Sequence[Row], made: Recipes, *, name="train", prompts=("",), dtype: Any = np.float32, leave_out=()
) -> Path:
    """Write the entries of these rows, and a catalog that names them. `leave_out` are captions whose entries are forgotten."""
    with open_store(path, mode="a") as store:
        with store.writer() as writer:
            if made.text is not None:
                for caption in {*prompts, *(caption for row in rows for caption in row.captions)} - set(leave_out):
                    writer.put(caption_key(made.text, caption), stored_text(made.text, caption, dtype))
            for row in rows:
                if made.latents is not None and row.bucket is not None and not row.fails:
                    writer.put(picture_key(made.latents, row.id), stored_latents(made.latents, row.id, row.bucket, dtype))
                if row.has_mask and row.bucket is not None:
                    width, height = row.bucket
                    mask = noise("mask", row.id, shape=(1, height // 8, width // 8)) > 0
                    writer.put(picture_key(made.masks, row.id), {"mask": mask.astype(np.uint8) * 255})
                if made.latents is not None and not row.control_fails:
                    for number, bucket in enumerate(row.controls):
                        shown = control_of(row, number)
                        writer.put(picture_key(made.latents, shown), stored_latents(made.latents, shown, bucket, dtype))
        store.commit()
        publish_catalog(store.layout, catalog_of(rows, made, name))
    return path


def catalog_of(rows: Sequence[Row], made: Recipes, name: str) -> Catalog:
    columns = []
    if made.text is not None:
        cells = [[Cell(caption_key(made.text, caption)) for caption in row.captions] for row in rows]
        columns.append(make_column("text", "caption", made.text.fingerprint, {}, cells))
    if made.latents is not None:
        columns.append(make_column("latents", "image", made.latents.fingerprint, {}, [picture_cells(made.latents, row) for row in rows]))
        if any(row.controls for row in rows):
            cells = [control_cells(made.latents, row) for row in rows]
            columns.append(make_column("latents", "control", made.latents.fingerprint, {}, cells))
    if made.masks is not None:
        cells = [[Cell(picture_key(made.masks, row.id))] if row.has_mask else [] for row in rows]
        columns.append(make_column("mask", "mask", made.masks.fingerprint, {}, cells))
    starts = np.cumsum([0, *(len(row.captions) for row in rows)]).tolist()
    return Catalog(
        name=name,
        request={},
        recipes={recipe.fingerprint: recipe for recipe in (made.text, made.latents, made.masks) if recipe is not None},
        ids=[row.id for row in rows],
        captions_at=starts,
        captions=[caption for row in rows for caption in row.captions],
        images={},
        extras=[row.extras for row in rows],
        columns=tuple(columns),
    )


def picture_cells(recipe: Recipe, row: Row) -> list[Cell]:
    if row.bucket is None:
        return []
    facts = {"size": row.size, "bucket": row.bucket, "crop": row.crop} if row.is_measured else {}
    return [Cell(None if row.fails else picture_key(recipe, row.id), facts=facts)]


def control_of(row: Row, number: int) -> str:
    """What names a sample's control image."""
    return f"{row.id}, control {number}"


def control_cells(recipe: Recipe, row: Row) -> list[Cell]:
    keys = [None if row.control_fails else picture_key(recipe, control_of(row, number)) for number in range(len(row.controls))]
    return [Cell(key, facts={"bucket": bucket} if row.is_measured else {}) for key, bucket in zip(keys, row.controls, strict=True)]


def agrees(data, indices) -> None:
    """A data set's features with what a batch of it holds: the same tensors, and no number but the batch's own."""
    batch = data.read_batch(indices)
    lists = {name for name, value in batch.items() if isinstance(value, list) and isinstance(value[0], list)}
    assert set(data.features) == {name for name, value in batch.items() if hasattr(value, "dtype")} | (lists & {"control_latents"})
    for name, feature in data.features.items():
        tensor = batch[name] if name not in lists else batch[name][0][0]
        assert feature.dtype in {None, tensor.dtype}, name
        if feature.shape is not None:
            assert len(feature.shape) == tensor.ndim, name
            assert all(reported in {None, size} for reported, size in zip(feature.shape, tensor.shape, strict=True)), name
