"""Metadata and manifests of every kind: which file is taken, how its cells are split, and which rows fail alone."""

import csv
import io
import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import BadInput, MissingExtra
from cachestore.sources.folders import list_source
from cachestore.sources.tables import metadata_in, rows_of
from tests.sources.sources import captions, folder, ids, listed, manifest

CSV = "file_name,text\na.png,one\nb.png,two\n"
EXPECTED = {"a.png": ("one",), "b.png": ("two",)}
ROWS = [{"file_name": "a.png", "text": "one"}, {"file_name": "b.png", "text": "two"}]


def parquet(path, columns):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.table(columns), path)
    return path


# Which file


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metadata.csv", CSV),
        ("Metadata.CSV", CSV),
        ("METADATA.tsv", CSV.replace(",", "\t")),
        ("metadata.json", json.dumps(ROWS)),
        ("metadata.JSONL", "".join(json.dumps(row) + "\n" for row in ROWS)),
        ("metadata.json", json.dumps({"a.png": {"caption": "one"}, "b.png": {"tags": "two"}})),
        ("metadata.json", json.dumps({"a": {"caption": "one"}, "b": {"caption": "two", "tags": ""}})),
    ],
)
def test_metadata_of_every_kind_is_read_in_any_case_and_as_data_itself(tmp_path, name, content):
    folder(tmp_path / "data", {"a.png": "", "b.png": "", "c.png": "", name: content})
    assert captions(listed(tmp_path / "data")) == EXPECTED
    assert captions(listed(tmp_path / "data" / name)) == EXPECTED


def test_metadata_in_parquet_is_read_and_missing_numbers_are_null(tmp_path):
    columns = {"file_name": ["a.png", "b.png"], "text": ["one", "two"], "score": [0.5, float("nan")]}
    parquet(tmp_path / "metadata.parquet", columns)
    listing = listed(tmp_path)
    assert captions(listing) == EXPECTED
    assert [sample.extras for sample in listing.samples] == [{"score": 0.5}, {"score": None}]


def test_parquet_with_pictures_in_it_says_what_loads_it_and_beside_names_of_files_they_are_left_out(tmp_path):
    columns = {"image": [{"bytes": b"picture", "path": None}], "text": ["one"]}
    with pytest.raises(BadInput):
        listed(parquet(tmp_path / "pictures.parquet", columns))
    listing = listed(parquet(tmp_path / "names.parquet", {**columns, "file_name": ["a.png"]}))
    assert (captions(listing), listing.samples[0].extras) == ({"a.png": ("one",)}, {})


@pytest.mark.parametrize("damage", [b"PAR1", b"no parquet", b""])
def test_a_damaged_parquet_is_an_error_that_names_it(tmp_path, damage):
    pytest.importorskip("pyarrow")
    (tmp_path / "metadata.parquet").write_bytes(damage)
    with pytest.raises(BadInput):
        listed(tmp_path)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "metadata.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra):
        listed(tmp_path)


def test_metadata_one_level_down_is_read_together_relative_to_its_own_folder(tmp_path):
    manifest(tmp_path / "train/metadata.jsonl", {"file_name": "a.png", "text": "one", "mask": "m.png"}, {"id": 7, "file_name": "sub/b.png"})
    folder(tmp_path, {"test/Metadata.csv": "file_name,text\nc.png,three\n", "test/c.png": "c", "train/deeper/metadata.csv": CSV})
    listing = listed(tmp_path)
    assert {sample.id: dict(sample.images) for sample in listing.samples} == {
        "test/c.png": {"image": ("test/c.png",)},
        "train/a.png": {"image": ("train/a.png",), "mask": ("train/m.png",)},
        "train/7": {"image": ("train/sub/b.png",)},
    }
    assert listing.read("test/c.png")[0] == b"c"
    (tmp_path / "test/Metadata.csv").write_text("file_name,text\nc.png,other\n")
    assert listed(tmp_path).content != listing.content


def test_a_malformed_row_one_level_down_is_named_as_its_sample_would_be(tmp_path):
    manifest(tmp_path / "train/metadata.jsonl", {"file_name": "a.png", "text": "one"}, {"file_name": "b.png", "text": "\0"})
    listing = listed(tmp_path)
    assert (ids(listing), list(listing.refused)) == (["train/a.png"], ["train/b.png"])


