"""SimpleTuner: latents and text in the store. Its caches encode, batch and read as they do; where they look for a file is the store.

Keys are of content: the bytes of the picture and what its metadata says of crop and size, or the caption; and all that encodes them.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import cachestore as cs
from cachestore import live

TEXT, VAE = "simpletuner.helpers.caching.text_embeds", "simpletuner.helpers.caching.vae"
adapter = live.Adapter("simpletuner", tested={TEXT: [], VAE: []})
_VALUES = [
    "model_family",
    "model_flavour",
    "model_type",
    "tokenizer_max_length",
    "t5_padding",
    "weight_dtype",
    "base_weight_dtype",
    "vae_dtype",
    "framerate",
]
_VALUES += ["sana_complex_human_instruction", "sana_motion_score", "ideogram_auto_json", "ideogram_prompt_upsample"]
_NO_VALUES = [
    "pretrained_model_name_or_path",
    "pretrained_vae_model_name_or_path",
    "vae_path",
    "revision",
    "variant",
    "webhook_config",
    "output_dir",
]
_NO_CONFIG = [
    "id",
    "instance_data_dir",
    "cache_dir",
    "cache_dir_vae",
    "text_embeds",
    "image_embeds",
    "repeats",
    "probability",
    "caption_strategy",
]
_NO_CONFIG += ["instance_prompt", "only_instance_prompt", "prepend_instance_prompt", "hash_filenames", "preserve_data_backend_cache"]
_NO_CONFIG += [
    "write_batch_size",
    "read_batch_size",
    "vae_batch_size",
    "train_batch_size",
    "start_epoch",
    "start_step",
    "end_epoch",
    "end_step",
]
_TEST = "cachestore self-test"


def _watched(model: Any) -> Any:
    from simpletuner.helpers.training.state_tracker import StateTracker

    stack = ExitStack()
    for settings in {id(one): one for one in (model.config, StateTracker.get_args()) if one is not None}.values():
        stack.enter_context(live.watched(settings, _VALUES, _NO_VALUES))
    return stack


def _facts(model: Any, *more: Any) -> Any:
    return [type(model).__qualname__, {name: str(getattr(model.config, name, None)) for name in _VALUES}, *map(str, more)]


@adapter.replace(TEXT, "TextEmbeddingCache.__init__")
def _begin_text(own: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    own(self, *args, **kwargs)
    self.data_backend, self._live_made, self._live_kinds, self._live = live.ByName(self.data_backend), {}, {}, live.Dependence()


def _prompt_of(cache: Any, record: Any) -> Any:
    from simpletuner.helpers.prompts import PromptHandler

    return PromptHandler.filter_caption(cache.data_backend, record.get("prompt"))


@adapter.replace(TEXT, "TextEmbeddingCache.hash_prompt_with_path")
def _name_text(own: Any, self: Any, prompt_record: Any) -> str:
    name, prompt, model = own(self, prompt_record), str(_prompt_of(self, prompt_record)), self.model
    if self._requires_path_based_keys or model.requires_text_embed_image_context():
        raise live.Refused(f"text of {type(model).__name__} depends on pictures, or is named by them: this adapter knows text alone")
    encoders = [*(self.text_encoders or model.text_encoders or ()), *(self.tokenizers or model.tokenizers or ())]
    its = self._live.on(encoders, lambda: [*_facts(model), live.precision()])
    key = self.data_backend.keys[name] = cs.key("simpletuner text", its, self._live_kinds.get(prompt, ""), prompt)
    return live.ValueName(key, name)


@adapter.replace(TEXT, "TextEmbeddingCache.save_to_cache")
def _save_text(_own: Any, self: Any, filename: Any, embeddings: Any) -> None:
    self._live_made[filename.key] = live.pack(self.model.pack_text_embeddings_for_cache(embeddings))


def _make_text(cache: Any, kind: str, records: Sequence[Any], encode: Any, share: Any = lambda wanted: wanted) -> None:
    """Make text that is missing. A prompt stays what it was first asked for as, for training or validation, as in SimpleTuner's files."""

    def encode_batch(batch: Sequence[Any]) -> Mapping[Any, Any]:
        cache._live_made = {}
        with _watched(cache.model):
            encode([item["record"] for _key, item in batch])
        return cache._live_made

    wanted, rows = [], dict[str, int]()
    for record in records:
        if (prompt := _prompt_of(cache, record)) is not None:
            cache._live_kinds.setdefault(str(prompt), kind)
            its = (record.get("metadata") or {}).get("dataset_relative_path") or prompt or "(no caption)"
            rows[its] = rows.get(its, 0) + 1
            row = its if rows[its] == 1 else f"{its} ({rows[its]})"
            wanted.append((cache.hash_prompt_with_path(record).key, {"id": row, "record": record}))
    live.current().make("text", share(wanted), encode_batch, batch_size=16)
    live.current().make("text", wanted, encode_batch, batch_size=16)


@adapter.replace(TEXT, "TextEmbeddingCache.compute_prompt_embeddings_with_model")
def _compute_text(
    own: Any,
    self: Any,
    prompt_records: Any = None,
    return_concat: bool = True,
    is_validation: bool = False,
    load_from_cache: bool = True,
    is_negative_prompt: bool = False,
    progress_callback: Any = None,
    split_between_processes: bool = True,
) -> Any:
    records = self._normalize_prompt_records(prompt_records) if prompt_records is not None else self.prompt_records
    if not load_from_cache or self.text_cache_ondemand:
        _test_text(own, self)
        kind = " ".join(word for word, holds in (("validation", is_validation), ("negative", is_negative_prompt)) if holds)
        share = self.split_prompt_records_between_processes if split_between_processes else list
        _make_text(self, kind, records, lambda some: own(self, some, False, is_validation, False, is_negative_prompt, None, False), share)
    return own(self, records, True, is_validation, True, is_negative_prompt, progress_callback, False) if return_concat else None


