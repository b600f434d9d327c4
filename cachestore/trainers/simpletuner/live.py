"""SimpleTuner: latents and text in the store. Its caches encode, batch and read as they do; where they look for a file is the store.

Keys are of content: the bytes of the picture and what its metadata says of crop and size, or the caption; and all that encodes them.
"""
# pyright: basic, reportMissingImports=false

import json
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import cachestore as cs
from cachestore import live

TEXT, VAE = "simpletuner.helpers.caching.text_embeds", "simpletuner.helpers.caching.vae"
_STATE, _PROMPTS = "simpletuner.helpers.training.state_tracker", "simpletuner.helpers.prompts"
adapter = live.Adapter("simpletuner", tested={TEXT: ["03e2d43872b3"], VAE: ["3be230d64ccd"]})
_BOTH = "model_family model_flavour model_type weight_dtype"
_OF_TEXT = f"{_BOTH} base_weight_dtype tokenizer_max_length t5_padding sana_complex_human_instruction sana_motion_score".split()
_OF_TEXT += ["ideogram_auto_json", "ideogram_prompt_upsample"]
_OF_LATENTS = f"{_BOTH} vae_dtype framerate".split()
_NO_VALUES = ("pretrained_model_name_or_path", "pretrained_vae_model_name_or_path", "vae_path", "revision", "variant", "webhook_config")
_PATHS = "id instance_data_dir cache_dir cache_dir_vae text_embeds image_embeds repeats probability caption_strategy hash_filenames"
_RUNNING = "write_batch_size read_batch_size vae_batch_size train_batch_size start_epoch end_epoch preserve_data_backend_cache"
_WHEN = "start_step end_step disable_validation vae_cache_ondemand vae_cache_disable text_cache_ondemand text_cache_disable"
_NO_CONFIG = f"{_PATHS} {_RUNNING} {_WHEN} instance_prompt only_instance_prompt prepend_instance_prompt".split()
_NO_CONTEXT = ("image_path", "prompt", "data_backend_id", "dataset_relative_path")


