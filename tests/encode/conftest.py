"""Tiny models, built once a session."""

import os
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cachestore.encode.batching.environment import set_library_defaults
from tests.encode import tiny, tiny_families
from tests.encode.encoders import Built

set_library_defaults(os.environ)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # Four times faster on tiny models: threads that outnumber free cores wait for each other.


@dataclass(frozen=True)
class Tiny:
    folder: Path
    pipeline: Any


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Builds a pipeline by name, once: its folder with an unreadable denoiser, and the pipeline in memory to compare with."""

    @cache
    def build(name) -> Tiny:
        import torch

        torch.manual_seed(0)
        make, denoiser_name, denoiser_class = tiny.PIPELINES[name]
        pipeline, folder = make(), tmp_path_factory.mktemp(name)
        tiny.save(pipeline, folder, denoiser_name, denoiser_class)
        return Tiny(folder, pipeline)

    return build


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Builds a family's pipeline by name, once: its folder without a denoiser, and the pipeline in memory."""

    @cache
    def build(name) -> Built:
        import torch

        torch.manual_seed(0)
        family = tiny_families.FAMILIES[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Chroma's denoiser uses a name that diffusers gives up
            pipeline, folder = family.build(), tmp_path_factory.mktemp(name)
        pipeline.set_progress_bar_config(disable=True)
        tiny_families.save(family, pipeline, folder)
        return Built(folder, pipeline, family)

    return build


@pytest.fixture(scope="session")
def edit_built(tmp_path_factory):
    """Builds a pipeline of Qwen-Image-Edit by its class, once: its folder, and the pipeline in memory with transformers' own processor."""

    @cache
    def build(class_name) -> Built:
        import torch

        torch.manual_seed(0)
        pipeline, folder = tiny_families.qwen_edit(class_name), tmp_path_factory.mktemp(class_name)
        pipeline.set_progress_bar_config(disable=True)
        tiny_families.save_qwen_edit(pipeline, folder)
        return Built(folder, pipeline, tiny_families.Family(None))

    return build


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory):
    """A transformers text encoder's folder, with model and tokenizer in memory."""
    folder = tmp_path_factory.mktemp("plain")
    model, tokenizer = tiny.plain(folder)
    return folder, model, tokenizer


@pytest.fixture
def digest():
    """SHA-256 of a file, without a cache; `digest.seen` lists the files."""
    from cachestore.files.fingerprints import digest_file

    class Digest:
        def __init__(self):
            self.seen = []

        def __call__(self, path):
            self.seen.append(path)
            return digest_file(path, {})

    return Digest()
