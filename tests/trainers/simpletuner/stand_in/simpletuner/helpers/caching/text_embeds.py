"""A stand-in of SimpleTuner's module, with bodies of our own: text of a few numbers, in files by the prompt's name."""

import os

import torch


class TextEmbeddingCache:
    """Makes, saves and loads text."""

    def __init__(self, called, data_backend, model, split=lambda some: some):
        self.id, self.data_backend, self.model, self.split = called, data_backend, model, split
        self.text_encoders, self.tokenizers = model.text_encoders, model.tokenizers
        self.text_cache_ondemand = self._requires_path_based_keys = False
        self.prompt_records, self.accelerator, self.cache_dir = [], None, "cache"

    def _normalize_prompt_records(self, prompts):
        return [dict(one) if isinstance(one, dict) else {"prompt": one, "key": one, "metadata": {}} for one in prompts]

    def split_prompt_records_between_processes(self, prompt_records):
        """Return this process's part."""
        return self.split(prompt_records)

    def hash_prompt_with_path(self, prompt_record):
        """Return the file of a prompt."""
        return os.path.join("cache", f"{prompt_record['key']}.pt")

    def save_to_cache(self, filename, embeddings):
        """Save text."""
        self.data_backend.torch_save(self.model.pack_text_embeddings_for_cache(embeddings), filename)

    def wait_for_pending_writes(self):
        """Wait for a thread that writes. Here is none."""

    def load_from_cache(self, filename):
        """Load text."""
        return self.model.unpack_text_embeddings_from_cache(self.data_backend.torch_load(filename))

    def encode_dropout_caption(self):
        """Save the text of no caption."""
        self.save_to_cache(self.hash_prompt_with_path({"prompt": "", "key": ""}), self._encode_text_batch([""]))

    def encode_validation_negative_prompt(self, negative_prompt):
        """Save the text of a negative prompt."""
        made = self._encode_text_batch([negative_prompt], is_negative_prompt=True)
        self.save_to_cache(self.hash_prompt_with_path({"prompt": negative_prompt, "key": negative_prompt}), made)
        return made

    def _encode_text_batch(self, prompts, is_negative_prompt=False):
        return self.model.encode(prompts, is_negative_prompt)

    def compute_prompt_embeddings_with_model(
        self,
        prompt_records=None,
        return_concat=True,
        is_validation=False,
        load_from_cache=True,
        is_negative_prompt=False,
        progress_callback=None,
        split_between_processes=True,
    ):
        """Make text, or load it."""
        found = []
        for record in self._normalize_prompt_records(prompt_records):
            name = self.hash_prompt_with_path(record)
            if load_from_cache:
                found.append(self.load_from_cache(name))
            else:
                self.save_to_cache(name, self._encode_text_batch([record["prompt"]], is_negative_prompt=is_negative_prompt))
        if return_concat:
            return found[0] if len(found) == 1 else {"prompt_embeds": torch.cat([one["prompt_embeds"] for one in found])}
        return None
