"""What `precompute` is asked for, on its way to other processes and to a catalog, and the plan that follows."""

import argparse
import json
import os
import threading
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cachestore as cs
from cachestore.cli import _with_hyphens, make_parser
from cachestore.cli.precompute import request_from
from cachestore.core.captions import CaptionPolicy
from cachestore.core.errors import BadInput, BadUsage, RecipeMismatch
from cachestore.core.samples import Sample
from cachestore.jobs.planning import PrecomputeRequest, _differences, _requests, look_at_request
from cachestore.jobs.precompute import precompute_here
from cachestore.storage.commit import create_store
from cachestore.work import agreement
from cachestore.work.workers import Beat
from tests import fakes
from tests.core.test_captions import policies


def asked(data="data", store="store", **options):
    return PrecomputeRequest(str(data), options.pop("model", "model"), str(store), **options)


@pytest.fixture
def makers(monkeypatch):
    makers = fakes.Makers()
    monkeypatch.setattr("cachestore.jobs.planning._encoders", makers)
    return makers


def prompts(path, *lines):
    path.write_text("".join(line + "\n" for line in lines))
    return path


def manifest(path, **captions):
    path.write_text("".join(json.dumps({"id": name, "caption": caption}) + "\n" for name, caption in captions.items()))
    return path


# As arguments


words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
places = words.map("no such place/{}".format)
json_values = st.recursive(st.booleans() | st.integers() | words, lambda inner: st.lists(inner, max_size=2), max_leaves=4)
requests = st.builds(
    PrecomputeRequest,
    data=places,
    model=places,
    store=places,
    encode=st.sampled_from([("text", "latents"), ("text",), ("latents",)]),
    resolution=st.integers(1, 4096) | st.lists(st.integers(1, 4096), min_size=2, max_size=3).map(tuple),
    crop=st.just("random"),
    variants=st.integers(1, 3),
    crop_seed=st.integers(0, 9),
    flip=st.booleans(),
    bucket_step=st.sampled_from([8, 64]),
    no_upscale=st.booleans(),
    frames=st.lists(st.integers(1, 200), min_size=1, max_size=3).map(tuple),
    fps=st.none() | st.sampled_from([16, 23.976, 60.0]),
    clips=st.integers(1, 5),
    name=words,
    captions=st.sampled_from(["first", "all", "random"]) | policies,
    caption_lines=st.sampled_from(["whole", "each", "first"]),
    caption=st.none() | words | st.sampled_from(["", "-1", "--name", "-x y"]),
    vae=st.none() | places,
    text_encoder=st.none() | places,
    revision=st.none() | words,
    variant=st.none() | words,
    encode_arg=st.dictionaries(words.filter(lambda name: name and "=" not in name), json_values, max_size=2),
    text_dtype=st.sampled_from(["auto", "bfloat16"]),
    latents=st.sampled_from(["moments", "mean", "sample"]),
    procs=st.none() | st.integers(1, 9),
    device=st.sampled_from(["auto", "cuda:1"]),
    batch_size=st.sampled_from(["auto", 1, 64]),
    workers=st.none() | st.integers(0, 9),
    rank=st.none() | st.integers(0, 3),
    world_size=st.none() | st.integers(1, 4),
    strict=st.booleans(),
    max_failures=st.sampled_from(["0", "3", "2%"]),
    replace=st.booleans(),
)


PARSER = make_parser()


@given(requests)
@settings(max_examples=50)
def test_a_request_survives_the_way_through_a_command_line(request):
    assert request_from(PARSER.parse_args(_with_hyphens(request.arguments()))) == request


def test_what_has_its_default_is_left_out_of_the_arguments():
    assert asked().arguments() == ["precompute", "data", "--model", "model", "--store", "store"]


def test_every_field_of_a_request_is_an_option_of_the_command():
    parser = make_parser()
    [commands] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    options = {action.dest for action in commands.choices["precompute"]._actions}
    assert {one.name for one in fields(PrecomputeRequest)} <= options


