"""What `precompute` is asked for, on its way to other processes and to a catalog, and the plan that follows."""

import json
import os
import threading

import pytest

from cachestore.core.captions import CaptionPolicy
from cachestore.core.errors import BadInput, BadUsage, RecipeMismatch
from cachestore.jobs.plan.comparison import _differences
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.share import agreement
from cachestore.jobs.share.workers import Heartbeat
from cachestore.jobs.start.here import precompute_here
from cachestore.store.write.commit import create_store
from tests.fakes import asks_for, planned, tells_of


def asked(data="data", store="store", **options):
    return PrecomputeRequest(str(data), options.pop("model", "model"), str(store), **options)


def prompts(path, *lines):
    path.write_text("".join(line + "\n" for line in lines))
    return path


def manifest(path, **captions):
    path.write_text("".join(json.dumps({"id": name, "caption": caption}) + "\n" for name, caption in captions.items()))
    return path


# The plan that follows


def test_a_plan_of_before_there_were_variants_and_masks_is_found_again(tmp_path, makers):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.png").write_bytes(b"x")
    (tmp_path / "data/a.txt").write_text("hi")
    plan = plan_for(tmp_path, tmp_path / "data")
    assert plan.name == "536dfdc1831cbae4857effc3ebff8b47"
    assert [unit.hex() for unit in plan.unit_ids][-1] == "5356c9efeeb57d82cc63f321ef6d1262"
    assert [dict(column.options) for column in plan.columns] == [{}, {"resolution": 1024, "step": 64}]


def test_a_column_stands_for_each_resolution_and_its_cells_for_crops_and_sides(tmp_path, makers):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.png").write_bytes(b"x")
    options = {"resolution": (64, 32, 64), "crop": "random", "crop_seed": 5, "variants": 2, "flip": True, "no_upscale": True}
    plan = plan_for(tmp_path, tmp_path / "data", encode=("latents",), **options)
    shared = {"step": 64, "crop": "random", "seed": 5, "variants": 2, "flip": True, "upscale": False}
    assert [dict(column.options) for column in plan.columns] == [{"resolution": 64, **shared}, {"resolution": 32, **shared}]
    assert [list(at) for at, _units in plan.cells] == [[0, 4], [0, 4]]
    assert plan.unit_count == 8


def test_pictures_that_a_text_encoder_sees_are_not_mirrored_and_captions_beside_them_not_dropped(tmp_path, makers):
    makers.options["shown"] = "control"
    with pytest.raises(BadInput, check=asks_for("flip")):
        plan_for(tmp_path, prompts(tmp_path / "p.txt", "hi"), flip=True)
    with pytest.raises(BadInput, check=asks_for("captions")):
        plan_for(tmp_path, prompts(tmp_path / "p.txt", "hi"), captions=CaptionPolicy(dropout=0.1))


def plan_for(tmp_path, data, **options):
    request = asked(data, tmp_path / "store", **options)
    return planned(create_store(tmp_path / "store"), request).plan


def test_a_source_of_nothing_gives_a_plan_of_nothing(tmp_path, makers):
    done(tmp_path, prompts(tmp_path / "full.txt", "a cat"))
    assert plan_for(tmp_path, prompts(tmp_path / "p.txt"), replace=True).unit_count == 0


def test_the_empty_caption_is_planned_wherever_text_is_and_there_is_a_sample(tmp_path, makers):
    data = prompts(tmp_path / "p.txt", "a cat")
    plan = plan_for(tmp_path, data)
    assert {plan.unit(index).request["caption"] for index in range(plan.unit_count)} == {"", "a cat"}
    data = manifest(tmp_path / "m.jsonl", a="a cat")
    data.write_text(data.read_text() + json.dumps({"image": "b.png"}) + "\n")
    assert plan_for(tmp_path, data, encode=("latents",)).unit_count == 1


def texts_of(plan):
    return {plan.unit(index).request["caption"] for index in range(plan.unit_count)}


