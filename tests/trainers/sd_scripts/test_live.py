"""The live adapter of sd-scripts, with a stand-in of the trainer's modules."""
# The stand-in is put on the path by the tests.
# pyright: reportMissingImports=false

import importlib
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import cachestore as cs
from cachestore import live
from cachestore.live import arming
from cachestore.live import run as runs
from cachestore.live.adapter import Refused
from cachestore.trainers.sd_scripts.live import adapter, files

pytestmark = pytest.mark.torch
NAME = "sd-scripts/test"


class Trainer:
    """The stand-in, armed, with a data set of three pictures."""

    def __init__(self, folder):
        from library import strategy_base, strategy_small, train_util

        self.base, self.small, self.util, self.folder = strategy_base, strategy_small, train_util, folder
        self.waited = self.encoded = 0
        torch.manual_seed(0)
        self.vae, self.text = torch.nn.Conv2d(3, 4, 8, stride=8), torch.nn.Embedding(64, 5)
        for module in (self.vae, self.text):
            module.register_forward_hook(self._count)
        for number in range(3):
            Image.fromarray(np.random.default_rng(number).integers(0, 256, (16, 24, 3), np.uint8)).save(folder / f"{number}.png")
        self.captions = [f"caption {number}" for number in range(3)]
        self.flags = SimpleNamespace(flip_aug=False, alpha_mask=False, random_crop=False)
        self.tokens, self.to_disk, self.weighted = 6, True, False

    def _count(self, _module, inputs, _output):
        self.encoded += len(inputs[0])

    def wait_for_everyone(self):
        self.waited += 1

    def dataset(self):
        made = self.util.BaseDataset()
        for number, caption in enumerate(self.captions):
            info = self.util.ImageInfo(f"{number}", 1, caption, False, str(self.folder / f"{number}.png"))
            info.bucket_reso, info.resized_size, info.image_size = (24, 16), (24, 16), (24, 16)
            made.image_data[info.image_key], made.image_to_subset[info.image_key] = info, self.flags
        return made

    def start(self, group=True):
        """What a training script does up to its first step. Returns the data set, and how much was encoded: latents, text."""
        runs._runs.clear()
        self.encoded = 0
        self.base.LatentsCachingStrategy.set_strategy(self.small.SmallLatentsCachingStrategy(self.to_disk, 2, False))
        text = self.small.SmallTextEncoderOutputsCachingStrategy(self.to_disk, None, False, False, self.weighted)
        self.base.TextEncoderOutputsCachingStrategy.set_strategy(text)
        self.base.TokenizeStrategy.set_strategy(self.small.SmallTokenizeStrategy(self.tokens))
        self.base.TextEncodingStrategy.set_strategy(self.small.SmallTextEncodingStrategy())
        data = self.dataset()
        whole = self.util.DatasetGroup([data]) if group else data
        whole.new_cache_latents(self.vae, self)
        latents, self.encoded = self.encoded, 0
        whole.new_cache_text_encoder_outputs([self.text, self.text], self)
        return data, (latents, self.encoded)

    def counts(self):
        return self.start()[1]


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_in"))
    setting = arming.Setting("cachestore.trainers.sd_scripts.live", str(tmp_path / "store"), NAME)
    monkeypatch.setattr(arming, "_armed", [(setting, adapter)])
    monkeypatch.setattr(runs, "_runs", [])
    for module in ("train_util", "strategy_base", "strategy_small"):
        adapter.plug_into(importlib.import_module(f"library.{module}"))
    (tmp_path / "pictures").mkdir()
    yield Trainer(tmp_path / "pictures")
    files.drop()
    for module in [name for name in sys.modules if name.partition(".")[0] == "library"]:
        del sys.modules[module]


def read(trainer, info):
    latents = trainer.base.LatentsCachingStrategy.get_strategy().load_latents_from_disk(info.latents_npz, info.bucket_reso)
    return latents, trainer.base.TextEncoderOutputsCachingStrategy.get_strategy().load_outputs_npz(info.text_encoder_outputs_npz)


