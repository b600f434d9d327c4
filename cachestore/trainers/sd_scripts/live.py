"""kohya's sd-scripts, so kohya_ss and FluxGym: latents and text in the store, which its own strategies make, save and read.

A strategy saves by `np.savez` and reads by `np.load`, which mean the store where they get the name of a value: nothing here knows the
tensors of a family. Keys are of content. With `--cache_latents` alone, too, values go to the store.
"""
# pyright: basic, reportMissingImports=false

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cachestore as cs
from cachestore import live
from cachestore.trainers.sd_scripts.live_read_only import find_latents, find_text, pictures_of

_TESTED = {"library.train_util": ["a9b23be6e6e1"], "library.strategy_base": ["8e2f8a6b4c8b"]}
adapter = live.Adapter("sd-scripts", tested=_TESTED, reads_exports=True)
_NO_VALUES = ("_cache_to_disk", "_batch_size", "skip_disk_cache_validity_check", "_is_partial", "warn_fp8_weights")
_NO_VALUES += ("l_dropout_rate", "g_dropout_rate", "t5_dropout_rate")  # of the training, not of what is cached
_LATENTS_SEE = ("absolute_path", "bucket_reso", "resized_size", "resize_interpolation", "image")
_TEXT_SEES = ("caption", "caption_dropout_rate")

files = live.NpzFiles()
adapter.change("library.strategy_base", "np")(files.numpy)
adapter.change("library.strategy_*", "np", optional=True)(files.numpy)
adapter.change("library.strategy_*", "os", optional=True)(files.os)


@adapter.replace("library.train_util", "DatasetGroup.new_cache_latents")
@adapter.replace("library.train_util", "BaseDataset.new_cache_latents")
def _cache_latents(_own: Any, self: Any, model: Any, accelerator: Any) -> None:
    from library import train_util

    strategy = train_util.LatentsCachingStrategy.get_strategy()
    strategy._cache_to_disk, kind = True, type(strategy).__name__
    if live.current().exported is not None:
        find_latents(self, strategy)
        return
    how = [live.settings(strategy, others=_NO_VALUES), live.fingerprint(model), live.precision(), repr(train_util.IMAGE_TRANSFORMS)]
    pictures = pictures_of(self)
    digests = live.digests(info.absolute_path for _id, info, _subset in pictures)
    wanted = []
    for name, info, subset in pictures:
        flags = (subset.flip_aug, subset.alpha_mask, subset.random_crop)
        its = [info.bucket_reso, info.resized_size, info.resize_interpolation, flags]
        key = cs.key("sd-scripts latents", json.dumps([how, its]), digests[info.absolute_path])
        info.latents_npz = live.ValueName(key, f"cachestore:{name}")
        wanted.append((key, live.KeyFields(info, _LATENTS_SEE, id=name, latents_npz=info.latents_npz, flags=flags)))

    def read_from(bucket: Any) -> Any:
        return lambda name: strategy.load_latents_from_disk(name, bucket)

    def encode(batch: Sequence[Any]) -> Any:
        infos = [info for _key, info in batch]
        with ThreadPoolExecutor(len(infos)) as threads:
            images = list(threads.map(lambda info: train_util.load_image(info.absolute_path, info.flags[1]), infos))
        for info, image in zip(infos, images, strict=True):
            info.image = image
        strategy.cache_batch_latents(model, infos, *infos[0].flags)
        for info in infos:
            info.image = None
        return files.take(kind, [info.latents_npz for info in infos], read_from(infos[0].bucket_reso))

    if wanted:
        import torch

        latents = torch.arange(24.0).reshape(2, 3, 4)
        given = (latents, [7, 5], [0, 1, 2, 3], -latents, latents[0] / 2)
        write = lambda name, suffix: strategy.save_latents_to_disk(name, *given, suffix)  # noqa: E731
        files.test_writer(kind, "latents", given, write, read_from(wanted[0][1].bucket_reso))
    live.current().fill(
        "latents", wanted, encode, batch_size=strategy.batch_size, group_by=lambda info: (tuple(info.bucket_reso), info.flags)
    )
    _wait(self, accelerator)


@adapter.replace("library.train_util", "DatasetGroup.new_cache_text_encoder_outputs")
@adapter.replace("library.train_util", "BaseDataset.new_cache_text_encoder_outputs")
def _cache_text(_own: Any, self: Any, models: Sequence[Any], accelerator: Any) -> None:
    from library import train_util

    kinds = (train_util.TextEncoderOutputsCachingStrategy, train_util.TokenizeStrategy, train_util.TextEncodingStrategy)
    strategy, tokenize, encoding = (one.get_strategy() for one in kinds)
    strategy._cache_to_disk, kind = True, type(strategy).__name__
    if live.current().exported is not None:
        find_text(self, strategy)
        return
    encoders = list({id(model): model for model in models}.values())  # SDXL's second comes twice
    how = [live.settings(one, others=_NO_VALUES) for one in (strategy, tokenize, encoding)]
    how += [live.precision(), *(None if one is None else live.fingerprint(one) for one in encoders)]
    wanted = []
    for name, info, _subset in pictures_of(self):
        key = cs.key("sd-scripts text", json.dumps([how, info.caption_dropout_rate]), info.caption)
        info.text_encoder_outputs_npz = live.ValueName(key, f"cachestore:{name}")
        wanted.append((key, live.KeyFields(info, _TEXT_SEES, id=name, text_encoder_outputs_npz=info.text_encoder_outputs_npz)))

    def save(*infos: Any, to_disk: bool = True) -> Any:
        strategy._cache_to_disk = to_disk
        strategy.cache_batch_outputs(tokenize, models, encoding, list(infos))
        strategy._cache_to_disk = True
        return vars(infos[0]).pop("text_encoder_outputs", None)

    def encode(batch: Sequence[Any]) -> Any:
        if todo := [info for _key, info in batch if not files.is_held(info.text_encoder_outputs_npz)]:
            save(*todo)
        return files.take(kind, [info.text_encoder_outputs_npz for _key, info in batch], strategy.load_outputs_npz)

    if wanted:
        named = [(info.text_encoder_outputs_npz, info) for _key, info in wanted]
        once = encoding, ("encode_tokens", "encode_tokens_with_weights")
        files.test_encoder(kind, named, lambda info: save(info, to_disk=False), save, strategy.load_outputs_npz, once=once)
    live.current().fill("text", wanted, encode, batch_size=strategy.batch_size or getattr(self, "datasets", [self])[0].batch_size)
    files.drop()  # the first value, if another rank made it
    _wait(self, accelerator)


def _wait(caller: Any, accelerator: Any) -> None:
    if hasattr(caller, "datasets"):
        accelerator.wait_for_everyone()  # where the trainer does
