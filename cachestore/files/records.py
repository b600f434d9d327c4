"""Small JSON files with a format name and a checksum: recipes, rounds, claims, ledgers, heartbeats, `done.json`, `cachestore.json`.

The checksum covers the format too. So one flipped bit in its number is found as damage, and never looks like a newer version.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cachestore.core.errors import WRONG_FIELDS, newer
from cachestore.core.keys import Json, canonical
from cachestore.files.checksum import digest_of
from cachestore.files.opening import read_whole
from cachestore.files.paths import damaged

RECORD_LIMIT_BYTES: Final = 256 * 1024 * 1024
"""Largest record that is read. A round that opens ten million units again is smaller."""


def encode_record(kind: str, version: int, body: Mapping[str, Json]) -> bytes:
    """Return the bytes of a record. Equal bodies give equal bytes."""
    raw = canonical(dict(body))
    written_as = f"{kind}/{version}".encode()
    checksum = digest_of([raw, written_as]).encode()
    return b'{"body":' + raw + b',"checksum":"' + checksum + b'","format":"' + written_as + b'"}\n'


def decode_record(kind: str, version: int, data: bytes | bytearray, *, where: Path) -> dict[str, Any]:
    """Return the body of a record. Raises FormatError if it is damaged or of another kind, NewerFormat if it is newer than `version`."""
    try:
        record = json.loads(bytes(data))
        written_as, body, checksum = str(record["format"]), record["body"], record["checksum"]
        found_kind, _, found_version = written_as.partition("/")
        number = int(found_version)
        expected = digest_of([canonical(body), written_as.encode()])
    except WRONG_FIELDS as error:
        raise damaged(f"{where} is not a record of cachestore: {type(error).__name__}", where) from error
    if found_kind != kind or not isinstance(body, dict):
        raise damaged(f"{where} holds {found_kind!r}, but should hold {kind!r}", where)
    if checksum != expected:
        raise damaged(f"{where} does not match its checksum", where)
    if number > version:
        raise newer(where, written_as, f"{kind}/{version}")
    return body  # pyright: ignore[reportUnknownVariableType] - checked field by field where it is used


def read_record(path: Path, kind: str, version: int) -> dict[str, Any]:
    """Read and check a record. Raises FormatError, or FileNotFoundError."""
    return decode_record(kind, version, read_whole(path, limit_bytes=RECORD_LIMIT_BYTES), where=path)
