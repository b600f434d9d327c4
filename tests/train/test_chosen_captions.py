"""Which caption a sample comes with: the one that the policy says, with its own embeddings, and never one that was not encoded."""

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest

import cachestore as cs
from cachestore.files.paths import Layout
from tests.fakes import FakeEncoder, asks_for, publish_catalog
from tests.shares import share
from tests.train.stores import PLAIN, SDXL, Row, catalog_of, make_store, recipes, stored_text
from tests.train.test_dataset import batch_of, equal, loader

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")]

ROWS = [Row("a.png", ("red, small, cat", "a cat")), Row("b.png", ("dog",)), Row("c.png", ("one", "two", "three"))]
POLICY = cs.CaptionPolicy(choose="random", dropout=0.3, shuffle_tags=True, variants=3, prefix="sks ")


def encoded_for(path, policy, rows=ROWS, made=None, **options):
    """A store in which what a policy may ask for is encoded, and its catalog says so."""
    made = made or recipes(PLAIN)
    rows = [replace(row, captions=policy.texts(row.captions)) for row in rows]
    make_store(path, rows, made, **options)
    publish_catalog(Layout(path), replace(catalog_of(rows, made, "train"), texts=policy.encoding()))
    return path


@pytest.mark.parametrize(
    "policy",
    [cs.CaptionPolicy(choose="random", max_tags=1, variants=3, dropout=0.3), cs.CaptionPolicy(wildcards=3, drop_tags=1, shuffle_tags=True)],
)
def test_dropped_tags_and_wildcards_come_with_their_own_embeddings_in_every_epoch(path, policy):
    made, rows = recipes(PLAIN), [Row("a.png", ("red, small, {cat|dog}", "a cat, b, c")), Row("b.png", ("one",))]
    data = cs.CachedDataset(encoded_for(path, policy, rows, made), captions=policy)
    seen = set()
    for epoch in range(60):
        data.set_epoch(epoch)
        for sample in data.__getitems__([0, 1]):
            assert (sample["prompt_embeds"].numpy() == stored_text(made.text, sample["caption"])["prompt_embeds"]).all()
            seen.add(sample["caption"])
    whole = set(replace(policy, max_tags=0, drop_tags=0, shuffle_tags=False).texts(rows[0].captions))
    assert seen <= {"", *(text for row in rows for text in policy.texts(row.captions))} - whole
    assert len(seen) > 4


def captions_of(data, epochs):
    found = []
    for epoch in range(epochs):
        data.set_epoch(epoch)
        found.append([sample["caption"] for sample in data.__getitems__(range(len(data)))])
    return found


def test_a_data_set_without_samples_takes_any_policy(path):
    assert len(cs.CachedDataset(make_store(path, [], recipes(PLAIN), prompts=()), captions=POLICY)) == 0


def test_without_a_policy_it_is_the_first_text_as_it_was_encoded(path):
    assert captions_of(cs.CachedDataset(encoded_for(path, POLICY)), 3) == [["sks red, small, cat", "sks dog", "sks one"]] * 3


def test_every_caption_comes_with_its_own_embeddings_in_every_epoch(path):
    made = recipes(PLAIN)
    data = cs.CachedDataset(encoded_for(path, POLICY, made=made), captions=POLICY)
    seen = set()
    for epoch in range(40):
        data.set_epoch(epoch)
        for row, sample in zip(ROWS, data.__getitems__([0, 1, 2]), strict=True):
            expected = stored_text(made.text, sample["caption"])["prompt_embeds"]
            assert (sample["prompt_embeds"].numpy() == expected).all()
            assert sample["caption"] in {"", *POLICY.texts(row.captions)}
            seen.add(sample["caption"])
    assert seen == {"", *(text for row in ROWS for text in POLICY.texts(row.captions))}


def test_a_batch_that_is_read_straight_has_the_same_captions_and_embeddings(path):
    data = cs.CachedDataset(encoded_for(path, POLICY), captions=POLICY)
    for epoch in range(10):
        data.set_epoch(epoch)
        data.prefetch([0, 1, 2])
        assert equal(data.read_batch([0, 1, 1, 2]), batch_of(data, 0, 1, 1, 2))


def test_dropped_captions_are_a_batch_like_any_other(path):
    data = cs.CachedDataset(encoded_for(path, cs.CaptionPolicy(), made=recipes(SDXL)), captions=cs.CaptionPolicy(dropout=1.0))
    batch, empty = batch_of(data, 0, 1), data.prompt("")
    assert batch["caption"] == ["", ""]
    assert (batch["prompt_embeds"] == empty["prompt_embeds"]).all()
    assert (batch["pooled_prompt_embeds"] == empty["pooled_prompt_embeds"]).all()


def test_a_choice_depends_on_seed_epoch_and_sample_alone(path):
    policy = cs.CaptionPolicy(choose="random", dropout=0.1)
    encoded_for(path, policy, [Row(f"{n}", ("a", "b", "c")) for n in range(30)])
    drawn = captions_of(cs.CachedDataset(path, captions=policy), 3)
    assert captions_of(cs.CachedDataset(path, captions=policy), 3) == drawn
    assert captions_of(cs.CachedDataset(path, captions=policy, seed=1), 3) != drawn
    assert drawn[0] != drawn[1]
    data = cs.CachedDataset(path, captions=policy)
    assert [data[index]["caption"] for index in (7, 3)] == [drawn[0][7], drawn[0][3]]


