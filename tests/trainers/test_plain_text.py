"""Text that is one tensor, in the files of SimpleTuner and ai-toolkit. `test_recorded` has what both wrote themselves."""

import pytest
import torch

from cachestore.core.errors import BadInput
from cachestore.core.raw_tensors import Text
from cachestore.core.tensors import to_raw, to_torch
from cachestore.trainers.ai_toolkit import format as ai_toolkit
from cachestore.trainers.ai_toolkit.format import AI_TOOLKIT
from cachestore.trainers.exported import Named
from cachestore.trainers.families import FAMILIES, family_named
from cachestore.trainers.simpletuner import format as simpletuner
from cachestore.trainers.table import load_formats
from tests.fakes import asks_for
from tests.trainers.caches import bring, equal
from tests.trainers.simpletuner.files import st_text_path
from tests.trainers.trainers import PICTURES, noise

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("torch_files_read_here")]


def filled(rows):
    return torch.nn.functional.pad(rows, (0, 0, 0, 512 - len(rows)))[None]


@pytest.fixture
def flux2(tmp_path, monkeypatch):
    """SimpleTuner's cache of FLUX.2's text. Of one caption the padding was cut off, as with a text_encoder_batch_size above 1."""
    monkeypatch.setattr("tests.trainers.simpletuner.files.ST_FAMILY", {"flux2": "flux2"})
    (tmp_path / "cache").mkdir()
    for picture in PICTURES:
        count = 9 if picture == PICTURES[1] else 512
        text = {"prompt_embeds": noise(picture.caption, shape=(1, count, 8)), "attention_mask": torch.ones(1, count)}
        torch.save(text, st_text_path(tmp_path / "cache", picture.caption, "flux2"))
    return tmp_path / "cache"


def test_files_whose_name_several_models_share_are_imported_only_for_a_named_family(data, flux2, store):
    with pytest.raises(BadInput, check=asks_for("family")):
        bring("simpletuner", flux2, store, data)
    assert not store.exists()
    assert bring("simpletuner", flux2, store, data, family="flux2-klein-9b").family == "flux2-klein-9b"


def test_text_of_flux2_whose_padding_was_cut_off_is_refused(data, flux2, store):
    (failure,) = bring("simpletuner", flux2, store, data, family="flux2").report.failures
    assert (failure["sample"], "it has 9 rows, but simpletuner makes 512" in failure["reason"]) == ("two.png", True)


@pytest.mark.parametrize(("family", "name", "rows"), [("wan", "attention_masks", 3), ("flux2", "attention_mask", 512)])
def test_text_that_was_encoded_here_gets_the_tensors_that_simpletuner_writes_itself(family, name, rows):
    text = noise("a caption", shape=(rows, 8), dtype=torch.bfloat16)
    named = Named("a.png", "a caption")
    contents = simpletuner.text_file(family_named(family), named, Text(to_raw({"prompt_embeds": text})))
    assert simpletuner.text_path(family_named(family), named).endswith(f"-{family}.pt")
    made = to_torch({key: (raw[0], raw[1], bytearray(raw[2])) for key, raw in contents.tensors.items()})
    assert equal(made["prompt_embeds"], filled(text))
    assert equal(made[name], filled(text) if family == "wan" else torch.ones(1, 512, dtype=torch.int64))


@pytest.mark.parametrize("kind", load_formats(), ids=lambda kind: kind.name)
def test_every_family_of_a_trainer_is_known(kind):
    assert kind.trainer.cached.keys() <= {family.name for family in FAMILIES}


def test_every_family_of_ai_toolkit_has_a_step():
    assert ai_toolkit._STEPS.keys() == AI_TOOLKIT.cached.keys()
