"""Originals beside pictures from latents: the part that was encoded, of exactly the file that was encoded; else the reason why not."""

import os
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from cachestore.report import originals
from cachestore.report.originals import LONGEST_SIDE, find_originals
from cachestore.report.previews import choose_rows, picture_columns, read_samples
from cachestore.store.read.reader import Reader
from cachestore.store.read.rows import newest_catalog
from tests.report.pictures import SIZE, make, picture


def found(path, source=None):
    """The originals of a store by sample."""
    with Reader(path) as reader:
        catalog = newest_catalog(reader.layout, "train")
        assert catalog is not None
        [column] = picture_columns(catalog)
        shown = read_samples(reader, catalog, column, choose_rows(catalog, [column]))
        return dict(zip([one.sample for one in shown], find_originals(catalog, column, shown, source), strict=True))


def pixels_of(original):
    [shown] = original.shown
    with Image.open(BytesIO(shown.data)) as image:
        assert (image.format, image.size) == ("JPEG", (shown.width, shown.height))
        return np.asarray(image.convert("RGB"), np.float64)


def is_like(original, expected):
    """Whether a JPEG shows these pixels, as far as JPEG keeps noise of 8 x 8 pixels."""
    return pixels_of(original).shape == expected.shape and np.abs(pixels_of(original) - expected).mean() < 12


def test_an_original_is_shown_as_it_was_encoded(tmp_path):
    path = make(tmp_path)
    assert {name: one.state for name, one in found(path).items()} == dict.fromkeys(("0.png", "1.png", "2.png"), "found")
    assert is_like(found(path)["1.png"], picture(1)[1])
    assert not is_like(found(path)["1.png"], picture(2)[1])


def test_only_the_part_that_was_encoded_is_shown(tmp_path):
    original = found(make(tmp_path, resized=(SIZE[0] // 2, SIZE[1] // 2), crop=(32, 16, 64, 48)))["1.png"]
    assert is_like(original, picture(1)[1][32:96, 64:128])


def test_of_a_mirrored_crop_the_same_part_is_shown_mirrored(tmp_path):
    """The crop (0, 0, 32, 96) of the mirrored picture is the right edge of the file."""
    original = found(make(tmp_path, crop=(0, 0, 32, 96), flip=(1,)))["1.png"]
    assert is_like(original, picture(1)[1][:, ::-1][:, :32])


def test_without_a_crop_the_whole_picture_is_shown_and_nothing_is_fitted_to_it(tmp_path):
    original = found(make(tmp_path, crop=()))["1.png"]
    assert is_like(original, picture(1)[1])
    assert original.pixels == ()


def test_a_file_that_changed_or_is_gone_is_not_shown_and_the_state_says_which(tmp_path):
    path = make(tmp_path, 5)
    (tmp_path / "data" / "1.png").write_bytes((tmp_path / "data" / "0.png").read_bytes())
    (tmp_path / "data" / "2.png").unlink()
    (tmp_path / "data" / "3.png").write_bytes(b"no picture")
    (tmp_path / "data" / "4.png").unlink()
    (tmp_path / "data" / "4.png").symlink_to("0.png")
    states = {name: one.state for name, one in found(path).items()}
    assert states == {"0.png": "found", "1.png": "changed", "2.png": "missing", "3.png": "changed", "4.png": "changed"}
    assert not any(one.shown for name, one in found(path).items() if name != "0.png")


def test_a_fifo_a_folder_and_a_file_that_is_too_large_are_unreadable_and_the_reason_names_no_path(tmp_path, monkeypatch):
    path = make(tmp_path)
    (tmp_path / "data" / "0.png").unlink()
    os.mkfifo(tmp_path / "data" / "0.png")
    (tmp_path / "data" / "1.png").unlink()
    (tmp_path / "data" / "1.png").mkdir()
    with (tmp_path / "data" / "2.png").open("ab") as file:
        file.truncate(originals.LARGEST_FILE + 1)
    states = found(path)
    assert {one.state for one in states.values()} == {"unreadable"}
    assert states["2.png"].reason == "the file has more than 256 MiB"
    assert not any(str(tmp_path) in one.reason for one in states.values())


def test_a_picture_with_too_many_pixels_is_unreadable_and_costs_no_memory(tmp_path, monkeypatch):
    path = make(tmp_path, 1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", SIZE[0] * SIZE[1] // 3)
    assert (found(path)["0.png"].state, "too many pixels" in found(path)["0.png"].reason) == ("unreadable", True)


@pytest.mark.parametrize("crop", [(90, 90, 3, 3), (3, 3, 3, 3), (0, 90, 1, 3), (500, 0, 600, 9)])
def test_a_crop_that_is_nonsense_is_unreadable(tmp_path, crop):
    assert found(make(tmp_path, 1, crop=crop))["0.png"].state == "unreadable"


def test_without_pillow_the_reason_names_the_extra(tmp_path, monkeypatch):
    def absent(_options, _data, _one):
        raise ModuleNotFoundError("No module named 'PIL'", name="PIL")

    path = make(tmp_path, 1)
    monkeypatch.setattr(originals, "_decoded", absent)
    assert "The extra [encode] brings it" in found(path)["0.png"].reason


def test_a_catalog_without_sources_has_no_originals_and_of_nothing_there_are_none(tmp_path):
    path = make(tmp_path, 2)
    (tmp_path / "data").rename(tmp_path / "moved")
    assert {one.state for one in found(path).values()} == {"missing"}
    assert {one.state for one in found(path, tmp_path / "moved").values()} == {"found"}
    with Reader(path) as reader:
        catalog = newest_catalog(reader.layout, "train")
        assert catalog is not None
        assert find_originals(catalog, catalog.columns[0], []) == []


@pytest.mark.parametrize("size", [(3000, 2000), (20_000, 3)])
def test_a_large_or_thin_picture_is_reduced_to_a_few_kilobytes(tmp_path, size):
    buffer = BytesIO()
    Image.linear_gradient("L").resize(size).convert("RGB").save(buffer, "PNG")
    path = make(tmp_path, 1, resized=size, crop=(0, 0, *size), pictures=[buffer.getvalue()])
    [shown] = found(path)["0.png"].shown
    assert max(shown.width, shown.height) == LONGEST_SIDE
    assert len(shown.data) < 20_000
