"""Plans: the same on every node, byte for byte, and read as they were published."""

import os
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import FormatError
from cachestore.core.keys import KEY_BYTES, Key, Recipe, canonical, digest_parts
from cachestore.core.samples import Sample
from cachestore.files.publish import publish
from cachestore.files.table import encode_table
from cachestore.jobs.share.plan import (
    FORMAT,
    VERSION,
    ColumnRequest,
    PlanColumn,
    build_plan,
    is_published,
    plan_of_keys,
    publish_plan,
    read_outline,
    read_plan,
)
from cachestore.sources.folders import list_source
from cachestore.store.write.commit import create_store
from tests.fakes import FakeEncoder, captions, pictures, plan_of

TEXT, LATENTS = FakeEncoder("text"), FakeEncoder("latents")
NAMES = ["a.png", "b c.png", "ünïcode.png", "sub/a.png", "sub/deep/a.png", "z.JPG", "dots.in.name.png"]


def same(one, other):
    return plain(one) == plain(other)


def plain(plan):
    rows: dict[str, Any] = {
        name: list(getattr(plan, name)) for name in ("ids", "captions_at", "captions", "extras", "units_at", "unit_ids", "unit_requests")
    }
    rows["cells"] = [(list(at), list(units)) for at, units in plan.cells]
    rows["images"] = {role: (list(at), list(references)) for role, (at, references) in plan.images.items()}
    rows["recipes"] = [recipe.as_json() for recipe in plan.recipes]
    return rows | {name: getattr(plan, name) for name in ("name", "request", "content", "catalog", "columns")}


