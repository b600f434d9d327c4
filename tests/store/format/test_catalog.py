"""Catalogs: rows and their keys come back, damage is seen, generations are put if absent."""

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import FormatError
from cachestore.core.keys import Key, Recipe, key
from cachestore.files.opening import names_in
from cachestore.files.table import encode_table, number_column, read_table, string_columns
from cachestore.store.format.catalog import (
    FACTS,
    FORMAT,
    NO_KEY,
    Catalog,
    Cell,
    list_generations,
    list_names,
    make_column,
    open_catalog,
    read_catalog,
)
from cachestore.store.read.rows import newest_catalog
from cachestore.store.write.catalog_writer import draft_of, publish_draft
from tests.fakes import publish_catalog
from tests.store.stores import flip

RECIPE = Recipe("latents", {"vae": "x"}, {"scale": 2.0})
EMPTY = Catalog("train", {}, {}, [], [0], [], {}, [], ())

texts = st.text(st.characters(exclude_categories=[]), max_size=6)
facts = st.fixed_dictionaries(
    {}, optional={name: st.lists(st.integers(0, 2**40), min_size=width, max_size=width).map(tuple) for name, width in FACTS.items()}
)
cells = st.builds(
    Cell,
    st.none() | st.binary(min_size=16, max_size=16).filter(lambda raw: raw != NO_KEY).map(Key),
    st.binary(min_size=32, max_size=32),
    st.tuples(st.integers(-1, 2**62), st.integers(-1, 2**62)),
    facts,
)