@pytest.mark.parametrize("column", ["image_file_name", "file_names", "image_file_names"])
def test_columns_of_files_are_called_as_in_folders_of_hugging_face(tmp_path, column):
    value = "a.png" if column.endswith("name") else ["a.png"]
    manifest(tmp_path / "metadata.jsonl", {column: value, "text": "one", "mask_file_name": "m.png"})
    [sample] = listed(tmp_path).samples
    assert dict(sample.images) == {"image": ("a.png",), "mask": ("m.png",)}


def test_of_two_tables_the_first_is_taken_the_other_is_named_and_so_is_what_differs(tmp_path):
    folder(tmp_path, {"metadata.csv": CSV.replace("two", "other"), "sub/metadata.json": "[]"})
    manifest(tmp_path / "metadata.jsonl", *ROWS)
    listing = listed(tmp_path)
    assert captions(listing) == EXPECTED
    assert listing.unused == {"second-metadata": ["metadata.csv", "sub/metadata.json"]}
    assert any(
        "1 sample has captions in two places that differ (b.png: metadata.jsonl is taken, not metadata.csv)" in one
        for one in listing.remarks
    )


def test_equal_tables_differ_in_nothing(tmp_path):
    folder(tmp_path, {"metadata.csv": CSV})
    manifest(tmp_path / "metadata.jsonl", *ROWS)
    assert not any("differ" in one for one in listed(tmp_path).remarks)


def test_a_row_and_a_file_beside_its_picture_that_differ_are_named(tmp_path):
    folder(tmp_path, {"metadata.csv": CSV, "a.txt": "one\n", "b.txt": "another"})
    assert any("b.png: metadata.csv is taken, not b.txt" in one for one in listed(tmp_path).remarks)
    assert not any("a.png" in one for one in listed(tmp_path).remarks)


@pytest.mark.parametrize("content", ['{"name": "cats", "licence": "CC0"}', '{"features": {"image": {"dtype": "image"}}}', "{}"])
def test_a_json_that_describes_a_data_set_is_no_metadata_and_a_damaged_one_is_an_error(tmp_path, content):
    folder(tmp_path, {"a.png": "", "metadata.json": content})
    assert ids(listed(tmp_path)) == ["a.png"]
    assert metadata_in(tmp_path, ["metadata.json", "Metadata.txt", "metadata"]) == []
    (tmp_path / "metadata.json").write_text(content[:-1])
    with pytest.raises(BadInput):
        listed(tmp_path)


# CSV


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["metadata.csv", "metadata.tsv"])
def test_the_header_alone_tells_what_stands_between_cells(tmp_path, delimiter, name):
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerows([["file_name", "text"], ["a.png", "one, two; three | four\tfive"], ["b.png", "a,b,c,d,e,f"]])
    folder(tmp_path, {name: "\ufeff" + text.getvalue()})
    assert captions(listed(tmp_path)) == {"a.png": ("one, two; three | four\tfive",), "b.png": ("a,b,c,d,e,f",)}


CELLS = st.lists(st.text(st.sampled_from('ab,;\t|"\n\r é'), max_size=12), min_size=3, max_size=3)


@given(rows=st.lists(CELLS, max_size=6), delimiter=st.sampled_from(",;\t|"), ends=st.sampled_from(["\n", "\r\n"]))
def test_what_a_program_writes_as_cells_is_read_as_it_was(tmp_path_factory, rows, delimiter, ends):
    path = tmp_path_factory.getbasetemp() / "rows.csv"
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator=ends, quoting=csv.QUOTE_ALL)
    writer.writerows([["id", "caption", "note"], *rows])
    path.write_bytes(text.getvalue().encode())
    found: list[Any] = [row for _place, row in rows_of(path, ("id", "caption"))]
    assert [list(row.values()) for row in found] == rows


def test_a_quote_that_nothing_closes_costs_its_own_row_alone(tmp_path):
    lines = ["file_name,text", *(f"{n}.png,caption {n}" for n in range(6)), '6.png,"fine, too"', "7.png,last"]
    lines[3] = '2.png,"open'
    folder(tmp_path, {"metadata.csv": "\n".join(lines)})
    listing = listed(tmp_path)
    assert ids(listing) == [f"{n}.png" for n in (0, 1, 3, 4, 5, 6, 7)]
    assert captions(listing)["6.png"] == ("fine, too",)
    assert [place.rpartition("/")[2] for place in listing.refused] == ["metadata.csv, line 4"]


