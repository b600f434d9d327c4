"""Calls that tests of import and export share."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

import cachestore as cs
from cachestore.core.errors import EncodeFailed
from cachestore.trainers.export_target import NOTE

CLAIMS = {"model": "a model"}
SELECTING = ("family", "resolution_only", "variant_only", "leave_out", "name", "generation")


def bring(kind, folder, store, data, claims: Any = CLAIMS, **options: Any):
    return cs.import_cache(kind, folder, store=store, data=data, claims=claims, **options)


def send(kind, store, out, **options: Any):
    """Export, and compare each written file with what `exported` reads without writing it."""
    report = cs.export_cache(store, format=kind, folder=out, **options)
    chosen = {name: value for name, value in options.items() if name in SELECTING}
    if kind != "webdataset":
        check_written(cs.exported(store, kind, folder=out, **chosen), Path(out), report)
    return report


def check_written(files, out, report):
    """Every file that the export wrote, and no other, has the same arrays and metadata."""
    listed = json.loads((out / NOTE).read_text())["files"]
    written = {path for path, (_digest, kind) in listed.items() if kind == files.format and not path.endswith(".json")}
    made = {path: of_mapping(files, path) for path in files}
    assert {path for path, contents in made.items() if contents is not None} - {*report.foreign} <= written
    assert {(one["sample"], one["encoder"]) for one in files.failures} <= {(one["sample"], one["encoder"]) for one in report.failures}
    failed = len(report.failures) - len(files.failures) - sum(contents is None for contents in made.values())
    assert failed == 0 or any("would also be the file" in one["reason"] for one in files.failures), report.failures
    for path, contents in made.items():
        if contents is not None and path not in report.foreign:
            assert contents == of_file(out / path), path


def of_mapping(files, path):
    """(arrays, metadata) in a form that compares; None if the file cannot be made."""
    try:
        return {name: bits(value) for name, value in files[path].items()}, files.metadata(path)
    except EncodeFailed:
        return None


def of_file(path):
    """The same of a file, read as its trainer reads it."""
    if path.suffix == ".npz":
        with np.load(path) as file:
            return {name: bits(file[name]) for name in file.files}, {}
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            return {name: bits(file.get_tensor(name)) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    loaded = torch.load(path, weights_only=True)
    loaded = loaded if isinstance(loaded, dict) else {"value": loaded}
    values = {name: value for name, value in loaded.items() if not isinstance(value, torch.Tensor)}
    return {name: bits(value) for name, value in loaded.items() if name not in values}, values


def bits(value):
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    assert value.flags.writeable
    return value.dtype.newbyteorder("="), value.shape, value.tobytes()


def equal(one, other):
    """Bit for bit."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
