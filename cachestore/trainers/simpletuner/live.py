"""SimpleTuner: latents and text in the store. Its caches encode, batch and read as they do; where they look for a file is the store.

Keys are of content: the bytes of the picture and what its metadata says of crop and size, or the caption; and all that encodes them.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import cachestore as cs
from cachestore import live

TEXT, VAE = "simpletuner.helpers.caching.text_embeds", "simpletuner.helpers.caching.vae"
adapter = live.Adapter("simpletuner", tested={TEXT: ["03e2d43872b3"], VAE: ["3be230d64ccd"]})
_CHOSEN = "model_family model_flavour model_type tokenizer_max_length t5_padding weight_dtype base_weight_dtype vae_dtype framerate"
_VALUES = f"{_CHOSEN} sana_complex_human_instruction sana_motion_score ideogram_auto_json ideogram_prompt_upsample".split()
_NO_VALUES = ("pretrained_model_name_or_path", "pretrained_vae_model_name_or_path", "vae_path", "revision", "variant", "webhook_config")
_PATHS = "id instance_data_dir cache_dir cache_dir_vae text_embeds image_embeds repeats probability caption_strategy hash_filenames"
_RUNNING = "write_batch_size read_batch_size vae_batch_size train_batch_size start_epoch end_epoch preserve_data_backend_cache"
_NO_CONFIG = f"{_PATHS} {_RUNNING} instance_prompt only_instance_prompt prepend_instance_prompt".split()
_TEST = "cachestore self-test"


def _state() -> Any:
    return import_module("simpletuner.helpers.training.state_tracker").StateTracker


def _watched(model: Any) -> Any:
    return live.watched((model.config, _state().get_args()), _VALUES, _NO_VALUES)


def _facts(model: Any, *more: Any) -> Any:
    return [type(model).__qualname__, {name: str(getattr(model.config, name, None)) for name in _VALUES}, *map(str, more)]


@adapter.replace(TEXT, "TextEmbeddingCache.__init__")
def _begin_text(own: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    own(self, *args, **kwargs)
    self.data_backend, self._live_kinds, self._live_tested = live.ByName(self.data_backend), dict[str, str](), False


def _prompt_of(cache: Any, record: Any) -> Any:
    return import_module("simpletuner.helpers.prompts").PromptHandler.filter_caption(cache.data_backend, record.get("prompt"))


@adapter.replace(TEXT, "TextEmbeddingCache.hash_prompt_with_path")
def _name_text(own: Any, self: Any, prompt_record: Any) -> str:
    prompt, model = str(_prompt_of(self, prompt_record)), self.model
    if self._requires_path_based_keys or model.requires_text_embed_image_context():
        raise live.Refused(f"text of {type(model).__name__} depends on pictures, or is named by them: this adapter knows text alone")
    encoders = [one for one in self.text_encoders or model.text_encoders or () if one is not None]
    encoders += (self.tokenizers or model.tokenizers or ()) if encoders else ()
    its = self.data_backend.depends_on(encoders, lambda: [*_facts(model), live.precision()])
    return self.data_backend.named(own(self, prompt_record), cs.key("simpletuner text", its, self._live_kinds.get(prompt, ""), prompt))


@adapter.replace(TEXT, "TextEmbeddingCache.save_to_cache")
def _save_text(_own: Any, self: Any, filename: Any, embeddings: Any) -> None:
    self.data_backend.made[filename.key] = live.pack(self.model.pack_text_embeddings_for_cache(embeddings))


def _make_text(cache: Any, kind: str, records: Any, encode: Callable[[Any], Any], part_of: Any = list) -> None:
    """Make text that is missing. A prompt stays what it was first asked for as, for training or validation, as in SimpleTuner's files."""

    def encode_batch(batch: Sequence[Any]) -> Mapping[Any, Any]:
        cache.data_backend.made.clear()
        with _watched(cache.model):
            encode([item["record"] for _key, item in batch])
        return dict(cache.data_backend.made)

    _test_text(cache)
    wanted: list[Any] = []
    for record in records:
        metadata: Any = record.get("metadata") or {}
        if (prompt := _prompt_of(cache, record)) is not None:
            cache._live_kinds.setdefault(str(prompt), kind)
            row = str(metadata.get("dataset_relative_path") or prompt or "(no caption)")
            wanted.append((cache.hash_prompt_with_path(record).key, {"id": row, "record": record}))
    live.current().make("text", part_of(wanted), encode_batch, batch_size=16)
    live.current().make("text", wanted, encode_batch, batch_size=16)  # what others were to make


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
        kind = f"{'validation ' * is_validation}{'negative' * is_negative_prompt}".strip()
        part_of = self.split_prompt_records_between_processes if split_between_processes else list

        def encode(some: Any) -> None:
            own(self, some, False, is_validation, False, is_negative_prompt, None, False)

        _make_text(self, kind, records, encode, part_of)
    return own(self, records, True, is_validation, True, is_negative_prompt, progress_callback, False) if return_concat else None


