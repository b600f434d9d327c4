"""Caches of musubi-tuner made by hand: safetensors in one flat folder."""

import torch
from safetensors.torch import load_file, save_file

from tests.trainers.trainers import PICTURES, ROWS, latents_of, noise, text_of

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
