"""Entries of a line against a model: a dict of rows, each a dict of parts and values."""

import math
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import FormatError
from cachestore.core.keys import Key
from cachestore.files.paths import BlockName
from cachestore.files.table import encode_table, string_columns
from cachestore.store.format.catalog import FORMAT as CATALOG_FORMAT
from cachestore.store.format.catalog import VERSION as CATALOG_VERSION
from cachestore.store.format.catalog import Catalog
from cachestore.store.format.line import (
    FORMAT,
    VERSION,
    Line,
    LineEntry,
    RowChange,
    add_change,
    encode_entry,
    lay,
    list_line,
    path_of,
    read_entry,
    read_start,
)
from cachestore.store.write.commit import create_store

EMPTY = Catalog("own", {}, {}, [], [0], [], {}, [], (), made="published")

cells = st.lists(st.integers(1, 3), max_size=2).map(lambda numbers: tuple(Key(bytes([number]) * 16) for number in numbers))
sets = st.tuples(st.just("set"), st.sampled_from("abcde"), st.dictionaries(st.sampled_from(["x", "y"]), cells, min_size=1))
removes = st.tuples(st.just("remove"), st.sampled_from("abcde"), st.none())
flushes = st.lists(st.lists(sets | removes, max_size=6), max_size=4)


def changes_of(flush):
    changes = {}
    for what, sample, parts in flush:
        add_change(changes, sample, RowChange(is_removed=True) if what == "remove" else RowChange(parts=dict(parts)))
    return changes


def model_of(listed):
    rows = {}
    for flush in listed:
        for what, sample, parts in flush:
            if what == "remove":
                rows.pop(sample, None)
            else:
                rows.setdefault(sample, {}).update(parts)
    return {sample: {part: keys for part, keys in parts.items() if keys} for sample, parts in rows.items()}


def rows_of(catalog):
    return {
        sample: {column.encoder: tuple(column.row_keys(row)) for column in catalog.columns if column.row_keys(row)}
        for row, sample in enumerate(catalog.ids)
    }


@given(flushes)
def test_changes_laid_one_by_one_or_as_one_give_the_rows_of_the_model_in_its_order(listed):
    one_by_one, merged = EMPTY, {}
    for flush in listed:
        one_by_one = lay(one_by_one, changes_of(flush))
        for sample, change in changes_of(flush).items():
            add_change(merged, sample, change)
    for found in (one_by_one, lay(EMPTY, merged)):
        assert list(rows_of(found).items()) == list(model_of(listed).items())


@given(flushes.filter(bool), st.booleans())
def test_an_entry_is_read_as_it_was_written(tmp_path_factory, listed, as_block):
    layout = create_store(tmp_path_factory.mktemp("line") / "store")
    entry = LineEntry("changes", "5" * 32, "4" * 32, 9, changes_of(listed[0]))
    number = BlockName(1, 256) if as_block else 7
    layout.catalog_folder("own").mkdir(parents=True)
    path_of(layout, "own", number).write_bytes(b"".join(map(bytes, encode_entry("own", number, entry))))
    assert read_entry(layout, "own", number) == entry
    assert list(read_entry(layout, "own", number).changes) == list(entry.changes)


def test_rows_of_one_key_each_take_little_more_than_ids_and_keys():
    """Columns that say nothing took half of the bytes."""
    changes = {f"{number:08}": RowChange(parts={"x": (Key(b"1" * 16),)}) for number in range(1000)}
    plain = b"".join(map(bytes, encode_entry("own", 7, LineEntry("changes", "5" * 32, "", 1000, changes))))
    assert len(plain) < 1000 * (8 + 8 + 16) + 1500


def test_an_entry_under_another_number_or_name_is_refused(tmp_path):
    layout = create_store(tmp_path / "store")
    entry = LineEntry("changes", "5" * 32, "", 1, {"a": RowChange(parts={"x": (Key(b"1" * 16),)})})
    for name, number in (("own", 8), ("other", 7)):
        layout.catalog_folder(name).mkdir(parents=True)
        layout.entry(name, number).write_bytes(b"".join(map(bytes, encode_entry("own", 7, entry))))
        with pytest.raises(FormatError):
            read_entry(layout, name, number)


