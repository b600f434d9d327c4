"""Caches of diffusion-pipe made by hand: shards with a table."""

import sqlite3

import torch

from tests.trainers.trainers import PICTURES, latents_of, noise, text_of


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
