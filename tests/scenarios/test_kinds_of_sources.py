"""The same pictures as a folder, a manifest, tars, samples in memory, and a data set of Hugging Face; and several of these at once."""

import gc
import json
import os
from importlib.util import find_spec
from typing import Any

import pytest

import cachestore as cs
from cachestore.cli import main
from cachestore.core.errors import BadInput, RecipeMismatch
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.start import precompute as run
from cachestore.jobs.start.forecast import forecast_of
from tests import fakes
from tests.fakes import asks_for, catalog
from tests.leaks import held
from tests.sources.test_tars import pack

Sample: Any = cs.Sample
NAMES = [f"{number}.png" for number in range(4)]


def content(name):
    return f"picture {name}".encode()


def caption(name):
    return f"caption {name[0]}"


@pytest.fixture
def in_processes(monkeypatch, tmp_path):
    """Workers with fake encoders, which write down what they encode; returns where."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(fakes.ROOT / "tests/cli/at_start"), str(fakes.ROOT)]))
    monkeypatch.setenv("FAKE_ENCODERS", "1")
    monkeypatch.setenv(fakes.LOG, str(tmp_path / "encoded"))
    return tmp_path / "encoded"


def folder(path, names=NAMES):
    path.mkdir(parents=True)
    for name in names:
        put(path / name, content(name))
        (path / name).with_suffix(".txt").write_text(caption(name))
    return path


def put(path, data, at=1):
    path.write_bytes(data)
    os.utime(path, (at, at))


def of_kind(kind, root) -> Any:  # noqa: PLR0911 - one for each kind
    """The same samples as a source of each kind."""
    match kind:
        case "folder":
            return folder(root / "folder")
        case "metadata":
            path = folder(root / "with metadata")
            (path / "metadata.jsonl").write_text("".join(json.dumps({"file_name": n, "text": caption(n)}) + "\n" for n in NAMES))
            return path
        case "manifest":
            folder(root / "listed")
            rows = [{"image": f"listed/{name}", "caption": caption(name)} for name in NAMES]
            (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            return root / "rows.jsonl"
        case "tar":
            return pack(root / "one.tar", [m for n in NAMES for m in ((n, content(n)), (n.replace("png", "txt"), caption(n)))])
        case "tars":
            for number, name in enumerate(NAMES):
                pack(root / f"tars/{number:02}.tar", {name: content(name), "0.json": "{}", name.replace("png", "json"): _row(name)})
            return root / "tars"
        case "range":
            of_kind("tars", root / "range")
            return root / "range/tars/{00..03}.tar"
        case "bytes":
            return [Sample(name, {"image": content(name)}, (caption(name),)) for name in NAMES]
        case "paths":
            path = folder(root / "of paths")
            return [Sample(name, {"image": path / name}, caption(name)) for name in NAMES]
        case _:
            return hugging_face()


def _row(name):
    return json.dumps({"caption": caption(name)})


def hugging_face(**columns):
    import datasets

    pictures = [{"bytes": content(name), "path": None} for name in NAMES]
    made = datasets.Dataset.from_dict({"image": pictures, "text": [caption(name) for name in NAMES], **columns})
    return made.cast_column("image", datasets.Image(decode=False))


def keys(root, name="train"):
    """The keys of each column, whatever the order of the samples."""
    return {(column.encoder, column.role): sorted(column.keys) for column in catalog(root, name).columns}


KINDS = ["folder", "metadata", "manifest", "tar", "tars", "range", "bytes", "paths"]
HUB = pytest.param(
    "Hugging Face",
    marks=[pytest.mark.processes, pytest.mark.skipif(find_spec("datasets") is None, reason="Hugging Face datasets is not installed")],
)


@pytest.mark.parametrize("kind", [*KINDS[1:], HUB])
def test_the_same_pictures_have_the_same_keys_in_a_source_of_any_kind(kind, tmp_path, makers):
    root = tmp_path / "store"
    first = cs.precompute(of_kind("folder", tmp_path), model="m", store=root, inline=True)
    second = cs.precompute(of_kind(kind, tmp_path), model="m", store=root, name="again", inline=True)
    assert (first.wanted, first.encoded) == (9, 9)
    assert (second.wanted, second.encoded, second.reused) == (9, 0, 9)
    assert keys(root, "again") == keys(root)


@pytest.mark.parametrize("kind", [*KINDS, HUB])
def test_a_second_run_over_a_source_of_any_kind_finds_everything_and_makes_no_catalog(kind, tmp_path, makers):
    data = of_kind(kind, tmp_path)
    first = cs.precompute(data, model=tmp_path, store=tmp_path / "store", inline=True)
    makers.made.clear()
    second = cs.precompute(data, model=tmp_path, store=tmp_path / "store")  # starts no process, as nothing is to be encoded
    assert (second.encoded, second.reused, second.generation) == (0, 9, first.generation)
    assert [encoder.prepared for encoder in makers.made] == [0] * len(makers.made)


# Several at once


def test_sources_share_captions_and_models_and_one_replaced_picture_is_encoded_alone(tmp_path, makers):
    one, other = folder(tmp_path / "one"), folder(tmp_path / "other", ["0.png", "8.png", "9.png"])
    put(other / "0.png", b"another picture under a caption of the first")
    sources = [cs.Source(one), cs.Source(other, name="other", repeats=5), cs.Source(of_kind("bytes", tmp_path), name="held")]
    report = cs.precompute(sources, model="m", store=tmp_path / "store", inline=True)
    # Captions 0 to 3, 8, 9 and the empty one; pictures by reference, of which those in memory are found under the same keys.
    assert (report.samples, report.wanted, report.encoded, report.reused) == (11, 7 + 11, 7 + 7, 4)
    assert len(makers.made) == 2
    put(other / "8.png", b"replaced", at=2)
    makers.made.clear()
    again = cs.precompute(sources, model="m", store=tmp_path / "store", inline=True)
    assert (again.encoded, again.reused) == (1, 17)
    assert makers.encoded() == [b"replaced"]


def test_a_source_of_its_own_resolution_leaves_the_others_alone(tmp_path, makers):
    one, other = cs.Source(folder(tmp_path / "one")), cs.Source(folder(tmp_path / "other"), name="small", resolution=512)
    options: Any = {"model": "m", "store": tmp_path / "store", "encode": ("latents",), "inline": True}
    assert cs.precompute([one], **options).encoded == 4
    mixed = cs.precompute([one, other], **options)
    assert (mixed.encoded, mixed.reused) == (4, 4)  # the same bytes at another resolution
    with pytest.raises(RecipeMismatch, check=asks_for("replace", 512)):
        cs.precompute([one, cs.Source(other.data, name="small", resolution=256)], **options)


def test_the_command_takes_several_paths_and_a_file_that_names_them(tmp_path, makers, capsys):
    one, other = folder(tmp_path / "one"), folder(tmp_path / "other", ["8.png"])
    assert main(["precompute", str(one), str(other), "--model", "m", "--store", str(tmp_path / "store"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 5
    table = f'model = "m"\nstore = {json.dumps(str(tmp_path / "store"))}\n[[source]]\ndata = {json.dumps(str(one))}\n'
    (tmp_path / "train.toml").write_text(table + f"[[source]]\ndata = {json.dumps(str(other))}\n")
    assert main(["precompute", "--config", str(tmp_path / "train.toml"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["encoded"], report["reused"], report["generation"]) == (0, 11, 1)


def test_a_lost_entry_of_one_of_several_sources_is_made_again(tmp_path, makers):
    sources = [folder(tmp_path / "one"), cs.Source(of_kind("tar", tmp_path), name="tar")]
    cs.precompute(sources, model="m", store=tmp_path / "store", inline=True)
    fakes.flip_entry(tmp_path / "store", "tar/2.png", "latents")
    report = cs.repair(tmp_path / "store", refill=True)
    assert (report.refilled, report.missing) == (1, 0)


def test_what_was_in_memory_is_asked_for_where_it_must_be_made_again(tmp_path, makers):
    cs.precompute(of_kind("bytes", tmp_path), model="m", store=tmp_path / "store", inline=True)
    fakes.flip_entry(tmp_path / "store", "2.png", "latents")
    with pytest.raises(BadInput, match="samples in memory"):
        cs.repair(tmp_path / "store", refill=True)
    assert cs.precompute(of_kind("bytes", tmp_path), model="m", store=tmp_path / "store", inline=True).complete
    assert cs.verify(tmp_path / "store").ok


# Beforehand


@pytest.mark.parametrize("kind", ["folder", "tar", "manifest", "bytes"])
def test_captions_of_several_lines_truncated_and_missing_ones_are_reported_beforehand(kind, tmp_path, makers):
    long = "nine words are one more than the encoder reads"
    texts = {"0.png": f"{long} now", "1.png": "two\nlines", "2.png": None}
    match kind:
        case "folder":
            data = folder(tmp_path / "folder", [])
            for name, text in texts.items():
                put(data / name, content(name))
                if text is not None:
                    (data / name).with_suffix(".txt").write_text(text)
        case "tar":
            captions = {name.replace("png", "txt"): text for name, text in texts.items() if text is not None}
            data = pack(tmp_path / "a.tar", {**{name: content(name) for name in texts}, **captions})
        case "manifest":
            folder(tmp_path / "folder", list(texts))
            data = tmp_path / "rows.jsonl"
            data.write_text("".join(json.dumps({"image": f"folder/{n}", "id": n, "caption": t}) + "\n" for n, t in texts.items()))
        case _:
            samples = [Sample(name, {"image": content(name)}, () if text is None else text) for name, text in texts.items()]
            cs.precompute(samples, model="m", store=tmp_path / "store", inline=True)
            return
    forecast = forecast_of(PrecomputeRequest(str(data), "m", str(tmp_path / "store")))
    assert forecast.truncated_captions == 1
    said = ["1 sample has no caption", "1 caption has several lines"]
    said += ["3 samples have captions in two places that differ"] if kind == "manifest" else []  # the folder has files with captions too
    assert [remark.partition(" (")[0] for remark in forecast.remarks] == said
    assert "1.png" in forecast.remarks[1]


# Hugging Face


hub = pytest.mark.skipif(find_spec("datasets") is None, reason="Hugging Face datasets is not installed")


@hub
@pytest.mark.processes
def test_a_data_set_keeps_its_other_columns_and_its_ids(tmp_path, makers):
    data = hugging_face(id=["a", "b", "c", "d"], score=[1.5, None, 2.0, 3.0], tags=[["x"], [], ["y", "z"], ["x"]])
    cs.precompute(data, model="m", store=tmp_path / "store", inline=True)
    found = catalog(tmp_path / "store")
    assert list(found.ids) == ["a", "b", "c", "d"]
    assert json.loads(found.extras[2]) == {"score": 2.0, "tags": ["y", "z"]}


@hub
@pytest.mark.processes
def test_pictures_of_other_columns_are_control_images_and_masks(tmp_path, makers):
    import datasets

    pictures = [[{"bytes": content(name), "path": None}, {"bytes": b"second " + content(name), "path": None}] for name in NAMES]
    masks = [{"bytes": b"mask of " + content(name), "path": None} for name in NAMES]
    data = hugging_face(control=pictures, mask=masks)
    data = data.cast_column("control", [datasets.Image(decode=False)]).cast_column("mask", datasets.Image(decode=False))
    report = cs.precompute(data, model="m", store=tmp_path / "store", encode=("latents",), inline=True)
    assert (report.wanted, report.failed) == (12, 0)
    found = catalog(tmp_path / "store")
    assert {role: len(references) for role, (_at, references) in found.images.items()} == {"image": 4, "control": 8, "mask": 4}


@hub
@pytest.mark.processes
def test_a_data_set_that_decodes_is_refused_with_the_line_that_helps(tmp_path, makers):
    import datasets

    for data, says in (
        (hugging_face().cast_column("image", datasets.Image()), r"cast_column\('image', datasets.Image\(decode=False\)\)"),
        (datasets.DatasetDict({"train": hugging_face()}), "choose one of its parts"),
        (hugging_face().to_iterable_dataset(), "streamed"),
    ):
        with pytest.raises(BadInput, match=says):
            cs.precompute(data, model="m", store=tmp_path / "store", inline=True)


@hub
@pytest.mark.processes
def test_a_single_column_of_pictures_may_have_any_name(tmp_path, makers):
    report = cs.precompute(hugging_face().rename_column("image", "photo"), model="m", store=tmp_path / "store", inline=True)
    assert (report.wanted, report.failed) == (9, 0)


# Workers that ask their caller


@pytest.mark.processes
@pytest.mark.parametrize("procs", [None, 2])
def test_workers_encode_what_only_their_caller_holds(procs, tmp_path, makers, in_processes):
    before = held()
    samples = [Sample(f"held {n}.png", {"image": b"picture %d" % n + bytes(200_000)}, f"caption {n}") for n in range(12)]
    sources = [cs.Source(samples), cs.Source(folder(tmp_path / "folder"))]
    report = cs.precompute(sources, model=tmp_path, store=tmp_path / "store", procs=procs)
    assert (report.wanted, report.encoded, report.failed) == (13 + 16, 13 + 16, 0)
    assert len(list((tmp_path / "store/plans").iterdir())) == 1  # workers and their caller mean the same
    assert {json.loads(text)["source"] for text in catalog(tmp_path / "store").extras} == {"memory", "folder"}
    assert {pid for pid, _encoder, _key in fakes.logged(in_processes)}.isdisjoint({os.getpid()})
    assert list((tmp_path / "store/tmp").iterdir()) == []
    assert not held() - before
    again = cs.precompute(sources, model=tmp_path, store=tmp_path / "store", name="inline", inline=True)
    assert (again.encoded, again.reused) == (0, 29)
    assert keys(tmp_path / "store") == keys(tmp_path / "store", "inline")


@pytest.mark.processes
def test_a_picture_that_its_caller_cannot_hand_over_fails_alone_and_no_descriptor_stays(tmp_path, makers, in_processes):
    class Broken(list[Any]):
        is_listed = False

        def __getitem__(self, index):
            if index == 1 and self.is_listed:
                raise RuntimeError("row 1 cannot be read")
            return super().__getitem__(index)

    data = Broken(of_kind("bytes", tmp_path))
    gc.collect()
    before = held()
    real = run.list_in_memory

    def gathered(*arguments, **options):
        found = real(*arguments, **options)
        data.is_listed = True
        return found

    run.list_in_memory = gathered
    try:
        report = cs.precompute(data, model=tmp_path, store=tmp_path / "store")
    finally:
        run.list_in_memory = real
    assert [(failure["sample"], "row 1 cannot be read" in failure["reason"]) for failure in report.failures] == [("1.png", True)]
    assert report.encoded == 8
    gc.collect()
    assert not held() - before


@pytest.mark.parametrize("kind", ["folder", "manifest", "tar", "samples", pytest.param("hugging face", marks=pytest.mark.torch)])
def test_every_kind_of_source_names_roles_alike(tmp_path, kind):
    from cachestore.sources.combined import list_path
    from cachestore.sources.memory import list_objects

    roles = ("image", "control", "mask", "reference")
    names = {"image": "a.png", **{role: f"a.{role}.png" for role in roles[1:]}}
    for name in names.values():
        put(tmp_path / name, content(name))
    match kind:
        case "folder":
            listing = list_path(tmp_path)
        case "manifest":
            (tmp_path / "rows.jsonl").write_text(json.dumps(names) + "\n")
            listing = list_path(tmp_path / "rows.jsonl")
        case "tar":
            listing = list_path(pack(tmp_path / "a.tar", {name: content(name) for name in names.values()}))
        case "samples":
            listing = list_objects([Sample("a.png", {role: content(name) for role, name in names.items()})])
        case _:
            datasets: Any = pytest.importorskip("datasets")
            features = datasets.Features({role: datasets.Image(decode=False) for role in roles})
            rows = {role: [{"bytes": content(name), "path": None}] for role, name in names.items()}
            listing = list_objects(datasets.Dataset.from_dict(rows, features=features))
    [sample] = listing.samples()
    read = {role: [listing.read(reference)[0] for reference in references] for role, references in sample.images.items()}
    assert read == {role: [content(name)] for role, name in names.items()}