# As hints in a catalog


@given(requests)
@settings(max_examples=50)
def test_hints_ask_for_the_same_keys_again(request):
    again = PrecomputeRequest.from_hints(json.loads(json.dumps(request.hints())), store="elsewhere")
    local = {"store", "procs", "rank", "world_size", "device", "batch_size", "workers", "strict", "max_failures", "replace"}
    assert again.store == "elsewhere"
    assert {one.name: getattr(again, one.name) for one in fields(again) if one.name not in local} == {
        one.name: getattr(request, one.name) for one in fields(request) if one.name not in local
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"resolution": ()}, "--resolution is a whole number"),
        ({"resolution": (64, 0)}, "--resolution is a whole number"),
        ({"crop": "left"}, "--crop is center or random"),
        ({"variants": 0}, "from 1 on"),
        ({"bucket_step": 0}, "from 1 on"),
        ({"variants": 2}, "add --crop random"),
        ({"frames": (17, 0)}, "--frames is a number of frames"),
        ({"frames": (17,), "fps": 0}, "--fps is a number of frames a second"),
        ({"frames": (17,), "fps": float("nan")}, "--fps is a number of frames a second"),
        ({"frames": (17,), "clips": 0}, "--clips is a number from 1 on"),
        ({"fps": 16}, "for videos, of which none is encoded without --frames"),
        ({"clips": 2}, "for videos, of which none is encoded without --frames"),
    ],
)
def test_options_of_pictures_that_make_no_sense_are_refused(tmp_path, options, words):
    with pytest.raises(BadInput, match=words):
        look_at_request(create_store(tmp_path / "store"), asked(tmp_path, tmp_path / "store", **options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"resolution": "64"}, "--resolution is a whole number of pixels from 1 on, .*, not '64'"),
        ({"resolution": [64, "32"]}, r"--resolution is .*, not \(64, '32'\)"),
        ({"resolution": 64.0}, r"--resolution is .*, not 64\.0"),
        ({"resolution": True}, "--resolution is .*, not True"),
        ({"variants": "2"}, "--variants is a whole number from 1 on, not '2'"),
        ({"crop_seed": -1}, "--crop-seed is a whole number from 0 on, not -1"),
        ({"procs": "2"}, "--procs is a whole number from 1 on, not '2'"),
        ({"batch_size": "8"}, "--batch-size is auto or a whole number from 1 on, not '8'"),
        ({"flip": "yes"}, "--flip is given or not .*, not 'yes'"),
        ({"caption": 5}, "--caption is a text, not 5"),
        ({"name": None}, "--name is a text, not None"),
    ],
)
def test_what_is_of_another_kind_from_python_is_refused_by_the_arguments_name(tmp_path, options, words):
    with pytest.raises(BadInput, match=words):
        cs.precompute(tmp_path, model="m", store=tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("text", ["", "64,", "x", "64;32", "-1"])
def test_a_resolution_that_is_no_number_is_refused(text):
    with pytest.raises(BadInput, match="--resolution is a number of pixels"):
        request_from(PARSER.parse_args(["precompute", "data", "--model", "m", "--store", "s", f"--resolution={text}"]))


def test_hints_name_existing_places_absolutely_and_leave_hub_names_alone(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    hints = asked("data", model="some/model").hints()
    assert hints["data"] == str(tmp_path / "data")
    assert hints["model"] == "some/model"


def test_hints_of_a_newer_version_are_passed_over():
    assert PrecomputeRequest.from_hints({**asked().hints(), "of_tomorrow": 1}, store="s") == asked(store="s")


def test_a_catalog_that_precompute_did_not_make_cannot_be_asked_for_again():
    with pytest.raises(BadInput, match="does not say how it was made"):
        PrecomputeRequest.from_hints({}, store="s")


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


def test_a_mask_without_a_picture_is_refused():
    with pytest.raises(BadInput, match="'x' has a mask and no picture"):
        _requests("mask", {"resolution": 64}, Sample("x", {"mask": ("m.png",)}))
    assert _requests("mask", {"resolution": 64}, Sample("x", {"image": ("a.png",)})) == []


def test_pictures_that_a_text_encoder_sees_are_not_mirrored(tmp_path, makers):
    makers.options["shown"] = "control"
    with pytest.raises(BadInput, match="--flip mirrors pictures"):
        plan_for(tmp_path, prompts(tmp_path / "p.txt", "hi"), flip=True)


def test_captions_beside_which_a_text_encoder_sees_pictures_are_not_dropped(tmp_path, makers):
    makers.options["shown"] = "control"
    with pytest.raises(BadInput, match=r"leave the dropout of --captions out"):
        plan_for(tmp_path, prompts(tmp_path / "p.txt", "hi"), captions=CaptionPolicy(dropout=0.1))


def plan_for(tmp_path, data, **options):
    request = asked(data, tmp_path / "store", **options)
    return look_at_request(create_store(tmp_path / "store"), request).plan


def test_a_source_of_nothing_gives_a_plan_of_nothing(tmp_path, makers):
    done(tmp_path, prompts(tmp_path / "full.txt", "a cat"))
    assert plan_for(tmp_path, prompts(tmp_path / "p.txt"), replace=True).unit_count == 0


def test_the_empty_caption_is_planned_wherever_text_is_and_there_is_a_sample(tmp_path, makers):
    data = prompts(tmp_path / "p.txt", "a cat")
    plan = plan_for(tmp_path, data)
    assert {plan.unit(place).request["caption"] for place in range(plan.unit_count)} == {"", "a cat"}
    data = manifest(tmp_path / "m.jsonl", a="a cat")
    data.write_text(data.read_text() + json.dumps({"image": "b.png"}) + "\n")
    assert plan_for(tmp_path, data, encode=("latents",)).unit_count == 1


def texts_of(plan):
    return {plan.unit(place).request["caption"] for place in range(plan.unit_count)}


def test_a_policy_plans_every_text_that_it_may_ask_for_and_the_empty_caption(tmp_path, makers):
    policy = CaptionPolicy(choose="random", dropout=0.1, shuffle_tags=True, variants=3, prefix="sks, ")
    plan = plan_for(tmp_path, manifest(tmp_path / "m.jsonl", a=["x, y, z", "one"], b=""), captions=policy)
    assert texts_of(plan) == {"", *policy.texts(["x, y, z", "one", ""])}
    assert list(plan.captions) == [*policy.texts(["x, y, z", "one"]), *policy.texts([""])]
    assert plan.texts == policy.encoding()


def test_policies_that_have_the_same_texts_encoded_make_the_same_plan(tmp_path, makers):
    data = manifest(tmp_path / "m.jsonl", a=["x", "y"])
    first = {plan_for(tmp_path, data, captions=one).name for one in ("first", CaptionPolicy(), CaptionPolicy(dropout=0.5))}
    every = {plan_for(tmp_path, data, captions=one).name for one in ("all", CaptionPolicy(choose="random"), CaptionPolicy(choose="all"))}
    other = {plan_for(tmp_path, data, captions=CaptionPolicy(prefix="sks ")).name}
    assert (len(first), len(every), len(first | every | other)) == (1, 1, 3)


def test_captions_that_are_no_policy_are_refused_before_anything_is_listed(tmp_path, makers):
    with pytest.raises(BadInput, match="'last'"):
        plan_for(tmp_path, tmp_path / "not there either", captions="last")


@pytest.mark.parametrize("text", ["last", "{", '{"droput": 0.1}', "[]"])
def test_captions_on_a_command_line_are_a_word_or_json(text):
    with pytest.raises(BadInput, match="--captions is first, all"):
        request_from(PARSER.parse_args(["precompute", "d", "--model", "m", "--store", "s", "--captions", text]))


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
    remarks = look_at_request(create_store(tmp_path / "store"), request).remarks
    assert "2 new samples under the name 'train'" in remarks
    assert "1 samples are no longer listed and leave 'train'" in remarks


@pytest.mark.parametrize(
    ("data", "change", "says"),
    [
        ({"d": "x"}, {}, "none of them is in this source"),
        ({}, {}, "none of them is in this source, which lists 0"),
        ({"a": "x"}, {"model": "other"}, "made with another model or other settings (model)"),
    ],
)
def test_a_name_that_is_used_for_something_else_needs_replace(tmp_path, makers, data, change, says):
    done(tmp_path, manifest(tmp_path / "m.jsonl", a="x", b="x"))
    other = manifest(tmp_path / "n.jsonl", **data)
    with pytest.raises(RecipeMismatch) as refused:
        done(tmp_path, other, **change)
    assert says in str(refused.value)
    assert "--replace" in str(refused.value)
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
    with pytest.raises(RecipeMismatch, match="--replace"):
        done(tmp_path, tmp_path / "data", resolution=512)
    assert done(tmp_path, tmp_path / "data", resolution=512, replace=True).complete


def test_another_resolution_does_not_concern_the_text(tmp_path, makers):
    done(tmp_path, prompts(tmp_path / "p.txt", "a"), encode=("text",), resolution=1024)
    assert done(tmp_path, prompts(tmp_path / "p.txt", "a"), encode=("text",), resolution=512).complete


def test_a_refused_request_says_so_again_the_next_time(tmp_path, makers):
    """Its plan is published before it is refused; that must not let it pass."""
    done(tmp_path, manifest(tmp_path / "m.jsonl", a="x"))
    for _ in range(2):
        with pytest.raises(RecipeMismatch):
            done(tmp_path, manifest(tmp_path / "n.jsonl", d="x"))


def test_samples_of_which_only_some_have_a_picture_are_counted_aloud(tmp_path, makers):
    def remarks(*rows, **options):
        (tmp_path / "m.jsonl").write_text("".join(json.dumps({"caption": "x"} | row) + "\n" for row in rows))
        wanted = look_at_request(create_store(tmp_path / "store"), asked(tmp_path / "m.jsonl", tmp_path / "store", **options))
        return [remark for remark in wanted.remarks if "no picture (" in remark and "samples have" in remark]

    (tmp_path / "a.png").write_bytes(b"a picture")
    whole, misspelt = {"id": "a", "image": "a.png"}, [{"id": name, "img": "a.png"} for name in "bcde"]
    both = {"encode": ("text", "latents")}
    assert remarks(whole, **both) == remarks(*misspelt, **both) == remarks(whole, *misspelt, encode=("text",)) == []
    assert remarks(whole, *misspelt, **both) == ["4 samples have no picture (b, c, d, …): their batches hold no latents"]
    with pytest.raises(BadUsage, match="none of 1 samples has a picture"):
        remarks(*misspelt[:1], encode=("latents",))


def test_a_manifest_whose_pictures_are_in_a_column_that_is_not_known_is_said(tmp_path, makers):
    (tmp_path / "m.jsonl").write_text('{"id": "a", "img": "a.png", "caption": "x"}\n')
    wanted = look_at_request(create_store(tmp_path / "store"), asked(tmp_path / "m.jsonl", tmp_path / "store"))
    assert [words for words in wanted.remarks if "no row of" in words and "img, caption; the known ones are image, control" in words]
    plain = look_at_request(create_store(tmp_path / "other"), asked(manifest(tmp_path / "p.jsonl", a="x"), tmp_path / "other"))
    assert plain.remarks == ()


def test_an_emptied_source_empties_the_data_set_when_it_is_said_to_take_its_place(tmp_path, makers):
    done(tmp_path, manifest(tmp_path / "m.jsonl", a="x"))
    report = done(tmp_path, manifest(tmp_path / "m.jsonl"), replace=True)
    assert (report.complete, report.samples, report.wanted) == (True, 0, 0)


# Many ranks, one plan


def test_a_start_that_finds_the_plan_reads_no_row(tmp_path, makers, monkeypatch):
    data = manifest(tmp_path / "m.jsonl", a="one", b="")
    layout = create_store(tmp_path / "store")
    first = look_at_request(layout, asked(data, tmp_path / "store"))
    monkeypatch.setattr("cachestore.source.rows.from_row", None)
    second = look_at_request(layout, asked(data, tmp_path / "store"))
    assert second.plan.name == first.plan.name
    assert second.remarks == first.remarks


def test_another_rank_leaves_the_plan_to_rank_0_while_that_one_is_planning(tmp_path, makers, monkeypatch):
    data = manifest(tmp_path / "m.jsonl", a="one")
    layout = create_store(tmp_path / "store")
    published = threading.Event()
    with Beat(layout, "", 0, "launch", 0, 2), Beat(layout, "", 0, "launch", 1, 2) as beat:
        real = agreement.read_beats

        def looked(layout):
            if not published.is_set():
                published.set()
                look_at_request(layout, asked(data, tmp_path / "store"))
                monkeypatch.setattr("cachestore.jobs.planning._build", None)
            return real(layout)

        monkeypatch.setattr(agreement, "read_beats", looked)
        found = look_at_request(layout, asked(data, tmp_path / "store"), beat=beat)
    assert list(found.plan.ids) == ["a"]
    assert published.is_set()


def test_without_rank_0_another_rank_lays_out_the_plan_itself(tmp_path, makers, monkeypatch):
    monkeypatch.setattr("cachestore.jobs.planning.PLAN_SECONDS", 0.0)
    layout = create_store(tmp_path / "store")
    with Beat(layout, "", 0, "launch", 1, 2) as beat:
        found = look_at_request(layout, asked(manifest(tmp_path / "m.jsonl", a="one"), tmp_path / "store"), beat=beat)
    assert list(found.plan.ids) == ["a"]


def other_start(layout, data, tmp_path, launch):
    """Another start that is about to work on this data."""
    beat = Beat(layout, "", 0, launch, 0, 2)
    beat.detail = look_at_request(layout, asked(data, tmp_path / "store")).intent.as_json()
    return beat


@pytest.mark.parametrize(("launch", "strict"), [("mine", False), ("another", True)], ids=["one launch", "strict"])
def test_a_rank_that_means_another_plan_stops_and_names_what_differs(tmp_path, makers, monkeypatch, launch, strict):
    monkeypatch.setenv("CACHESTORE_LAUNCH", "mine")
    layout = create_store(tmp_path / "store")
    theirs, ours = manifest(tmp_path / "theirs.jsonl", a="one", b="two"), manifest(tmp_path / "ours.jsonl", a="one", c="three")
    with other_start(layout, theirs, tmp_path, launch), pytest.raises(BadInput, match="only here: 'c'; only there: 'b'"):
        precompute_here(asked(ours, tmp_path / "store", strict=strict))
    assert makers.encoded() == []


def test_another_launch_that_means_another_plan_is_said_and_both_go_on(tmp_path, makers):
    layout, said = create_store(tmp_path / "store"), []
    theirs, ours = manifest(tmp_path / "theirs.jsonl", a="one"), manifest(tmp_path / "ours.jsonl", a="two")
    with other_start(layout, theirs, tmp_path, "another"):
        assert precompute_here(asked(ours, tmp_path / "store"), say=said.append).complete
    assert any("other captions or files of 'a'" in line for line in said)


def test_two_roots_and_other_times_are_one_plan(tmp_path, makers):
    layout, names = create_store(tmp_path / "store"), set()
    for number, root in enumerate(("one", "another/place")):
        (tmp_path / root).mkdir(parents=True)
        manifest(tmp_path / root / "m.jsonl", a="one")
        os.utime(tmp_path / root / "m.jsonl", (number, number))
        names.add(look_at_request(layout, asked(tmp_path / root / "m.jsonl", tmp_path / "store")).plan.name)
    assert len(names) == 1
