"""A data set that is encoded while it is read: what the first epoch encodes, in which order it comes, and what is left behind."""

import errno
import gc
import logging
import os
import pickle
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import cachestore as cs
from cachestore.files import publish
from cachestore.files.paths import Layout
from cachestore.jobs.share.workers import read_heartbeats
from cachestore.store.format.catalog import list_generations
from cachestore.train.encoding.dataset import AT_ONCE
from tests.fakes import LOG, asks_for, captioned, logged, refusing, tells_of
from tests.leaks import held
from tests.train.encoders import ReadableEncoder

pytestmark = pytest.mark.torch

COUNT = 13
UNITS = 2 * COUNT + 1
"""Pictures and captions, and the empty caption."""
BAD = "4.png"


@pytest.fixture
def pictures(tmp_path, makers):
    makers.make = ReadableEncoder
    return captioned(tmp_path / "pictures", COUNT)


@pytest.fixture
def full(tmp_path, pictures, makers):
    """The finished data set: what training from it gives is what must come out."""
    cs.precompute(pictures, model="model", store=tmp_path / "full", inline=True)
    makers.encoded()
    return cs.CachedDataset(tmp_path / "full", generation=1)


def opened(root, pictures, *, rank=None, world_size=None, **seen):
    through = cs.ReadThrough.of("model", store=root, rank=rank, world_size=world_size, captions=seen.get("captions", "first"))
    return through.open(pictures, **seen)


def epochs(data, count, **options):
    loader = cs.make_loader(data, batch_size=3, **options)
    return [list(loader) for _epoch in range(count)]


def same(one, other):
    assert list(one) == list(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name], name


def test_the_first_epoch_encodes_each_unit_once_and_gives_what_the_finished_data_set_gives(root, pictures, full, makers):
    data = opened(root, pictures)
    assert (len(data), list(data.ids), data.buckets) == (len(full), list(full.ids), full.buckets)
    first, second = epochs(data, 2)
    assert len(makers.encoded()) == UNITS
    for ours, theirs in zip(first + second, (batch for epoch in epochs(full, 2) for batch in epoch), strict=True):
        same(ours, theirs)
    assert data.report is not None
    assert (data.report.complete, data.report.encoded, data.report.encoded_here, data.generation) == (True, UNITS, UNITS, 1)
    assert cs.verify(root).ok


def test_workers_read_from_the_second_epoch_on_what_this_process_encoded_in_the_first(root, pictures, full, makers):
    data = opened(root, pictures)
    first, second = epochs(data, 2, num_workers=2)
    assert len(makers.encoded()) == UNITS
    for ours, theirs in zip(first + second, (batch for epoch in epochs(full, 2) for batch in epoch), strict=True):
        same(ours, theirs)


def test_what_an_epoch_leaves_out_is_encoded_at_its_end_and_precompute_finds_everything(root, pictures, makers):
    [first] = epochs(opened(root, pictures), 1)
    assert sum(len(batch["sample_id"]) for batch in first) < COUNT
    assert len(cs.CachedDataset(root)) == COUNT
    makers.encoded()
    assert cs.precompute(pictures, model="model", store=root, inline=True).encoded == 0
    assert makers.encoded() == []


@pytest.mark.parametrize("rounds", ["in step", "one after the other"])
def test_two_ranks_encode_each_unit_once_and_read_what_two_ranks_of_the_finished_data_set_read(
    root, pictures, full, tmp_path, monkeypatch, rounds
):
    monkeypatch.setenv("CACHESTORE_LAUNCH", "one launch")
    monkeypatch.setenv(LOG, str(tmp_path / "log"))
    ours = [opened(root, pictures, rank=rank, world_size=2) for rank in range(2)]
    theirs = [cs.BucketBatchSampler(full, 3, rank=rank, num_replicas=2) for rank in range(2)]
    samplers = [cs.BucketBatchSampler(data, 3, rank=rank, num_replicas=2) for rank, data in enumerate(ours)]
    for _epoch in range(2):
        pairs = list(zip(samplers, ours, strict=True))
        if rounds == "in step":
            turns = [[data.read_batch(batch) for data, batch in zip(ours, turn, strict=True)] for turn in zip(*samplers, strict=True)]
            read = [[batch["sample_id"] for batch in batches] for batches in zip(*turns, strict=True)]
            for data in ours:
                data.finish()
        else:
            read = [[data.read_batch(batch)["sample_id"] for batch in sampler] for sampler, data in pairs]
        assert read == [[[full.ids[index] for index in batch] for batch in sampler] for sampler in theirs]
    assert Counter(Counter(key for _pid, _encoder, key in logged(tmp_path / "log")).values()) == {1: UNITS}
    reports = [data.report for data in ours]
    assert [(report.encoded, report.generation, report.complete) for report in reports if report] == [(UNITS, 1, True)] * 2
    assert sum(report.encoded_here for report in reports if report) == UNITS


