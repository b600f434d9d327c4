"""What a page shows of samples: frames of clips, and how each sample was scaled and cut."""

from typing import Any

import pytest

from cachestore.report.document import _in_words
from cachestore.report.gallery import make_gallery
from cachestore.report.numbers import ClipFile, Framing, Picture, Thumbnail
from cachestore.report.write import write_report
from cachestore.store.format.catalog import Cell
from cachestore.store.read.reader import Reader
from cachestore.store.read.rows import newest_catalog
from cachestore.train.facts import cut_of
from tests.encode.footage import moving, write
from tests.report.pictures import SIZE, make, make_clips
from tests.report.test_write import Page, is_accessible, is_static

MP4: Any = {"kind": "mp4", "codec": "libx264", "pix_fmt": "yuv420p"}


def gallery_of(path):
    with Reader(path) as reader:
        catalog = newest_catalog(reader.layout, "train")
        assert catalog is not None
        return make_gallery(reader, catalog, None)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, (None, None, ())),
        ({"size": (128, 96), "resized": (128, 96), "crop": (0, 0, 128, 96)}, (1.0, 0.0, ())),
        ({"size": (90, 60), "resized": (320, 213), "crop": (0, 10, 320, 202)}, (3.556, 0.099, ("top", "bottom"))),
        ({"size": (800, 400), "resized": (200, 100), "crop": (0, 0, 100, 100)}, (0.25, 0.5, ("right",))),
        ({"size": (800, 400), "resized": (200, 100), "crop": (0, 0, 100, 100), "flip": (1,)}, (0.25, 0.5, ("left",))),
        ({"size": (0, 0), "resized": (200, 100), "crop": (0, 0, 200, 100)}, (None, 0.0, ())),
        ({"size": (9, 9), "resized": (9, 9), "crop": (5, 5, 3, 3)}, (None, None, ())),
    ],
)
def test_how_a_picture_was_scaled_and_where_it_was_cut_follows_from_the_catalog(facts, expected):
    scale, cut, sides = cut_of(Cell(facts=facts))
    assert (scale and round(scale, 3), cut and round(cut, 3), sides) == expected


def thumbnail(framing):
    return Thumbnail(framing, "", "", (Picture("png", b"", 16, 12),), ())


@pytest.mark.parametrize(
    ("framing", "said"),
    [
        (Framing("a", ()), "16x12 latents"),
        (Framing("a", (64, 48), (64, 48), 1.0, 0.0), "64x48, bucket 64x48, not scaled, nothing cut"),
        (Framing("a", (64, 48), (32, 24), 2.0, 0.004, ("left",)), "scaled up 2.00 times, less than 1\u00a0% cut at left"),
        (Framing("a", (64, 48), (640, 600), 0.1, 0.2, ("top", "bottom")), "scaled down to 0.10, 20\u00a0% cut at top and bottom"),
        (Framing("a", (64, 48), (64, 48), within=(0, 0, 9, 9)), "64x48, of which [0, 0, 9, 9] is used, bucket 64x48"),
        (Framing("a", (64, 48, 33), fps=16.0), "bucket 64x48, 33 frames at 16 a second, 2.1 s"),
        (Framing("a", (64, 48, 1)), "1 frame"),
        (
            Framing("a", (64, 48, 9), fps=16.0, file=ClipFile(10.0, 3, has_sound=True)),
            "3 of them repeated: the file has 10 a second, sound: not",
        ),
        (Framing("a", (64, 48, 9), fps=16.0, file=ClipFile(16.0, 0, has_sound=False)), "0.6 s, sound: none"),
    ],
)
def test_what_was_encoded_is_said_in_words(framing, said):
    assert said in _in_words(thumbnail(framing))


def test_a_clip_shows_three_frames_and_what_its_file_says(tmp_path):
    clips = {
        "sound.mp4": write(moving(40, SIZE), rate=16, has_sound=True, **MP4),
        "slow.mp4": write(moving(20, SIZE), rate=8, **MP4),
    }
    found = gallery_of(make_clips(tmp_path, clips, fps=16, frames=17))
    by_name = {one.framing.sample: one for one in found.thumbnails}
    files = {name: (one.framing.file.repeated, one.framing.file.has_sound) for name, one in by_name.items() if one.framing.file}
    assert files == {"sound.mp4": (0, True), "slow.mp4": (8, False)}
    for one in by_name.values():
        assert (len(one.originals), len(one.latents), one.is_clip) == (3, 3, True)
        assert len({original.data for original in one.originals}) == 3


def test_the_frames_of_clips_take_no_more_room_than_pictures(tmp_path):
    clip = gallery_of(make_clips(tmp_path, {"a.mp4": write(moving(20, (320, 240)), **MP4)}, fps=16, frames=17)).thumbnails[0]
    assert sum(one.width * one.height for one in clip.originals) <= 192 * 192
    assert all(one.width * one.height * len(clip.latents) <= 128 * 128 for one in clip.latents)


def test_the_page_of_clips_names_rate_length_and_sound_and_of_a_clip_that_is_gone_why(tmp_path):
    clips = {name: write(moving(20 + n, SIZE), **MP4) for n, name in enumerate(("a.mp4", "b.mp4"))}
    path = make_clips(tmp_path, clips, fps=16, frames=17)
    (tmp_path / "clips" / "b.mp4").unlink()
    reported: Any = write_report(path, tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    shown = "".join(page.words)
    assert "2 samples, chosen arbitrarily from 2. Of each clip, the first, middle and last frame" in shown
    assert "17 frames at 16 a second, 1.1 s, sound: none" in shown
    assert "The original was not found." in shown
    assert len(page.all("img")) == 9
    assert is_static(page)
    assert is_accessible(page)
    assert [one["fps"] for one in reported["thumbnails"]["samples"]] == [16.0, 16.0]


def test_a_clip_of_frames_that_its_file_does_not_have_is_not_shown_beside_it(tmp_path):
    short = gallery_of(make_clips(tmp_path, {"a.mp4": write(moving(5, SIZE), **MP4)}, fps=16, frames=17)).thumbnails[0]
    assert (short.originals, short.framing.file) == ((), None)
    assert "frames that the file does not have" in short.why_none


def test_pictures_say_on_which_side_the_original_stands(tmp_path):
    path = make(tmp_path, 2)
    write_report(path, tmp_path / "page.html")
    assert "Left: the part that was encoded. Right: a rough picture of the latents." in (tmp_path / "page.html").read_text(encoding="utf-8")
    (tmp_path / "data").rename(tmp_path / "moved")
    write_report(path, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Left:" not in page
    assert "Shown is a rough picture of the latents." in page
