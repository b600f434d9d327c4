"""Caches made by hand as the trainers make them, and the rules by which their readers accept a file. Nothing here uses our own formats.

Writers and readers follow docs/design/trainers.md and the tables of docs/interop.md: names, keys, shapes, dtypes and scaling states.
"""

import base64
import gzip
import hashlib
import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

CHANNELS = {"sd15": 4, "sdxl": 4, "sd3": 16, "flux": 16, "wan": 16, "qwen-image": 16, "z-image": 16}
ROWS = 6
"""T5's rows, of which real caches have hundreds."""
T5_MASK = [1, 1, 1, 0, 0, 0]


@dataclass(frozen=True)
class Picture:
    """A sample of the source, and how large it and its latents are."""

    reference: str
    caption: str
    size: tuple[int, int]
    latent: tuple[int, int]
    """(height, width)."""

    @property
    def stem(self):
        return self.reference.rpartition(".")[0]


PICTURES = (
    Picture("a/one.png", "a red fox, in snow", (100, 80), (6, 8)),
    Picture("two.png", "ein grüner Vogel", (64, 64), (8, 8)),
    Picture("a/three.v2.png", "", (90, 120), (8, 6)),
)


def make_source(root: Path, pictures=PICTURES) -> Path:
    for number, picture in enumerate(pictures):
        path = root / picture.reference
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", picture.size, (40 * number, 80, 200)).save(path)
        (root / f"{picture.stem}.txt").write_text(picture.caption, encoding="utf-8")
    return root


def noise(*parts, shape, dtype=torch.float32):
    seed = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def latents_of(picture, family, dtype=torch.float32, *, frames=None):
    height, width = picture.latent
    shape = (CHANNELS[family], height, width) if frames is None else (CHANNELS[family], frames, height, width)
    return noise(picture.reference, family, shape=shape, dtype=dtype)


def text_of(caption, family, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """What a family's encoders make of a caption: joined as pipelines take it, without a batch axis."""
    if family == "sdxl":
        return {"prompt": noise(caption, shape=(77, 2048), dtype=dtype), "pooled": noise(caption, 1, shape=(1280,), dtype=dtype)}
    if family == "sd3":
        clip = torch.nn.functional.pad(noise(caption, shape=(77, 2048), dtype=dtype), (0, 2048))
        t5 = noise(caption, 2, shape=(ROWS, 4096), dtype=dtype)
        return {"prompt": torch.cat([clip, t5]), "pooled": noise(caption, 1, shape=(2048,), dtype=dtype)}
    return {"prompt": noise(caption, shape=(ROWS, 4096), dtype=dtype), "pooled": noise(caption, 1, shape=(768,), dtype=dtype)}


# sd-scripts: numpy.savez beside the picture

SD_SUFFIX = {"sd15": "sd", "sdxl": "sdxl", "sd3": "sd3", "flux": "flux"}
SD_TEXT = {"sdxl": "_te_outputs.npz", "sd3": "_sd3_te.npz", "flux": "_flux_te.npz"}


def sd_latents_path(root, picture, family):
    width, height = picture.size
    return root / f"{picture.stem}_{width:04d}x{height:04d}_{SD_SUFFIX[family]}.npz"


def write_sd_scripts(root, family, pictures=PICTURES, *, is_flipped=True, bare=None):
    """A cache as sd-scripts writes it; `bare` forces keys with or without their size."""
    for picture in pictures:
        height, width = picture.latent
        suffix = "" if (family in {"sd15", "sdxl"} if bare is None else bare) else f"_{height}x{width}"
        latents = latents_of(picture, family).numpy()
        arrays: dict[str, Any] = {
            f"latents{suffix}": latents,
            f"original_size{suffix}": np.array(picture.size),
            f"crop_ltrb{suffix}": np.array([0, 0, *picture.size]),
        }
        if is_flipped:
            arrays[f"latents_flipped{suffix}"] = latents[..., ::-1].copy()
            arrays[f"alpha_mask{suffix}"] = np.ones((height * 8, width * 8), np.float32)
        path = sd_latents_path(root, picture, family)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **arrays)
        if family in SD_TEXT:
            np.savez(root / f"{picture.stem}{SD_TEXT[family]}", **sd_text(picture.caption, family))


