"""What a unit is made from: a caption, an image, or a caption with the images that its text encoder is shown, in order.

Requests are JSON, as they stand in a plan: `{"caption": TEXT}`, `{"image": REF, "role": ROLE, ...}`, or
`{"caption": TEXT, "images": {ROLE: [REF, ...]}}`. Pure; whoever calls reads the files.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from cachestore.keys import Json, canonical, digest_bytes, digest_parts, digest_text
from cachestore.samples import CAPTION, IMAGE

Stat = tuple[int, int]
"""(size, mtime_ns)."""

NO_STAT: Final[Stat] = (-1, -1)
"""Of a unit without a file, or whose file was modified so lately that its time proves nothing."""

SHOWN: Final = "images"
"""An option of a column of captions: the role of the images that the text encoder is shown beside them."""

SOURCE: Final = "source"
"""The column that says which of several sources a sample is of."""
SOURCE_WEIGHT: Final = "source_weight"
"""The column that says how often a sample of its source comes in an epoch, where sources differ in that."""

RESOLUTIONS: Final = "resolutions"
"""An option of a column of images: the resolution by source, where sources differ in it."""

_TIME_BITS: Final = 63


def options_for(options: Mapping[str, Json], extras: Mapping[str, Json]) -> Mapping[str, Json]:
    """The options of a column for one sample, by its columns: with the resolution of its source."""
    by_source: Mapping[str, Json] | None = options.get(RESOLUTIONS)
    if by_source is None:
        return options
    plain = {name: value for name, value in options.items() if name != RESOLUTIONS}
    return plain | {"resolution": by_source.get(str(extras.get(SOURCE)), plain["resolution"])}


def request_for(role: str, options: Mapping[str, Json], value: str, images: Mapping[str, Sequence[str]]) -> dict[str, Json]:
    """What the encoder of a column is asked to make of one caption, or of one reference: `value`.

    `images` are the sample's references by role; those of the role that the column's options name come with a caption, none of none.
    """
    if role != CAPTION:
        return {"image": value, "role": role, **options}
    shown = options.get(SHOWN)
    return {"caption": value} if shown is None else {"caption": value, "images": {shown: list(images.get(shown, ()))}}


def is_of_files(role: str, options: Mapping[str, Json]) -> bool:
    """Whether the cells of a column are made from files; captions alone are in the plan itself."""
    return role != CAPTION or SHOWN in options


def references_of(request: Mapping[str, Json]) -> list[str]:
    """The files that a unit is made from, in order; none for a caption alone."""
    if "image" in request:
        return [str(request["image"])]
    shown: Mapping[str, Sequence[str]] = request.get("images", {})
    return [reference for references in shown.values() for reference in references]


def digests_of(request: Mapping[str, Json], contents: Sequence[bytes]) -> dict[str, str]:
    """SHA-256 (hex) of what the encoder sees, by role, in order; `contents` are the bytes behind `references_of`.

    A second image of one role is named `ROLE.2`, and so on.
    """
    if "image" in request:
        return {str(request.get("role", IMAGE)): digest_bytes(contents[0])}
    digests = {CAPTION: digest_text(str(request["caption"]))}
    shown: Mapping[str, Sequence[str]] = request.get("images", {})
    names = [role if number == 1 else f"{role}.{number}" for role, some in shown.items() for number in range(1, len(some) + 1)]
    return digests | {name: digest_bytes(content) for name, content in zip(names, contents, strict=True)}


def combined_digest(inputs: Mapping[str, str]) -> str:
    """One digest (hex) for what a unit is made from: its only input's own, else one over names and digests; empty for none."""
    if len(inputs) <= 1:
        return next(iter(inputs.values()), "")
    return digest_parts("cachestore-inputs", canonical([[name, digest] for name, digest in inputs.items()])).hex()


def combined_stat(stats: Sequence[Stat]) -> Stat:
    """One (size, mtime_ns) for the files that a unit is made from: the only file's own; NO_STAT for none, or where one proves nothing.

    Of several files it is the sum of the sizes, and in the place of the time 63 bits of a digest over each one's size and time.
    """
    if len(stats) == 1:
        return stats[0]
    if not stats or NO_STAT in stats:
        return NO_STAT
    digest = digest_parts("cachestore-stats", canonical([list(stat) for stat in stats]))
    return sum(size for size, _time in stats), int.from_bytes(digest[:8], "big") >> (64 - _TIME_BITS)