@st.composite
def catalogs(draw):
    rows = draw(st.integers(0, 4))
    captions = [draw(st.lists(texts, max_size=3)) for _row in range(rows)]
    images = {
        role: [draw(st.lists(texts, max_size=2)) for _row in range(rows)]
        for role in draw(st.sets(st.sampled_from(["image", "control", "mask"])))
    }
    columns = tuple(
        make_column(encoder, role, RECIPE.fingerprint, {"resolution": 512}, [draw(st.lists(cells, max_size=2)) for _row in range(rows)])
        for encoder, role in draw(st.lists(st.sampled_from([("text", "caption"), ("latents", "image")]), unique=True))
    )

    def flat(lists):
        starts = [0]
        for each in lists:
            starts.append(starts[-1] + len(each))
        return starts, [item for each in lists for item in each]

    return Catalog(
        "train",
        {"text": {"model": "x"}},
        {RECIPE.fingerprint: RECIPE},
        [f"{n}.jpg" for n in range(rows)],
        *flat(captions),
        {role: flat(references) for role, references in images.items()},
        ["{}"] * rows,
        columns,
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("catalogs") / "train"
    folder.mkdir()
    return folder / "1.safetensors"


def small(name="train", n=3, **changes):
    column = make_column(
        "text", "caption", RECIPE.fingerprint, {}, [[Cell(key(str(row)), bytes(32), (10, 20), {"tokens": (row,)})] for row in range(n)]
    )
    ids = [str(row) for row in range(n)]
    made = Catalog(
        name, {}, {RECIPE.fingerprint: RECIPE}, ids, list(range(n + 1)), ids, {"image": (list(range(n + 1)), ids)}, ["{}"] * n, (column,)
    )
    return dataclasses.replace(made, **changes)


def write(path, catalog):
    draft = draft_of(catalog)
    path.write_bytes(b"".join(draft.chunks(catalog.generation or 1)))
    return draft.digest


def newest(layout, name="train"):
    found = newest_catalog(layout, name)
    assert found is not None
    return found


def seen(catalog):
    rows = range(len(catalog))
    return {
        "name": catalog.name,
        "request": dict(catalog.request),
        "recipes": dict(catalog.recipes),
        "ids": list(catalog.ids),
        "captions": [catalog.row_captions(row) for row in rows],
        "images": {role: (list(at), list(references)) for role, (at, references) in catalog.images.items()},
        "extras": list(catalog.extras),
        "columns": [
            (
                each.encoder,
                each.role,
                each.fingerprint,
                dict(each.options),
                [[dataclasses.astuple(cell) for cell in each.row_cells(row)] for row in rows],
            )
            for each in catalog.columns
        ],
    }


def test_an_empty_catalog_comes_back(path):
    write(path, EMPTY)
    found = read_catalog(path, generation=1)
    assert len(found) == 0
    assert seen(found) == seen(EMPTY)


@given(catalog=catalogs())
def test_a_catalog_comes_back(path, catalog):
    digest = write(path, dataclasses.replace(catalog, generation=7))
    found = read_catalog(path, generation=7)
    assert seen(found) == seen(catalog)
    assert (found.generation, found.digest) == (7, digest)
    for column in found.columns:
        assert [column.row_keys(row) for row in range(len(found))] == [
            [cell.key for cell in column.row_cells(row)] for row in range(len(found))
        ]
        assert [column.count(row) for row in range(len(found))] == [len(column.row_cells(row)) for row in range(len(found))]


@given(catalog=catalogs())
def test_a_catalog_that_is_read_where_it_is_looked_at_holds_the_same(path, catalog):
    digest = write(path, dataclasses.replace(catalog, generation=7))
    found = open_catalog(path, generation=7, digest=digest)
    assert seen(found) == seen(catalog)
    assert (found.generation, found.digest) == (7, digest)


def test_another_catalog_than_the_one_that_was_handed_over_is_refused(path):
    digest = write(path, small())
    write(path, small(n=4))
    with pytest.raises(FormatError):
        open_catalog(path, generation=1, digest=digest)


@given(catalog=catalogs())
def test_a_catalog_that_was_read_is_written_again_as_it_was(path, catalog):
    digest = write(path, dataclasses.replace(catalog, generation=1))
    raw = path.read_bytes()
    assert write(path, read_catalog(path, generation=1)) == digest
    assert path.read_bytes() == raw


def test_a_row_is_complete_when_every_cell_has_a_key(path):
    rows = [[Cell(key("a")), Cell(key("b"))], [Cell(key("a")), Cell()], []]
    columns = (make_column("text", "caption", RECIPE.fingerprint, {}, rows),)
    catalog = dataclasses.replace(EMPTY, ids=["0", "1", "2"], captions_at=[0, 0, 0, 0], extras=["{}"] * 3, columns=columns)
    write(path, catalog)
    found = read_catalog(path, generation=1)
    assert [found.is_complete(row) for row in range(3)] == [True, False, True]


def test_a_column_is_found_by_encoder_and_role():
    catalog = small()
    assert catalog.column("text", "caption") is catalog.columns[0]
    assert catalog.column("text", "image") is None


def test_a_fact_that_is_unknown_for_a_cell_is_left_out():
    column = make_column("latents", "image", "f", {}, [[Cell(facts={"size": (4, 3)})], [Cell()]])
    assert [dict(column.cell(index).facts) for index in range(2)] == [{"size": (4, 3)}, {}]


class TestDigests:
    def test_rows_and_recipes_decide_it(self):
        base = draft_of(small()).digest
        changes: list[dict[str, Any]] = [
            {"name": "other"},
            {"ids": ["0", "1", "x"]},
            {"captions": ["0", "1", "x"]},
            {"extras": ["{}", "{}", '{"a":1}']},
            {"recipes": {}},
            {"images": {}},
            {"columns": ()},
        ]
        others = {draft_of(small(**change)).digest for change in changes}
        assert len(others) == 7
        assert base not in others

    def test_request_generation_and_stats_do_not(self):
        moved = dataclasses.replace(small().columns[0], stats=[7] * 6)
        assert draft_of(small(request={"text": {"data": "/elsewhere"}}, generation=9, columns=(moved,))).digest == draft_of(small()).digest

    def test_captions_that_change_places_change_it(self):
        assert draft_of(small(captions=["1", "0", "2"])).digest != draft_of(small()).digest


def test_every_flipped_bit_is_detected_or_harmless(path):
    write(path, small())
    expected = seen(read_catalog(path, generation=1))
    raw = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for index, byte in enumerate(raw):
            os.pwrite(file.fileno(), bytes([byte ^ 1 << index % 8]), index)
            with contextlib.suppress(FormatError):
                assert seen(read_catalog(path, generation=1)) == expected
            os.pwrite(file.fileno(), bytes([byte]), index)


def test_the_stock_library_opens_a_catalog(path):
    write(path, small())
    with safetensors.safe_open(path, "np") as file:
        assert file.get_tensor("key/0/keys").shape == (3, 16)
        assert file.get_tensor("key/0/stat").tolist() == [[10, 20]] * 3


def reshape(path, catalog=None, header=None, **columns):
    """Write a catalog whose columns or header were changed by somebody who knows the checksums."""
    write(path, catalog or small())
    table = read_table(path, FORMAT, 1)
    written = {
        name: ("I64" if name.endswith(("at", "stat", "tokens", "offsets")) else "U8", (len(raw),), bytes(raw))
        for name, raw in table.columns.items()
    }
    written = {name: (dtype, (len(raw) // 8,) if dtype == "I64" else shape, raw) for name, (dtype, shape, raw) in written.items()}
    for name, column in columns.items():
        written[name.replace("__", "/")] = column
    written = {name: column for name, column in written.items() if column is not None}
    path.write_bytes(b"".join(encode_table(FORMAT, 1, {**table.header, **(header or {})}, written)))


def bytes_column(raw):
    return ("U8", (len(raw),), raw)


MALFORMED = {
    "too few captions' starts": {"captions__at": number_column([0, 1, 3])},
    "captions that are not all named": {"captions__at": number_column([0, 1, 2, 2])},
    "starts that do not begin at 0": {"captions__at": number_column([1, 1, 2, 3])},
    "starts that go back": {"captions__at": number_column([0, 3, 1, 3])},
    "starts before the beginning": {"captions__at": number_column([0, -1, 2, 3])},
    "no starts": {"captions__at": None},
    "images that are not all named": {"images__image__at": number_column([0, 1, 1, 2])},
    "too few extras": string_columns("extras", ["{}"]),
    "too few keys": {"key__0__keys": bytes_column(bytes(32))},
    "no keys": {"key__0__keys": None},
    "keys of another width": {"key__0__keys": ("U8", (3, 8), bytes(24))},
    "too few inputs": {"key__0__inputs": bytes_column(bytes(64))},
    "too few stats": {"key__0__stat": number_column([1, 2])},
    "too many numbers of a fact": {"key__0__tokens": number_column([1] * 6)},
    "a fact without numbers": {"key__0__tokens": None},
    "cells that are not all named": {"key__0__at": number_column([0, 1, 2, 2])},
    "starts that are no numbers": {"captions__at": bytes_column(b"abc")},
    "a header without recipes": {"header": {"recipes": None}},
    "a recipe without make": {"header": {"recipes": [{"encoder": "x"}]}},
    "a role that is a number": {"header": {"roles": 5}},
    "columns that are a text": {"header": {"columns": "x"}},
    "a column without a role": {"header": {"columns": [{"encoder": "x"}]}},
    "a name that is a number": {"header": {"name": 5}},
    "the name of another data set": {"header": {"name": "other"}},
}


def test_the_catalog_that_the_malformed_ones_vary_is_good(path):
    reshape(path)
    assert seen(read_catalog(path, generation=1)) == seen(small())


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_catalog_is_a_format_error(path, what):
    reshape(path, **{name.replace("/", "__"): column for name, column in MALFORMED[what].items()})
    with pytest.raises(FormatError):
        read_catalog(path, generation=1)


def test_a_catalog_without_a_header_that_is_an_object_is_a_format_error(path):
    path.write_bytes(b"".join(encode_table(FORMAT, 1, {}, {})))
    with pytest.raises(FormatError):
        read_catalog(path, generation=1)


class TestPublishing:
    def test_a_store_without_catalogs_has_no_names(self, layout):
        assert list_names(layout) == []
        assert list_generations(layout, "train") == []
        assert newest_catalog(layout, "train") is None

    def test_an_empty_catalog_is_published(self, layout):
        generation, digest = publish_catalog(layout, EMPTY)
        found = newest(layout)
        assert (generation, len(found), found.digest) == (1, 0, digest)

    def test_generations_count_up_and_the_newest_is_found(self, layout):
        assert [publish_catalog(layout, small(n=n))[0] for n in (1, 2, 3)] == [1, 2, 3]
        assert list_generations(layout, "train") == [1, 2, 3]
        assert len(newest(layout)) == 3

    def test_one_equal_to_the_newest_is_not_published_again(self, layout):
        assert publish_catalog(layout, small()) == publish_catalog(layout, small(request={"text": {"data": "moved"}}))
        assert list_generations(layout, "train") == [1]

    def test_one_equal_to_an_older_one_is_published(self, layout):
        assert [publish_catalog(layout, small(n=n))[0] for n in (1, 2, 1)] == [1, 2, 3]

    def test_one_with_other_stats_is_published(self, layout):
        touched = dataclasses.replace(small().columns[0], stats=[5] * 6)
        assert [publish_catalog(layout, small())[0], publish_catalog(layout, small(columns=(touched,)))[0]] == [1, 2]
        assert list(newest(layout).columns[0].stats) == [5] * 6

    def test_names_do_not_see_each_other(self, layout):
        for name in ("train", "a/b", "käse"):
            publish_catalog(layout, small(name=name))
        assert sorted(list_names(layout)) == sorted(["train", "a/b", "käse"])
        assert {name: list_generations(layout, name) for name in list_names(layout)} == {"train": [1], "a/b": [1], "käse": [1]}

    def test_a_generation_that_is_there_is_never_replaced(self, layout):
        publish_catalog(layout, small(n=1))
        assert not publish_draft(layout, draft_of(small(n=2)), after=0)
        assert [len(read_catalog(layout.catalog("train", n), generation=n)) for n in list_generations(layout, "train")] == [1]

    def test_a_catalog_keeps_the_number_of_its_listing_which_its_digest_leaves_out(self, layout):
        _generation, digest = publish_catalog(layout, small(listing=7))
        assert newest(layout).listing == 7
        assert draft_of(small(listing=8)).digest == digest

    def test_a_damaged_newest_is_passed_over_and_its_number_is_not_used_again(self, layout):
        publish_catalog(layout, small(n=1))
        publish_catalog(layout, small(n=2))
        flip(layout.catalog("train", 2), 500)
        assert len(newest(layout)) == 1
        assert publish_catalog(layout, small(n=2))[0] == 3

    def test_a_catalog_copied_into_another_data_sets_folder_is_refused(self, layout):
        publish_catalog(layout, small(name="train"))
        publish_catalog(layout, small(name="val", n=1))
        layout.catalog("val", 2).write_bytes(layout.catalog("train", 1).read_bytes())
        with pytest.raises(FormatError):
            read_catalog(layout.catalog("val", 2), generation=2)
        assert len(newest(layout, "val")) == 1

    def test_a_published_catalog_cannot_be_written_and_files_that_are_not_ours_are_not_generations(self, layout):
        publish_catalog(layout, small())
        for name in ("notes.txt", "01.safetensors", "2.safetensors.part"):
            (layout.catalog_folder("train") / name).touch()
        (layout.catalogs / ".git").mkdir()
        Path(os.fsdecode(bytes(layout.catalogs) + b"/\xff")).mkdir()
        assert list_generations(layout, "train") == [1]
        assert list_names(layout) == ["train"]
        assert layout.catalog("train", 1).stat().st_mode & 0o777 == 0o444
        assert names_in(layout.temporary) == []
