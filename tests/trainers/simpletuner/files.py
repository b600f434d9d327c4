"""Caches of SimpleTuner made by hand: torch.save, text by the caption's digest, latents by the picture's."""

import gzip
import hashlib
import json

import torch

from tests.trainers.trainers import CHANNELS, PICTURES, ROWS, T5_MASK, latents_of, text_of

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
