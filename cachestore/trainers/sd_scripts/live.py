"""kohya's sd-scripts, so kohya_ss and FluxGym: latents and outputs of text encoders in the store, made, saved and read by its own strategies.

A strategy saves by `np.savez` and reads by `np.load`, which mean the store where they get the name of a value: nothing here knows the
tensors of a family. Keys are of content. A strategy that is told to cache in memory alone caches in the store too.
"""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cachestore as cs
from cachestore import live

adapter = live.Adapter("sd-scripts", tested={"library.train_util": [], "library.strategy_base": []})
_NO_VALUES = frozenset(
    "_cache_to_disk _batch_size skip_disk_cache_validity_check _is_partial warn_fp8_weights l_dropout_rate g_dropout_rate t5_dropout_rate".split()
)
"""Fields of strategies on which cached values do not depend; dropout is that of the training."""
_LATENTS_SEE = ("absolute_path", "bucket_reso", "resized_size", "resize_interpolation", "image")
_TEXT_SEES = ("caption", "caption_dropout_rate")

adapter.change("library.strategy_base", "np")(live.numpy_for_names)
adapter.change("library.strategy_*", "np", optional=True)(live.numpy_for_names)


@adapter.replace("library.train_util", "DatasetGroup.new_cache_latents")
def latents_of_all(own: Any, self: Any, model: Any, accelerator: Any) -> None:
    _latents(self.datasets, model)
    accelerator.wait_for_everyone()


@adapter.replace("library.train_util", "BaseDataset.new_cache_latents")
def latents_of_one(own: Any, self: Any, model: Any, accelerator: Any) -> None:
    _latents([self], model)


@adapter.replace("library.train_util", "DatasetGroup.new_cache_text_encoder_outputs")
def text_of_all(own: Any, self: Any, models: Any, accelerator: Any) -> None:
    _text(self.datasets, models)
    accelerator.wait_for_everyone()


@adapter.replace("library.train_util", "BaseDataset.new_cache_text_encoder_outputs")
def text_of_one(own: Any, self: Any, models: Any, accelerator: Any) -> None:
    _text([self], models)


def _latents(datasets: Sequence[Any], model: Any) -> None:
    from library import train_util

    strategy = train_util.LatentsCachingStrategy.get_strategy()
    strategy._cache_to_disk = True
    how = [live.settings(strategy, others=_NO_VALUES), live.fingerprint(model), live.precision(), repr(train_util.IMAGE_TRANSFORMS)]
    pictures = _pictures(datasets)
    digests = live.digests(info.absolute_path for _id, info, _subset in pictures)
    wanted = []
    for name, info, subset in pictures:
        flags = (subset.flip_aug, subset.alpha_mask, subset.random_crop)
        its = [info.bucket_reso, info.resized_size, info.resize_interpolation, flags]
        key = cs.key("sd-scripts latents", json.dumps([how, its]), digests[info.absolute_path])
        info.latents_npz = live.ValueName(key, f"cachestore:{name}")
        wanted.append((key, live.Shown(info, _LATENTS_SEE, id=name, latents_npz=info.latents_npz, flags=flags)))

    def encode(batch: Sequence[Any]) -> Any:
        infos = [info for _key, info in batch]
        with ThreadPoolExecutor(len(infos)) as pool:
            for info, image in zip(infos, pool.map(lambda one: train_util.load_image(one.absolute_path, one.flags[1]), infos), strict=True):
                info.image = image
        strategy.cache_batch_latents(model, infos, *infos[0].flags)
        for info in infos:
            info.image = None
        bucket = infos[0].bucket_reso
        return live.take(_kind(strategy), [one.latents_npz for one in infos], lambda name: strategy.load_latents_from_disk(name, bucket))

    if wanted:
        _test_latents(strategy, wanted[0][1].bucket_reso)
    live.current().fill("latents", wanted, encode, batch_size=strategy.batch_size, group_by=lambda one: (tuple(one.bucket_reso), one.flags))