def test_a_line_shows_what_is_above_its_last_end(tmp_path):
    layout = create_store(tmp_path / "store")
    folder = layout.catalog_folder("own")
    folder.mkdir(parents=True)
    for name in (
        "3.safetensors",
        "3.dropped",
        "2.changes",
        "4.safetensors",
        "5.changes",
        "6.changes",
        "7.safetensors",
        "1-256.changes",
        "x.changes",
    ):
        (folder / name).touch()
    line = list_line(layout, "own")
    assert line == Line("own", [4, 7], [5, 6], [], 3)
    assert line.highest == 7


def test_entries_are_read_in_as_few_files_as_cover_them_and_a_gap_is_a_loss():
    line = Line("own", [256], [*range(257, 515), 1100], [BlockName(257, 512), BlockName(513, 768), BlockName(769, 1024)], 0)
    assert line.above(256, 512) == [BlockName(257, 512)]
    assert line.above(256, 514) == [BlockName(257, 512), 513, 514]
    assert line.above(256, 1024) == [BlockName(257, 512), BlockName(513, 768), BlockName(769, 1024)]
    assert line.above(1099, 1100) == [1100]
    with pytest.raises(FormatError):
        line.above(256, 1100)


def test_a_line_lists_what_can_be_opened():
    assert Line("own", [1, 3], [2, 3, 4, 5], [], 0).states == [1, 2, 3, 4, 5]
    assert Line("own", [3, 9], [5, 9, 10], [], 0).states == [3, 9, 10]
    assert Line("own", [256], [*range(513, 515)], [BlockName(257, 512)], 0).states == [256, 512, 513, 514]
    assert Line("own", [], [], [], 3).states == []


def test_new_rows_have_an_empty_value_of_its_kind_in_each_column_of_a_publisher():
    columns = {"n": array("q", [7]), "f": array("d", [0.5]), "t": ["x"]}
    table = lay(EMPTY, {"a": RowChange(parts={"x": ()})})
    removed = lay(replace(table, values=columns), {"a": RowChange(is_removed=True)})
    laid = lay(removed, {"b": RowChange(parts={"x": ()})})
    assert (list(laid.values["n"]), list(laid.values["t"])) == ([0], [""])
    assert math.isnan(laid.values["f"][0])


def test_damage_in_an_entry_is_said_to_be_in_one_of_changes(tmp_path):
    """It was said to be a table of another kind, as whole tables are entries too."""
    layout = create_store(tmp_path / "store")
    layout.catalog_folder("own").mkdir(parents=True)
    raw = b"".join(map(bytes, encode_entry("own", 2, LineEntry("fence", "m", ""))))
    layout.entry("own", 2).write_bytes(raw.replace(b"what", b"whot"))
    with pytest.raises(FormatError) as damage:
        read_entry(layout, "own", 2)
    assert "cachestore-catalog" not in str(damage.value)


FORGED = {
    "above": ["/etc/passwd", None, [], {}, "1e400"],
    "what": [None, [], "other"],
    "made": [[], {}, "other"],
    "parts": [None, 5, {"x": 1}],
    "number": [None, "2", [2, 3]],
    "name": [None, "other"],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in FORGED.items() for value in values])
def test_a_wrong_field_of_an_entry_is_damage(tmp_path, field, value):
    layout = create_store(tmp_path / "store")
    layout.catalog_folder("own").mkdir(parents=True)
    header = {"name": "own", "number": 2, "what": "changes", "mark": "m", "before": "", "above": 0, "parts": []} | {field: value}
    layout.entry("own", 2).write_bytes(b"".join(map(bytes, encode_table(FORMAT, VERSION, header, string_columns("ids", [])))))
    with pytest.raises(FormatError):
        read_entry(layout, "own", 2)


@pytest.mark.parametrize("entry", [None, "text", [], 5, {"what": "whole"}, {"what": "whole", "mark": 1, "before": 1, "above": "x"}])
def test_a_whole_table_with_a_wrong_entry_is_damage(tmp_path, entry):
    layout = create_store(tmp_path / "store")
    layout.catalog_folder("own").mkdir(parents=True)
    header = {"name": "own", "generation": 2, "entry": entry}
    layout.entry("own", 2).write_bytes(b"".join(map(bytes, encode_table(CATALOG_FORMAT, CATALOG_VERSION, header, {}))))
    with pytest.raises(FormatError):
        read_start(layout, "own", 2)
