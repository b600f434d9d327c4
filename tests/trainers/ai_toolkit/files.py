"""Caches of ai-toolkit made by hand: safetensors beside the pictures, by a digest."""

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.trainers.trainers import CHANNELS, PICTURES, latents_of, text_of

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