def _text(datasets: Sequence[Any], models: Sequence[Any]) -> None:
    from library import train_util

    kinds = (train_util.TextEncoderOutputsCachingStrategy, train_util.TokenizeStrategy, train_util.TextEncodingStrategy)
    strategy, tokenize, encoding = (kind.get_strategy() for kind in kinds)
    strategy._cache_to_disk = True
    encoders = [one for number, one in enumerate(models) if not any(one is other for other in models[:number])]  # SDXL's second comes twice
    how = [live.settings(one, others=_NO_VALUES) for one in (strategy, tokenize, encoding)]
    how += [live.precision(), *(None if one is None else live.fingerprint(one) for one in encoders)]
    wanted = []
    for name, info, _subset in _pictures(datasets):
        key = cs.key("sd-scripts text", json.dumps([how, info.caption_dropout_rate]), info.caption)
        info.text_encoder_outputs_npz = live.ValueName(key, f"cachestore:{name}")
        wanted.append((key, live.Shown(info, _TEXT_SEES, id=name, text_encoder_outputs_npz=info.text_encoder_outputs_npz)))

    def save(*infos: Any) -> None:
        strategy.cache_batch_outputs(tokenize, models, encoding, list(infos))

    def encode(batch: Sequence[Any]) -> Any:
        names = [info.text_encoder_outputs_npz for _key, info in batch]
        if todo := [info for _key, info in batch if not live.is_held(info.text_encoder_outputs_npz)]:
            save(*todo)
        return live.take(_kind(strategy), names, strategy.load_outputs_npz)

    if wanted:
        _test_text(strategy, encoding, wanted, save)
    live.current().fill("text", wanted, encode, batch_size=strategy.batch_size or datasets[0].batch_size)
    live.drop()


def _kind(strategy: object) -> str:
    return type(strategy).__name__


def _pictures(datasets: Sequence[Any]) -> list[tuple[str, Any, Any]]:
    """Return the id, ImageInfo and subset of each picture. A ControlNet data set has them in another one."""
    real = [getattr(one, "dreambooth_dataset_delegate", one) for one in datasets]
    found = [(info, one.image_to_subset[info.image_key]) for one in real for info in one.image_data.values()]
    if other := next((info for info, _subset in found if info.absolute_path.endswith(".npz")), None):
        raise live.Refused(f"{other.image_key}: its metadata has no image_size, and sd-scripts takes {other.absolute_path} for the picture")
    ids = live.ids_of(info.absolute_path for info, _subset in found)
    return [(name, info, subset) for name, (info, subset) in zip(ids, found, strict=True)]


def _test_latents(strategy: Any, bucket: Any) -> None:
    """Put made-up latents through the trainer's writer, a store and its reader. What the reader asks for first tells their names."""
    import torch

    def read(name: live.ValueName) -> Any:
        return strategy.load_latents_from_disk(name, bucket)

    name = live.ValueName(cs.key("self-test"), os.path.join(tempfile.gettempdir(), "cachestore-self-test"))
    point = f"{_kind(strategy)}.load_latents_from_disk"
    suffix = live.first_asked(point, name, read).removeprefix("latents")
    latents = torch.arange(24.0).reshape(2, 3, 4)
    given = (latents, [7, 5], [0, 1, 2, 3], -latents, latents[0] / 2)
    strategy.save_latents_to_disk(name, *given, suffix)
    live.put_through_store(f"{_kind(strategy)}.save_latents_to_disk", name)
    live.check_same(point, given, read(name))
    live.drop()


def _test_text(strategy: Any, encoding: Any, wanted: Sequence[Any], save: Callable[[Any], None]) -> None:
    """Compare what the reader returns with what the strategy keeps in memory, for the first value that lacks; it is encoded once."""
    run, point = live.current(), f"{_kind(strategy)}.load_outputs_npz"
    info = next((info for key, info in wanted if key not in run.store), wanted[0][1])
    name = info.text_encoder_outputs_npz
    if name.key in run.store:
        live.check_among(point, run.get(name), strategy.load_outputs_npz(name))
        return
    with live.called_once(encoding, "encode_tokens", "encode_tokens_with_weights"):
        strategy._cache_to_disk = False
        save(info)
        strategy._cache_to_disk = True
        save(info)
    live.put_through_store(f"{_kind(strategy)}.cache_batch_outputs", name)
    live.check_same(point, vars(info).pop("text_encoder_outputs", None), strategy.load_outputs_npz(name))