@adapter.replace(TEXT, "TextEmbeddingCache.__init__")
def _begin_text(own: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    own(self, *args, **kwargs)
    if self._requires_path_based_keys or self.model.requires_text_embed_image_context():
        raise live.Refused(f"text of {type(self.model).__name__} depends on pictures, or is named by them: this adapter knows text alone")
    settings, wait = (self.model.config, import_module(_STATE).StateTracker.get_args()), self.wait_for_pending_writes
    files = self.data_backend = live.ByName(self.data_backend, "text", settings, _OF_TEXT, _NO_VALUES, wait=wait)
    self.text_cache_disable, name = False, self.hash_prompt_with_path({"prompt": "a caption", "key": "a caption"})
    save = lambda value: self.save_to_cache(name, {"prompt_embeds": value})  # noqa: E731
    load = lambda: self.compute_prompt_embeddings_with_model.__wrapped__(self, ["a caption"])  # noqa: E731
    import_module(VAE).VAECache(self.id, self.model, None, self.accelerator, None, None, files, cache_dir=self.cache_dir)  # tests itself
    files.test("TextEmbeddingCache", save, load, self.model.unpack_text_embeddings_from_cache)


def _make_text(cache: Any, prompts: Any, kind: str, encode: Callable[[Any], Any], part_of: Any = None) -> None:
    model, files, wanted = cache.model, cache.data_backend, []
    encoders = [*(cache.text_encoders or model.text_encoders or ()), *(cache.tokenizers or model.tokenizers or ())]
    how = files.depends_on(encoders, type(model).__qualname__)
    for record in cache._normalize_prompt_records(prompts):
        if (prompt := import_module(_PROMPTS).PromptHandler.filter_caption(files, record["prompt"])) is not None:
            context = live.settings(record["metadata"], others=_NO_CONTEXT)
            key = cs.key("simpletuner text", how, json.dumps([kind, context]), prompt)
            row = str(record["metadata"].get("dataset_relative_path") or prompt or "(no caption)")
            wanted.append((key, {**record, "id": row, "name": cache.hash_prompt_with_path(record)}))
    files.make(wanted, encode, batch_size=16, part_of=part_of)


@adapter.replace(TEXT, "TextEmbeddingCache.compute_prompt_embeddings_with_model")
def _compute_text(
    own, self, prompt_records, return_concat, is_validation, load_from_cache, is_negative_prompt, progress_callback, split_between_processes
) -> Any:
    if not load_from_cache or self.text_cache_ondemand:
        encode = lambda some: own(self, some, False, is_validation, False, is_negative_prompt, None, False)  # noqa: E731
        kind, prompts = f"{is_validation} {is_negative_prompt}", self.prompt_records if prompt_records is None else prompt_records
        _make_text(self, prompts, kind, encode, self.split_prompt_records_between_processes if split_between_processes else None)
    return own(self, prompt_records, True, is_validation, True, is_negative_prompt, progress_callback, False) if return_concat else None


@adapter.replace(TEXT, "TextEmbeddingCache.encode_dropout_caption")
@adapter.replace(TEXT, "TextEmbeddingCache.encode_validation_negative_prompt")
def _make_one(own: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    [prompt] = [*args, *kwargs.values()] or [""]
    _make_text(self, [prompt], own.__name__, lambda _records: own(self, *args, **kwargs))
    return self.load_from_cache(self.hash_prompt_with_path({"prompt": prompt, "key": prompt}))


@adapter.replace(VAE, "VAECache.__init__")
def _begin_latents(own: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    own(self, *args, **kwargs)
    if self.dataset_type == "audio":
        raise live.Refused(f"the data set {self.id!r} is of audio, which this adapter does not know")
    self._live_wanted, settings = {}, (self.model.config, import_module(_STATE).StateTracker.get_args())
    files = self.cache_data_backend = live.ByName(self.cache_data_backend, "latents", settings, _OF_LATENTS, _NO_VALUES)
    name = self.generate_vae_cache_filename("a picture.png")[0]
    files.test("VAECache", lambda value: files.torch_save(value, name), lambda: self.retrieve_from_cache("a picture.png"))


def _latents(cache: Any, paths: Sequence[str]) -> dict[str, Any]:
    state = import_module(_STATE).StateTracker
    if pairs := [train for train, paired in state.get_conditioning_mappings() if paired == cache.id]:
        raise live.Refused(f"the data set {cache.id!r} conditions {pairs[0]!r}, which decides its crops: this adapter does not know that")
    dtype, backend, files, wanted = cache._cache_vae_dtype(), cache.image_data_backend, cache.cache_data_backend, {}
    vae = cache.vae and cache.vae.to(cache.accelerator.device, dtype=dtype)  # as before it encodes
    how = files.depends_on([vae], type(cache.model).__qualname__, str(dtype), cache.dataset_type, cache.num_video_frames)
    config = live.settings(state.get_data_backend_config(data_backend_id=cache.id) or {}, others=_NO_CONFIG)
    for path, digest in live.digests(paths, None if backend.type == "local" else backend.read).items():
        its = state.get_metadata_by_filepath(path, data_backend_id=cache.id, search_dataset_types=cache._metadata_search_types)
        key = cs.key("simpletuner latents", how, json.dumps([config, live.settings(its or {})]), digest)
        wanted[path] = (key, {"id": path, "path": path, "name": cache.generate_vae_cache_filename(path)[0]})
    return wanted


@adapter.replace(VAE, "VAECache.discover_unprocessed_files")
def _discover(own: Any, self: Any) -> Any:
    self._live_wanted = _latents(self, own(self))
    self.local_unprocessed_files = [item["path"] for item in self.cache_data_backend.lacking([*self._live_wanted.values()])]
    return self.local_unprocessed_files


@adapter.replace(VAE, "VAECache.encode_images")
def _encode(own: Any, self: Any, images: Sequence[Any], filepaths: Sequence[str], load_from_cache: bool) -> Any:
    known, given = self._live_wanted, {path: image for path, image in zip(filepaths, images, strict=True) if image is not None}
    if given:
        known.update(_latents(self, [path for path in given if path not in known]))
        encode = lambda items: own(self, [given[one["path"]] for one in items], [one["path"] for one in items], False)  # noqa: E731
        self.cache_data_backend.make([known[path] for path in given], encode, batch_size=len(given))
    return own(self, [None] * len(images) if given else images, filepaths, True)
