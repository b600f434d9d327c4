"""Addresses of stores in object stores: `s3://bucket/cache`. Parses only. No address holds an endpoint or a credential.

The endpoint and the credentials come from the environment, as the clouds' own tools read them.
"""

import re
from dataclasses import dataclass
from typing import Final

from cachestore.core.errors import BadInput

SCHEMES: Final = ("s3", "gs", "az", "file")

_ADDRESS: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,220}")
_NOT_IN_KEYS: Final = re.compile(r"[\x00-\x1f\x7f\\?#]")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a store is in an object store. `str` gives it back as users write it."""

    scheme: str
    bucket: str
    """Empty for file://."""
    prefix: str
    """The start of every key of the store, without slashes at its ends; empty for a store at the root of a bucket."""

    def __str__(self) -> str:
        start = f"{self.scheme}://{self.bucket}"
        return f"{start}/{self.prefix}" if self.prefix or not self.bucket else start

    def key(self, where: str) -> str:
        """Return the whole key of a path in the store; of "" the start of all keys."""
        return "/".join(filter(None, (self.prefix, where)))

    def of(self, where: str) -> str:
        """Return the address of a file of the store, for messages."""
        return f"{str(self).rstrip('/')}/{where}" if where else str(self)


def parse_address(argument: str, given: object) -> Address:
    """Return the parts of an address; errors call it `argument`. Raises BadInput, whose message repeats no password."""
    found = _ADDRESS.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        raise BadInput(f"{argument} must be the address of a store, such as s3://bucket/cache, as a text", option=argument)
    scheme, rest = found[1].lower(), found[2]
    if scheme not in SCHEMES:
        raise BadInput(
            f"{argument} begins with {scheme}://, but cachestore knows {', '.join(f'{one}://' for one in SCHEMES)}", option=argument
        )
    bucket, _slash, prefix = rest.partition("/")
    if "@" in bucket or _NOT_IN_KEYS.search(rest):
        raise BadInput(
            f"{argument} may hold a bucket and a path only: the endpoint and the credentials come from the environment, such as"
            " AWS_ENDPOINT_URL and AWS_ACCESS_KEY_ID",
            option=argument,
        )
    prefix = prefix.rstrip("/")
    if any(part in {"", ".", ".."} for part in prefix.split("/")) and prefix:
        raise BadInput(f"{argument} {given!r} has an empty part, or one that is . or ..: write the path without it", option=argument)
    if scheme == "file":
        if bucket:
            raise BadInput(f"{argument} {given!r} must have three slashes and a whole path: file:///data/cache", option=argument)
    elif not _BUCKET.fullmatch(bucket):
        lacks = f"has the bucket {bucket!r}, but a name of a bucket has 2 or more letters and digits" if bucket else "names no bucket"
        raise BadInput(f"{argument} {given!r} {lacks}: write {scheme}://BUCKET/PATH", option=argument)
    return Address(scheme, bucket, prefix)
