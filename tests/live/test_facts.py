"""What values depend on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cachestore import live
from cachestore.live import arming
from cachestore.live import run as runs
from cachestore.live.adapter import Refused

pytestmark = pytest.mark.torch


def small() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))


CHANGES = {
    "a weight": lambda one: one[0].weight.data[0].add_(1),
    "a dtype": lambda one: one.half(),
    "a flag of a part": lambda one: setattr(one[1], "eps", 1e-3),
    "a class of a part": lambda one: setattr(one[1], "__class__", type("Other", (nn.LayerNorm,), {})),
    "a buffer": lambda one: one.register_buffer("mean", torch.zeros(2)),
    "a further part": lambda one: one.append(nn.ReLU()),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_fingerprint_changes_with(what):
    before, changed = live.fingerprint(small()), small()
    CHANGES[what](changed)
    assert live.fingerprint(changed) != before


def test_a_fingerprint_is_of_content():
    one, other = small(), small().train()
    one.eval()
    other.name_or_path = "/elsewhere"
    other[0].weight = nn.Parameter(other[0].weight.detach().T.contiguous().T)  # other strides, the same numbers
    assert live.fingerprint(one) == live.fingerprint(other)


def test_tied_weights_are_digested_once(monkeypatch):
    from cachestore.live import facts

    module = small()
    module.again = module[0]
    asked = []
    own = facts._digest_tensor
    monkeypatch.setattr(facts, "_digest_tensor", lambda tensor: asked.append(1) or own(tensor))
    live.fingerprint(module)
    assert len(asked) == 4


def test_every_dtype_can_be_digested():
    module = nn.Module()
    for number, dtype in enumerate([torch.float8_e4m3fn, torch.bfloat16, torch.bool, torch.int64]):
        module.register_buffer(f"b{number}", torch.ones(3).to(dtype))
    module.register_buffer("none", torch.ones(0))
    module.register_buffer("one", torch.tensor(1.0))
    assert len(live.fingerprint(module)) == 64


class Sharded(torch.Tensor):
    pass


@pytest.mark.parametrize("thing", [nn.Linear(2, 2, device="meta"), object(), "a text"])
def test_what_cannot_be_told_apart_is_refused(thing):
    with pytest.raises(Refused):
        live.fingerprint(thing)


def test_a_wrapped_weight_is_refused_by_name(capsys):
    module = nn.Linear(2, 2)
    module.register_buffer("scale", torch.ones(2).as_subclass(Sharded))
    with pytest.raises(Refused):
        live.fingerprint(module)
    assert "scale" in capsys.readouterr().err


def test_settings_without_a_list_of_values_count_all_fields_but_others():
    thing = SimpleNamespace(length=512, mask=True, batch=4, dtype=torch.bfloat16, parts=[1, None], names={"a": 1.5})
    found = live.settings(thing, others={"batch", "lacking"})
    wanted = {"length": 512, "mask": True, "dtype": "torch.bfloat16", "parts": [1, None], "names": {"a": 1.5}}
    assert found == {"class": "SimpleNamespace", **wanted}
    assert live.settings(vars(thing), others={"batch"}) == {"class": "dict", **wanted}


def test_settings_refuse_a_field_in_neither_list_by_name(capsys):
    with pytest.raises(Refused):
        live.settings(SimpleNamespace(length=512, t5_max_length=256), {"length"})
    assert "t5_max_length" in capsys.readouterr().err


@pytest.mark.parametrize("value", [print, lambda text: text, object(), [object()]])
def test_settings_refuse_a_value_that_cannot_be_written_down_by_name(value, capsys):
    with pytest.raises(Refused):
        live.settings(SimpleNamespace(hook=value))
    assert "hook" in capsys.readouterr().err


def test_modules_among_settings_are_fingerprinted():
    assert live.settings(SimpleNamespace(model=small()))["model"] == live.fingerprint(small())


def test_precision_is_that_of_autocast():
    assert live.precision() == {}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert live.precision() == {"cpu": "torch.bfloat16"}


def test_shown_fields_are_all_that_an_encoder_sees(capsys):
    shown: Any = live.KeyFields(SimpleNamespace(caption="a cat", size=(1, 2)), ["caption"], id="cat.png")
    shown.made = 3
    assert (shown.caption, shown.id, shown.made) == ("a cat", "cat.png", 3)
    with pytest.raises(Refused):
        _ = shown.size
    assert "size" in capsys.readouterr().err
    assert not hasattr(shown, "__fspath__")


@pytest.mark.parametrize(
    ("paths", "ids"),
    [
        (["/data/1_cat/a.png", "/data/2_dog/a.png"], ["1_cat/a.png", "2_dog/a.png"]),
        (["/data/a.png", "/data/b.png"], ["a.png", "b.png"]),
        (["/data/a.png"], ["a.png"]),
        (["/data/a.png", "/data/a.png"], ["a.png", "a.png"]),
        ([], []),
    ],
)
def test_ids_are_paths_below_the_common_folder(paths, ids):
    assert live.ids_of(paths) == ids


def test_digests_are_remembered_until_a_file_changes(tmp_path, monkeypatch):
    import os

    from cachestore.files import fingerprints

    monkeypatch.setattr(arming, "_armed", [(arming.Setting("a", str(tmp_path / "store"), "name"), live.Adapter("a"))])
    monkeypatch.setattr(runs, "_runs", [])
    paths = [str(tmp_path / name) for name in ("a", "b")]
    for path in paths:
        with open(path, "w") as file:
            file.write(path)
        os.utime(path, (1, 1))
    monkeypatch.setattr(fingerprints, "proof_of", fingerprints.stat_of)  # as if they were older than two seconds
    first = live.digests([*paths, paths[0]])
    assert len(set(first.values())) == 2
    monkeypatch.setattr(fingerprints, "digest_opened", lambda _file: pytest.fail("read again"))
    assert live.digests(paths) == first
    monkeypatch.undo()
    monkeypatch.setattr(arming, "_armed", [(arming.Setting("a", str(tmp_path / "store"), "name"), live.Adapter("a"))])
    with open(paths[0], "a") as file:
        file.write("more")
    assert live.digests(paths)[paths[0]] != first[paths[0]]