def test_a_sample_that_cannot_be_encoded_gives_its_place_to_another_and_leaves_the_later_epochs(root, pictures, tmp_path, makers, caplog):
    (pictures / BAD).write_bytes(b"undecodable")
    cs.precompute(pictures, model="model", store=tmp_path / "full", inline=True)
    data = opened(root, pictures)
    first, second = epochs(data, 2)
    assert [len(batch["sample_id"]) for batch in first] == [3] * (COUNT // 3)
    assert f"1 sample could not be encoded: '{BAD}' (this is no picture)" in caplog.text
    assert BAD not in [one for batch in first for one in batch["sample_id"]]
    wanted = epochs(cs.CachedDataset(tmp_path / "full"), 2)[1]
    assert [batch["sample_id"] for batch in second] == [batch["sample_id"] for batch in wanted]
    assert data.report is not None
    assert [failure["sample"] for failure in data.report.failures] == [BAD]


def test_a_batch_of_which_nothing_can_be_encoded_is_an_error_that_names_its_samples(root, pictures):
    for path in pictures.glob("*.png"):
        path.write_bytes(b"undecodable")
    data = opened(root, pictures)
    with pytest.raises(cs.EncodeFailed, check=tells_of(".png'", "no picture")):
        epochs(data, 1, ahead=0)


def test_an_unreadable_file_leaves_its_sample_out_from_the_start(root, pictures, monkeypatch):
    real = ReadableEncoder.resolve

    def resolve(self, request, read):
        if request.get("image") == BAD:
            raise cs.EncodeFailed("no header")
        return real(self, request, read)

    monkeypatch.setattr(ReadableEncoder, "resolve", resolve)
    data = opened(root, pictures)
    assert BAD not in data.ids
    epochs(data, 1)
    assert data.report is not None
    assert [failure["reason"] for failure in data.report.failures] == ["no header"]


def test_training_that_is_left_early_goes_on_later_and_encodes_only_the_rest(root, pictures, makers):
    data = opened(root, pictures)
    loader = cs.make_loader(data, batch_size=3, ahead=0)
    next(iter(loader))
    state = loader.batch_sampler.state_dict(batches_consumed=1)
    begun = len(makers.encoded())
    assert 0 < begun <= UNITS
    assert data.report is None
    assert not list_generations(Layout(root), "train")
    again = opened(root, pictures)
    resumed = cs.make_loader(again, batch_size=3)
    resumed.load_state_dict(state)
    assert len(list(resumed)) == COUNT // 3 - 1
    assert begun + len(makers.encoded()) == UNITS
    assert len(cs.CachedDataset(root)) == COUNT


def test_only_the_next_samples_are_encoded_with_those_that_are_asked_for(root, tmp_path, makers):
    makers.make = ReadableEncoder
    count = 3 * AT_ONCE
    data = opened(root, captioned(tmp_path / "many", count))
    next(iter(cs.make_loader(data, batch_size=4, ahead=0)))
    assert len(makers.encoded("latents")) == AT_ONCE


def test_a_store_that_has_everything_encodes_nothing_and_is_shown_at_once(root, pictures, makers, caplog):
    cs.precompute(pictures, model="model", store=root, inline=True)
    makers.encoded()
    data = opened(root, pictures)
    assert (data.not_encoded, data.generation) == ("", 1)
    epochs(data, 1)
    assert makers.encoded() == []
    assert "are not in" not in caplog.text


def test_make_loader_says_how_much_is_not_encoded(root, pictures, caplog):
    cs.precompute(pictures, model="model", store=root, encode="text", inline=True)
    with caplog.at_level(logging.WARNING):
        cs.make_loader(opened(root, pictures), batch_size=3)
    assert f"{COUNT} of {UNITS} captions and pictures (48%) are not in {root} yet: the first epoch encodes them" in caplog.text


def test_dropped_captions_have_the_empty_caption_in_the_first_batch(root, pictures):
    policy = cs.CaptionPolicy(dropout=0.9)
    data = opened(root, pictures, captions=policy)
    [first] = epochs(data, 1)
    assert "" in [caption for batch in first for caption in batch["caption"]]


def test_the_empty_prompt_is_there_before_the_first_epoch(root, pictures, full):
    data = opened(root, pictures)
    same(data.prompt(""), full.prompt(""))


def test_a_cast_data_set_encodes_too_and_both_are_complete_afterwards(root, pictures, full):
    data = opened(root, pictures)
    loader = cs.make_loader(data, batch_size=3, dtype=torch.bfloat16)
    assert {batch["latents"].dtype for batch in loader} == {torch.bfloat16}
    data.set_epoch(0)
    same(data.read_batch([0, 1]), full.read_batch([0, 1]))


def test_a_full_disk_ends_an_epoch_with_one_error_and_the_next_run_encodes_the_rest(root, pictures, makers, monkeypatch):
    is_full, ignored = [], []
    makers.options = {"before_encode": lambda _items: is_full.append(True) if len(makers.made[-1].batches) == 2 else None}
    monkeypatch.setattr(sys, "unraisablehook", lambda problem: ignored.append(problem.exc_value))
    real = publish.check_for_writing
    monkeypatch.setattr(publish, "check_for_writing", lambda *given: refusing(errno.ENOSPC)() if is_full else real(*given))
    with pytest.raises(cs.WriteFailed):
        epochs(opened(root, pictures), 1, ahead=0)
    gc.collect()
    assert ignored == []
    is_full.clear()
    makers.options = {}
    begun = len(makers.encoded())
    epochs(opened(root, pictures), 1)
    assert begun < UNITS <= begun + len(makers.encoded())
    assert cs.verify(root).ok


def test_precompute_beside_it_encodes_what_is_left_and_the_epoch_goes_on_as_if_alone(root, pictures, full, makers, monkeypatch):
    monkeypatch.setattr("cachestore.train.encoding.dataset.AT_ONCE", 3)
    data = opened(root, pictures)
    batches = iter(cs.make_loader(data, batch_size=3, ahead=0))
    first = next(batches)
    begun = len(makers.encoded())
    report = cs.precompute(pictures, model="model", store=root, inline=True)
    assert (report.complete, report.generation, report.encoded_here) == (True, 1, UNITS - begun)
    for ours, theirs in zip([first, *batches], epochs(full, 1)[0], strict=True):
        same(ours, theirs)
    assert data.report is not None
    assert (data.report.generation, data.report.encoded_here, 0 < begun < UNITS) == (1, begun, True)


def test_a_source_that_changed_meanwhile_is_said_and_the_data_set_has_what_it_lists_at_the_end(root, pictures, caplog):
    data = opened(root, pictures)
    data.prompt("")
    (pictures / "0.txt").write_text("another caption")
    data.finish()
    assert f"the source changed while it was encoded: the data set has the {COUNT} samples" in caplog.text
    assert data[list(data.ids).index("0.png")]["caption"] == "another caption"


@pytest.mark.parametrize("is_left", [True, False])
def test_nothing_is_left_behind_in_the_process(root, pictures, is_left):
    data = opened(root, pictures)
    data.prompt("")  # opens what the reader holds open as long as it lives
    before = held()
    batches: Any = iter(cs.make_loader(data, batch_size=3))
    next(batches)
    if is_left:
        batches.close()
    else:
        list(batches)
    assert {one for one in held() - before if "segments" not in str(one) and "index" not in str(one)} == set()


def test_it_cannot_leave_its_process_nor_be_mixed_or_divided_before_it_is_complete(root, pictures, full):
    data = opened(root, pictures)
    with pytest.raises(cs.BadInput, check=asks_for("num_workers")):
        pickle.dumps(data)
    with pytest.raises(cs.BadInput, match="num_workers=0"):
        list(DataLoader(data, batch_sampler=cs.BucketBatchSampler(data, 3, rank=0, num_replicas=1), collate_fn=data.collate, num_workers=1))
    for action in (lambda: data.select([0]), lambda: data.batch_slice([0])):
        with pytest.raises(cs.BadInput, check=tells_of("`finish()`")):
            action()
    assert data.finish().complete
    assert list(data.select([2]).ids) == [full.ids[2]]
    same(pickle.loads(pickle.dumps(data)).read_batch([0, 2]), full.read_batch([0, 2]))
    same(data.select([2]).read_batch([0]), full.select([2]).read_batch([0]))


@pytest.mark.parametrize("options", [{"procs": 2}, {"rezolution": 3}, {"store": ""}])
def test_what_cannot_be_used_is_refused_before_anything_is_read(root, options):
    with pytest.raises(cs.BadInput, check=asks_for(next(iter(options)))):
        cs.ReadThrough.of("model", **{"store": root, **options})
    assert not root.exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_that_drops_the_epoch_leaves_its_parents_part_of_the_pass_as_it_is(root, pictures, full):
    loader = cs.make_loader(opened(root, pictures), batch_size=3, ahead=0)
    epoch = iter(loader)
    batches = [next(epoch)]
    phases = [beat.phase for beat in read_heartbeats(Layout.at(root))]
    child = os.fork()
    if child == 0:
        del epoch
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [beat.phase for beat in read_heartbeats(Layout.at(root))] == phases
    assert "working" in phases
    batches += epoch
    for ours, theirs in zip(batches, epochs(full, 1)[0], strict=True):
        same(ours, theirs)


def test_what_of_the_source_cannot_be_used_is_said_when_it_is_opened_and_is_in_the_report(root, pictures, makers, caplog):
    (pictures / BAD).with_suffix(".txt").write_bytes(b"nul \0")
    data = opened(root, pictures)
    assert any(
        "1 row or file of the source cannot be used" in record.getMessage() and BAD in record.getMessage() for record in caplog.records
    )
    epochs(data, 1)
    assert data.report is not None
    assert [(failure["sample"], failure["encoder"]) for failure in data.report.failures] == [(BAD, "source")]
    assert len(data) == COUNT - 1
