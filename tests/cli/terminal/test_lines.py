"""The lines of Python that are printed after a job train as the job was asked: every test runs them."""

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

import cachestore as cs
from cachestore.cli import OK, main
from cachestore.cli.terminal.lines import _fitting, training_lines
from cachestore.core.keys import Recipe
from cachestore.core.samples import Source
from cachestore.files.paths import Layout
from cachestore.jobs.share.report import Report
from tests.fakes import publish_catalog
from tests.scenarios.trainers import run_script
from tests.train.stores import FLUX, PLAIN, SDXL, Row, catalog_of, make_store, recipes

POLICY = cs.CaptionPolicy(choose="random", dropout=0.5, shuffle_tags=True, variants=2, keep_tokens=1, prefix='the "sks" style, ')
SOURCES = (Source("photos"), Source("faces", name="faces", repeats=3))


def encoded(root, rows, policy=None, made=None) -> Report:
    """The report of a job that encoded these rows, with these captions' texts."""
    policy = policy or cs.CaptionPolicy()
    rows, made = [replace(row, captions=policy.texts(row.captions)) for row in rows], made or recipes()
    make_store(root, rows, made)
    catalog = replace(catalog_of(rows, made, "train"), texts=policy.encoding())
    generation, _digest = publish_catalog(Layout(root.absolute()), catalog)
    counts = dict.fromkeys(("wanted", "reused", "encoded", "failed", "missing", "encoded_here", "seconds", "bytes"), 0)
    named = {"store": str(root), "name": "train", "plan": "", "generation": generation}
    return Report.from_json({"complete": True, "samples": len(rows), **named, **counts})


def trained(lines) -> dict[str, Any]:
    """What the lines define when they were run; `seen` are the batches."""
    names: dict[str, Any] = {"seen": []}
    exec("\n".join(lines) + "\n    seen.append(batch)", names)
    return names


@pytest.mark.torch
def test_plain_captions_and_sources_need_no_more_than_the_data_set(tmp_path):
    report = encoded(tmp_path / "store", [Row("a"), Row("b")])
    lines = training_lines(report, 1, captions=cs.CaptionPolicy(), sources=(Source("photos"), Source("faces")))
    assert lines == training_lines(report, 1)
    assert isinstance(trained(lines)["data"], cs.CachedDataset)


@pytest.mark.torch
@pytest.mark.parametrize(("buckets", "batch_size"), [([(64, 48)] * 3, 3), ([(64, 48), (48, 64)], 1), ([(64, 48)] * 9, 8)])
def test_of_few_samples_the_lines_ask_for_batches_that_there_are(tmp_path, buckets, batch_size):
    report = encoded(tmp_path / "store", [Row(f"{number}.png", bucket=bucket) for number, bucket in enumerate(buckets)])
    names = trained(training_lines(report))
    assert {len(batch["sample_id"]) for batch in names["seen"]} == {batch_size}


@pytest.mark.parametrize(
    ("buckets", "batch_size"), [([9, 5, 3, 3, 2, 2, 2, 2, 1, 1], 2), ([8, 8, 4], 8), ([7], 7), ([1, 1, 1], 1), ([0], 1), ([64, 3], 8)]
)
def test_the_batch_size_of_the_lines_leaves_out_a_quarter_at_most(buckets, batch_size):
    size = _fitting(buckets, max(1, min(8, max(buckets))))
    assert (size, sum(count % size for count in buckets) * 4 <= sum(buckets)) == (batch_size, True)


@pytest.mark.torch
@pytest.mark.parametrize("policy", [POLICY, cs.CaptionPolicy(choose="all"), cs.CaptionPolicy(dropout=1.0)])
def test_the_lines_hand_out_captions_by_the_policy_that_was_encoded_for(tmp_path, policy):
    report = encoded(tmp_path / "store", [Row(f"{n}.png", (f"a {n}, b, c", f"other {n}, d")) for n in range(8)], policy)
    names = trained(training_lines(report, 1, captions=policy))
    assert names["captions"] == policy
    data = cs.CachedDataset(report.store, captions=policy)
    assert {batch["sample_id"][0]: batch["caption"][0] for batch in names["seen"]} == {one["sample_id"]: one["caption"] for one in data}


@pytest.mark.torch
def test_the_lines_have_samples_come_as_often_as_their_source_says(tmp_path):
    extras = [json.dumps({"source": name, "source_weight": weight}) for name, weight in (("photos", 1.0), ("faces", 3.0))]
    report = encoded(tmp_path / "store", [Row("a", extras=extras[0]), Row("faces/b", extras=extras[1])], POLICY)
    names = trained(training_lines(report, 1, captions=POLICY, sources=SOURCES))
    assert Counter(batch["sample_id"][0] for batch in names["seen"]) == {"a": 1, "faces/b": 3}
    assert names["captions"] == POLICY


