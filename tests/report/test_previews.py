"""Pictures from latents: fitted where the pictures are there with the same digest, grey where not, and never another sample's colours."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import BadInput
from cachestore.report.originals import Original
from cachestore.report.previews import (
    MAX_SAMPLES,
    _grey,
    choose_rows,
    find_colours,
    fit,
    picture_columns,
    preview_sample,
    read_samples,
    reduce,
)
from cachestore.store.format.catalog import make_column
from cachestore.store.read.reader import Reader
from cachestore.store.read.rows import newest_catalog
from tests.fakes import asks_for, tells_of
from tests.report.pictures import FACTOR, SIZE, make, picture
from tests.train import stores
from tests.train.stores import Row


def column_of(catalog) -> Any:
    return picture_columns(catalog)[0]


def preview(path, sample="0.png", source=None):
    with Reader(path) as reader:
        return preview_sample(reader, ["train"], sample, source)


def difference(pixels, n):
    return np.abs(pixels.astype(int) - picture(n)[0].astype(int)).max()


def test_the_condition_of_a_video_is_not_shown_for_the_video(tmp_path):
    with Reader(stores.make_store(tmp_path, [Row("0.png")], stores.recipes())) as reader:
        catalog = newest_catalog(reader.layout, "train")
    assert catalog is not None
    [latents] = [replace(column, role="video") for column in catalog.columns if column.encoder == "latents"]
    condition = replace(latents, encoder="conditioning_latents", options={"images": ["control"]})
    assert column_of(replace(catalog, columns=(condition, latents))) is latents


def test_a_map_that_is_linear_is_found_and_gives_the_picture_back(tmp_path):
    made = preview(make(tmp_path), "1.png")
    assert (made.colours.fitted_to, made.pixels.shape) == (3, (SIZE[1] // FACTOR, SIZE[0] // FACTOR, 3))
    assert made.colours.explained > 0.999
    assert difference(made.pixels, 1) <= 1
    assert "estimated" in made.colours.in_words()


def test_a_picture_that_was_replaced_is_not_fitted_to(tmp_path):
    path = make(tmp_path)
    (tmp_path / "data" / "1.png").write_bytes((tmp_path / "data" / "0.png").read_bytes())
    (tmp_path / "data" / "2.png").write_bytes(b"no picture")
    made = preview(path, "1.png")
    assert made.colours.fitted_to == 1
    assert difference(made.pixels, 1) <= 2


def test_a_flipped_picture_is_compared_as_it_was_encoded(tmp_path):
    assert preview(make(tmp_path, flip=(1,))).colours.explained < 0.5
    other = tmp_path / "straight"
    other.mkdir()
    assert preview(make(other)).colours.explained > 0.99


def test_without_the_pictures_it_is_grey_and_says_so_and_a_source_that_moved_can_be_named(tmp_path):
    path = make(tmp_path)
    (tmp_path / "data").rename(tmp_path / "moved")
    made = preview(path)
    assert (made.colours.fitted_to, made.pixels.ndim) == (0, 2)
    assert made.pixels.min() < 20
    assert made.pixels.max() > 235
    assert "Grey" in made.colours.in_words()
    assert preview(path, source=tmp_path / "moved").colours.fitted_to == 3


def test_pictures_of_several_sources_are_found_in_their_own(tmp_path):
    path = make(tmp_path, others=[tmp_path / "another"])
    assert preview(path).colours.fitted_to == 3
    with pytest.raises(BadInput, check=asks_for("source", "data, another")):
        preview(path, source=tmp_path / "data")
    (tmp_path / "data").rename(tmp_path / "moved")
    assert preview(path).colours.fitted_to == 0
    assert preview(path, source={"data": tmp_path / "moved"}).colours.fitted_to == 3


@pytest.mark.parametrize("facts", [{"resized": (0, 0)}, {"crop": (90, 90, 3, 3)}, {"crop": ()}])
def test_a_catalog_whose_crops_are_nonsense_gives_grey(tmp_path, facts):
    assert preview(make(tmp_path, **facts)).colours.fitted_to == 0


def test_a_damaged_entry_and_a_sample_nobody_knows_are_reported(tmp_path):
    path = make(tmp_path)
    with pytest.raises(BadInput, check=tells_of("'nobody'")):
        preview(path, "nobody")
    for segment in (path / "segments").rglob("*.safetensors"):
        segment.chmod(0o644)
        segment.write_bytes(segment.read_bytes()[:-40_000])
    with pytest.raises(BadInput):
        preview(path)


def test_the_rows_that_are_shown_depend_on_no_order_and_stay_when_samples_come(tmp_path):
    made = stores.recipes(None)
    rows = [Row(f"{n}") for n in range(60)]
    found = []
    for listed in (rows, rows[::-1], rows[:50]):
        catalog = stores.catalog_of(listed, made, "train")
        found.append([catalog.ids[row] for row in choose_rows(catalog, picture_columns(catalog))])
    assert found[0] == found[1]
    assert len(found[0]) == MAX_SAMPLES
    assert set(found[0]) - {row.id for row in rows[50:]} <= set(found[2])


def test_a_row_without_latents_is_not_chosen_and_a_clip_shows_its_first_middle_and_last_frame(tmp_path, monkeypatch):
    made = stores.recipes(None, "mean")
    rows = [Row("failed", fails=True), Row("clip")]
    path = stores.make_store(tmp_path / "store", rows, made)
    frames = np.stack([np.full((4, 6, 8), n, np.float32) for n in range(7)], axis=1)
    catalog = stores.catalog_of(rows, made, "train")
    column = replace(column_of(catalog), role="video")
    assert list(choose_rows(catalog, [column])) == [1]
    monkeypatch.setattr(Reader, "get_raw", lambda _reader, _keys: [{"mean": ("F32", frames.shape, frames.tobytes())}])
    with Reader(path) as reader:
        [shown] = read_samples(reader, catalog, column, [0, 1])
    assert (shown.sample, [one[0, 0, 0] for one in shown.latents], [float(one) for one in shown.positions]) == (
        "clip",
        [0, 3, 6],
        [0, 0.5, 1],
    )
    assert find_colours([shown], [Original("missing")]).paint(shown.latents[0]).shape == (6, 8)


def test_pictures_and_clips_of_one_data_set_are_both_shown(tmp_path):
    made = stores.recipes(None)
    rows = [Row("0.png"), Row("1.mp4")]
    with Reader(stores.make_store(tmp_path, rows, made)) as reader:
        catalog = newest_catalog(reader.layout, "train")
    assert catalog is not None
    column = column_of(catalog)
    cells = [column.row_cells(row) for row in range(2)]
    both = [
        make_column("latents", role, column.fingerprint, {}, some) for role, some in (("video", [[], cells[1]]), ("image", [cells[0], []]))
    ]
    mixed = replace(catalog, columns=tuple(both))
    columns = picture_columns(mixed)
    assert [one.role for one in columns] == ["image", "video"]
    assert {mixed.ids[row]: one.role for row, one in choose_rows(mixed, columns).items()} == {"0.png": "image", "1.mp4": "video"}
    assert picture_columns(mixed, 1) == [both[0]]


def test_channels_that_never_differ_are_one_grey():
    flat = np.ones((4, 2, 2), np.float32)
    assert (_grey([flat]).paint(flat) == 127).all()


def test_one_colour_is_explained_wholly():
    latents = [np.random.default_rng(1).standard_normal((4, 3, 3)).astype(np.float32)]
    made = fit(latents, [np.full((3, 3, 3), 90.0)])
    assert made.explained == 1.0
    assert (made.paint(latents[0]) == 90).all()


@given(st.integers(1, 300), st.integers(1, 300), st.booleans())
def test_a_reduced_picture_is_never_larger_than_asked_and_keeps_its_mean_colour(height, width, is_grey):
    pixels = np.full((height, width) if is_grey else (height, width, 3), 77, np.uint8)
    small = reduce(pixels, 64)
    assert max(small.shape[:2]) <= 64
    assert min(small.shape[:2]) >= 1
    assert small.ndim == pixels.ndim
    assert (small == 77).all()
