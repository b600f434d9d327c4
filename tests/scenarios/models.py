"""Parts that run a real text encoder of a few kilobytes. Imports torch: for processes that are to have it before they are forked."""

import torch

from tests.encode import tiny
from tests.scenarios import parts

torch.set_num_threads(1)
torch.manual_seed(0)
MODEL = tiny.clip_text()
TOKENIZER = tiny.clip_tokenizer()


def embed(batch):
    tokens = TOKENIZER([name for _key, name in batch], padding="max_length", truncation=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = MODEL(**tokens).last_hidden_state
    return {key: {"prompt_embeds": row.contiguous()} for (key, _name), row in zip(batch, hidden, strict=True)}


def fill(body):
    """One rank of a `fill` with the model."""
    return parts.fill(body, embed)
