"""Masks of clips: cut as the clip, shrunk to its latents in space and time, and read back beside them."""

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import cachestore as cs
from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.encode.families.resamplers import DEFAULT
from cachestore.encode.pictures.masks import MaskEncoder
from cachestore.encode.pictures.shots import read_input
from tests.encode.encoders import Files
from tests.encode.footage import moving, write
from tests.encode.pictures.test_masks import png
from tests.fakes import tells_of

FACTOR, FRAMES_EACH = 8, 4
WANTED: dict[str, Any] = {"video": "clip", "resolution": 56, "step": 16, "frames": [1, 5, 9]}


def grey(frames):
    """The same frames without colours, and with edges that move."""
    return [np.repeat((frame[..., :1] // 2 + (frame[..., 1:2] > 60) * np.uint8(100)), 3, axis=2) for frame in frames]


def blocks(frames, factor=FACTOR, each=FRAMES_EACH):
    """The plain computation: the mean of the pixels that each latent pixel is made of; the first frame is one latent frame."""
    count, height, width = frames.shape[:3]
    shrunk = frames[..., 0].astype(float).reshape(count, height // factor, factor, width // factor, factor).mean(axis=(2, 4))
    return np.stack([shrunk[0], *(shrunk[a:b].mean(axis=0) for a, b in pairwise(range(1, count + 1, each)))])


def found(files, mask, encoder=None, **more):
    encoder = encoder or MaskEncoder(FACTOR, FRAMES_EACH)
    resolved = encoder.resolve({**WANTED, **more, "images": {"mask": [mask]}}, files)
    prepared = encoder.prepare(resolved)
    return resolved, encoder.submit([(resolved.key, prepared.payload)])()[resolved.key]["mask"]


@pytest.mark.torch
@pytest.mark.parametrize("size", [(64, 48), (71, 45), (130, 99)], ids=str)
def test_the_mask_of_a_clip_is_the_mean_of_its_frames_over_the_pixels_and_frames_of_each_latent(size):
    """The clip is its own mask, so the pixels that are encoded say what the mask must be."""
    files = Files(clip=write(grey(moving(14, size))))
    drawn = {"crop": "random", "seed": 3, "variant": 1}
    clips = {"clips": 2, "clip": 1}
    for more in ({}, {"flip": True}, {"fps": 8.0}, {"frames": [1]}, {**clips, "flip": True}, {**drawn, **clips}, {**drawn, "flip": True}):
        seen = read_input({**WANTED, **more}, files, DEFAULT).shot.pixels()
        resolved, mask = found(files, "clip", **more)
        assert (mask.dtype, mask.shape) == (np.dtype(np.uint8), (1, *blocks(seen).shape))
        far = np.abs(mask[0] - blocks(seen))
        # without scaling only two roundings differ; with it the filter, beside edges
        assert far.max() <= (1.01 if size == (64, 48) and "crop" not in more else 25), more
        assert far.mean() <= 3, more
        assert resolved.facts == read_input({**WANTED, **more}, files, DEFAULT).facts


def test_a_picture_is_the_mask_of_all_frames_and_cut_as_each(tmp_path):
    frames = grey(moving(9, (130, 99)))
    files = Files(clip=write(moving(9, (130, 99))), still=write(frames[:1] * 9), picture=png(frames[0]))
    for more in ({}, {"flip": True}, {"crop": "random", "seed": 3, "variant": 1}):
        moved, still = found(files, "still", **more)[1], found(files, "picture", **more)[1]
        np.testing.assert_array_equal(moved, still)
        assert (still == still[:, :1]).all()


def test_the_key_is_of_the_mask_and_of_what_is_taken_of_the_video():
    frames = moving(14, (64, 48))
    files = Files(clip=write(frames), other=write(frames[::-1]), larger=write(moving(14, (128, 96))), mask=write(grey(frames)))
    files["picture"], files["same"] = png(grey(frames)[0]), files["mask"]
    key = found(files, "mask")[0].key
    assert found(files, "same", video="other")[0].key == found(files, "mask", video="larger")[0].key == key
    others = [
        found(files, "clip")[0],
        found(files, "picture")[0],
        *(found(files, "mask", **more)[0] for more in ({"flip": True}, {"fps": 8.0}, {"clips": 2, "clip": 1}, {"frames": [5]})),
        found(files, "mask", MaskEncoder(FACTOR, 8))[0],
    ]
    assert len({key, *(one.key for one in others)}) == 1 + len(others)
    second = found(files, "picture", clips=2, clip=1)[0]
    assert second.key == others[1].key  # a picture shows the same at any time
    assert [*second.inputs] == ["video", "mask"]


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        (["short"], r"^the mask video is too short: it has 3 frames, but the clip of its sample ends after 9$"),
        (["wide"], r"^the mask has 96 x 48 pixels, but its video 64 x 48: they need the same aspect ratio$"),
        (["clip", "wide"], r"^a video has one mask, but this sample has 2: leave the others out$"),
    ],
)
def test_what_cannot_be_the_mask_of_a_clip_is_refused(masks, words):
    files = Files(clip=write(moving(9, (64, 48))), wide=write(moving(9, (96, 48))), short=write(moving(3, (64, 48))))
    with pytest.raises(EncodeFailed, match=words):
        MaskEncoder(FACTOR, FRAMES_EACH).resolve({**WANTED, "images": {"mask": masks}}, files)


# Through a store


@pytest.fixture
def footage(tmp_path):
    """Two clips with a mask, as a video and as a picture, one without, a picture with a mask, and one without."""
    folder = tmp_path / "data"
    folder.mkdir()
    frames = moving(14, (64, 48))
    for number, name in enumerate(("a", "b", "c")):
        (folder / f"{name}.mkv").write_bytes(write(frames[number:]))
    for name in ("d", "e"):
        (folder / f"{name}.png").write_bytes(png(frames[3]))
    (folder / "a.mask.mkv").write_bytes(write(grey(frames)))
    for name in ("b", "d"):
        (folder / f"{name}.mask.png").write_bytes(png(grey(frames)[2]))
    return folder


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::FutureWarning:diffusers")
def test_masks_of_videos_and_of_pictures_have_the_axes_of_their_latents_in_every_batch(built, footage, tmp_path, monkeypatch):
    import torch

    from tests.train.test_read_batch import assert_read_straight

    def run(**more):
        options: dict[str, Any] = {
            "resolution": 56,
            "bucket_step": 16,
            "frames": [5, 9],
            "flip": True,
            "clips": 2,
            "inline": True,
            "vae_dtype": "float32",
        }
        return cs.precompute(footage, model=built("wan").folder, store=tmp_path / "store", **(options | more))

    report = run()
    assert (report.failed, report.not_made_here) == (0, ())
    data = cs.CachedDataset(tmp_path / "store")
    files = Files({path.name: path.read_bytes() for path in footage.iterdir()})
    for epoch in range(4):  # each clip, plain and mirrored
        data.set_epoch(epoch)
        for name in data.ids:
            sample = data[data.index(name)]
            assert sample["mask"].shape == (1, *sample["latents"].shape[1:])
        assert bool((data[data.index("c.mkv")]["mask"] == 1).all() & (data[data.index("e.png")]["mask"] == 1).all())
        cells = [
            found(files, "a.mask.mkv", video="a.mkv", frames=[5, 9], clips=2, clip=clip, **({"flip": True} if flip else {}))[1]
            for clip in range(2)
            for flip in (False, True)
        ]
        mask = data[data.index("a.mkv")]["mask"]
        assert sum(mask.equal(torch.from_numpy(cell).float() / 255) for cell in cells) == 1
        videos, pictures = ([data.index(name) for name in names] for names in (("a.mkv", "c.mkv", "b.mkv"), ("e.png", "d.png")))
        for rows in (videos, videos[1:2], pictures, pictures[:1]):
            assert_read_straight(data, rows, monkeypatch)
    assert data.features["mask"].shape == (None, 1, None, None, None)
    assert cs.verify(tmp_path / "store", recompute=50).ok

    (footage / "a.txt").write_text("another caption")
    (footage / "e.mask.png").unlink(missing_ok=True)
    assert run(encode=["text"]).encoded == 1
    assert len(cs.CachedDataset(tmp_path / "store")) == 5  # masks stay beside latents
    (footage / "a.mask.mkv").write_bytes((footage / "a.mkv").read_bytes())
    assert run(encode=["latents"]).encoded == 4
    cs.export_cache(tmp_path / "store", format="webdataset", folder=tmp_path / "tars")
    cs.import_cache("webdataset", tmp_path / "tars", store=tmp_path / "back")
    there, back = (cs.CachedDataset(tmp_path / store) for store in ("store", "back"))
    assert all(back[back.index(name)]["mask"].equal(there[there.index(name)]["mask"]) for name in there.ids)
    with pytest.raises(BadInput):
        cs.export_cache(tmp_path / "store", format="musubi", folder=tmp_path / "out", leave_out=["flips"])


@pytest.mark.torch
def test_a_mask_without_picture_and_video_is_still_refused(built, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "one", "mask": "m.png", "caption": "x"}) + "\n")
    with pytest.raises(BadInput, check=tells_of("'one'", "mask")):
        cs.plan(tmp_path / "rows.jsonl", model=built("wan").folder, store=tmp_path / "store", frames=[5])
