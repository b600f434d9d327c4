"""A tokenizer that remembers gives what it gave before, and tokenises each text once."""

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from cachestore.encode.models.random_model import TINY, random_model
from cachestore.encode.text.token_memory import TokenMemory, is_plain, keep_prompts, remember
from tests.encode import tiny, tiny_families
from tests.encode.text.test_encoder import text_encoder

pytestmark = pytest.mark.torch

TEXTS = ["", "a cat", "a photograph of a red car, highly detailed", 'a "SIGN" 漢字 é', "x " * 90, "a cat"]
TOKENIZERS: dict[str, Callable[[], Any]] = {
    "clip": tiny.clip_tokenizer,
    "clip of another pad": lambda: tiny.clip_tokenizer(pad="!"),
    "t5": tiny.t5_tokenizer,
    "gemma": tiny_families.gemma_tokenizer,
    "gemma, left": lambda: tiny_families.gemma_tokenizer("left"),
    "qwen": tiny_families.qwen_tokenizer,
    "byt5": transformers.ByT5Tokenizer,
    "with kinds": lambda: random_model(TINY, torch.device("cpu")).parts["tokenizer_2"],
}
PLAIN: list[dict[str, Any]] = [
    {"padding": padding, "truncation": truncation, "max_length": length, "return_tensors": "pt", **more}
    for padding, truncation, length, more in product(
        ("max_length", "longest", True),
        (True, False),
        (20, 600),
        ({}, {"return_attention_mask": True}, {"return_length": False, "return_overflowing_tokens": False, "add_special_tokens": True}),
    )
] + [{"padding": "longest", "return_tensors": "pt"}]
OTHER: list[dict[str, Any]] = [
    {},
    {"padding": True},
    {"padding": "longest", "return_tensors": "np"},
    {"padding": "longest", "return_tensors": "pt", "add_special_tokens": False},
    {"padding": "longest", "return_tensors": "pt", "pad_to_multiple_of": 8},
    {"padding": "max_length", "max_length": 30, "truncation": "longest_first", "return_tensors": "pt"},
    {"padding": "max_length", "max_length": 30, "truncation": True, "return_tensors": "pt", "return_length": True},
]


def outcome(call):
    try:
        found = call()
    except (ValueError, TypeError, UserWarning) as error:
        return type(error)
    return {name: values.tolist() if hasattr(values, "tolist") else values for name, values in found.items()}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_it_gives_what_the_tokenizer_gives(name):
    own, made = TOKENIZERS[name](), TOKENIZERS[name]()
    remember(made, TokenMemory())
    assert type(made).__name__ == type(own).__name__
    assert isinstance(made, type(own))
    for options in [*PLAIN, *OTHER]:
        for texts in (TEXTS, TEXTS[:2], TEXTS[2]):
            expected = outcome(lambda options=options, texts=texts: own(texts, **options))
            for _again in range(2):
                assert outcome(lambda options=options, texts=texts: made(texts, **options)) == expected, (options, texts)
    assert made(TEXTS, **PLAIN[0]).input_ids.dtype == torch.int64


def counted(tokenizer: Any) -> list[str]:
    """The texts that a tokenizer is asked for from now on, in the order in which it gets them."""
    seen: list[str] = []
    kind: Any = type(tokenizer)

    class Counting(kind):
        def __call__(self, text, *more, **options):
            seen.extend([text] if isinstance(text, str) else text)
            return super().__call__(text, *more, **options)

    tokenizer.__class__ = Counting
    return seen


def test_each_text_is_tokenised_once_and_a_longer_one_once_more_for_each_cut():
    tokenizer: Any = tiny.t5_tokenizer()
    seen = counted(tokenizer)
    remember(tokenizer, TokenMemory())
    for _again in range(3):
        tokenizer(TEXTS[:3], padding="longest", return_tensors="pt")
        tokenizer(TEXTS[:3], padding="max_length", max_length=200, truncation=True, return_tensors="pt")
    assert seen == TEXTS[:3]
    for _again in range(2):
        tokenizer(["x " * 90], padding="max_length", max_length=20, truncation=True, return_tensors="pt")
    assert seen[3:] == ["x " * 90] * 2
    tokenizer(["x " * 90], padding="max_length", max_length=30, truncation=True, return_tensors="pt")
    assert seen[5:] == ["x " * 90]


def test_captions_that_were_counted_before_a_run_are_not_tokenised_again_when_they_are_prepared(tiny_model, digest):
    encoder = text_encoder(tiny_model("flux").folder, digest)
    (empty, *_counts) = encoder.count_tokens(["", "a cat"])
    seen = counted(encoder._tokenizer(encoder.setup.family.tokenizer))
    prepared = [encoder.prepare(encoder.resolve({"caption": caption}, None)) for caption in ("", "a cat", "a dog")]
    assert prepared[0].facts["tokens"] == empty
    assert seen == ["a dog"]


def test_the_oldest_texts_are_forgotten(monkeypatch):
    monkeypatch.setattr("cachestore.encode.text.token_memory._MOST", 2)
    memory = TokenMemory()
    for text in "abc":
        memory.put(text, {"input_ids": [1, 2]})
    assert [memory.get(text) is None for text in "abc"] == [True, False, False]


def test_what_has_more_than_ids_and_a_mask_is_not_remembered():
    memory = TokenMemory()
    memory.put("a", {"input_ids": [1], "special_tokens_mask": [1]})
    assert memory.get("a") is None


@pytest.mark.parametrize("options", OTHER[:-1])
def test_other_calls_are_left_to_the_tokenizer(options):
    assert not is_plain(["a"], options)


def test_prompts_are_kept_unless_a_textual_inversion_has_several_vectors():
    def pipeline():
        return SimpleNamespace(maybe_convert_prompt=lambda prompt, _tokenizer: prompt * 2)

    for added, expected in (({"<cat>": 1, "<dog>": 2}, "a"), ({"<cat>": 1, "<cat>_1": 2}, "aa")):
        made = pipeline()
        keep_prompts(made, [SimpleNamespace(added_tokens_encoder=added)])
        assert made.maybe_convert_prompt("a", None) == expected
    plain = SimpleNamespace()
    keep_prompts(plain, [])
    assert vars(plain) == {}


@pytest.mark.parametrize("name", ["sd15", "sdxl", "flux"])
def test_the_thread_that_encodes_tokenises_no_caption_again_be_it_cut_or_not(tiny_model, digest, name, monkeypatch):
    from cachestore.encode.models import modules
    from cachestore.encode.text import encoder as text
    from cachestore.encode.text import prompts

    encoder = text_encoder(tiny_model(name).folder, digest)
    seen: list[list[str]] = []

    def loaded(component):
        tokenizer = modules.load_tokenizer(component)
        seen.append(counted(tokenizer))
        return tokenizer

    monkeypatch.setattr(prompts, "load_tokenizer", loaded)
    captions = ["a cat", "two dogs", "a photograph of a red car " * 40]
    resolved = [encoder.resolve({"caption": caption}, text.Read) for caption in captions]
    batch = [(one.key, encoder.prepare(one).payload) for one in resolved]
    encoder.submit(batch[:2])()
    encoder.submit(batch[2:])()
    assert len(seen) == sum(name.startswith("tokenizer") for name in encoder.setup.components)
    assert not any(set(captions) & set(texts) for texts in seen)