def _test_text(cache: Any) -> None:
    import torch

    if not cache._live_tested:
        own: Any = cache.compute_prompt_embeddings_with_model.__wrapped__
        record, files = {"prompt": _TEST, "key": _TEST, "metadata": dict[str, Any]()}, cache.data_backend
        given = {"prompt_embeds": torch.arange(24.0).reshape(1, 3, 8), "attention_mask": torch.ones(1, 3)}

        def answer(*_args: Any, **_more: Any) -> Any:
            return given

        cache._live_tested, cache._encode_text_batch = True, answer
        files.made.clear()
        own(cache, [record], False, False, False, False, None, False)
        del cache._encode_text_batch
        written, name = live.unpack(*files.made.values()), cache.hash_prompt_with_path(record)
        files.test("TextEmbeddingCache", name, written, lambda: own(cache, [record], True, False, True, False, None, False))


@adapter.replace(TEXT, "TextEmbeddingCache.encode_dropout_caption")
def _make_dropout(own: Any, self: Any) -> None:
    _make_text(self, "dropout", [{"prompt": "", "key": ""}], lambda _records: own(self))


@adapter.replace(TEXT, "TextEmbeddingCache.encode_validation_negative_prompt")
def _make_negative(own: Any, self: Any, negative_prompt: str) -> Any:
    record = {"prompt": negative_prompt, "key": negative_prompt}
    _make_text(self, "negative", [record], lambda _records: own(self, negative_prompt))
    return self.load_from_cache(self.hash_prompt_with_path(record))


@adapter.replace(VAE, "VAECache.__init__")
def _begin_latents(own: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    own(self, *args, **kwargs)
    if self.dataset_type == "audio":
        raise live.Refused(f"the data set {self.id!r} is of audio, which this adapter does not know")
    self.cache_data_backend, self._live_digests = live.ByName(self.cache_data_backend), dict[str, str]()


def _name_latents(cache: Any, path: str) -> Any:
    """Return the name of a picture's latents, which knows its key."""
    if path not in cache._live_digests:
        _digest(cache, [path])
    if pairs := [train for train, paired in _state().get_conditioning_mappings() if paired == cache.id]:
        raise live.Refused(f"the data set {cache.id!r} conditions {pairs[0]!r}, which decides its crops: this adapter does not know that")
    config: Any = _state().get_data_backend_config(data_backend_id=cache.id) or {}
    how: Any = {field: value for field, value in config.items() if field not in _NO_CONFIG}
    its: Any = _state().get_metadata_by_filepath(path, data_backend_id=cache.id, search_dataset_types=cache._metadata_search_types)

    def facts() -> Any:
        cache.vae.to(cache.accelerator.device, dtype=cache._cache_vae_dtype())  # as before it encodes
        return _facts(cache.model, cache._cache_vae_dtype(), cache.dataset_type, cache.num_video_frames)

    encoder = cache.cache_data_backend.depends_on([cache.vae], facts)
    key = cs.key("simpletuner latents", encoder, json.dumps([how, its], sort_keys=True, default=str), cache._live_digests[path])
    return cache.cache_data_backend.named(cache.generate_vae_cache_filename(path)[0], key)


def _digest(cache: Any, paths: Sequence[str]) -> None:
    backend = cache.image_data_backend
    others = {} if backend.type == "local" else {path: hashlib.sha256(backend.read(path)).hexdigest() for path in paths}
    cache._live_digests.update(others or live.digests(paths))


@adapter.replace(VAE, "VAECache.already_cached")
def _is_cached(_own: Any, self: Any, filepath: str) -> bool:
    return self.cache_data_backend.exists(_name_latents(self, filepath))


@adapter.replace(VAE, "VAECache.discover_unprocessed_files")
def _discover(own: Any, self: Any) -> Any:
    import torch

    probe, value = f"{_TEST}.png", torch.arange(24.0).reshape(2, 3, 4)
    self.cache_data_backend.test("VAECache", self.generate_vae_cache_filename(probe)[0], value, lambda: self.retrieve_from_cache(probe))
    found: Any = own(self)
    _digest(self, found)
    keys = {path: _name_latents(self, path).key for path in found}
    lacking = {*live.current().store.missing([*keys.values()])}
    live.current().make("latents", [(key, {"id": path}) for path, key in keys.items() if key not in lacking], dict)
    self.local_unprocessed_files = [path for path in found if keys[path] in lacking]
    return self.local_unprocessed_files


@adapter.replace(VAE, "VAECache.encode_images")
def _encode(own: Any, self: Any, images: Sequence[Any], filepaths: Sequence[str], load_from_cache: bool = True) -> Any:
    names = [None if path.startswith(_TEST) else _name_latents(self, path) for path in filepaths]
    pairs = zip(names, filepaths, images, strict=True)
    wanted = [(name.key, {"id": path, "image": image}) for name, path, image in pairs if name is not None and image is not None]

    def encode(batch: Sequence[Any]) -> Mapping[Any, Any]:
        with _watched(self.model):
            made = own(self, [item["image"] for _key, item in batch], [item["id"] for _key, item in batch], False)
        return {key: live.pack(value) for (key, _item), value in zip(batch, made, strict=True)}

    if wanted:
        live.current().make("latents", wanted, encode, batch_size=len(wanted))
    return own(self, [None] * len(images) if wanted else images, filepaths, True)