@pytest.mark.torch
@pytest.mark.parametrize("family", [SDXL, FLUX, PLAIN])
@pytest.mark.parametrize("buckets", [[(64, 48)] * 3, [(64, 48), (48, 64)]])
def test_the_lines_name_the_tensors_of_a_batch_with_their_dtypes_and_shapes(tmp_path, family, buckets):
    import torch

    made = replace(recipes(family), masks=Recipe("mask", {"kind": "masks"}, {"format": 1, "stored": "mask", "factor": 8}))
    rows = [Row(f"{number}.png", ("a", "longer")[number % 2 : 2], bucket, has_mask=True) for number, bucket in enumerate(buckets)]
    lines = training_lines(encoded(tmp_path / "store", rows, made=made))
    batch = next(iter(trained(lines)["loader"]))
    written = dict(line.strip("# ").split(": ") for line in lines[lines.index("for batch in loader:") + 2 :])
    tensors = {name: one for name, one in batch.items() if isinstance(one, torch.Tensor)}
    assert set(written) == set(tensors)
    for name, tensor in tensors.items():
        dtype, _space, axes = written[name].partition(" ")
        assert f"torch.{dtype}" == str(tensor.dtype), name
        sizes = axes.strip("[]").split(", ")
        assert len(sizes) == tensor.ndim, name
        assert all(size in {"?", str(axis)} for size, axis in zip(sizes, tensor.shape, strict=True)), name
    assert ("?" in written["latents"]) == (len(set(buckets)) > 1)


def torchrun(_crowd, folder, source, sizes):
    (folder / "pasted.py").write_text(source)
    arguments = ["--standalone", "--nproc-per-node", str(sizes), "pasted.py"]
    run_script(folder, f"from torch.distributed.run import main\nmain({arguments})\n")


def its_variables(crowd, folder, source, sizes):
    """Starts the ranks with what torchrun tells them, but in a moment; accelerate, which would deal the batches, is not imported."""
    source = f"import sys\ndel sys.modules['accelerate.state']\n{source}"
    world = {"WORLD_SIZE": str(sizes), "LOCAL_WORLD_SIZE": str(sizes), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "tests"}
    ranks = [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(sizes)]
    bodies = [{"source": source, "cwd": str(folder), "environment": rank} for rank in ranks]
    assert [code for code, _out in crowd.run("tests.scenarios.trainers:run_lines", *bodies)] == [0] * sizes


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize(
    ("start", "sizes"), [(its_variables, 2), *(pytest.param(torchrun, sizes, marks=pytest.mark.slow) for sizes in (1, 2))]
)
def test_pasted_into_a_script_that_torchrun_starts_each_rank_takes_its_part(tmp_path, torch_crowd, start, sizes):
    report = encoded(tmp_path / "store", [Row(f"{number}.png") for number in range(8)])
    lines = "\n".join(training_lines(report, 2)).replace("    ...", "    seen += batch['sample_id']")
    pasted = f"import os, pathlib\nseen = []\n{lines}\npathlib.Path(f'rank {{os.environ[\"RANK\"]}}').write_text(' '.join(seen))\n"
    start(torch_crowd, tmp_path, pasted, sizes)
    seen = [(tmp_path / f"rank {rank}").read_text().split() for rank in range(sizes)]
    assert [len(ids) for ids in seen] == [8 // sizes] * sizes
    assert {sample_id for ids in seen for sample_id in ids} == {f"{number}.png" for number in range(8)}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--captions", "all"], ["captions = cs.CaptionPolicy(choose='all')", ", generation=1, captions=captions)"]),
        (["--captions", '{"dropout": 0.25}'], ["captions = cs.CaptionPolicy(dropout=0.25)"]),
        (["--sources", '[{"data": "DATA", "repeats": 2}]'], ["data = cs.MixedDataset.of_sources(cs.CachedDataset("]),
        ([], ["data = cs.CachedDataset("]),
    ],
)
def test_the_command_prints_lines_for_what_it_was_given(tmp_path, work_here, capsys, options, wanted):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.txt").write_text("a")
    (tmp_path / "data/a.png").write_bytes(b"a")
    given = [option.replace("DATA", str(tmp_path / "data")) for option in options]
    data = [] if "--sources" in options else [str(tmp_path / "data")]
    assert main(["precompute", *data, "--model", "m", "--store", str(tmp_path / "store"), *given]) == OK
    reported = capsys.readouterr().out
    assert [words for words in wanted if words not in reported] == []
