"""Caches of sd-scripts made by hand: numpy.savez beside the picture."""

from typing import Any

import numpy as np

from tests.trainers.trainers import PICTURES, ROWS, T5_MASK, latents_of, text_of

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