def test_the_first_start_encodes_all_and_the_second_nothing_and_both_read_the_same(trainer, tmp_path):
    first, encoded = trainer.start()
    assert encoded == (3, 3)
    again, encoded = trainer.start()
    assert encoded == (0, 0)
    for info, other in zip(first.image_data.values(), again.image_data.values(), strict=True):
        live.check_same("the second start", read(trainer, info), read(trainer, other))
        (latents, size, *_rest), (rows, pooled) = read(trainer, info)
        assert (latents.shape, size, rows.shape, pooled.shape) == ((4, 2, 3), [24, 16], (6, 5), (5,))
        with torch.no_grad():
            np.testing.assert_array_equal(rows, trainer.text(trainer.small.SmallTokenizeStrategy(6).tokenize([info.caption])[0])[0].numpy())
    assert not list(tmp_path.rglob("*.npz"))
    assert trainer.waited == 4
    assert live.current().last_line().startswith("latents: 3 reused, 0 encoded; text: 3 reused, 0 encoded")


def test_values_are_data_sets_whose_ids_are_paths_below_the_common_folder(trainer, tmp_path):
    trainer.start(group=False)
    assert trainer.waited == 0
    with cs.open(tmp_path / "store") as store:
        assert sorted(store.names()) == [f"{NAME}/latents", f"{NAME}/text"]
        assert sorted(store.dataset(f"{NAME}/text").ids) == ["0.png", "1.png", "2.png"]