def test_a_policy_plans_every_text_that_it_may_ask_for_and_the_empty_caption(tmp_path, makers):
    policy = CaptionPolicy(choose="random", dropout=0.1, shuffle_tags=True, variants=3, prefix="sks, ")
    plan = plan_for(tmp_path, manifest(tmp_path / "m.jsonl", a=["x, y, z", "one"], b=""), captions=policy)
    assert texts_of(plan) == {"", *policy.texts(["x, y, z", "one", ""])}
    assert list(plan.captions) == [*policy.texts(["x, y, z", "one"]), *policy.texts([""])]
    assert plan.texts == policy.encoding()


def test_wildcards_are_expanded_and_what_is_beyond_the_most_is_reported(tmp_path, makers):
    data = manifest(tmp_path / "m.jsonl", a="a {red|blue} cat", b="{1|2|3} {1|2|3}", c="plain")
    plan = plan_for(tmp_path, data, captions=CaptionPolicy(wildcards=4))
    assert len(texts_of(plan)) == 1 + 2 + 4 + 1
    assert [remark for remark in plan.remarks if "wildcards" in remark] == [
        "1 sample has more combinations of wildcards than `wildcards` in captions (b): that many are drawn and encoded"
    ]
    [remark] = [remark for remark in plan_for(tmp_path, data).remarks if "wildcards" in remark]
    assert remark.startswith("2 samples have wildcards such as {a|b} in captions (a, b), encoded as text")


def test_policies_that_have_the_same_texts_encoded_make_the_same_plan(tmp_path, makers):
    data = manifest(tmp_path / "m.jsonl", a=["x", "y"])
    first = {plan_for(tmp_path, data, captions=one).name for one in ("first", CaptionPolicy(), CaptionPolicy(dropout=0.5))}
    every = {plan_for(tmp_path, data, captions=one).name for one in ("all", CaptionPolicy(choose="random"), CaptionPolicy(choose="all"))}
    other = {plan_for(tmp_path, data, captions=CaptionPolicy(prefix="sks ")).name}
    assert (len(first), len(every), len(first | every | other)) == (1, 1, 3)


def test_captions_that_are_no_policy_are_refused_before_anything_is_listed(tmp_path, makers):
    with pytest.raises(BadInput, check=asks_for("captions")):
        plan_for(tmp_path, tmp_path / "not there either", captions="last")


def test_the_same_request_over_the_same_content_is_the_same_plan(tmp_path, makers):
    one = plan_for(tmp_path, prompts(tmp_path / "p.txt", "a", "b"))
    assert plan_for(tmp_path, prompts(tmp_path / "q.txt", "a", "b")).name == one.name


@pytest.mark.parametrize("change", [{"name": "other"}, {"resolution": 512}, {"model": "other"}, {"captions": "all"}, {"encode": ("text",)}])
def test_what_changes_keys_or_the_catalog_makes_another_plan(tmp_path, makers, change):
    data = prompts(tmp_path / "p.txt", "a", "b")
    assert plan_for(tmp_path, data, **change).name != plan_for(tmp_path, data).name


@pytest.mark.parametrize("change", [{"batch_size": 3}, {"workers": 0}, {"strict": True}, {"procs": 4}, {"device": "cuda"}, {"rank": 0}])
def test_what_only_changes_how_it_is_done_makes_the_same_plan(tmp_path, makers, change):
    data = prompts(tmp_path / "p.txt", "a", "b")
    assert plan_for(tmp_path, data, **change).name == plan_for(tmp_path, data).name


def test_a_plan_that_was_damaged_is_built_again(tmp_path, makers):
    data = prompts(tmp_path / "p.txt", "a", "b")
    plan = plan_for(tmp_path, data)
    requests = list(plan.unit_requests)
    path = create_store(tmp_path / "store").plan(plan.name)
    path.chmod(0o644)
    path.write_bytes(b"?")
    assert list(plan_for(tmp_path, data).unit_requests) == requests


# Against what the name holds already


def done(tmp_path, data, **options):
    return precompute_here(asked(data, tmp_path / "store", **options))