@pytest.mark.parametrize("method", share(["fork", "spawn"], 2))
def test_workers_choose_as_the_trainer_does_in_every_epoch(path, method):
    encoded_for(path, POLICY, [Row(f"{n}", ("a, b", "c")) for n in range(8)])
    data = cs.CachedDataset(path, captions=POLICY)
    sampler = cs.BucketBatchSampler(data, batch_size=2)
    here = [list(loader(data, batch_sampler=sampler)) for _epoch in range(2)]
    sampler.set_epoch(0)
    there = loader(data, batch_sampler=sampler, num_workers=2, multiprocessing_context=method, persistent_workers=True)
    for expected in here:
        assert all(map(equal, list(there), expected))


def test_a_pickled_data_set_keeps_its_policy(path):
    data = cs.CachedDataset(encoded_for(path, POLICY), captions=POLICY)
    assert captions_of(pickle.loads(pickle.dumps(data)), 4) == captions_of(data, 4)


def test_a_word_stands_for_the_policy_that_chooses_so(path):
    encoded_for(path, cs.CaptionPolicy(choose="all"))
    word, policy = cs.CachedDataset(path, captions="random"), cs.CachedDataset(path, captions=cs.CaptionPolicy(choose="random"))
    assert captions_of(word, 4) == captions_of(policy, 4)


@pytest.mark.parametrize(
    ("encoded", "asked", "says"),
    [
        (cs.CaptionPolicy(), cs.CaptionPolicy(prefix="sks "), "prefix is 'sks '"),
        (cs.CaptionPolicy(), cs.CaptionPolicy(shuffle_tags=True), "4 orders"),
        (POLICY, cs.CaptionPolicy(choose="all"), "prefix is ''"),
    ],
)
def test_a_policy_whose_captions_were_not_encoded_is_refused_when_the_data_set_is_opened(path, encoded, asked, says):
    encoded_for(path, encoded)
    with pytest.raises(cs.BadInput, check=asks_for("captions")):
        cs.CachedDataset(path, captions=asked)


def test_only_the_first_captions_were_encoded_is_an_error_for_who_wants_any(path):
    encoded_for(path, cs.CaptionPolicy())
    with pytest.raises(cs.BadInput, check=asks_for("captions")):
        cs.CachedDataset(path, captions=cs.CaptionPolicy(choose="random"))


def test_a_catalog_that_does_not_say_how_its_several_captions_were_made_has_them_as_they_are(path):
    data = cs.CachedDataset(make_store(path, ROWS, recipes(PLAIN)), captions=cs.CaptionPolicy(choose="all"))
    assert {caption for epoch in captions_of(data, 3) for caption in epoch} == {text for row in ROWS for text in row.captions}


def test_captions_cannot_be_dropped_where_the_empty_one_is_not_encoded(path):
    encoded_for(path, cs.CaptionPolicy(), leave_out=[""])
    with pytest.raises(cs.MissingEntry):
        cs.CachedDataset(path, captions=cs.CaptionPolicy(dropout=0.1))
    assert len(cs.CachedDataset(path, captions=cs.CaptionPolicy())) == 3


def test_a_column_that_has_not_one_entry_for_each_caption_is_refused(path):
    made = recipes(PLAIN)
    make_store(path, ROWS, made)
    more = [replace(row, captions=(*row.captions, "more")) for row in ROWS]
    columns = catalog_of(ROWS, made, "train").columns
    publish_catalog(Layout(path), replace(catalog_of(more, made, "train"), columns=columns))
    with pytest.raises(cs.FormatError):
        cs.CachedDataset(path, captions=cs.CaptionPolicy(choose="all"))


def test_captions_alone_are_chosen_too(path):
    """A trainer that trains its text encoder, or runs it itself."""
    policy = cs.CaptionPolicy(choose="all", dropout=0.2)
    data = cs.CachedDataset(encoded_for(path, policy, made=recipes(family=None)), captions=policy)
    assert {caption for epoch in captions_of(data, 30) for caption in epoch} == {"", *(text for row in ROWS for text in row.captions)}


def test_what_precompute_encodes_under_a_policy_is_what_the_data_set_asks_for(tmp_path, path, monkeypatch):
    made = recipes(PLAIN, stored=None)

    class Encoder(FakeEncoder):
        @property
        def recipe(self):
            return made.text

        def encode(self, batch):
            return {key: stored_text(made.text, caption) for key, caption in batch}

    monkeypatch.setattr("cachestore.jobs.plan.planning.make_encoders", lambda _layout, _request, **_how: (Encoder(),))
    captions: dict[str, Any] = {"a": ["red, small, cat, old, fat", "a cat"], "b": "dog", "c": "", "d": ["x, y", "x", "z"]}
    (tmp_path / "m.jsonl").write_text("".join(json.dumps({"id": name, "caption": one}) + "\n" for name, one in captions.items()))
    report = cs.precompute(tmp_path / "m.jsonl", model="m", store=path, encode=("text",), captions=POLICY, inline=True)
    data = cs.CachedDataset(path, captions=POLICY, generation=report.generation)
    seen = {caption for epoch in captions_of(data, 60) for caption in epoch}
    assert report.complete
    assert len(seen) == report.wanted