def sd_text(caption, family) -> dict[str, Any]:
    made = {name: tensor.numpy() for name, tensor in text_of(caption, family).items()}
    mask = np.array(T5_MASK, np.int64)
    if family == "sdxl":
        return {"hidden_state1": made["prompt"][:, :768], "hidden_state2": made["prompt"][:, 768:], "pool2": made["pooled"]}
    if family == "sd3":
        clip = np.ones(77, np.int64)
        return {
            "lg_out": made["prompt"][:77, :2048],
            "lg_pooled": made["pooled"],
            "t5_out": made["prompt"][77:],
            "clip_l_attn_mask": clip,
            "clip_g_attn_mask": clip,
            "t5_attn_mask": mask,
            "apply_lg_attn_mask": np.array(False),
            "apply_t5_attn_mask": np.array(True),
        }
    ids = np.zeros((ROWS, 3), np.float32)
    return {
        "l_pooled": made["pooled"],
        "t5_out": made["prompt"],
        "txt_ids": ids,
        "t5_attn_mask": mask,
        "apply_t5_attn_mask": np.array(True),
    }


def read_sd_scripts(root, picture, family, bucket):
    """What sd-scripts takes of a folder; anything else it would encode again."""
    latents_path, text_path = sd_latents_path(root, picture, family), root / f"{picture.stem}{SD_TEXT[family]}"
    size = (bucket[1] // 8, bucket[0] // 8)
    suffix = "" if family in {"sd15", "sdxl"} else f"_{size[0]}x{size[1]}"
    npz, text = np.load(latents_path, allow_pickle=False), np.load(text_path, allow_pickle=False)
    assert (npz[f"latents{suffix}"].shape[1:], npz[f"latents{suffix}"].dtype) == (size, np.float32)
    assert npz[f"original_size{suffix}"].tolist() == list(picture.size)
    assert npz[f"crop_ltrb{suffix}"].shape == (4,)
    needed = {
        "sdxl": ("hidden_state1", "hidden_state2", "pool2"),
        "sd3": ("lg_out", "lg_pooled", "clip_l_attn_mask", "clip_g_attn_mask", "apply_lg_attn_mask", "t5_out", "t5_attn_mask"),
        "flux": ("l_pooled", "t5_out", "txt_ids", "t5_attn_mask", "apply_t5_attn_mask"),
    }[family]
    assert set(needed) <= set(text)
    return dict(npz), dict(text)


# SimpleTuner: torch.save, text by the caption's digest, latents by the picture's

ST_FAMILY = {"sd15": "sd1x", "sdxl": "sdxl", "sd3": "sd3", "flux": "flux", "wan": "wan"}


def st_text_path(folder, caption, family):
    return folder / f"{hashlib.md5(str(caption).encode('utf-8')).hexdigest()}-{ST_FAMILY[family]}.pt"


def st_latents_path(folder, picture):
    sub, _, name = picture.reference.rpartition("/")
    return folder / sub / f"{hashlib.sha256(name.rpartition('.')[0].encode()).hexdigest()}.pt"


def st_text(caption, family, dtype=torch.bfloat16):
    made = text_of(caption, family, dtype)
    record = {"prompt_embeds": made["prompt"][None], "pooled_prompt_embeds": made["pooled"]}
    if family == "flux":
        record |= {"time_ids": torch.zeros(1, ROWS, 3), "attention_masks": torch.tensor([T5_MASK])}
    return record


def write_simpletuner(text, vae, family, pictures=PICTURES, *, dtype=torch.bfloat16, compress=False):
    """The two folders of a SimpleTuner cache."""
    text.mkdir(parents=True, exist_ok=True)
    for caption in {"", *(picture.caption for picture in pictures)}:
        path = st_text_path(text, caption, family)
        torch.save(st_text(caption, family, dtype), path)
        if compress:
            path.write_bytes(gzip.compress(path.read_bytes()))
    for picture in pictures:
        path = st_latents_path(vae, picture)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(latents_of(picture, family, dtype), path)


def st_sizes(picture, *, left=0):
    """What SimpleTuner knows of a picture that was cut from a larger one, `left` pixels beside the centre."""
    height, width = (8 * side for side in picture.latent)
    return {
        "original_size": list(picture.size),
        "intermediary_size": [width + 20, height + 7],
        "target_size": [width, height],
        "crop_coordinates": [3, 10 + left],
        "aspect_ratio": round(width / height, 2),
        "luminance": 93.5,
    }


def write_st_sizes(data, name, pictures=PICTURES, *, left=0, root="/elsewhere/data"):
    """The two files that SimpleTuner keeps beside the pictures, as they were made on a machine where the data lay elsewhere."""
    known = {f"{root}/{picture.reference}": st_sizes(picture, left=left) for picture in pictures}
    buckets: dict[str, list[str]] = {}
    for path, sizes in known.items():
        buckets.setdefault(str(sizes["aspect_ratio"]), []).append(path)
    indices = {"config": {"resolution": 1.0}, "aspect_ratio_bucket_indices": buckets}
    (data / f"aspect_ratio_bucket_metadata_{name}.json").write_text(json.dumps(known))
    (data / f"aspect_ratio_bucket_indices_{name}.json").write_text(json.dumps(indices))


def read_simpletuner(text, vae, picture, family):
    """What SimpleTuner takes of its folders: it trusts names, and finds a tensor of latents and a dict of text."""
    latents = torch.load(st_latents_path(vae, picture), weights_only=True)
    record = torch.load(st_text_path(text, picture.caption, family), weights_only=True)
    assert isinstance(latents, torch.Tensor)
    assert latents.shape == (CHANNELS[family], *picture.latent)
    assert record["prompt_embeds"].ndim == 3
    assert record["prompt_embeds"].shape[0] == 1
    assert record["pooled_prompt_embeds"].ndim == 1
    return latents, record


# musubi-tuner: safetensors in one flat folder

MUSUBI = {"flux": ("fk", "flux_kontext"), "wan": ("wan", "wan"), "qwen-image": ("qi", "qwen_image"), "z-image": ("zi", "z_image")}
MUSUBI_TEXT = {"flux": "t5_vec", "wan": "varlen_t5", "qwen-image": "varlen_vl_embed", "z-image": "varlen_llm_embed"}
WIDTH = 4096
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32", "int64")


def musubi_paths(folder, picture, family):
    stem, arch, (width, height) = picture.stem.rpartition("/")[2], MUSUBI[family][0], picture.size
    return folder / f"{stem}_{width:04d}x{height:04d}_{arch}.safetensors", folder / f"{stem}_{arch}_te.safetensors"


def write_musubi(folder, family, pictures=PICTURES, *, dtype=torch.float32):
    folder.mkdir(parents=True, exist_ok=True)
    name = str(dtype).removeprefix("torch.")
    for picture in pictures:
        latents_path, text_path = musubi_paths(folder, picture, family)
        frames = 1 if family in {"wan", "qwen-image"} else None
        latents = latents_of(picture, family, dtype, frames=frames)
        height, width = picture.latent
        tensors = {f"latents_1x{height}x{width}_{name}": latents}
        if family == "flux":
            tensors[f"latents_control_1x{height}x{width}_{name}"] = latents + 1
        reported = {"architecture": MUSUBI[family][1], "format_version": "1.0.1"}
        metadata = {**reported, "width": f"{picture.size[0]}", "height": f"{picture.size[1]}"}
        save_file(tensors, latents_path, metadata=metadata)
        made = {f"{MUSUBI_TEXT[family]}_{name}": musubi_text(picture, family, dtype)}
        if family == "flux":
            made[f"clip_l_pooler_{name}"] = text_of(picture.caption, "flux", dtype)["pooled"]
        save_file(made, text_path, metadata={**reported, "caption1": picture.caption})


def musubi_text(picture, family, dtype):
    """Embeddings of the caption's own length where the model takes such."""
    rows = ROWS if family == "flux" else 2 + len(picture.caption) % 5
    return noise(picture.caption, family, shape=(rows, WIDTH), dtype=dtype)


def read_musubi(folder, picture, family) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What musubi-tuner takes of its folder: the dtype is cut off each key, then frames and size off those of latents."""
    found = []
    for path in musubi_paths(folder, picture, family):
        tensors = {}
        for key, tensor in load_file(path).items():
            name = next(key.removesuffix(f"_{dtype}") for dtype in DTYPES if key.endswith(f"_{dtype}"))
            if name.startswith("latents_"):
                name, size = name.rpartition("_")[::2]
                assert [int(number) for number in size.split("x")][-2:] == list(tensor.shape[-2:])
            tensors[name] = tensor
        found.append(tensors)
    return found[0], found[1]


# ai-toolkit: safetensors beside the pictures, by a digest

AITK_SPACE = {"sd15": "sd1", "sdxl": "sdxl", "sd3": "sd3", "flux": "flux1"}
AITK_TEXT_SPACE = {"sdxl": "sdxl", "sd3": "sd3", "flux": "flux"}


def aitk_hash(info: Mapping[str, Any]) -> str:
    return base64.urlsafe_b64encode(hashlib.md5(json.dumps(info, sort_keys=True).encode()).digest()).decode().rstrip("=")


def aitk_caption(text):
    """What it digests of a caption file's text."""
    return ", ".join(text.split(","))


def aitk_info(picture, family):
    """A picture scaled to cover its bucket, and cut at the centre."""
    height, width = (8 * side for side in picture.latent)
    scale = max(width / picture.size[0], height / picture.size[1])
    across, down = round(picture.size[0] * scale), round(picture.size[1] * scale)
    return {
        "filename": picture.reference.rpartition("/")[2],
        "scale_to_width": across,
        "scale_to_height": down,
        "crop_x": (across - width) // 2,
        "crop_y": (down - height) // 2,
        "crop_width": width,
        "crop_height": height,
        "latent_space_version": AITK_SPACE[family],
        "latent_version": 1,
    }


def aitk_paths(root, picture, family, *, is_flipped=False):
    folder = (root / picture.reference).parent
    info = aitk_info(picture, family) | ({"flip_x": True} if is_flipped else {})
    name = picture.stem.rpartition("/")[2]
    text = {"caption": aitk_caption(picture.caption), "text_embedding_space_version": AITK_TEXT_SPACE[family], "text_embedding_version": 1}
    latents = folder / "_latent_cache" / f"{name}_{aitk_hash(info)}.safetensors"
    return latents, folder / "_t_e_cache" / f"{name}_{aitk_hash(text)}.safetensors"


def write_ai_toolkit(root, family, pictures=PICTURES, *, dtype=torch.bfloat16):
    for picture in pictures:
        latents_path, text_path = aitk_paths(root, picture, family)
        for path in (latents_path, text_path):
            path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {name: json.dumps(value) for name, value in aitk_info(picture, family).items()}
        metadata |= {"format": "pt", "software": json.dumps({"name": "ai-toolkit"})}
        save_file({"latent": latents_of(picture, family, dtype)}, latents_path, metadata=metadata)
        made = text_of(picture.caption, family, dtype)
        save_file({"text_embed": made["prompt"][None].clone(), "pooled_embed": made["pooled"][None].clone()}, text_path)


def read_ai_toolkit(root, picture, family):
    """What ai-toolkit takes of a folder: it looks for the very name, and loads it whole."""
    latents_path, text_path = aitk_paths(root, picture, family)
    latents, text = load_file(latents_path), load_file(text_path)
    assert latents["latent"].shape == (CHANNELS[family], *picture.latent)
    assert text["text_embed"].ndim == 3
    assert text["pooled_embed"].ndim == 2
    return latents, text


# diffusion-pipe: shards with a table


def write_shards(folder, items):
    """One cache folder of diffusion-pipe."""
    folder.mkdir(parents=True)
    table = sqlite3.connect(folder / "metadata.db")
    table.execute("CREATE TABLE fingerprint(value)")
    table.execute("CREATE TABLE items(shard, shard_index)")
    table.execute("CREATE TABLE shard_0(offset, size)")
    with (folder / "shard_0.bin").open("wb") as file:
        for number, item in enumerate(items):
            offset = file.tell()
            torch.save(item, file)
            table.execute("INSERT INTO items VALUES(0, ?)", (number,))
            table.execute("INSERT INTO shard_0 VALUES(?, ?)", (offset, file.tell() - offset))
    table.commit()
    table.close()


def write_diffusion_pipe(folder, family="flux", pictures=PICTURES, *, dtype=torch.bfloat16, width=None):
    """The cache of one model, as it was made on a machine where the data lay elsewhere. `width` is that of a tiny model's text."""
    for picture in pictures:
        spec = (None, f"/elsewhere/data/{picture.reference}")
        size = f"{picture.latent[1] * 8}x{picture.latent[0] * 8}"
        name = picture.stem.replace("/", "-")
        latents = {"latents": latents_of(picture, family, dtype), "mask": None, "image_spec": spec, "caption": [picture.caption]}
        write_shards(folder / f"cache_{name}x{size}x1" / "latents", [latents])
        made = {key: tensor[..., :width].clone() for key, tensor in text_of(picture.caption, family, dtype).items()}
        write_shards(folder / f"ar_frames_{name}_1" / "text_embeddings_1", [{"clip_embed": made["pooled"], "image_spec": spec}])
        write_shards(folder / f"ar_frames_{name}_1" / "text_embeddings_2", [{"t5_embed": made["prompt"], "image_spec": spec}])


def write_diffusion_pipe_wan(folder, name, caption, frames, size, *, dtype=torch.bfloat16, width=16):
    """Latents and text of one video or picture of Wan. Rows after the caption are what the encoder makes of padding."""
    spec, (across, down) = (None, f"/elsewhere/data/{name}"), size
    tensor = noise(name, frames, across, shape=(16, (frames - 1) // 4 + 1, down // 8, across // 8), dtype=dtype)
    rows = noise(caption, shape=(9, width), dtype=dtype)
    latents = {"latents": tensor, "mask": None, "image_spec": spec, "caption": [caption]}
    write_shards(folder / f"cache_{name}x{across}x{down}x{frames}" / "latents", [latents])
    text = {"text_embeddings": rows, "seq_lens": torch.tensor(3), "image_spec": spec}
    write_shards(folder / f"ar_frames_{name}_{frames}_{across}" / "text_embeddings_1", [text])
    return tensor, rows[:3]
