"""Several sources as one."""

import json
from pathlib import Path

import pytest

from cachestore.core.errors import BadInput
from cachestore.core.keys import digest_text
from cachestore.core.samples import Sample, Source
from cachestore.sources.combined import as_sources, files_of_sources, list_in_memory, list_path, list_sources, resolutions_of
from cachestore.sources.reading import ListingOptions
from cachestore.sources.remarks import Remarks
from tests.fakes import asks_for
from tests.sources.test_tars import pack


def folder(path, **captions):
    path.mkdir(parents=True)
    for name, caption in captions.items():
        (path / f"{name}.png").write_bytes(f"picture {name}".encode())
        (path / f"{name}.txt").write_text(caption)
    return path


def together(*sources, **options):
    given = [one if isinstance(one, Source) else Source(str(one)) for one in sources]
    return list_sources(given, options.pop("in_memory", {}), ListingOptions(**options))


def rows(listing):
    return {sample.id: sample for sample in listing.samples()}


# Nothing


def test_no_sources_list_nothing():
    assert rows(together()) == {}
    assert resolutions_of([], 1024) == (1024, {})


def test_sources_of_nothing_list_nothing(tmp_path):
    assert rows(together(folder(tmp_path / "a"), folder(tmp_path / "b"))) == {}


# One


def test_one_source_is_listed_as_its_path_is(tmp_path):
    path = folder(tmp_path / "a", x="one")
    one, alone = together(path), list_path(path)
    assert (list(one.samples()), one.content) == (list(alone.samples()), alone.content)


def test_a_source_with_a_name_has_it_before_its_ids_and_in_a_column(tmp_path):
    [sample] = rows(together(Source(folder(tmp_path / "a", x="one"), name="cats"))).values()
    assert (sample.id, dict(sample.extras)) == ("cats/x.png", {"source": "cats"})


# Several


def test_ids_of_sources_without_a_name_stay_as_they_are(tmp_path):
    listing = together(folder(tmp_path / "a", x="one"), folder(tmp_path / "b", y="two"))
    found = rows(listing)
    assert {name: sample.extras["source"] for name, sample in found.items()} == {"x.png": "a", "y.png": "b"}
    assert [listing.read(sample.images["image"][0])[0] for sample in found.values()] == [b"picture x", b"picture y"]
    with listing.open(found["y.png"].images["image"][0]) as (file, _stat):
        assert file.read(3) == b"pic"
    assert listing.stat(found["y.png"].images["image"][0])[0] == 9


def test_two_samples_of_one_id_are_an_error_that_names_both_sources(tmp_path):
    one, other = folder(tmp_path / "one", x=""), folder(tmp_path / "other", x="")
    with pytest.raises(BadInput) as refused:
        rows(together(one, other))
    assert all(str(part) in str(refused.value) for part in ("'x.png'", one, other))
    assert list(rows(together(one, Source(str(other), name="n")))) == ["x.png", "n/x.png"]


def test_two_sources_called_alike_are_an_error_that_names_both(tmp_path):
    one, other = folder(tmp_path / "1/photos"), folder(tmp_path / "2/photos")
    with pytest.raises(BadInput) as refused:
        together(one, other)
    assert all(str(part) in str(refused.value) for part in (one, other, "name="))


def test_a_prompt_that_two_lists_share_collapses_and_is_counted(tmp_path):
    for name, lines in (("a", "x\ny\n"), ("b", "y\nz\n")):
        (tmp_path / f"{name}.txt").write_text(lines)
    remarks = Remarks()
    found = list(together(tmp_path / "a.txt", tmp_path / "b.txt").samples(remarks))
    assert [sample.id for sample in found] == [digest_text(text) for text in "xyz"]
    assert remarks.collapsed == 1


def test_each_source_may_have_a_caption_of_its_own_for_samples_without_one(tmp_path):
    for name in "ab":
        folder(tmp_path / name)
        (tmp_path / name / f"{name}.png").touch()
    found = rows(together(Source(str(tmp_path / "a"), caption="own"), tmp_path / "b", caption="all"))
    assert [sample.captions for sample in found.values()] == [("own",), ("all",)]