def test_other_samples_under_a_name_are_counted_aloud(tmp_path, makers):
    done(tmp_path, manifest(tmp_path / "m.jsonl", a="x", b="x", c="x"))
    request = asked(manifest(tmp_path / "n.jsonl", b="x", c="x", d="x", e="x"), tmp_path / "store")
    remarks = planned(create_store(tmp_path / "store"), request).remarks
    assert "2 new samples under the name 'train'" in remarks
    assert "1 sample is no longer listed and leaves 'train'" in remarks


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        ({"a": "x", "b": "x", "c": "x"}, {"a": "y", "b": "x", "c": "z"}, ["2 captions changed, of samples a, c"]),
        ({"a": "x", "b": "x"}, {"b": "y", "c": "z"}, ["1 caption changed, of sample b"]),
        ({"a": ["x", "y"]}, {"a": ["x", "z", "w"]}, ["2 captions changed, of sample a"]),
        ({"a": ["x", "y"], "b": "z"}, {"a": ["x", "y"], "b": "w"}, ["1 caption changed, of sample b"]),
        ({"a": "x", "b": "x"}, {"a": "x", "c": "y"}, []),
        ({"a": "x"}, {"a": "x"}, []),
    ],
)
def test_changed_captions_of_kept_samples_are_counted_aloud(tmp_path, makers, before, now, says):
    options = {"captions": "all"}
    done(tmp_path, manifest(tmp_path / "m.jsonl", **before), **options)
    request = asked(manifest(tmp_path / "n.jsonl", **now), tmp_path / "store", **options)
    remarks = planned(create_store(tmp_path / "store"), request).remarks
    assert [remark for remark in remarks if " changed, of " in remark] == says


def test_captions_that_are_chosen_in_another_way_are_not_called_changed(tmp_path, makers):
    data = manifest(tmp_path / "m.jsonl", a=["x", "y"])
    done(tmp_path, data)
    request = asked(data, tmp_path / "store", captions="all")
    assert not any(" changed, of " in remark for remark in planned(create_store(tmp_path / "store"), request).remarks)


@pytest.mark.parametrize(
    ("data", "change"), [({"d": "x"}, {}), ({}, {}), ({"a": "x"}, {"model": "other"})], ids=["others", "none", "another model"]
)
def test_a_name_that_is_used_for_something_else_needs_replace(tmp_path, makers, data, change):
    done(tmp_path, manifest(tmp_path / "m.jsonl", a="x", b="x"))
    other = manifest(tmp_path / "n.jsonl", **data)
    with pytest.raises(RecipeMismatch, check=asks_for("replace")):
        done(tmp_path, other, **change)
    assert done(tmp_path, other, replace=True, **change).complete


def test_differences_of_recipes_are_named_by_their_path():
    before = {"dtype": "float32", "files": {"vae/config.json": "1", "vae/weights": "2"}, "outputs": ["mean"]}
    now = {"dtype": "float32", "files": {"vae/config.json": "1", "vae/weights": "3", "vae/more": "4"}, "outputs": ["sample"]}
    assert _differences(before, now) == ["files.vae/more", "files.vae/weights", "outputs"]
    assert _differences(before, before) == []


def test_another_resolution_needs_replace(tmp_path, makers):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.png").write_bytes(b"picture")
    done(tmp_path, tmp_path / "data")
    with pytest.raises(RecipeMismatch, check=asks_for("replace")):
        done(tmp_path, tmp_path / "data", resolution=512)
    assert done(tmp_path, tmp_path / "data", resolution=512, replace=True).complete


def test_another_resolution_does_not_concern_the_text(tmp_path, makers):
    done(tmp_path, prompts(tmp_path / "p.txt", "a"), encode=("text",), resolution=1024)
    assert done(tmp_path, prompts(tmp_path / "p.txt", "a"), encode=("text",), resolution=512).complete


def test_a_refused_request_says_so_again_the_next_time(tmp_path, makers):
    done(tmp_path, manifest(tmp_path / "m.jsonl", a="x"))
    for _ in range(2):
        with pytest.raises(RecipeMismatch):
            done(tmp_path, manifest(tmp_path / "n.jsonl", d="x"))