CHANGES = {
    "one caption": (lambda its: its.captions.__setitem__(1, "another"), (0, 1)),
    "one picture": (lambda its: (its.folder / "2.png").write_bytes((its.folder / "0.png").read_bytes()), (0, 0)),
    "a new picture": (lambda its: Image.new("RGB", (24, 16)).save(its.folder / "2.png"), (1, 0)),
    "flips": (lambda its: setattr(its.flags, "flip_aug", True), (3, 0)),
    "masks": (lambda its: setattr(its.flags, "alpha_mask", True), (3, 0)),
    "the VAE": (lambda its: its.vae.bias.data.add_(1), (3, 0)),
    "the text encoder": (lambda its: its.text.to(torch.bfloat16).to(torch.float32), (0, 3)),
    "the token length": (lambda its: setattr(its, "tokens", 7), (0, 3)),
    "weighted captions": (lambda its: setattr(its, "weighted", True), (0, 3)),
    "a flag of the VAE": (lambda its: setattr(its.vae, "tiling", True), (3, 0)),
    "how pixels are scaled": (lambda its: setattr(its.util, "IMAGE_TRANSFORMS", "to [0, 1]"), (3, 0)),
    "the cache in memory alone": (lambda its: setattr(its, "to_disk", False), (0, 0)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_encodes_again_what_it_changes_alone(trainer, what):
    trainer.start()
    change, encoded = CHANGES[what]
    change(trainer)
    assert trainer.counts() == encoded


def test_equal_captions_are_encoded_once(trainer):
    trainer.captions = ["one", "one", "one"]
    assert trainer.counts() == (3, 1)


def test_flipped_latents_and_masks_come_back(trainer):
    trainer.flags.flip_aug = trainer.flags.alpha_mask = True
    data, _ = trainer.start()
    latents, _size, _crop, flipped, mask = read(trainer, data.image_data["1"])[0]
    np.testing.assert_array_equal(flipped, latents[..., ::-1])
    assert mask.shape == (2, 3)


def test_a_control_net_data_set_is_cached_by_the_one_that_has_its_pictures(trainer):
    inner = trainer.dataset()
    trainer.start()
    outer = SimpleNamespace(dreambooth_dataset_delegate=inner, image_data={}, batch_size=1)
    trainer.util.DatasetGroup([outer]).new_cache_latents(trainer.vae, trainer)
    assert all(isinstance(info.latents_npz, live.ValueName) for info in inner.image_data.values())


def test_two_data_sets_of_a_group_are_one_and_a_second_group_is_another(trainer, tmp_path):
    trainer.start()
    both = trainer.util.DatasetGroup([trainer.dataset(), trainer.dataset()])
    for info in both.datasets[1].image_data.values():
        info.bucket_reso = (24, 16)
        info.resize_interpolation = "lanczos"
    both.new_cache_latents(trainer.vae, trainer)
    with cs.open(tmp_path / "store") as store:
        rows = store.dataset(f"{NAME}/latents-2")
        assert [len(rows[name]["value"]) for name in rows.ids] == [2, 2, 2]


def test_an_empty_data_set_encodes_nothing(trainer):
    trainer.captions = []
    assert trainer.counts() == (0, 0)


def test_other_paths_are_read_and_written_as_ever(trainer, tmp_path):
    trainer.small.np.savez(tmp_path / "own.npz", a=np.arange(3))
    assert trainer.small.np.load(tmp_path / "own.npz")["a"].tolist() == [0, 1, 2]


def test_a_name_is_the_same_after_pickling(trainer):
    data, _ = trainer.start()
    info = data.image_data["0"]
    again = pickle.loads(pickle.dumps(info))
    live.check_same("pickled", read(trainer, info), read(trainer, again))


# ------------------------------------------------------------------------------------------------------------- refused


def refused(trainer, capsys, *words):
    with pytest.raises(Refused) as error:
        trainer.start()
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert [word for word in words if word not in said] == []


@pytest.mark.parametrize("is_full", [False, True])
def test_a_reader_that_transposes_latents_is_refused(trainer, capsys, monkeypatch, is_full):
    if is_full:
        trainer.start()
    own = trainer.base.LatentsCachingStrategy.load_latents_from_disk

    def load(self, npz_path, bucket_reso):
        latents, *rest = own(self, npz_path, bucket_reso)
        return latents.swapaxes(1, 2), *rest

    monkeypatch.setattr(trainer.base.LatentsCachingStrategy, "load_latents_from_disk", load)
    refused(trainer, capsys, "SmallLatentsCachingStrategy")
    assert trainer.encoded == 0


@pytest.mark.parametrize("is_full", [False, True])
def test_a_reader_that_transposes_text_is_refused(trainer, capsys, monkeypatch, is_full):
    if is_full:
        trainer.start()
    kind = trainer.small.SmallTextEncoderOutputsCachingStrategy
    own = kind.load_outputs_npz
    monkeypatch.setattr(kind, "load_outputs_npz", lambda self, npz_path: [own(self, npz_path)[0].T, own(self, npz_path)[1]])
    refused(trainer, capsys, "SmallTextEncoderOutputsCachingStrategy")
    assert trainer.encoded <= 1


def test_a_reader_that_mixes_up_its_parts_is_refused(trainer, capsys, monkeypatch):
    kind = trainer.small.SmallTextEncoderOutputsCachingStrategy
    own = kind.load_outputs_npz
    monkeypatch.setattr(kind, "load_outputs_npz", lambda self, npz_path: own(self, npz_path)[::-1])
    refused(trainer, capsys, "SmallTextEncoderOutputsCachingStrategy")


@pytest.mark.parametrize("module", ["strategy_base", "strategy_small"])
def test_a_strategy_that_goes_another_way_than_numpy_is_refused(trainer, capsys, monkeypatch, tmp_path, module):
    own = SimpleNamespace(savez=lambda *_path, **_arrays: None, load=np.load, array=np.array)
    monkeypatch.setattr(importlib.import_module(f"library.{module}"), "np", own)
    refused(trainer, capsys, "numpy")
    assert not list(tmp_path.rglob("*.npz"))


def test_a_field_of_a_strategy_that_cannot_be_written_down_is_refused_by_name(trainer, capsys, monkeypatch):
    kind = trainer.small.SmallTokenizeStrategy
    own = kind.__init__

    def begin(self, max_length):
        own(self, max_length)
        self.hook = lambda text: text

    monkeypatch.setattr(kind, "__init__", begin)
    refused(trainer, capsys, "SmallTokenizeStrategy.hook")


def test_an_unknown_field_of_a_strategy_counts(trainer, monkeypatch):
    trainer.start()
    own = trainer.small.SmallTokenizeStrategy.__init__

    def begin(self, max_length):
        own(self, max_length)
        self.system_prompt = "as a painter"

    monkeypatch.setattr(trainer.small.SmallTokenizeStrategy, "__init__", begin)
    assert trainer.counts() == (0, 3)


def test_a_strategy_that_reads_another_field_of_a_picture_is_refused_by_name(trainer, capsys, monkeypatch):
    def cache(self, tokenize_strategy, models, text_encoding_strategy, infos):
        return [info.num_repeats for info in infos]

    monkeypatch.setattr(trainer.small.SmallTextEncoderOutputsCachingStrategy, "cache_batch_outputs", cache)
    refused(trainer, capsys, "num_repeats", "ImageInfo")


def test_metadata_without_sizes_beside_cache_files_is_refused(trainer, capsys):
    own = trainer.dataset

    def dataset():
        made = own()
        made.image_data["1"].absolute_path = "1_0024x0016_sd.npz"
        return made

    trainer.dataset = dataset
    refused(trainer, capsys, "image_size", "1_0024x0016_sd.npz")


def test_a_checkout_without_a_plug_point_is_refused(trainer, capsys):
    module = trainer.util
    del module.DatasetGroup.new_cache_latents
    with pytest.raises(Refused):
        adapter.plug_into(module)
    assert "DatasetGroup.new_cache_latents" in capsys.readouterr().err


class Exported:
    """What a run that reads a data set of `precompute` has in place of the store's own values."""

    def __init__(self, folder, bucket=(24, 16), caption="caption"):
        self.bucket, self.text = bucket, caption
        latents = {"latents_2x3": np.ones((4, 2, 3), np.float32), "original_size_2x3": np.array([24, 16]), "crop_ltrb_2x3": np.zeros(4)}
        self.held = {str(folder / f"{number}_0024x0016_small.npz"): latents for number in range(3)}
        rows = {"rows": np.zeros((6, 5), np.float32), "pooled": np.ones(5, np.float32)}
        self.held |= {str(folder / f"{number}_small_te.npz"): rows for number in range(3)}

    def exists(self, path):
        return str(path) in self.held

    def load(self, path):
        return dict(self.held[path])

    def buckets(self, _path):
        return {self.bucket}

    def caption(self, path):
        return f"{self.text} {Path(path).name[0]}"

    def refuse(self, path, why):
        raise Refused(f"{path}: {why}")

    def save(self, path):
        self.refuse(path, "the trainer wants to encode and save it")


@pytest.fixture
def reading(trainer, monkeypatch):
    def read_from(exported):
        monkeypatch.setattr(runs.Run, "exported", exported)
        return exported

    return read_from


def test_a_data_set_of_precompute_is_read_by_the_trainers_own_readers(trainer, tmp_path, reading):
    files = reading(Exported(trainer.folder))
    data, encoded = trainer.start()
    assert encoded == (0, 0)
    for info in data.image_data.values():
        assert info.latents_npz in files.held
        (latents, size, *_rest), (rows, pooled) = read(trainer, info)
        assert (latents.sum(), size, rows.shape, pooled.sum()) == (24, [24, 16], (6, 5), 5)
    assert live.current().counts == {"latents": [3, 0], "text": [3, 0]}
    assert not [*tmp_path.rglob("*.npz"), *tmp_path.glob("store")]


@pytest.mark.parametrize(
    ("exported", "change"),
    [
        ({"bucket": (16, 24)}, lambda its: None),
        ({"caption": "another"}, lambda its: None),
        ({}, lambda its: setattr(its.flags, "flip_aug", True)),
        ({}, lambda its: Image.new("RGB", (24, 16)).save(its.folder / "2.jpg") or setattr(its, "captions", ["caption 0"] * 4)),
    ],
    ids=["another bucket", "another caption", "no mirrored latents", "a new picture"],
)
def test_what_such_a_data_set_lacks_ends_the_run(trainer, reading, exported, change):
    reading(Exported(trainer.folder, **exported))
    change(trainer)
    with pytest.raises(Refused):
        trainer.start()
    assert trainer.encoded == 0


def test_what_the_trainer_would_save_over_such_a_data_set_is_refused(trainer, tmp_path, reading):
    files = reading(Exported(trainer.folder))
    with pytest.raises(Refused):
        trainer.small.np.savez(next(iter(files.held)), rows=np.zeros(1))
    trainer.small.np.savez(tmp_path / "own.npz", rows=np.zeros(1))
    assert trainer.small.np.load(tmp_path / "own.npz")["rows"].tolist() == [0]
    assert trainer.small.os.path.exists(tmp_path / "own.npz")