def test_what_is_reported_of_several_sources_names_which(tmp_path):
    folder(tmp_path / "a", x="two\nlines")
    (folder(tmp_path / "b") / "y.png").touch()
    remarks = Remarks()
    list(together(tmp_path / "a", tmp_path / "b").samples(remarks))
    assert (remarks.multi_line, remarks.missing) == (["a/x.png"], ["b/y.png"])


def test_repeats_and_weight_are_columns_where_sources_differ_in_them(tmp_path):
    one, other = folder(tmp_path / "a", x=""), folder(tmp_path / "b", y="")
    found = rows(together(Source(str(one), repeats=4, weight=0.5), other))
    assert [dict(sample.extras) for sample in found.values()] == [
        {"source": "a", "source_weight": 2.0},
        {"source": "b", "source_weight": 1.0},
    ]


def test_a_column_that_says_something_else_is_not_overwritten(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"id": "x", "caption": "a", "source": "the web"}) + "\n")
    with pytest.raises(BadInput):
        rows(together(path, folder(tmp_path / "b")))
    assert rows(together(path))["x"].extras == {"source": "the web"}


def test_another_name_weight_or_sample_of_one_source_is_another_content(tmp_path):
    one, other = folder(tmp_path / "a", x=""), folder(tmp_path / "b", y="")
    contents = {
        together(one, other).content,
        together(Source(str(one), name="n"), other).content,
        together(Source(str(one), repeats=2), other).content,
        together(other, one).content,
        together(one).content,
    }
    assert len(contents) == 5
    assert together(one, other).content == together(one, other).content


def test_sources_of_every_kind_are_read_by_references_alone(tmp_path):
    pack(tmp_path / "t.tar", {"z.png": "picture z"})
    (tmp_path / "m.jsonl").write_text('{"image": "a/x.png"}\n')
    given = [Source(str(folder(tmp_path / "a", x=""))), Source(str(tmp_path / "m.jsonl"), name="m"), Source(str(tmp_path / "t.tar"))]
    listing, files = list_sources(given, {}), files_of_sources(given)
    read = {sample.id: files.read(sample.images["image"][0])[0] for sample in listing.samples()}
    assert read == {"x.png": b"picture x", "m/a/x.png": b"picture x", "z.png": b"picture z"}
    with pytest.raises(FileNotFoundError):
        files.read("elsewhere/x.png")


# What precompute is given


def test_a_path_is_a_path(tmp_path):
    assert as_sources("a") == as_sources(Path("a")) == ("a", (), {})


def test_samples_and_sources_may_be_mixed_as_sources():
    held = [Sample("x", {"image": (b"1",)})]
    path, sources, found = as_sources(["a", Source(held, name="held"), Path("b")])
    assert (path, [source.data for source in sources], found) == ("", ["a", "(in memory)", "b"], {1: held})
    in_memory = list_in_memory(sources, found)
    assert [sample.id for sample in in_memory[1].samples()] == ["x"]


def test_a_list_of_sources_and_samples_is_refused():
    with pytest.raises(BadInput):
        as_sources(["a", Sample("x")])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "a/b"),
        ("name", 7),
        ("resolution", 0),
        ("resolution", True),
        ("repeats", 1.5),
        ("weight", -1),
        ("weight", float("nan")),
        ("caption", 7),
    ],
)
def test_a_source_that_cannot_be_meant_is_refused_by_its_field(field, value):
    with pytest.raises(BadInput, check=asks_for(field)):
        Source("a", **{field: value})


def test_resolutions_are_by_source_only_where_they_differ():
    assert resolutions_of([Source("a", resolution=512)], 1024) == (512, {})
    assert resolutions_of([Source("a"), Source("b", resolution=1024)], 1024) == (1024, {})
    assert resolutions_of([Source("a"), Source("b", resolution=512)], 1024) == (1024, {"a": 1024, "b": 512})


def test_sources_that_cannot_be_listed_are_named_all_at_once(tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    paths = [tmp_path / "a", there, tmp_path / "b.tar"]
    with pytest.raises(BadInput):
        list_sources([Source(str(path)) for path in paths], {})
