"""Verify with recompute: entries that belong to something else are found, and what cannot be made again is said."""

import json
import os
import shutil
from typing import Any

import numpy as np
import pytest
from PIL import Image

import cachestore as cs
from cachestore.care.recompute import choose
from cachestore.cli import DAMAGE, ERROR, OK, USAGE, main
from cachestore.core.errors import BadInput, EncodeFailed, RecipeMismatch
from cachestore.core.keys import Key
from cachestore.files.paths import Layout
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.start.here import precompute_here
from cachestore.store.read.rows import newest_catalog
from cachestore.store.read.snapshot import list_segments
from cachestore.store.write.append import Appender
from tests import fakes
from tests.encode import tiny
from tests.fakes import asks_for, catalog, raising

COUNT = 6


def answer(batch):
    """Numbers that depend on the input alone, with some rounding that depends on the batch."""
    made = {}
    for key, item in batch:
        seed = sum(item.encode() if isinstance(item, str) else item)
        values = np.random.default_rng(seed).standard_normal(64).astype(np.float32)
        made[key] = {"value": values * np.float32(1 + 1e-6 * len(batch))}
    return made


@pytest.fixture
def makers(monkeypatch):
    makers = fakes.Makers(options={"answer": answer})
    monkeypatch.setattr("cachestore.jobs.plan.planning.make_encoders", makers)
    monkeypatch.setattr("cachestore.care.recompute.encoders_of", lambda request, known: makers(None, request))
    return makers


@pytest.fixture
def data(tmp_path):
    return fakes.captioned(tmp_path / "data", COUNT)


@pytest.fixture
def store(tmp_path, data, makers):
    """A store of text and latents, in which each recipe has its own segment."""
    for encode in (("text",), ("latents",)):
        precompute_here(PrecomputeRequest(str(data), "model", str(tmp_path / "store"), encode=encode))
    makers.encoded()
    return tmp_path / "store"


def key_of(store, sample, encoder):
    found = catalog(store)
    column = next(column for column in found.columns if column.encoder == encoder)
    return column.row_keys(list(found.ids).index(sample))[0]


def put_instead(store, changes):
    """Replace entries, as a program that pairs by position would: key -> (tensors, meta), whatever the key says."""
    with cs.open(store) as reader:
        entries = {key: (reader.get_raw([key])[0], reader.describe(key).meta) for key in reader.keys()}  # noqa: SIM118
    layout = Layout(store)
    for digest in list_segments(layout):
        layout.segment(digest).unlink()
    appender = Appender(layout, origin="")
    for key, (tensors, meta) in (entries | changes(entries)).items():
        list(appender.put(key, tensors, meta))
    appender.close_segment()


def swap(one, two):
    """Give two keys each other's tensors; each entry still says that it was made of its own input."""
    return lambda entries: {one: (entries[two][0], entries[one][1]), two: (entries[one][0], entries[two][1])}


def state(store):
    return {path: path.stat().st_mtime_ns for path in store.rglob("*")}


# Nothing to do


def test_without_recompute_nobody_is_asked_to_make_anything(store, makers):
    assert cs.verify(store).recomputed is None
    assert makers.made == []


def test_a_store_of_which_no_entry_can_be_made_again_is_an_error(tmp_path, makers):
    with cs.open(tmp_path / "store", mode="a") as store, store.writer() as writer:
        writer.put(cs.key("a"), {"x": np.ones(2)})
    with pytest.raises(BadInput, check=asks_for("recompute")):
        cs.verify(tmp_path / "store", recompute=5)
    assert makers.made == []


def test_an_empty_store_has_nothing_to_make_again(tmp_path, makers):
    cs.open(tmp_path / "store", mode="a").close()
    report = cs.verify(tmp_path / "store", recompute=5)
    assert (report.ok, report.recomputed["chosen"], report.recomputed["of"]) == (True, 0, 0)


def test_a_count_below_nothing_is_refused(store):
    with pytest.raises(BadInput, check=asks_for("recompute")):
        cs.verify(store, recompute=-1)