def test_a_cell_of_megabytes_costs_its_own_row_alone_also_with_lines_in_it(tmp_path):
    long = "x" * 200_000 + '\n,b.png\n"",c.png\n' + "y" * 10_000_000
    folder(tmp_path, {"metadata.csv": f'text,file_name\none,a.png\n"{long}",z.png\nlast,d.png\n'})
    listing = listed(tmp_path)
    assert captions(listing) == {"a.png": ("one",), "d.png": ("last",)}
    assert [place.rpartition("/")[2] for place in listing.refused] == ["metadata.csv, lines 3 to 6"]


def test_a_long_cell_before_an_open_quote_costs_its_own_line_alone(tmp_path):
    folder(tmp_path, {"metadata.csv": f'file_name,text,note\na.png,one,\nx.png,{"x" * 200_000},"\nb.png,two,\n'})
    listing = listed(tmp_path)
    assert (captions(listing), len(listing.refused)) == (EXPECTED, 1)


def test_a_line_of_more_characters_than_are_read_is_one_row(tmp_path):
    long = "x" * (17 << 20)
    folder(tmp_path, {"metadata.csv": f'text,file_name\none,a.png\n{long},x.png\n"{long},\n"",",y.png\ntwo,b.png\n'})
    listing = listed(tmp_path)
    assert (captions(listing), len(listing.refused)) == (EXPECTED, 2)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (b"b.png,caf\xe9", "not UTF-8"),
        (b"b.png,a,b", "more cells"),
        (b",x", "needs `file_name`"),
        (b"b.png,nul\0", "NUL"),
        (b"b.png," + b"x" * 100_001, "100,001 characters"),
    ],
)
def test_a_malformed_row_of_cells_fails_alone(tmp_path, row, says):
    (tmp_path / "metadata.csv").write_bytes(b"file_name,text\na.png,one\n" + row + b"\nc.png,three\n")
    listing = listed(tmp_path)
    assert ids(listing) == ["a.png", "c.png"]
    [reason] = listing.refused.values()
    assert says in reason


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl", "metadata.json", "prompts.txt"])
def test_a_table_in_utf_16_or_32_is_an_error_that_says_how_to_save_it(tmp_path, encoding, name):
    text = {"csv": CSV, "jsonl": json.dumps(ROWS[0]) + "\n", "json": json.dumps(ROWS), "txt": "a cat\na dog\n"}[name.partition(".")[2]]
    (tmp_path / name).write_bytes(text.encode(encoding))
    with pytest.raises(BadInput):
        listed(tmp_path / name)


def test_two_columns_of_one_known_name_are_an_error(tmp_path):
    folder(tmp_path, {"metadata.csv": "file_name,text,text\na.png,one,two\n"})
    with pytest.raises(BadInput):
        listed(tmp_path)


# Rows of JSON


@pytest.mark.parametrize(
    "row",
    [
        '{"file_name": "b.png", "text": "half \\ud83d"}',
        '{"file_name": "b.png", "caption.text_encoder_2": "half \\ude00"}',
        '{"file_name": "b.png", "text": "nul \\u0000"}',
        '{"file_name": "b\\u0000.png", "text": "x"}',
        '{"file_name": "\\ud83d.png", "text": "x"}',
        '{"file_name": "' + "n" * 300 + '.png", "text": "x"}',
        '{"file_name": "b.png", "id": "\\ud83d", "text": "x"}',
        '{"file_name": "b.png", "id": 1' + "0" * 4000 + "}",
        '{"file_name": "b.png", "id": "' + "n" * 5000 + '"}',
        '{"file_name": "b.png", "text": "' + "x" * 10_000_000 + '"}',
        '{"file_name": "b.png", "score": 1e999}',
        '{"file_name": "b.png", "note": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"file_name": "b.png", "note": ' + "[" * 400 + "]" * 400 + "}",
        '{"file_name": "b.png", "score": 1' + "0" * 5000 + "}",
        '{"file_name": "b.png", "text": "x"',
        '{"file_name": ["b.png", 7]}',
        '{"file_name": {"path": "b.png"}}',
        '["b.png", "x"]',
        '"b.png"',
        "{}",
    ],
    ids=range(20),
)
def test_a_malformed_row_of_json_fails_alone_with_its_line(tmp_path, row):
    (tmp_path / "metadata.jsonl").write_text("\n".join([json.dumps(ROWS[0]), row, json.dumps({"file_name": "c.png", "text": "three"})]))
    listing = listed(tmp_path)
    assert ids(listing) == ["a.png", "c.png"]
    [(sample, reason)] = listing.refused.items()
    assert "metadata.jsonl, line 2" in sample + reason
    assert len(reason) < 600