def test_samples_of_which_only_some_have_a_picture_are_counted_aloud(tmp_path, makers):
    def remarks(*rows, **options):
        (tmp_path / "m.jsonl").write_text("".join(json.dumps({"caption": "x"} | row) + "\n" for row in rows))
        wanted = planned(create_store(tmp_path / "store"), asked(tmp_path / "m.jsonl", tmp_path / "store", **options))
        return [remark for remark in wanted.remarks if "no picture (" in remark]

    (tmp_path / "a.png").write_bytes(b"a picture")
    whole, misspelt = {"id": "a", "image": "a.png"}, [{"id": name, "img": "a.png"} for name in "bcde"]
    both = {"encode": ("text", "latents")}
    assert remarks(whole, **both) == remarks(*misspelt, encode=("text",)) == remarks(whole, *misspelt, encode=("text",)) == []
    lines = [f"{tmp_path / 'm.jsonl'}, line {number} (columns caption, id, img)" for number in (2, 3, 4)]
    for _ in range(2):  # the second time the plan is read from disk
        assert remarks(whole, *misspelt, **both) == [
            f"4 samples have no picture ({', '.join(lines)}, …): batches of such samples hold no latents"
        ]
    assert remarks(whole, misspelt[0], **both) == [f"1 sample has no picture ({lines[0]}): batches of such samples hold no latents"]


@pytest.mark.parametrize("encode", [("text", "latents"), ("latents",)])
@pytest.mark.parametrize("is_store", [True, False])
def test_a_manifest_without_any_picture_is_refused_before_anything_is_made(tmp_path, makers, encode, is_store):
    store = tmp_path / "store"
    if is_store:
        create_store(store)
    (tmp_path / "m.jsonl").write_text('{"id": "a", "imgae": "a.png", "caption": "x"}\n')
    says = r"its columns are id, imgae, caption; .*pass encode=\"text\" .*; did you mean 'image'\?"
    for _ in range(2):
        with pytest.raises(BadUsage, match=says):
            done(tmp_path, tmp_path / "m.jsonl", encode=encode)
    assert store.exists() == is_store
    assert not list(tmp_path.glob("store/plans/*/*"))
    text = done(tmp_path, tmp_path / "m.jsonl", encode=("text",))
    assert (text.complete, text.without_picture) == (True, "")


def test_captions_alone_are_meant_as_such(tmp_path, makers):
    plain = planned(create_store(tmp_path / "other"), asked(manifest(tmp_path / "p.jsonl", a="x"), tmp_path / "other"))
    assert plain.remarks == ()


def test_a_column_that_is_nearly_called_as_a_known_one_is_remarked_on(tmp_path, makers):
    (tmp_path / "a.png").write_bytes(b"a picture")
    row = {
        "image": "a.png",
        "caption": "x",
        "maks": "a.png",
        "contrl": "a.png",
        "corp": [0, 0, 1, 1],
        "task": "x",
        "video_id": 1,
        "side": 2,
    }
    (tmp_path / "m.jsonl").write_text(json.dumps(row) + "\n")
    wanted = planned(create_store(tmp_path / "store"), asked(tmp_path / "m.jsonl", tmp_path / "store"))
    pairs = (("contrl", "control"), ("corp", "crop"), ("maks", "mask"))
    assert wanted.remarks == tuple(f"{tmp_path / 'm.jsonl'} has a column {one!r}; did you mean {other!r}?" for one, other in pairs)


def test_an_emptied_source_empties_the_data_set_when_it_may_replace_it(tmp_path, makers):
    done(tmp_path, manifest(tmp_path / "m.jsonl", a="x"))
    report = done(tmp_path, manifest(tmp_path / "m.jsonl"), replace=True)
    assert (report.complete, report.samples, report.wanted) == (True, 0, 0)


# Many ranks, one plan


