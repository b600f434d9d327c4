"""What a pass reports: how much it made, what failed, and which files changed meanwhile."""

from tests import fakes
from tests.fakes import FakeEncoder, Pictures, captions, pictures, run_pass
from tests.jobs.bench import edits


def test_an_image_that_changed_after_it_was_read_is_named(root):
    source = Pictures({"a.png": b"a", "b.png": b"b"})

    def replace_it(_items):
        source.files["b.png"], source.times["b.png"] = b"B", 5

    encoder = FakeEncoder("text", shown="control", before_encode=replace_it)
    report = fakes.run(root, edits(("a.png", "b.png")), encoder, source=source)
    assert report.changed == ("a.png", "b.png")  # which of them it was is not recorded


def test_an_image_that_was_touched_after_it_was_read_is_not_named(root):
    source = Pictures({"a.png": b"a"})
    encoder = FakeEncoder("latents", before_encode=lambda _items: source.times.update({"a.png": 5}))
    assert fakes.run(root, pictures("a.png"), encoder, source=source).changed == ()


def test_pictures_of_equal_bytes_count_as_one_encoded_and_the_rest_reused(root):
    source = Pictures({"a.png": b"same", "b.png": b"same", "c.png": b"other"})
    report = fakes.run(root, pictures(*source.files), FakeEncoder("latents"), source=source)
    assert (report.wanted, report.encoded, report.reused) == (3, 2, 1)


def test_every_sample_of_a_failed_caption_is_listed(root):
    def refuse(items):
        if "bad" in items:
            raise ValueError("no")

    report = fakes.run(root, captions("bad", "good", "bad"), FakeEncoder(before_encode=refuse))
    assert [failure["sample"] for failure in report.failures] == ["0000", "0002"]
    assert (report.failed, report.encoded, report.samples) == (1, 1, 3)
    assert fakes.adds_up(report)


def test_a_failed_unit_that_no_sample_refers_to_is_listed_without_one(root):
    def refuse(items):
        if "" in items:
            raise ValueError("no")

    encoder = FakeEncoder(before_encode=refuse)
    report = run_pass(fakes.job(root, captions("a"), [encoder], extra=[(0, {"caption": ""})]))
    assert [(failure["sample"], failure["encoder"]) for failure in report.failures] == [("", "text")]


def test_a_report_counts_the_bytes_that_the_pass_made(root):
    assert fakes.run(root, captions("a", "b"), FakeEncoder()).bytes == 32
    assert fakes.run(root, captions("a", "b"), FakeEncoder()).bytes == 0
