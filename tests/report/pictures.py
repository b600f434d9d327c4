"""Stores of latents that a linear VAE would make, with the pictures beside them."""

from dataclasses import replace
from io import BytesIO

import numpy as np
from PIL import Image

from cachestore.core.keys import digest_bytes
from cachestore.store.format.catalog import Cell, make_column
from cachestore.store.write.writer import open_store
from tests.fakes import publish_catalog
from tests.train import stores
from tests.train.stores import Row, picture_key

FACTOR = 8
SIZE = (128, 96)
MIX = np.array([[0.9, -0.3, 0.1, 0.2], [0.2, 0.8, -0.4, 0.1], [-0.1, 0.3, 0.7, 0.5]])


def picture(n):
    """A picture of smooth colours, 8 x 8 pixels of each."""
    coarse = np.random.default_rng(n).integers(0, 256, (SIZE[1] // FACTOR, SIZE[0] // FACTOR, 3), np.uint8)
    return coarse, coarse.repeat(FACTOR, 0).repeat(FACTOR, 1)


def latents_of(coarse):
    """What a linear VAE would make of it: four channels, and a log-variance that means nothing."""
    mean = np.moveaxis(coarse.astype(np.float64) @ MIX / 128 - 1, -1, 0)
    return np.concatenate([mean, np.full_like(mean, -20)]).astype(np.float32)


def make(tmp_path, count=3, *, others=(), pictures=(), **facts):
    """A store of such latents, with the pictures beside it, perhaps of these bytes, and perhaps other sources; returns its path."""
    made = stores.recipes(None)
    data, path = tmp_path / "data", tmp_path / "store"
    data.mkdir()
    rows, cells = [Row(f"{n}.png", (f"caption {n}",)) for n in range(count)], []
    with open_store(path, mode="a") as store:
        with store.writer() as writer:
            for n, row in enumerate(rows):
                coarse, pixels = picture(n)
                buffer = BytesIO()
                Image.fromarray(pixels).save(buffer, "PNG")
                content = pictures[n] if pictures else buffer.getvalue()
                (data / row.id).write_bytes(content)
                writer.put(picture_key(made.latents, row.id), {"moments": latents_of(coarse)})
                known = {"size": SIZE, "bucket": SIZE, "resized": SIZE, "crop": (0, 0, *SIZE), **facts}
                digest = bytes.fromhex(digest_bytes(content))
                cells.append([Cell(picture_key(made.latents, row.id), digest, facts=known)])
        store.commit()
        ids = [row.id for row in rows]
        column = make_column("latents", "image", made.latents.fingerprint, {}, cells)
        catalog = stores.catalog_of([replace(row, bucket=None) for row in rows], made, "train")
        images = {"image": (list(range(count + 1)), [f"data/{name}" for name in ids] if others else ids)}
        sources = {"sources": [{"data": str(path)} for path in (data, *others)]} if others else {}
        catalog = replace(catalog, columns=(column,), images=images, request={"latents": {"data": str(data), **sources}})
        publish_catalog(store.layout, catalog)
    return path


def make_clips(tmp_path, clips, *, fps, frames):
    """A store of latents of these clips, bytes by name, as a VAE would make them of so many frames, four at a time after the first."""
    made = stores.recipes(None, "mean")
    data, path = tmp_path / "clips", tmp_path / "clip store"
    data.mkdir()
    rows, cells = [Row(name, (f"a caption of {name}",)) for name in clips], []
    with open_store(path, mode="a") as store:
        with store.writer() as writer:
            for name, content in clips.items():
                (data / name).write_bytes(content)
                latents = np.random.default_rng(1).standard_normal((4, 1 + frames // 4, SIZE[1] // FACTOR, SIZE[0] // FACTOR))
                writer.put(picture_key(made.latents, name), {"mean": latents.astype(np.float32)})
                facts = {"size": SIZE, "bucket": (*SIZE, frames), "resized": SIZE, "crop": (0, 0, *SIZE), "fps": (fps, 1), "start": (0,)}
                cells.append([Cell(picture_key(made.latents, name), bytes.fromhex(digest_bytes(content)), facts=facts)])
        store.commit()
        column = make_column("latents", "video", made.latents.fingerprint, {"fps": fps}, cells)
        catalog = replace(
            stores.catalog_of(rows, made, "train"),
            columns=(column,),
            images={"video": (list(range(len(clips) + 1)), list(clips))},
            request={"latents": {"data": str(data)}},
        )
        publish_catalog(store.layout, catalog)
    return path
