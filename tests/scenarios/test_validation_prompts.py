"""Prompts for validation live with their data set: encoded once, named by its catalog, checked, moved and removed with it."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import cachestore as cs
from cachestore.care.collect import collect
from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.core.inputs import caption_key
from cachestore.files.paths import Layout
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.start.here import precompute_here
from cachestore.remote.transfer import segments_of
from cachestore.store.read.reader import Reader
from cachestore.store.read.snapshot import list_segments, load_snapshot
from cachestore.store.write.catalog_writer import draft_of
from cachestore.store.write.commit import create_store
from tests import fakes
from tests.fakes import planned

TWO = (("a cat", "ugly"), ("a dog", ""))


@pytest.fixture
def root(tmp_path, makers):
    fakes.captioned(tmp_path / "photos", 2)
    return tmp_path


def asked(root: Path, **options) -> PrecomputeRequest:
    return PrecomputeRequest(str(root / "photos"), "model", str(root / "store"), **options)


def run(root, **options):
    return precompute_here(asked(root, **options))


def held(root):
    """The texts of the prompts that the newest catalog names and the store holds."""
    found = fakes.catalog(root / "store")
    with Reader(root / "store") as reader:
        return {text for key, text in found.prompt_keys() if key in reader}


def test_prompts_are_encoded_once_and_leave_the_samples_as_they_are(root, makers):
    before = run(root)
    makers.encoded()
    assert run(root, prompts=TWO).encoded == 3
    assert sorted(makers.encoded("text")) == ["a cat", "a dog", "ugly"]
    found = fakes.catalog(root / "store")
    assert (found.prompts, found.generation) == (TWO, before.generation + 1)
    assert found.digest == before.catalog_digest  # so positions of samplers stay valid
    again = run(root, prompts=TWO)
    assert (again.encoded, again.generation) == (0, found.generation)
    assert held(root) == {"a cat", "a dog", "ugly", ""}


def test_prompts_give_a_plan_of_its_own_and_no_prompts_a_catalog_without_them(root):
    layout = create_store(root / "store")
    plans = {planned(layout, asked(root, prompts=prompts)).plan.name for prompts in ((), (), TWO, TWO[:1])}
    assert len(plans) == 3
    assert draft_of(replace(fakes_catalog(root), prompts=())).chunks(1)[0] == draft_of(fakes_catalog(root)).chunks(1)[0]


def fakes_catalog(root):
    run(root)
    return fakes.catalog(root / "store")


def test_a_run_for_latents_alone_leaves_prompts_and_one_for_text_says_which_come_and_go(root):
    run(root, prompts=TWO)
    run(root, encode=("latents",), resolution=512, replace=True)
    assert fakes.catalog(root / "store").prompts == TWO
    layout = Layout(root / "store")
    remarks = planned(layout, asked(root, prompts=[("a cat", "ugly"), ("a bird", "")], encode=("text",))).remarks
    assert {"1 new prompt for validation under the name 'train'", "1 prompt is no longer in prompts and leaves 'train'"} <= {*remarks}


def test_gc_keeps_the_values_of_prompts_and_marks_them_once_they_have_left(root):
    run(root)
    run(root, prompts=TWO)
    assert collect(root / "store", apply=True, grace_seconds=0, keep=1).condemned.segments == 0
    run(root)
    assert collect(root / "store", apply=True, grace_seconds=0, keep=1).condemned.entries == 3
    assert held(root) == set()


def test_a_lost_prompt_is_a_finding_and_refill_encodes_it_again_without_the_file(root):
    (root / "prompts.txt").write_text("a cat --n ugly\n")
    run(root)
    before = list_segments(Layout(root / "store"))
    run(root, prompts=PrecomputeRequest.from_json({"data": "d", "model": "m", "store": "s", "prompts": str(root / "prompts.txt")}).prompts)
    (root / "prompts.txt").unlink()
    for digest in list_segments(Layout(root / "store")) - before:
        Layout(root / "store").segment(digest).unlink()
    findings = cs.verify(root / "store").findings
    assert {one.sample for one in findings if one.kind == "missing-entry"} == {"(prompt) a cat", "(prompt) ugly"}
    assert cs.repair(root / "store", refill=True).refilled == 2
    assert cs.verify(root / "store").ok
    assert held(root) == {"a cat", "ugly"}


def test_a_catalog_that_moves_takes_the_segments_of_its_prompts_with_it(root):
    run(root)
    run(root, prompts=TWO)
    catalog = fakes.catalog(root / "store")
    with closing(load_snapshot(Layout(root / "store"))) as snapshot:
        with_prompts, without = (
            segments_of(one, snapshot, where=Path("here"), command="") for one in (catalog, replace(catalog, prompts=()))
        )
    assert without < with_prompts


def test_a_prompt_that_cannot_be_encoded_is_a_failure_by_its_text_and_no_part_of_the_data_set(root, makers):
    def refuse(items):
        if "ugly" in items:
            raise EncodeFailed("no such word")

    makers.options["before_encode"] = refuse
    report = run(root, prompts=TWO)
    assert [(one["sample"], one["encoder"]) for one in report.failures] == [("(prompt) ugly", "text")]
    assert fakes.catalog(root / "store").prompts == TWO[1:]
    assert cs.verify(root / "store").ok
    makers.options.clear()
    assert run(root, prompts=TWO).encoded == 1
    assert fakes.catalog(root / "store").prompts == TWO


def test_prompts_without_a_text_encoder_or_with_one_that_sees_pictures_are_refused(root, makers):
    with pytest.raises(BadInput, check=fakes.asks_for("prompts")):
        run(root, prompts=TWO, encode=("latents",))
    makers.options["shown"] = "control"
    with pytest.raises(BadInput, check=fakes.asks_for("prompts")):
        run(root, prompts=TWO)


def test_ls_stats_and_status_show_prompts(root, capsys):
    from cachestore.cli import main

    run(root, prompts=TWO)
    shown = []
    for command in (["ls", "--samples"], ["stats"], ["status"]):
        assert main([command[0], str(root / "store"), *command[1:]]) == 0
        shown.append(capsys.readouterr().out)
    assert "train  (prompt)  -  ready  a cat  negative: ugly\ntrain  (prompt)  -  ready  a dog\n" in shown[0]
    assert "2 prompts for validation" in shown[1]
    assert "with 2 prompts for validation" in shown[2]


@pytest.mark.torch
def test_a_trainer_reads_prompts_and_their_embeddings_with_no_text_encoder(tmp_path):
    import torch

    from tests.fakes import publish_catalog
    from tests.train.stores import Row, catalog_of, make_store, recipes

    made = recipes()
    path = make_store(tmp_path / "store", [Row("a")], made, prompts=["", "a cat", "ugly"])
    publish_catalog(Layout(path), replace(catalog_of([Row("a")], made, "train"), prompts=TWO[:1]))
    data = cs.CachedDataset(path)
    [(prompt, negative)] = data.prompts
    one, other = data.prompt(prompt)["prompt_embeds"], data.prompt(negative)["prompt_embeds"]
    assert one.shape == other.shape
    assert not torch.equal(one, other)
    assert list(cs.CachedDataset(path, generation=1).prompts) == []
    assert caption_key(made.text.fingerprint, "a cat") in {key for key, _text in fakes.catalog(path).prompt_keys()}
