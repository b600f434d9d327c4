"""The catalog at the end of a pass: its own columns, and those that earlier encoders made."""

import pytest

from tests import fakes
from tests.fakes import FakeEncoder, Pictures, captions, catalog, pictures, run_pass
from tests.jobs.bench import edits, seeing


@pytest.mark.parametrize(
    ("change", "stays"),
    [
        (lambda source: source.times.update({"b.png": 5}), True),
        (lambda source: source.files.update({"b.png": b"longer"}), False),
        (lambda source: source.files.pop("b.png"), False),
    ],
    ids=["touched", "replaced", "gone"],
)
def test_a_kept_text_stays_while_the_images_that_it_saw_are_the_same(root, change, stays):
    source, samples = Pictures({"a.png": b"a", "b.png": b"b"}), edits(("a.png", "b.png"))
    fakes.run(root, samples, seeing(), source=source)
    change(source)
    fakes.run(root, samples, FakeEncoder("latents"), source=source)
    assert (catalog(root).column("text", "caption").row_keys(0)[0] is not None) == stays


def test_the_catalog_pairs_each_sample_with_the_entries_of_its_own_inputs(root):
    source = Pictures({f"{n}.png": b"undecodable" if n == 2 else f"{n}".encode() for n in range(5)})
    one = fakes.job(root, pictures(*source.files), [FakeEncoder("text"), FakeEncoder("latents")], source=source)
    report = run_pass(one)
    assert report.failed == 1
    found = catalog(root)
    latents, text = found.column("latents", "image"), found.column("text", "caption")
    for row, name in enumerate(found.ids):
        assert text.row_cells(row)[0].input.hex() == fakes.digest_text(f"caption of {name}")
        cell = latents.row_cells(row)[0]
        assert (cell.key is None) == (name == "2.png")
        if cell.key is not None:
            assert cell.input.hex() == fakes.digest_bytes(source.files[name])


def test_another_encoders_column_is_kept(root):
    source = Pictures({"a.png": b"one"})
    samples = pictures("a.png")
    fakes.run(root, samples, FakeEncoder("text"), source=source)
    report = fakes.run(root, samples, FakeEncoder("latents"), source=source)
    found = catalog(root)
    assert report.generation == found.generation == 2
    assert {(column.encoder, column.keys[0] != bytes(16)) for column in found.columns} == {("text", True), ("latents", True)}
    assert {recipe.encoder for recipe in found.recipes.values()} == {"text", "latents"}


def test_a_kept_cell_is_emptied_when_what_it_was_made_from_changes(root):
    source = Pictures({"a.png": b"one", "b.png": b"two"})
    samples = pictures("a.png", "b.png")
    fakes.run(root, samples, FakeEncoder("latents"), source=source)
    source.files["a.png"], source.times["a.png"] = b"ONE", 5
    fakes.run(root, samples, FakeEncoder("text"), source=source)
    latents = catalog(root).column("latents", "image")
    assert [latents.row_keys(row)[0] is None for row in range(2)] == [True, False]


def test_a_kept_cell_stays_when_its_file_was_only_touched(root):
    source = Pictures({"a.png": b"one"})
    fakes.run(root, pictures("a.png"), FakeEncoder("latents"), source=source)
    source.times["a.png"] = 5
    fakes.run(root, pictures("a.png"), FakeEncoder("text"), source=source)
    latents = catalog(root).column("latents", "image")
    assert latents.row_keys(0)[0] is not None


def test_a_kept_cell_is_emptied_when_its_file_is_gone(root):
    source = Pictures({"a.png": b"one"})
    fakes.run(root, pictures("a.png"), FakeEncoder("latents"), source=source)
    del source.files["a.png"]
    fakes.run(root, pictures("a.png"), FakeEncoder("text"), source=source)
    assert catalog(root).column("latents", "image").row_keys(0) == [None]


def test_a_kept_column_has_empty_cells_for_new_samples_and_none_for_those_that_left(root):
    fakes.run(root, captions("a", "b"), FakeEncoder("text"))
    source = Pictures({"x.png": b"x"})
    samples = [*captions("a")[:1], *pictures("x.png")]
    fakes.run(root, samples, FakeEncoder("latents"), source=source)
    found = catalog(root)
    text = found.column("text", "caption")
    assert list(found.ids) == ["0000", "x.png"]
    assert [text.row_keys(row)[0] is None for row in range(2)] == [False, True]


def test_a_kept_caption_cell_is_emptied_when_the_caption_is_edited(root):
    source = Pictures({"a.png": b"one"})
    fakes.run(root, captions("before"), FakeEncoder("text"))
    fakes.run(root, captions("after"), FakeEncoder("latents"), source=source)
    text = catalog(root).column("text", "caption")
    assert text.row_keys(0) == [None]


def test_the_catalog_remembers_what_each_encoder_was_asked_for(root):
    samples = pictures("a.png")
    source = Pictures({"a.png": b"one"})
    for name in ("text", "latents"):
        run_pass(fakes.job(root, samples, [FakeEncoder(name)], source=source, launch=name, request={"asked": name}))
    found = catalog(root)
    assert found.request == {"text": {"asked": "text"}, "latents": {"asked": "latents"}}