def test_an_invocation_that_finds_the_plan_reads_no_row(tmp_path, makers, monkeypatch):
    data = manifest(tmp_path / "m.jsonl", a="one", b="")
    layout = create_store(tmp_path / "store")
    first = planned(layout, asked(data, tmp_path / "store"))
    monkeypatch.setattr("cachestore.sources.rows.from_row", None)
    second = planned(layout, asked(data, tmp_path / "store"))
    assert (second.plan.name, second.remarks) == (first.plan.name, first.remarks)


def test_another_rank_leaves_the_plan_to_rank_0_while_that_one_is_planning(tmp_path, makers, monkeypatch):
    data = manifest(tmp_path / "m.jsonl", a="one")
    layout = create_store(tmp_path / "store")
    published = threading.Event()
    with Heartbeat(layout, "", 0, "launch", 0, 2), Heartbeat(layout, "", 0, "launch", 1, 2) as heartbeat:
        real = agreement.read_heartbeats

        def looked(layout):
            if not published.is_set():
                published.set()
                planned(layout, asked(data, tmp_path / "store"))
                monkeypatch.setattr("cachestore.jobs.plan.planning._build", None)
            return real(layout)

        monkeypatch.setattr(agreement, "read_heartbeats", looked)
        found = planned(layout, asked(data, tmp_path / "store"), heartbeat=heartbeat)
    assert list(found.plan.ids) == ["a"]
    assert published.is_set()


def test_without_rank_0_another_rank_lays_out_the_plan_itself(tmp_path, makers, monkeypatch):
    monkeypatch.setattr("cachestore.jobs.plan.planning.PLAN_SECONDS", 0.0)
    layout = create_store(tmp_path / "store")
    with Heartbeat(layout, "", 0, "launch", 1, 2) as heartbeat:
        found = planned(layout, asked(manifest(tmp_path / "m.jsonl", a="one"), tmp_path / "store"), heartbeat=heartbeat)
    assert list(found.plan.ids) == ["a"]


def other_invocation(layout, data, tmp_path, launch):
    """Another invocation that is about to work on this data."""
    heartbeat = Heartbeat(layout, "", 0, launch, 0, 2)
    heartbeat.detail = planned(layout, asked(data, tmp_path / "store")).intent.as_json()
    return heartbeat


@pytest.mark.parametrize(("launch", "strict"), [("mine", False), ("another", True)], ids=["one launch", "strict"])
def test_a_rank_that_means_another_plan_stops_and_names_what_differs(tmp_path, makers, monkeypatch, launch, strict):
    monkeypatch.setenv("CACHESTORE_LAUNCH", "mine")
    layout = create_store(tmp_path / "store")
    theirs, ours = manifest(tmp_path / "theirs.jsonl", a="one", b="two"), manifest(tmp_path / "ours.jsonl", a="one", c="three")
    with other_invocation(layout, theirs, tmp_path, launch), pytest.raises(BadInput, check=tells_of("here: 'c'", "there: 'b'")):
        precompute_here(asked(ours, tmp_path / "store", strict=strict))
    assert makers.encoded() == []


def test_another_launch_that_means_another_plan_is_reported_and_both_go_on(tmp_path, makers):
    layout, reported = create_store(tmp_path / "store"), []
    theirs, ours = manifest(tmp_path / "theirs.jsonl", a="one"), manifest(tmp_path / "ours.jsonl", a="two")
    with other_invocation(layout, theirs, tmp_path, "another"):
        assert precompute_here(asked(ours, tmp_path / "store"), say=reported.append).complete
    assert any("other captions or files for 'a'" in line for line in reported)


def test_two_roots_and_other_times_are_one_plan(tmp_path, makers):
    layout, names = create_store(tmp_path / "store"), set()
    for number, root in enumerate(("one", "another/place")):
        (tmp_path / root).mkdir(parents=True)
        manifest(tmp_path / root / "m.jsonl", a="one")
        os.utime(tmp_path / root / "m.jsonl", (number, number))
        names.add(planned(layout, asked(tmp_path / root / "m.jsonl", tmp_path / "store")).plan.name)
    assert len(names) == 1
