"""A cache of the digests of model files: create-only files `digests/<host>-<digest>.json`, each with what one run added.

The keys (path, size and stamp of a file, from `files.fingerprints`) are valid on one host only. If the cache is lost, the model
files are read again.
"""

import re
from collections.abc import Mapping
from contextlib import suppress

from cachestore.core.errors import FormatError
from cachestore.files.checksum import digest_of
from cachestore.files.opening import names_in
from cachestore.files.paths import Layout
from cachestore.files.publish import publish
from cachestore.files.records import encode_record, read_record

FORMAT = "cachestore-digests"
VERSION = 1


def load_digests(layout: Layout, host: str) -> dict[str, str]:
    """Everything that runs on this host have added. Ignores damaged files.

    A key with two digests is left out: its file changed and kept its stat record, as `precompute --recheck` found. It is read each time.
    """
    found: dict[str, set[str]] = {}
    prefix = f"{_safe(host)}-"
    for name in names_in(layout.digests):
        if name.startswith(prefix) and name.endswith(".json"):
            with suppress(FormatError, OSError):
                for key, digest in read_record(layout.digests / name, FORMAT, VERSION).items():
                    if isinstance(digest, str):
                        found.setdefault(key, set()).add(digest)
    return {key: digests.pop() for key, digests in found.items() if len(digests) == 1}


def publish_digests(layout: Layout, host: str, added: Mapping[str, str]) -> None:
    """Store what this run added. Makes no file if `added` is empty."""
    if not added:
        return
    record = encode_record(FORMAT, VERSION, dict(added))
    publish(layout, layout.digests / f"{_safe(host)}-{digest_of([record])}.json", [record])


def _safe(host: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", host)[:100] or "host"
