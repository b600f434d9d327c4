"""Calls that tests of import and export share."""

from typing import Any

import torch

import cachestore as cs

CLAIMS = {"model": "a model"}


def bring(kind, folder, store, data, claims: Any = CLAIMS, **options: Any):
    return cs.import_cache(kind, folder, store=store, data=data, claims=claims, **options)


def send(kind, store, out, **options: Any):
    return cs.export_cache(store, format=kind, folder=out, **options)


def equal(one, other):
    """Bit for bit."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