def _test_text(own: Any, cache: Any) -> None:
    import torch

    if "_live_tested" in vars(cache):
        return
    cache._live_tested, cache._live_made, record = True, {}, {"prompt": _TEST, "key": _TEST, "metadata": {}}
    given = {"prompt_embeds": torch.arange(24.0).reshape(1, 3, 8), "attention_mask": torch.ones(1, 3)}
    cache._encode_text_batch = lambda *_args, **_more: given
    own(cache, [record], False, False, False, False, None, False)
    del cache._encode_text_batch
    [written] = cache._live_made.values()
    read = lambda: own(cache, [record], True, False, True, False, None, False)  # noqa: E731
    cache.data_backend.test("TextEmbeddingCache", cache.hash_prompt_with_path(record), live.unpack(written), read)


@adapter.replace(TEXT, "TextEmbeddingCache.encode_dropout_caption")
def _make_dropout(own: Any, self: Any) -> None:
    _make_text(self, "dropout", [{"prompt": "", "key": "", "metadata": {}}], lambda _records: own(self))


@adapter.replace(TEXT, "TextEmbeddingCache.encode_validation_negative_prompt")
def _make_negative(own: Any, self: Any, negative_prompt: str) -> Any:
    record = {"prompt": negative_prompt, "key": negative_prompt, "metadata": {}}
    _make_text(self, "negative", [record], lambda _records: own(self, negative_prompt))
    return self.load_from_cache(self.hash_prompt_with_path(record))


@adapter.replace(VAE, "VAECache.__init__")
def _begin_latents(own: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    own(self, *args, **kwargs)
    if self.dataset_type == "audio":
        raise live.Refused(f"the data set {self.id!r} is of audio, which this adapter does not know")
    self.cache_data_backend, self._live_digests, self._live = live.ByName(self.cache_data_backend), {}, live.Dependence()


def _name_latents(cache: Any, path: str) -> str:
    """Return the name of a picture's latents, whose key the cache's backend then knows."""
    from simpletuner.helpers.training.state_tracker import StateTracker

    name, _base = cache.generate_vae_cache_filename(path)
    if path.startswith(_TEST):
        return name
    config, vae = StateTracker.get_data_backend_config(data_backend_id=cache.id) or {}, cache.vae
    how = {field: value for field, value in config.items() if field not in _NO_CONFIG}
    if vae is not None and hasattr(vae, "to"):
        vae.to(cache.accelerator.device, dtype=cache._cache_vae_dtype())  # as before it encodes
    its = cache._live.on([vae], lambda: _facts(cache.model, cache._cache_vae_dtype(), cache.dataset_type, cache.num_video_frames))
    if path not in cache._live_digests:
        _digest(cache, [path])
    pairs = [train for train, paired in StateTracker.get_conditioning_mappings() if paired == cache.id]
    facts = [StateTracker.get_metadata_by_filepath(path, data_backend_id=cache.id, search_dataset_types=cache._metadata_search_types)]
    if pairs:
        raise live.Refused(f"the data set {cache.id!r} conditions {pairs[0]!r}, which decides its crops: this adapter does not know that")
    cache.cache_data_backend.keys[name] = cs.key(
        "simpletuner latents", its, json.dumps([how, facts], sort_keys=True, default=str), cache._live_digests[path]
    )
    return name


def _digest(cache: Any, paths: Sequence[str]) -> None:
    backend = cache.image_data_backend
    if backend.type == "local":
        cache._live_digests.update(live.digests(paths))
    else:
        cache._live_digests.update({path: hashlib.sha256(backend.read(path)).hexdigest() for path in paths})


@adapter.replace(VAE, "VAECache.already_cached")
def _is_cached(_own: Any, self: Any, filepath: str) -> bool:
    return self.cache_data_backend.exists(_name_latents(self, filepath))


@adapter.replace(VAE, "VAECache.discover_unprocessed_files")
def _discover(own: Any, self: Any) -> Any:
    import torch

    probe, made_up = f"{_TEST}.png", torch.arange(24.0).reshape(2, 3, 4)
    self.cache_data_backend.test("VAECache", self.generate_vae_cache_filename(probe)[0], made_up, lambda: self.retrieve_from_cache(probe))
    found = own(self)
    _digest(self, found)
    named = {path: self.cache_data_backend.keys[_name_latents(self, path)] for path in found}
    lacking = {*live.current().store.missing([*named.values()])}
    live.current().make("latents", [(key, {"id": path}) for path, key in named.items() if key not in lacking], dict)
    self.local_unprocessed_files = [path for path in found if named[path] in lacking]
    return self.local_unprocessed_files


@adapter.replace(VAE, "VAECache.encode_images")
def _encode(own: Any, self: Any, images: Sequence[Any], filepaths: Sequence[str], load_from_cache: bool = True) -> Any:
    keys = [self.cache_data_backend.keys.get(_name_latents(self, path)) for path in filepaths]
    given = [(key, (path, image)) for key, path, image in zip(keys, filepaths, images, strict=True) if image is not None]

    def encode(batch: Sequence[Any]) -> Mapping[Any, Any]:
        with _watched(self.model):
            made = own(self, [item["image"] for _key, item in batch], [item["id"] for _key, item in batch], False)
        return {key: live.pack(value) for (key, _item), value in zip(batch, made, strict=True)}

    if given:
        wanted = [(key, {"id": path, "image": image}) for key, (path, image) in given]
        live.current().make("latents", wanted, encode, batch_size=len(wanted))
        images = [None] * len(images)
    return own(self, images, filepaths, True)