def test_bytes_that_are_no_text_fail_alone_and_a_line_of_more_than_16_mib_too(tmp_path):
    lines = [
        json.dumps(ROWS[0]).encode(),
        b'{"file_name": "caf\xe9.png"}',
        b'{"text": "' + b"x" * (17 << 20) + b'"}',
        json.dumps(ROWS[1]).encode(),
    ]
    (tmp_path / "metadata.jsonl").write_bytes(b"\n".join(lines))
    listing = listed(tmp_path)
    assert ids(listing) == ["a.png", "b.png"]
    assert [place.rpartition(", ")[2] for place in listing.refused] == ["line 2", "line 3"]


def test_one_malformed_row_of_a_list_or_an_object_fails_alone(tmp_path):
    (tmp_path / "metadata.json").write_text(json.dumps([ROWS[0], 7, {"file_name": "x.png", "text": "\0"}, ROWS[1]]))
    listing = listed(tmp_path)
    assert (captions(listing), [name.rpartition("/")[2] for name in listing.refused]) == (EXPECTED, ["metadata.json, row 2", "x.png"])
    (tmp_path / "metadata.json").write_text(json.dumps({"a.png": {"caption": "one"}, "x.png": 7, "y.png": {"caption": 7}, "b.png": "two"}))
    listing = listed(tmp_path)
    assert (captions(listing), len(listing.refused)) == (EXPECTED, 2)


def test_tags_follow_the_caption_as_in_sd_scripts(tmp_path):
    (tmp_path / "metadata.json").write_text(json.dumps({"a.png": {"caption": "a cat", "tags": "cat, tabby"}, "b.png": {"tags": "dog"}}))
    assert captions(listed(tmp_path)) == {"a.png": ("a cat, cat, tabby",), "b.png": ("dog",)}


def test_a_text_that_is_not_utf_8_in_parquet_fails_alone(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet_module = pytest.importorskip("pyarrow.parquet")
    offsets = arrow.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, 3, 5, 8)))
    texts = arrow.StringArray.from_buffers(3, offsets, arrow.py_buffer(b"one\xff\xfetwo"))
    parquet_module.write_table(arrow.table({"file_name": ["a.png", "x.png", "b.png"], "text": texts}), tmp_path / "metadata.parquet")
    listing = listed(tmp_path)
    assert captions(listing) == EXPECTED
    assert [place.rpartition("/")[2] for place in listing.refused] == ["metadata.parquet, row 2"]


# Which column has the captions


def test_another_column_may_have_the_captions(tmp_path):
    rows = [{"file_name": "a.png", "prompt": "one", "text": "not this"}, {"file_name": "b.png", "prompt": ["two"]}]
    listing = listed(manifest(tmp_path / "metadata.jsonl", *rows), caption_column="prompt")
    assert captions(listing) == EXPECTED
    assert listing.samples[0].extras == {"text": "not this"}
    assert listing.content != list_source(tmp_path).content
    folder(tmp_path / "csv", {"metadata.csv": "file_name;beschreibung\na.png;one\nb.png;two\n"})
    assert captions(listed(tmp_path / "csv", caption_column="beschreibung")) == EXPECTED


def test_where_no_row_has_that_column_it_is_named(tmp_path):
    from cachestore.sources.reading import ListingOptions
    from cachestore.sources.remarks import Remarks

    manifest(tmp_path / "metadata.jsonl", {"file_name": "a.png", "text": "one"})
    seen = Remarks()
    list(list_source(tmp_path, ListingOptions(caption_column="prompt")).samples(seen))
    [words] = seen.uncaptioned
    assert "a caption's column is called prompt" in words