def folder(root, names):
    """A folder of pictures, made in this order."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
        path.with_suffix(".txt").write_text(f"caption of {name}")
    return root


def plan_file(layout, samples, encoders=(TEXT, LATENTS)):
    plan = plan_of(samples, encoders)
    publish_plan(layout, plan)
    return plan.name, layout.plan(plan.name).read_bytes()


def test_a_plan_of_nothing_is_valid(layout):
    plan = plan_of([], [TEXT, LATENTS])
    publish_plan(layout, plan)
    read = read_plan(layout, plan.name)
    assert same(read, plan)
    assert read.unit_count == 0
    assert [list(read.units_of(recipe)) for recipe in range(2)] == [[], []]
    assert read.cells[0][0][:] is not None


def test_a_plan_without_recipes_is_valid(layout):
    plan = plan_of(captions("a"), [])
    publish_plan(layout, plan)
    assert same(read_plan(layout, plan.name), plan)
    assert read_outline(layout, plan.name).unit_count == 0


def test_the_outline_says_how_much_there_is_without_reading_the_rows(layout, monkeypatch):
    plan = plan_of(pictures("a.png", "b.png"), [TEXT, LATENTS])
    publish_plan(layout, plan)
    monkeypatch.setattr("cachestore.jobs.share.plan.read_table", None)
    outline = read_outline(layout, plan.name)
    assert (outline.name, outline.catalog, outline.samples) == (plan.name, "train", 2)
    assert (outline.units_at, outline.unit_count) == (tuple(plan.units_at), plan.unit_count)


def test_an_outline_that_does_not_count_is_a_format_error(layout):
    plan = plan_of([], [TEXT])
    publish_plan(layout, plan)
    layout.plan(plan.name).unlink()
    publish(layout, layout.plan(plan.name), encode_table(FORMAT, VERSION, {"catalog": ""}, {}))
    with pytest.raises(FormatError, match="how many units"):
        read_outline(layout, plan.name)


def test_a_plan_is_the_same_bytes_for_another_root_another_listing_order_and_other_times(tmp_path):
    files = []
    for number in range(3):
        root = folder(tmp_path / f"root {number}" / "data", random.Random(number).sample(NAMES, len(NAMES)))
        for name in NAMES:
            os.utime(root / name, (number * 1000, number * 1000))
        files.append(plan_file(create_store(tmp_path / f"store {number}"), list_source(root).samples()))
    assert files[0] == files[1] == files[2]


def test_another_caption_another_image_and_another_recipe_make_another_plan():
    names = {
        plan_of(samples, [encoder]).name
        for samples in (captions("a"), captions("b"), captions("a", "a"))
        for encoder in (TEXT, FakeEncoder("text", model="other"))
    }
    assert len(names) == 6


texts = st.text(st.characters(codec="utf-8"), max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
)
rows = st.builds(
    Sample,
    id=texts,
    images=st.fixed_dictionaries({}, optional={"image": st.tuples(texts), "control": st.lists(texts, min_size=1, max_size=3).map(tuple)}),
    captions=st.lists(texts, min_size=1, max_size=3).map(tuple),
    extras=st.dictionaries(texts, json_values, max_size=2),
)


@given(st.lists(rows, max_size=6))
def test_a_plan_is_read_as_it_was_published(tmp_path_factory, samples):
    layout = create_store(tmp_path_factory.getbasetemp() / "plans")
    plan = plan_of(samples, [TEXT, LATENTS])
    layout.plan(plan.name).unlink(missing_ok=True)
    publish_plan(layout, plan)
    assert same(read_plan(layout, plan.name), plan)


def test_what_is_no_utf_8_survives(layout):
    """A file name that is not UTF-8 reaches Python with half surrogates."""
    odd = os.fsdecode(b"caf\xe9.png")
    plan = plan_of([Sample(odd, {"image": (odd,)}, ("\ud83d",))], [TEXT, LATENTS])
    publish_plan(layout, plan)
    assert same(read_plan(layout, plan.name), plan)


def test_equal_captions_are_one_unit_and_every_cell_refers_to_it():
    plan = plan_of(captions("a", "b", "a", "a"), [TEXT])
    assert plan.unit_count == 2
    at, units = plan.cells[0]
    assert list(at) == [0, 1, 2, 3, 4]
    assert [plan.unit(index).request["caption"] for index in units] == ["a", "b", "a", "a"]


def test_one_caption_of_two_recipes_is_two_units():
    both = [TEXT, FakeEncoder("text", model="other")]
    assert plan_of(captions("a"), both).unit_count == 2


def test_units_that_no_sample_refers_to_are_planned_too_and_once():
    assert plan_of(captions("", "a"), [TEXT], extra=[(0, {"caption": ""})]).unit_count == 2
    assert plan_of(captions("a"), [TEXT], extra=[(0, {"caption": ""})]).unit_count == 2


def id_of(recipe, request):
    return digest_parts("cachestore-unit", recipe.fingerprint, canonical(request))[:KEY_BYTES]


def test_units_are_sorted_by_recipe_and_then_by_id():
    plan = plan_of([Sample(str(n), {"image": (f"{n}.png",)}, (f"caption {n}",)) for n in range(50)], [TEXT, LATENTS])
    for recipe in range(2):
        ids = [plan.unit_ids[index] for index in plan.units_of(recipe)]
        assert ids == sorted(set(ids))
        assert all(plan.recipe_of(index) == recipe for index in plan.units_of(recipe))
        assert all(plan.unit(index).id == id_of(plan.recipes[recipe], plan.unit(index).request) for index in plan.units_of(recipe))


def test_a_plan_of_no_keys_is_valid(layout):
    plan = plan_of_keys(Recipe("values", {}), [])
    publish_plan(layout, plan)
    assert same(read_plan(layout, plan.name), plan)
    assert plan.unit_count == 0


def test_units_may_be_named_by_their_keys(layout):
    keys = [Key(b"b" * 16), Key(b"a" * 16), Key(b"b" * 16)]
    plan = plan_of_keys(Recipe("values", {}), keys)
    assert list(plan.unit_ids) == [b"a" * 16, b"b" * 16]
    assert [plan.unit(index).request for index in range(2)] == [{"key": "61" * 16}, {"key": "62" * 16}]
    assert plan.name == plan_of_keys(Recipe("values", {}), reversed(keys)).name
    publish_plan(layout, plan)
    assert read_plan(layout, plan.name).ids_are_keys


def test_a_sample_without_images_has_no_cell_in_a_column_of_images():
    plan = plan_of([Sample("prompt"), Sample("a.png", {"image": ("a.png",)})], [LATENTS])
    assert [list(part) for part in plan.cells[0]] == [[0, 0, 1], [0]]


def test_a_column_may_ask_for_nothing():
    column = ColumnRequest(PlanColumn(0, "text", "caption", {}), lambda sample: [])
    plan = build_plan(catalog="x", request="r", content="c", recipes=[TEXT.recipe], samples=captions("a", "b"), columns=[column])
    assert plan.unit_count == 0


def test_a_recipes_further_column_is_there_if_a_sample_has_a_cell_in_it():
    def images(role):
        return ColumnRequest(PlanColumn(0, "latents", role, {}), lambda sample: [{"image": one} for one in sample.images.get(role, ())])

    def roles(*samples):
        columns = [images("image"), images("control"), images("mask")]
        plan = build_plan(catalog="x", request="r", content="c", recipes=[LATENTS.recipe], samples=samples, columns=columns)
        return {column.role: list(at) for column, (at, _units) in zip(plan.columns, plan.cells, strict=True)}

    assert roles() == {"image": [0]}
    assert roles(Sample("a"), Sample("b", {"image": ("b",)})) == {"image": [0, 0, 1]}
    assert roles(Sample("a", {"control": ("c", "d")}), Sample("b")) == {"image": [0, 0, 0], "control": [0, 2, 2]}


def test_publishing_a_plan_twice_is_harmless_and_a_damaged_one_is_a_format_error(layout):
    plan = plan_of(captions("a", "b"), [TEXT])
    assert not is_published(layout, plan.name)
    publish_plan(layout, plan)
    publish_plan(layout, plan)
    assert is_published(layout, plan.name)
    publish_plan(layout, plan)
    path = layout.plan(plan.name)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"caption", b"cAption", 1))
    with pytest.raises(FormatError):
        read_plan(layout, plan.name)


def test_a_plan_holds_no_absolute_path(tmp_path):
    root = folder(tmp_path / "data", NAMES)
    _name, raw = plan_file(create_store(tmp_path / "store"), list_source(root).samples())
    assert str(tmp_path).encode() not in raw


def test_a_column_that_needs_cells_goes_with_its_recipe_where_no_sample_has_one():
    def planned(*samples):
        def asked(role):
            return lambda sample: [{role: reference} for reference in sample.images.get(role, ())]

        columns = [
            ColumnRequest(PlanColumn(0, "latents", "image", {}), asked("image")),
            ColumnRequest(PlanColumn(1, "mask", "mask", {}), asked("mask"), needs_cells=True),
        ]
        recipes = [LATENTS.recipe, Recipe("mask", {"kind": "mask"})]
        return build_plan(catalog="train", request="r", content="c", recipes=recipes, samples=samples, columns=columns)

    without, masked = planned(*pictures("a.png")), planned(Sample("a", {"image": ("a.png",), "mask": ("m.png",)}))
    assert [recipe.encoder for recipe in without.recipes] == [column.encoder for column in without.columns] == ["latents"]
    assert (list(without.units_at), list(masked.units_at)) == ([0, 1], [0, 1, 2])
    assert [column.encoder for column in masked.columns] == ["latents", "mask"]
    assert [column.encoder for column in planned().columns] == ["latents"]
