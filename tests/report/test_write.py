"""The report: what it says of a store, how large it gets, and what a browser makes of it."""

import json
import os
import re
from dataclasses import replace
from functools import partial
from hashlib import sha256
from html.parser import HTMLParser
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

import cachestore as cs
from cachestore.core.errors import BadInput, StoreNotFound, WriteFailed
from cachestore.report.originals import _decoded, _shown
from cachestore.report.previews import MAX_SAMPLES, Colours
from cachestore.report.write import write_report
from cachestore.store.format.catalog import Cell, make_column
from cachestore.store.write.writer import open_store
from tests import fakes
from tests.fakes import asks_for, publish_catalog
from tests.report.browser import in_a_browser, look_at
from tests.train import stores
from tests.train.stores import Row

VOID = {"meta", "link", "img", "br", "rect", "path", "line"}
HOSTILE = "<script>document.title='owned'</script><img src=//a.example/x onerror=alert(1)>\"' & \x00\ud800 \N{RIGHT-TO-LEFT OVERRIDE}x"


class Page(HTMLParser):
    """What a page holds; every element must be closed, and in order."""

    def __init__(self, text):
        super().__init__()
        self.text, self.open, self.elements, self.words = text, [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def all(self, tag):
        return [attributes for found, attributes in self.elements if found == tag]


def report(store, output, **options):
    reported = write_report(store, output, **options)
    json.dumps(reported)
    return reported, Page(output.read_text(encoding="utf-8"))


def is_static(page):
    """No script, no handler, no address but of the page itself or of data."""
    addresses = [value for _tag, found in page.elements for name, value in found.items() if name in {"src", "href", "xlink:href", "action"}]
    handlers = [name for _tag, found in page.elements for name in found if name.startswith("on")]
    style = page.text[page.text.index("<style>") : page.text.index("</style>")]
    return (
        not page.all("script")
        and not page.all("iframe")
        and not handlers
        and all(address.startswith(("#", "data:")) for address in addresses)
        and "url(" not in style
        and "@import" not in style
    )


def test_the_check_sees_a_script_a_handler_and_an_address():
    head = "<style></style>"
    assert is_static(Page(head + '<a href="#x">y</a>'))
    assert not is_static(Page(head + "<script></script>"))
    assert not is_static(Page(head + '<p onclick="x">y</p>'))
    assert not is_static(Page(head + '<img src="//host/x">'))


def is_accessible(page):
    """Pictures have texts, drawings a label or a table that says the same, tables a caption, and the page a language and a title."""
    drawings = [one for one in page.all("svg") if one.get("aria-hidden") != "true"]
    return (
        all(image.get("alt") for image in page.all("img"))
        and all(one.get("role") == "img" and one.get("aria-label") for one in drawings)
        and len(page.all("table")) == len(page.all("caption"))
        and all(head.get("scope") for head in page.all("th"))
        and page.all("html")[0].get("lang") == "en"
        and len(page.all("title")) >= 1
    )


@pytest.fixture
def output(tmp_path):
    return tmp_path / "report.html"


def make(path, count=5, **options):
    rows = [Row(f"{n:05}", (f"caption {n % 3}",), bucket=(64, 48) if n % 2 else (48, 64)) for n in range(count)]
    return stores.make_store(path, rows, stores.recipes(**options))


def test_a_store_of_nothing_has_a_report_that_says_so(tmp_path, output):
    cs.open(tmp_path / "store", mode="a").close()
    reported, page = report(tmp_path / "store", output)
    assert (reported["name"], reported["samples"], reported["entries"], reported["damage"]["ok"]) == ("", 0, 0, True)
    assert is_static(page)
    assert is_accessible(page)
    assert "No data set" in page.text


def test_a_data_set_that_is_not_finished_is_called_so_with_how_far_it_is(tmp_path, output):
    fakes.open_pass(fakes.job(tmp_path / "store", fakes.captions("a", "b"), [fakes.FakeEncoder()]))
    reported, page = report(tmp_path / "store", output)
    assert [(one["name"], one["done"], one["total"]) for one in reported["unfinished"]] == [("train", 0, 2)]
    shown = "".join(page.words)
    assert "not finished (0 of 2 values)" in shown
    assert "--again" in shown
    assert "No data set" not in shown
    assert "0 samples" not in shown


def test_the_pictures_come_first_then_what_failed_and_what_is_not_used(tmp_path, output):
    _reported, page = report(make(tmp_path / "store"), output)
    assert [found["id"] for found in page.all("section")][:4] == ["pictures", "failures", "unused", "buckets"]


def test_what_is_left_out_is_said_of_this_loader_and_is_no_alarm(tmp_path, output):
    _reported, page = report(make(tmp_path / "store"), output, batch_size=3)
    assert "cachestore's loader leaves out 1 sample with a batch size of 2, 2 with 3, 5 with 4, 5 with 8" in "".join(page.words)
    buckets = page.text[page.text.index('id="buckets"') : page.text.index('id="captions"')]
    assert "lost" not in buckets
    assert "bad" not in buckets


def test_buckets_of_another_trainer_say_nothing_of_this_loader(tmp_path, output):
    path, made = make(tmp_path / "store"), stores.recipes()
    catalog = stores.catalog_of([Row("00000")], made, "theirs")
    columns = [replace(one, options={**one.options, "buckets": "ai-toolkit"}) for one in catalog.columns]
    with open_store(path, mode="a") as store:
        publish_catalog(store.layout, replace(catalog, columns=tuple(columns)))
    reported, page = report(path, output, name="theirs")
    assert reported["buckets"][0]["samples"] == 1
    assert "loader" not in "".join(page.words)


@pytest.mark.processes
def test_a_store_at_an_address_has_a_report_that_says_what_it_does_not_know(tmp_path, output):
    pytest.importorskip("obstore", reason="the extra [objects] is not installed")
    path = make(tmp_path / "store")
    here, _page = report(path, tmp_path / "here.html")
    reported, page = report(f"file://{path}", output)
    assert {name: reported[name] for name in ("samples", "complete", "entries", "bytes", "buckets", "captions")} == {
        name: here[name] for name in ("samples", "complete", "entries", "bytes", "buckets", "captions")
    }
    assert (reported["damage"], reported["thumbnails"]["shown"]) == (None, 5)
    assert "not checked" in page.words
    assert is_static(page)
    with pytest.raises(BadInput):
        write_report(f"file://{path}", output, "other")
    with pytest.raises(BadInput, check=asks_for("full")):
        write_report(f"file://{path}", output, level="full")


def test_where_there_is_no_store_nothing_is_written(tmp_path, output):
    with pytest.raises(StoreNotFound):
        write_report(tmp_path / "nothing", output)
    assert not output.exists()


def test_a_report_counts_samples_buckets_entries_and_what_is_shared(tmp_path, output):
    reported, page = report(make(tmp_path / "store"), output, batch_size=2)
    assert (reported["name"], reported["samples"], reported["complete"]) == ("train", 5, 5)
    assert [(one["name"], one["samples"], one["left_over"]) for one in reported["buckets"][0]["buckets"]] == [
        ("48x64", 3, 1),
        ("64x48", 2, 0),
    ]
    assert {one["encoder"]: (one["cells"], one["entries"]) for one in reported["kinds"]} == {"text": (5, 3), "latents": (5, 5)}
    assert reported["others"] == 1  # the empty caption
    shown = {name: value for name, value in reported["thumbnails"].items() if name != "samples"}
    assert shown == {"shown": 5, "originals": 0, "changed": [], "fitted_to": 0, "explained": 0.0}
    assert {tuple(one["bucket"]) for one in reported["thumbnails"]["samples"]} == {(48, 64), (64, 48)}
    assert len(page.all("figure")) == 5
    assert reported["page_bytes"] == output.stat().st_size
    assert is_static(page)
    assert is_accessible(page)


def test_the_data_set_is_the_only_one_or_the_named_one_and_an_unknown_one_is_refused(tmp_path, output):
    path = make(tmp_path / "store")
    assert report(path, output)[0]["name"] == "train"
    stores.make_store(path, [Row("a")], stores.recipes(), name="another")
    with pytest.raises(BadInput, check=asks_for("name", "another or train")):
        write_report(path, output)
    reported, _page = report(path, output, name="train")
    assert (reported["name"], reported["other_names"]) == ("train", ("another",))
    assert report(path, output, name="another")[0]["samples"] == 1
    with pytest.raises(BadInput):
        write_report(path, output, "none of them")
    with pytest.raises(BadInput, check=asks_for("batch_size")):
        write_report(path, output, batch_size=0)


def test_a_store_with_very_many_data_sets_names_the_first_ones(tmp_path, output):
    path = make(tmp_path / "store", 1)
    for n in range(12):
        stores.make_store(path, [Row("a")], stores.recipes(), name=f"another {n:02}")
    reported, page = report(path, output, name="train")
    assert len(reported["other_names"]) == 12
    assert "another 09" in page.words
    assert "another 10" not in page.words
    assert "and 2 more" in page.text


def test_a_file_that_cannot_be_written_leaves_what_stood_there(tmp_path, output):
    path = make(tmp_path / "store")
    output.mkdir()
    with pytest.raises(WriteFailed):
        write_report(path, output)
    assert sorted(os.listdir(tmp_path)) == ["report.html", "store"]


def test_a_report_writes_nothing_into_the_store(tmp_path, output):
    path = make(tmp_path / "store")
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    report(path, output, level="full")
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before


def test_damage_is_in_the_map_and_named_with_its_sample_and_quick_does_not_read_so_far(tmp_path, output):
    path = make(tmp_path / "store")
    fakes.flip_entry(path, "00003", "latents")
    assert report(path, output)[0]["damage"]["ok"]
    reported, page = report(path, output, level="full")
    assert [one["state"] for one in reported["damage"]["map"]] == ["damaged"]
    assert ("corrupt-entry", "00003") in {(one["kind"], one["sample"]) for one in reported["damage"]["findings"]}
    assert "00003" in page.words
    assert 'class="sign"' in page.text


def test_a_segment_that_is_gone_or_cut_is_in_the_map_and_the_rest_is_still_reported(tmp_path, output):
    path = make(tmp_path / "store")
    (segment,) = (path / "segments").rglob("*.safetensors")
    segment.chmod(0o644)
    segment.write_bytes(segment.read_bytes()[:100])
    reported, page = report(path, output)
    assert [one["state"] for one in reported["damage"]["map"]] == ["damaged"]
    segment.unlink()
    reported, page = report(path, output)
    assert [one["state"] for one in reported["damage"]["map"]] == ["gone"]
    assert reported["samples"] == 5
    assert is_static(page)


def test_passes_stages_ranks_and_failures_are_those_of_the_data_set(tmp_path, output):
    source = fakes.Pictures({"a.png": b"a picture", "b.png": b"undecodable"})
    encoders = fakes.FakeEncoder(), fakes.FakeEncoder("latents")
    fakes.run(tmp_path / "store", fakes.pictures("a.png", "b.png"), *encoders, source=source)
    fakes.run(tmp_path / "store", fakes.pictures("a.png", "b.png"), *encoders, source=source)
    reported, page = report(tmp_path / "store", output)
    assert [(one["number"], one["encoded"], one["reused"], one["failed"], one["complete"]) for one in reported["passes"]] == [
        (2, 0, 3, 1, True),
        (1, 3, 0, 1, True),
    ]
    assert [(one["sample"], one["encoder"], one["reason"]) for one in reported["failures"]] == [("b.png", "latents", "this is no picture")]
    assert [rank["encoded"] for rank in reported["passes"][1]["ranks"]] == [3]
    assert "this is no picture" in page.words
    assert reported["thumbnails"] == {}


def test_a_sample_that_fails_for_one_reason_in_several_encoders_is_one_row(tmp_path, output):
    source = fakes.Pictures({"b.png": b"undecodable"})
    encoders = fakes.FakeEncoder("latents"), fakes.FakeEncoder("vision")
    fakes.run(tmp_path / "store", fakes.pictures("b.png"), *encoders, source=source)
    reported, page = report(tmp_path / "store", output)
    assert [one["encoder"] for one in reported["failures"]] == ["latents", "vision"]
    assert page.words.count("this is no picture") == 1
    assert "latents, vision" in page.words


def test_a_done_that_says_something_else_and_a_damaged_plan_are_passed_over(tmp_path, output):
    fakes.run(tmp_path / "store", fakes.captions("one"), fakes.FakeEncoder())
    for plan in (tmp_path / "store" / "plans").rglob("plan.safetensors"):
        plan.chmod(0o644)
        plan.write_bytes(b"no plan")
    reported, page = report(tmp_path / "store", output)
    assert (reported["passes"], reported["samples"]) == ((), 1)
    assert is_static(page)


def hostile(path):
    """A store whose names and captions try to be markup, as far as a catalog lets them."""
    made = stores.recipes()
    text = HOSTILE.encode("utf-8", "replace").decode()
    stores.make_store(path, [Row(f"{text}{n}", (text,)) for n in range(3)], made)
    stores.make_store(path, [Row("a")], made, name="<b>bold")
    return path


def test_what_users_wrote_is_shown_as_text(tmp_path, output):
    _reported, page = report(hostile(tmp_path / "store"), output, name="train")
    assert is_static(page)
    assert is_accessible(page)
    assert "document.title" in "".join(page.words)
    assert len(page.all("img")) == 3
    assert not page.all("b")
    assert "\x00" not in page.text


def loud(_shown, _originals):
    """Colours as if pictures had been there to fit to, and of noise: the worst to compress."""
    return Colours(np.random.default_rng(1).normal(60, 60, (stores.CHANNELS + 1, 3)), MAX_SAMPLES, 0.5)


def noisy(_catalog, _column, shown, _source):
    """Originals of noise: the worst to compress."""
    side = 1024
    buffer = BytesIO()
    Image.fromarray(np.random.default_rng(2).integers(0, 256, (side, side, 3), np.uint8)).save(buffer, "PNG")
    return [_shown(buffer.getvalue(), one, partial(_decoded, {})) for one in shown]


@pytest.mark.parametrize(
    "request_", [{"latents": 3}, {"latents": {"data": 7}}, {"latents": {"data": "\0"}}, {"latents": {"sources": [3]}}, {}]
)
def test_a_catalog_that_says_nonsense_has_a_report_too(tmp_path, output, request_):
    path, made = make(tmp_path / "store"), stores.recipes()
    strange = replace(
        stores.catalog_of([Row("00000", fails=False)], made, "strange"), request=request_, images={"image": ([0, 1], ["a\0"])}
    )
    with open_store(path, mode="a") as store:
        publish_catalog(store.layout, strange)
        publish_catalog(store.layout, replace(strange, name="without recipes", recipes={}))
    for name, shown in (("strange", 1), ("without recipes", 0)):
        reported, page = report(path, output, name=name)
        assert (reported["samples"], reported["thumbnails"].get("shown", 0)) == (1, shown)
        assert is_static(page)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A report of 10,000 samples; those that are shown have latents of 1024 x 1024 pixels, most others are missing."""
    made, path = stores.recipes(), tmp_path_factory.mktemp("large") / "store"
    names = sorted((f"folder/picture {n:05}.jpg" for n in range(10_000)), key=lambda name: sha256(name.encode()).digest())
    rows = [
        Row(name, (f"caption {n % 40} " + "of a very long description " * (n % 90),), bucket=(16 + 8 * (n % 70), 16))
        for n, name in enumerate(names)
    ]
    rows[:MAX_SAMPLES] = [replace(row, bucket=(1024, 1024)) for row in rows[:MAX_SAMPLES]]
    with open_store(path, mode="a") as store:
        with store.writer() as writer:
            for row in rows[:400]:
                assert row.bucket is not None
                writer.put(stores.picture_key(made.latents, row.id), stores.stored_latents(made.latents, row.id, row.bucket))
        store.commit()
        tokens = [[Cell(stores.caption_key(made.text, row.captions[0]), facts={"tokens": (len(row.captions[0]) // 5,)})] for row in rows]
        catalog = stores.catalog_of(rows, made, "train")
        text = make_column("text", "caption", made.text.fingerprint, {}, tokens)
        publish_catalog(store.layout, replace(catalog, columns=(text, *catalog.columns[1:])))
    output = path.parent / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cachestore.report.gallery.find_colours", loud)
        patch.setattr("cachestore.report.gallery.find_originals", noisy)
        return write_report(path, output), output


def test_the_report_of_10_000_samples_is_under_2_mb_however_noisy_its_pictures_are(large):
    reported, output = large
    assert (reported["samples"], reported["thumbnails"]["shown"]) == (10_000, MAX_SAMPLES)
    assert len(reported["damage"]["findings"]) > 9000
    assert 1_000_000 < output.stat().st_size < 2_000_000
    page = Page(output.read_text(encoding="utf-8"))
    assert is_static(page)
    assert is_accessible(page)
    assert len(page.all("figure")) == MAX_SAMPLES


@in_a_browser
@pytest.mark.processes
def test_what_a_page_complains_about_would_be_seen(tmp_path):
    page = tmp_path / "page.html"
    policy = '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'">'
    page.write_text(f"<!DOCTYPE html>{policy}<img src='nothing.png'><script>document.title='owned'</script>")
    dom, console = look_at(page, tmp_path / "profile")
    assert any("Content Security Policy" in line for line in console)
    assert "owned</title>" not in dom


@in_a_browser
@pytest.mark.processes
def test_a_browser_shows_the_report_of_10_000_samples_and_complains_of_nothing(large, tmp_path):
    reported, output = large
    dom, console = look_at(output, tmp_path / "profile")
    assert console == []
    assert "<dd>10,000</dd>" in dom
    assert len(re.findall(r"<figure>", dom)) == MAX_SAMPLES
    assert len(re.findall(r"<section ", dom)) == 9
    assert f"{reported['entries']:,}" in dom


@in_a_browser
@pytest.mark.processes
def test_a_browser_runs_nothing_of_what_users_wrote(tmp_path, output):
    write_report(hostile(tmp_path / "store"), output, "train")
    dom, console = look_at(output, tmp_path / "profile")
    assert console == []
    assert "<title>train · cachestore report</title>" in dom
    assert "<script" not in dom
    assert "onerror=alert" not in re.sub(r">[^<]*<|\"[^\"]*\"", "", dom)
