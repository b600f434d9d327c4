"""What users import: every module once, then every public name, twice."""

import importlib
import json
import pkgutil
import shutil
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import cachestore as cs
from cachestore import live
from cachestore.core.errors import CacheStoreError
from tests import fakes
from tests.fakes import asks_for, encode, tells_of
from tests.leaks import held
from tests.train.stores import Row, make_store, recipes


def calls(root, data, trained):
    """How each public name is called; the call may be repeated with the same result."""

    def fill():
        with cs.open(root, mode="a") as store:
            return cs.fill(store, [(cs.key("a"), 1)], encode).complete

    def fill_dataset():
        beside = shutil.copytree(trained, root.parent / "beside", dirs_exist_ok=True)
        with cs.open(beside, mode="a") as store:
            return cs.fill_dataset(store, "own", encode, like="train").complete

    def read_through():
        with cs.open(root, mode="a") as store, cs.ReadThrough(store, encode, on_miss="encode") as read:
            return read([(cs.key("b"), 1)], as_numpy=True)[0]["value"].tolist()

    def encode_once():
        with cs.open(root, mode="a") as store, cs.EncodeOnce(store) as once:
            return once([(cs.key("c"), "c")], encode, as_numpy=True)[0]["value"].tolist()

    def sampler():
        return len(list(cs.BucketBatchSampler(cs.CachedDataset(trained), batch_size=1, rank=0, num_replicas=1)))

    def export(folder):
        return len(cs.export_cache(trained, format="sd-scripts", folder=folder, family="sdxl").failures)

    messages = {name: lambda name=name: str(getattr(cs, name)("what happened")) for name in cs.__all__ if is_error(name)}
    return messages | {
        "BucketBatchSampler": sampler,
        "CachedDataset": lambda: len(cs.CachedDataset(trained)),
        "CaptionPolicy": lambda: cs.CaptionPolicy(choose="all").texts(["a", "b"]),
        "Key": lambda: cs.Key(bytes(16)),
        "MixedDataset": lambda: len(cs.MixedDataset([cs.CachedDataset(trained)], [2.5])),
        "Finding": lambda: cs.Finding("stale-temp", "tmp/x", "left behind").kind,
        "EncodeOnce": encode_once,
        "ReadThrough": read_through,
        "ModelReadThrough": lambda: repr(cs.ReadThrough.of("m", store=root, encode="text")),
        **{name: lambda name=name: is_result(getattr(cs, name)) for name in RESULTS},
        "Store": lambda: cs.Store(root, mode="a").close(),
        "compact": lambda: cs.compact(root, apply=False).applied,
        "drop": lambda: cs.drop(root, "train", apply=False).applied,
        "forget": lambda: cs.forget(trained, ["a"], apply=False).samples,
        "gc": lambda: cs.gc(root).applied,
        "plan": lambda: cs.plan(data / "p.txt", model="m", store=root, encode=("text",)).samples,
        "status": lambda: cs.status(root).plans[0].complete,
        "push": lambda: cs.push(trained, f"file://{root.parent}/pushed").generations,
        "pull": lambda: cs.pull(f"file://{trained}", root.parent / "pulled").generations,
        "relocate": lambda: dict(cs.relocate(trained, {}).paths),
        "Rows": lambda: cs.Rows(["a"], {"dino": [cs.key("a")]}, {"score": [0.5]})["a"],
        "Recipe": lambda: cs.Recipe("text", {"a": 1}).fingerprint,
        "Sample": lambda: cs.Sample("a", {"image": ("a.png",)}, ("a cat",)).id,
        "Source": lambda: cs.Source("photos/", name="photos").name,
        "export_cache": lambda: export(root.parent / "exported"),
        "exported": lambda: len(cs.exported(trained, "sd-scripts", family="sdxl")),
        "ExportedFiles": lambda: repr(cs.exported(cs.CachedDataset(trained), "ai-toolkit", family="sdxl")),
        "fill": fill,
        "fill_dataset": fill_dataset,
        "FillSample": lambda: cs.FillSample("a", ("a cat",), {}, {}, {}).captions,
        "fingerprint": lambda: cs.fingerprint(files=[data / "p.txt"], dtype="float32"),
        "import_cache": lambda: (
            cs.import_cache(
                "sd-scripts", root.parent / "cached", store=root, data=root.parent / "cached", claims={"model": "m"}, name="imported"
            ).complete
        ),
        "key": lambda: cs.key("a", b"b"),
        "make_loader": lambda: len(list(cs.make_loader(cs.CachedDataset(trained), batch_size=1, framework="single"))),
        "open": lambda: cs.open(root, mode="a").close(),
        "precompute": lambda: cs.precompute(data / "p.txt", model="m", store=root, encode=("text",), inline=True).complete,
        "repair": lambda: cs.repair(root).missing,
        "stats": lambda: cs.stats(root).catalogs[0].name,
        "verify": lambda: cs.verify(root).ok,
    }


RESULTS = (
    *(
        "CatalogStats",
        "CompactReport",
        "DamagedEntry",
        "DropReport",
        "ExportReport",
        "Feature",
        "Forecast",
        "ForgetReport",
        "GcReport",
        "ImportReport",
        "PassStatus",
        "RankStatus",
    ),
    *("RelocateReport", "RepairReport", "Report", "StatusReport", "StoreStats", "TransferReport", "VerifyReport"),
)


def is_result(kind):
    return is_dataclass(kind) and bool(kind.__doc__)


def is_error(name):
    found = getattr(cs, name)
    return isinstance(found, type) and issubclass(found, Exception)


