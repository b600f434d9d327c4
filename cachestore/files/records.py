"""Small JSON files with a format name and a checksum: recipes, rounds, claims, ledgers, heartbeats, `done.json`, `cachestore.json`.

From format 2 on the checksum covers the format too. So one flipped bit in a `/1` is found as damage, and never looks like a newer version.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cachestore.core.errors import FormatError, NewerFormat
from cachestore.core.keys import Json, canonical
from cachestore.files.checksum import digest_of
from cachestore.files.opening import read_whole
from cachestore.files.paths import damaged, to_verify

RECORD_LIMIT_BYTES: Final = 256 * 1024 * 1024
"""Largest record that is read. A round that opens ten million units again is smaller."""


def encode_record(kind: str, version: int, body: Mapping[str, Json]) -> bytes:
    """Return the bytes of a record. Equal bodies give equal bytes."""
    raw = canonical(dict(body))
    checksum = _checksum(raw, kind, version).encode()
    return b'{"body":' + raw + b',"checksum":"' + checksum + b'","format":"' + f'{kind}/{version}"}}\n'.encode()


def _checksum(raw: bytes, kind: str, version: int) -> str:
    return digest_of([raw] if version <= 1 else [raw, f"{kind}/{version}".encode()])


def decode_record(kind: str, version: int, data: bytes | bytearray, *, where: Path) -> dict[str, Any]:
    """Return the body of a record. Raises FormatError if it is damaged or of another kind, NewerFormat if it is newer than `version`."""
    try:
        record = json.loads(bytes(data))
        found_kind, _, found_version = str(record["format"]).partition("/")
        body, checksum = record["body"], record["checksum"]
        number = int(found_version)
        raw = canonical(body)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise damaged(f"{where} is not a record of cachestore: {type(error).__name__}", where) from error
    if found_kind != kind or not isinstance(body, dict):
        raise FormatError(f"{where} holds {found_kind!r}, but should hold {kind!r}; run {to_verify(where)}")
    if number > version and checksum != _checksum(raw, kind, 1):
        raise NewerFormat(f"{where} has format {kind}/{number}; this cachestore reads up to {kind}/{version}: install a newer one")
    if checksum != _checksum(raw, kind, number):
        raise damaged(f"{where} does not match its checksum", where)
    return body  # pyright: ignore[reportUnknownVariableType] - checked field by field where it is used


def read_record(path: Path, kind: str, version: int) -> dict[str, Any]:
    """Read and check a record. Raises FormatError, or FileNotFoundError."""
    return decode_record(kind, version, read_whole(path, limit_bytes=RECORD_LIMIT_BYTES), where=path)
