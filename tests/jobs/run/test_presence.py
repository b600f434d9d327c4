"""Which units are there and unchanged, by catalogs, files and the store."""

import pytest

from tests import fakes
from tests.fakes import FakeEncoder, Pictures, as_launch, catalog, open_pass, pictures, run_pass
from tests.jobs.bench import edits, seeing, worked_on


def test_a_picture_with_another_time_is_looked_at_and_one_with_the_same_is_not(root):
    source = Pictures({"a.png": b"one", "b.png": b"two", "c.png": b"three"})
    one = fakes.job(root, pictures(*source.files), [FakeEncoder("latents")], source=source)
    run_pass(one)
    source.times["b.png"] = 5
    again = as_launch(one, "again")
    open_pass(again)
    assert worked_on(again) == {"b.png"}


def test_a_picture_whose_time_proved_nothing_is_looked_at_again(root, monkeypatch):
    source = Pictures({"a.png": b"one"})
    one = fakes.job(root, pictures("a.png"), [FakeEncoder("latents")], source=source)
    monkeypatch.setattr(source.__class__, "read", lambda self, name: (self.files[name], (-1, -1)))
    run_pass(one)
    again = as_launch(one, "again")
    open_pass(again)
    assert worked_on(again) == {"a.png"}


def test_unchanged_images_are_neither_read_nor_encoded_again(root):
    source, samples = Pictures({"a.png": b"a", "b.png": b"b"}), edits(("a.png", "b.png"), ("a.png",))
    fakes.run(root, samples, seeing(), source=source)
    source.reads.clear()
    again = fakes.run(root, samples, seeing(), source=source)
    assert (again.complete, again.encoded, again.reused, source.reads) == (True, 0, 2, [])


def test_a_replaced_image_makes_the_texts_anew_that_see_it_and_no_others(root):
    source, samples = Pictures({"a.png": b"a", "b.png": b"b"}), edits(("a.png", "b.png"), ("a.png",))
    fakes.run(root, samples, seeing(), source=source)
    source.files["b.png"] = b"B"
    source.times["b.png"] = 5
    again = fakes.run(root, samples, seeing(), source=source)
    assert (again.encoded, again.reused) == (1, 1)
    source.times["a.png"] = 6  # touched alone
    once_more = fakes.run(root, samples, seeing(), source=source)
    assert (once_more.encoded, once_more.reused) == (0, 2)


@pytest.mark.parametrize("now", [("b.png",), ("a.png", "b.png"), ()])
def test_a_sample_that_lists_other_images_has_another_text_whatever_its_caption(root, now):
    source = Pictures({"a.png": b"a", "b.png": b"b"})
    fakes.run(root, edits(("a.png",)), seeing(), source=source)
    before = catalog(root).column("text", "caption").row_keys(0)
    report = fakes.run(root, edits(now), seeing(), source=source)
    assert (report.encoded, report.failed) == ((1, 0) if now else (0, 1))
    assert catalog(root).column("text", "caption").row_keys(0) != before