@pytest.mark.torch
def test_every_public_name_can_be_called_twice_and_leaves_no_thread_and_no_open_file(tmp_path, monkeypatch):
    for module in pkgutil.walk_packages(cs.__path__, "cachestore."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    monkeypatch.setattr("cachestore.jobs.plan.planning.make_encoders", fakes.Makers())
    (tmp_path / "p.txt").write_text("a cat\n")
    (tmp_path / "cached").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "cached" / "a.png")
    np.savez(tmp_path / "cached" / "a_0008x0008_sdxl.npz", latents=np.zeros((4, 1, 1), np.float32))
    trained = make_store(tmp_path / "trained", [Row("a"), Row("b")], recipes())
    every = calls(tmp_path / "store", tmp_path, trained)
    assert set(every) == set(cs.__all__)
    left = {}

    def call(name):
        before = held()
        found = every[name]()
        left.setdefault(name, set()).update(held() - before)
        return found

    first = {name: call(name) for name in ("open", "precompute", *cs.__all__)}
    assert first == {name: call(name) for name in reversed(cs.__all__)}
    assert {name: some for name, some in left.items() if some} == {}


@pytest.mark.torch
def test_every_name_for_adapters_is_found_and_documented():
    assert {"Adapter", "Refused", "ValueName", "check_same", "current", "fingerprint", "settings"} <= set(live.__all__)
    assert all(getattr(live, name) is getattr(live, name) and getattr(live, name).__doc__ for name in live.__all__)
    page = (Path(__file__).resolve().parent.parent / "docs/reference.md").read_text(encoding="utf-8")
    assert [name for name in live.__all__ if f"::: cachestore.live.{name}\n" not in page] == []
    # Python sets a module that was imported as an attribute of its package, over the name that is meant.
    assert {*live.__all__}.isdisjoint(path.stem for path in Path(live.__file__).parent.glob("*.py"))
    with pytest.raises(AttributeError):
        _ = live.nothing


@pytest.mark.torch
def test_every_public_name_is_listed_and_found():
    assert set(cs.__all__) <= set(dir(cs))
    assert all(getattr(cs, name) is getattr(cs, name) for name in cs.__all__)
    assert isinstance(cs.__version__, str)


def test_an_unknown_name_is_an_attribute_error_that_says_so():
    with pytest.raises(AttributeError, check=tells_of("'opne'")):
        _ = cs.opne


@pytest.mark.torch
def test_every_error_takes_one_message_and_survives_being_built_again_from_it():
    """As a DataLoader does with a worker's error."""
    for name in filter(is_error, cs.__all__):
        kind = getattr(cs, name)
        assert issubclass(kind, CacheStoreError)
        assert str(kind(str(kind("what happened")))) == "what happened"


def test_no_public_name_is_shadowed_by_a_module_of_the_same_name():
    assert {module.name for module in pkgutil.iter_modules(cs.__path__)}.isdisjoint(cs.__all__)


@pytest.mark.parametrize(
    ("call", "begins"),
    [
        (cs.stats, "StoreStats(entries=0, segments=0"),
        (cs.verify, "VerifyReport("),
        (cs.repair, "RepairReport("),
        (cs.gc, "GcReport(applied=False"),
        (cs.compact, "CompactReport(applied=True"),
        (cs.status, "StatusReport(plans=(), without_runs=())"),
    ],
)
def test_a_result_reads_as_one_line(tmp_path, call, begins):
    cs.open(tmp_path, mode="a").close()
    shown = repr(call(tmp_path))
    assert shown.startswith(begins)
    assert len(shown.splitlines()) == 1


def test_a_result_counts_what_it_lists(tmp_path):
    cs.open(tmp_path, mode="a").close()
    for number in range(3):
        (tmp_path / f"stray{number}").write_text("x")
    assert "findings=<3 items>" in repr(cs.verify(tmp_path))


@pytest.mark.parametrize("name", ["compact", "drop", "gc", "status"])
def test_what_is_no_path_is_refused_by_its_argument(name):
    with pytest.raises(cs.BadInput, check=asks_for("path")):
        getattr(cs, name)(*(5, "train")[: 2 if name == "drop" else 1])


WRONG = """
import cachestore as cs
cs.precompute("images/", model="m", store="cache/", resolutoin=512)
cs.plan("images/", model="m", store="cache/", flipp=True)
cs.precompute("images/", model="m", store="cache/", resolution=512, flip=True)
"""


@pytest.mark.processes
def test_a_type_checker_refuses_an_option_that_does_not_exist(tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    settings = {"venvPath": str(Path(sys.prefix).parent), "venv": Path(sys.prefix).name, "extraPaths": [str(Path(cs.__path__[0]).parent)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "-p", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    errors = [
        (one["range"]["start"]["line"], one["rule"]) for one in json.loads(ended.stdout)["generalDiagnostics"] if one["severity"] == "error"
    ]
    assert errors == [(2, "reportCallIssue"), (3, "reportCallIssue")]


@pytest.mark.torch
def test_what_a_trainer_holds_says_what_it_is_in_one_line_and_when_its_store_is_closed_too(tmp_path):
    data = cs.CachedDataset(make_store(tmp_path / "store", [Row("a"), Row("b")], recipes()))
    shown = f"CachedDataset('{tmp_path}/store', 'train', generation=1: 2 samples)"
    assert repr(data) == shown
    assert repr(cs.make_loader(data, batch_size=1, framework="single")) == f"Loader({shown}, num_workers=0)"
    assert repr(cs.MixedDataset([data], [2])) == f"MixedDataset(4 samples an epoch of {shown})"
    with cs.open(tmp_path / "mine", mode="a") as store, cs.ReadThrough(store) as read:
        pass
    assert repr(read) == f"ReadThrough(Store('{tmp_path}/mine', mode='a'), on_miss='raise')"