# What is as it should be


def test_entries_that_differ_by_rounding_are_equal_and_nothing_is_written(store, makers):
    before = state(store)
    report = cs.verify(store, recompute=100)
    assert (report.ok, report.findings) == (True, ())
    assert {name: report.recomputed[name] for name in ("asked", "chosen", "of", "equal", "wrong", "seed", "remarks")} == {
        "asked": 100,
        "chosen": 2 * COUNT,
        "of": 2 * COUNT,
        "equal": 2 * COUNT,
        "wrong": 0,
        "seed": 0,
        "remarks": [],
    }
    assert state(store) == before
    assert len(makers.encoded("latents")) == COUNT


def test_the_callers_environment_stays_as_it_was(store, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.delenv("DIFFUSERS_VERBOSITY", raising=False)
    before = dict(os.environ)
    cs.verify(store, recompute=1)
    assert dict(os.environ) == before


# Wrong values


def test_two_captions_that_got_each_others_values_are_found_by_key_and_sample(store):
    one, two = key_of(store, "1.png", "text"), key_of(store, "4.png", "text")
    put_instead(store, swap(one, two))
    assert cs.verify(store).ok, "every byte is as published"
    report = cs.verify(store, recompute=100)
    assert not report.ok
    assert {(found.kind, found.key, found.sample) for found in report.findings} == {
        ("wrong-value", str(one), "1.png"),
        ("wrong-value", str(two), "4.png"),
    }
    assert all("--refill" in found.message and "value differs by" in found.message for found in report.findings)
    assert (report.recomputed["wrong"], report.recomputed["equal"]) == (2, 2 * COUNT - 2)


def test_what_the_finding_advises_mends_it(store):
    put_instead(store, swap(key_of(store, "1.png", "latents"), key_of(store, "4.png", "latents")))
    for path in {found.path for found in cs.verify(store, recompute=100).findings}:
        (store / path).unlink()
    cs.repair(store, refill=True)
    assert cs.verify(store, recompute=100).ok


def test_an_entry_that_says_it_was_made_of_another_input_is_found_before_anything_is_encoded(store, makers):
    one, two = key_of(store, "1.png", "text"), key_of(store, "4.png", "text")
    put_instead(store, lambda entries: {one: (entries[one][0], entries[two][1])})
    report = cs.verify(store, recompute=100)
    assert [(found.kind, found.sample) for found in report.findings] == [("wrong-value", "1.png")]
    assert "is not the input" in report.findings[0].message
    assert "caption 1" not in makers.encoded("text")


def test_a_catalog_that_pairs_a_sample_with_anothers_entry_is_found(store, monkeypatch):
    one, two = key_of(store, "1.png", "latents"), key_of(store, "4.png", "latents")

    def mispaired(layout, name):
        found = newest_catalog(layout, name)
        column = found.column("latents", "image")
        swapped = {one: two, two: one}
        object.__setattr__(column, "keys", [swapped.get(Key(key), key) for key in column.keys])
        return found

    monkeypatch.setattr("cachestore.care.recompute.newest_catalog", mispaired)
    report = cs.verify(store, recompute=100)
    assert {(found.kind, found.key, found.sample) for found in report.findings} == {
        ("wrong-value", str(two), "1.png"),
        ("wrong-value", str(one), "4.png"),
    }
    assert all("now makes entry" in found.message for found in report.findings)


def test_findings_are_reported_as_they_are_made(store):
    put_instead(store, swap(key_of(store, "1.png", "text"), key_of(store, "4.png", "text")))
    reported = []
    assert cs.verify(store, recompute=100, on_finding=reported.append).findings == tuple(reported)
    assert len(reported) == 2


# What cannot be made again


def test_a_picture_that_is_gone_is_counted_and_named(store, data):
    (data / "2.png").unlink()
    report = cs.verify(store, recompute=100)
    assert (report.ok, report.recomputed["source_gone"], report.recomputed["equal"]) == (True, 1, 2 * COUNT - 1)
    assert "2.png" in report.recomputed["remarks"][0]


def test_without_the_whole_source_captions_are_still_compared(store, data, tmp_path):
    data.rename(tmp_path / "moved")
    report = cs.verify(store, recompute=100)
    assert (report.ok, report.recomputed["source_gone"], report.recomputed["equal"]) == (True, COUNT, COUNT)
    assert cs.verify(store, recompute=100, source=tmp_path / "moved").recomputed["equal"] == 2 * COUNT


def test_a_picture_that_changed_since_is_counted_and_is_no_wrong_value(store, data):
    (data / "2.png").write_bytes(b"PICTURE 2")
    report = cs.verify(store, recompute=100)
    assert (report.ok, report.recomputed["source_changed"], report.recomputed["equal"]) == (True, 1, 2 * COUNT - 1)
    assert "changed" in report.recomputed["remarks"][0]


def test_an_input_that_the_model_refuses_now_is_counted_and_hides_no_other(store, makers):
    def refuse(items):
        if b"picture 3" in items:
            raise EncodeFailed("out of luck")

    makers.options["before_encode"] = refuse
    report = cs.verify(store, recompute=100)
    assert (report.recomputed["refused"], report.recomputed["equal"]) == (1, 2 * COUNT - 1)
    assert report.recomputed["remarks"] == ["1 entry could not be encoded again (3.png): out of luck"]


def test_a_model_that_cannot_be_loaded_ends_it(store, makers):
    makers.options["before_encode"] = raising(BadInput("no such weights"))
    with pytest.raises(BadInput):
        cs.verify(store, recompute=100)


def test_a_data_set_that_does_not_say_how_it_was_made_is_reported(store, monkeypatch):
    def silent(layout, name):
        found = newest_catalog(layout, name)
        object.__setattr__(found, "request", {"latents": found.request["latents"]})
        return found

    monkeypatch.setattr("cachestore.care.recompute.newest_catalog", silent)
    report = cs.verify(store, recompute=100)
    assert report.recomputed["equal"] == report.recomputed["of"] == COUNT
    assert "text of the data set 'train' was not checked" in report.recomputed["remarks"][0]


def test_a_damaged_entry_is_damage_and_not_a_wrong_value(store):
    key = fakes.flip_entry(store, "2.png", "latents")
    quick = cs.verify(store, "quick", recompute=100)
    assert [(found.kind, found.key) for found in quick.findings] == [("corrupt-entry", str(key))]
    kinds = sorted(found.kind for found in cs.verify(store, recompute=100).findings)
    assert kinds == sorted(found.kind for found in cs.verify(store).findings) == ["corrupt-entry"]


# The model


def test_another_model_is_reported_before_anything_is_read_or_encoded(store, makers, monkeypatch):
    monkeypatch.setattr("cachestore.care.verify.verify", lambda *arguments, **options: pytest.fail("read"))
    with pytest.raises(RecipeMismatch, check=asks_for("model", "other", "latents", "'train'")):
        cs.verify(store, recompute=1, model="other")
    assert makers.encoded() == []


def test_an_encoder_that_was_replaced_since_is_made_again_by_its_own_request(tmp_path, data, makers):
    """Text and latents were asked for together, then text alone with another model."""
    root = tmp_path / "store"
    precompute_here(PrecomputeRequest(str(data), "model", str(root)))
    precompute_here(PrecomputeRequest(str(data), "second", str(root), encode=("text",), replace=True))
    report = cs.verify(root, recompute=100)
    assert (report.ok, report.recomputed["equal"]) == (True, 2 * COUNT)
    fakes.flip_entry(root, "2.png", "latents")
    assert cs.repair(root, refill=True).refilled == 1
    assert cs.verify(root, recompute=100).ok


# The choice


class Cell:
    def __init__(self, name):
        self.key = name


def groups(*catalogs) -> Any:
    """Catalogs of columns of segments of so many cells."""
    return [
        [[[Cell((c, k, s, n)) for n in range(count)] for s, count in enumerate(column)] for k, column in enumerate(columns)]
        for c, columns in enumerate(catalogs)
    ]


def counts(chosen, depth):
    found: dict[tuple[int, ...], int] = {}
    for cell in chosen:
        found[cell.key[:depth]] = found.get(cell.key[:depth], 0) + 1
    return found


def test_nothing_is_chosen_of_nothing():
    assert choose([], 5, 0) == choose(groups([[]]), 5, 0) == choose(groups([[3]]), 0, 0) == []


def test_a_large_data_set_column_or_segment_does_not_crowd_out_a_small_one():
    chosen = choose(groups([[1000, 1000, 3], [50]], [[7]]), 24, 0)
    assert counts(chosen, 1) == {(0,): 17, (1,): 7}
    assert counts(chosen, 2) == {(0, 0): 9, (0, 1): 8, (1, 0): 7}
    assert counts(chosen, 3) == {(0, 0, 0): 3, (0, 0, 1): 3, (0, 0, 2): 3, (0, 1, 0): 8, (1, 0, 0): 7}


def test_the_seed_decides_the_choice_and_each_key_is_chosen_once():
    same = groups([[100]], [[100]])
    first, again, other = (choose(same, 10, seed) for seed in (0, 0, 1))
    assert first == again != other
    shared: Any = [[[[Cell(n) for n in range(5)]]], [[[Cell(n) for n in range(5)]]]]
    assert sorted(cell.key for cell in choose(shared, 99, 0)) == [0, 1, 2, 3, 4]


def test_the_seed_of_a_verify_is_reported_and_chooses(store, makers):
    assert cs.verify(store, recompute=3, seed=7).recomputed["seed"] == 7
    assert len({tuple(makers.encoded()) for seed in range(8) if cs.verify(store, recompute=2, seed=seed)}) > 1


# The command


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = main(list(map(str, arguments)))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_the_command_counts_as_encoded_again_only_what_was(run, store, data):
    (data / "2.png").unlink()
    code, out, _err = run("verify", store, "--recompute", 2 * COUNT)
    assert code == OK
    assert f"{2 * COUNT - 1} of {2 * COUNT} chosen entries encoded again (of {2 * COUNT}, seed 0): {2 * COUNT - 1} equal" in out


def test_the_command_is_4_on_a_wrong_value_and_tells_what_it_chose(run, store):
    assert run("verify", store, "--recompute", 100)[0] == OK
    put_instead(store, swap(key_of(store, "1.png", "text"), key_of(store, "4.png", "text")))
    code, out, _err = run("verify", store, "--recompute=100", "--seed", "3")
    assert code == DAMAGE
    assert out.count("wrong-value: ") == 2
    again = f"{2 * COUNT} of {2 * COUNT} chosen entries encoded again (of {2 * COUNT}, seed 3)"
    assert f"{again}: {2 * COUNT - 2} equal up to rounding, 2 wrong" in out
    code, out, _err = run("verify", store, "--recompute=100", "--json")
    assert (code, json.loads(out)["recomputed"]["wrong"]) == (DAMAGE, 2)


def test_the_command_tells_what_it_could_not_make_again(run, store, data):
    (data / "2.png").unlink()
    code, out, _err = run("verify", store, "--recompute=100")
    assert code == OK
    assert "note: 1 entry could not be encoded again, as their source is missing (2.png)" in out


def test_the_command_takes_what_moved_and_refuses_it_without_recompute(run, store, data, tmp_path):
    data.rename(tmp_path / "moved")
    code, out, _err = run("verify", store, "--recompute=100", "--source", tmp_path / "moved", "--model", "model", "--json")
    assert (code, json.loads(out)["recomputed"]["equal"]) == (OK, 2 * COUNT)
    code, _out, err = run("verify", store, "--source", tmp_path / "moved")
    assert (code, "--source needs --recompute" in err) == (USAGE, True)
    code, _out, err = run("verify", store, "--recompute", 1, "--model", "other")
    assert (code, "nothing was encoded" in err) == (ERROR, True)


WITHOUT_TORCH = """
import sys
from cachestore.cli import main
main(["verify", sys.argv[1]])
print([name for name in ("torch", "transformers", "diffusers", "cachestore.jobs.start.precompute") if name in sys.modules])
"""


def test_verify_without_recompute_imports_no_torch_and_nothing_of_the_whole_job(store):
    out, err = fakes.program(WITHOUT_TORCH, str(store)).communicate(timeout=50)
    assert out.splitlines()[-1:] == ["[]"], err


# With models


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    import torch

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    tiny.sd15().save_pretrained(folder)
    return folder


def paint(data):
    for n in range(COUNT):
        pixels = np.random.default_rng(n).integers(0, 256, (64, 96, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(data / f"{n}.png")
        os.utime(data / f"{n}.png", (n, n))


def encode(data, model, root, **options):
    paint(data)
    arguments: dict[str, Any] = {"resolution": 64, "device": "cpu", **options}
    return precompute_here(PrecomputeRequest(str(data), str(model), str(root), **arguments))


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_models_entries_are_made_again_and_are_equal_though_they_shared_other_batches(tmp_path, data, model, dtype):
    assert encode(data, model, tmp_path / "store", batch_size=4, text_dtype=dtype, vae_dtype=dtype).complete
    report = cs.verify(tmp_path / "store", recompute=100)
    assert (report.ok, report.recomputed["equal"], report.recomputed["remarks"]) == (True, 2 * COUNT, [])


@pytest.mark.torch
@pytest.mark.parametrize("encoder", ["text", "latents"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_models_entries_under_each_others_keys_are_wrong_values(tmp_path, data, model, encoder, dtype):
    root = tmp_path / "store"
    encode(data, model, root, text_dtype=dtype, vae_dtype=dtype)
    one, two = key_of(root, "1.png", encoder), key_of(root, "4.png", encoder)
    put_instead(root, swap(one, two))
    assert cs.verify(root).ok
    report = cs.verify(root, recompute=100)
    assert {(found.kind, found.key, found.sample) for found in report.findings} == {
        ("wrong-value", str(one), "1.png"),
        ("wrong-value", str(two), "4.png"),
    }


@pytest.mark.torch
def test_another_models_weights_are_named_before_anything_is_encoded(tmp_path, data, model):
    encode(data, model, tmp_path / "store")
    changed = tmp_path / "changed"
    shutil.copytree(model, changed)
    weights = changed / "vae/diffusion_pytorch_model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(RecipeMismatch, check=asks_for("model", "latents", "vae/diffusion_pytorch_model.safetensors")):
        cs.verify(tmp_path / "store", recompute=1, model=changed)
    assert cs.verify(tmp_path / "store", recompute=100, model=changed, vae=model).ok


@pytest.mark.torch
def test_a_picture_of_which_the_vae_makes_nan_costs_its_own_unit_alone(tmp_path, data, model, monkeypatch):
    from cachestore.encode.pictures import vae

    paint(data)
    white = np.full((64, 96, 3), 255, np.uint8)
    begin = vae.Vae._begin

    def poison(self, batch, *took):
        entries = begin(self, batch, *took)()
        for key, pixels in batch:
            if pixels.min() == 255:
                entries[key]["moments"] = entries[key]["moments"] * float("nan")
        return lambda: entries

    monkeypatch.setattr(vae.Vae, "_begin", poison)
    Image.fromarray(white).save(data / "white.png")
    os.utime(data / "white.png", (9, 9))
    report = precompute_here(PrecomputeRequest(str(data), str(model), str(tmp_path / "store"), resolution=64, device="cpu"))
    assert (report.encoded, report.failed) == (2 * COUNT + 1, 1), "pictures, their captions, and the empty one"
    (failure,) = report.failures
    assert (failure["sample"], failure["encoder"]) == ("white.png", "latents")
    assert failure["reason"].startswith("the VAE returned NaN in 'moments' for entry")
