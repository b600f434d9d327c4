"""What a unit is made from: a caption, an image, an image and the one it goes with, a caption with the images it is shown with.

Requests are JSON, as they stand in a plan: `{"caption": TEXT}`, `{"image": REF, "role": ROLE, ...}`, the same with `"like": REF`,
`{"video": REF, ...}`, or `{"caption": TEXT, "images": {ROLE: [REF, ...]}}`. Whoever calls reads the files.

The options of a column of images, each left out where it has its default: `resolution`, `step`, `upscale` (false: small pictures are
not scaled up), `crop` ("random", with its `seed`), `variants` (so many random crops), `flip` (each mirrored as well). Of videos also
`frames` (counts to choose from), `fps` (in place of the file's own), `clips` (so many parts of each).
"""

from collections.abc import Mapping, Sequence
from typing import Final, cast

from cachestore.core.keys import Json, Key, canonical, digest_bytes, digest_parts, digest_text, input_key
from cachestore.core.samples import CAPTION, CONTROL, IMAGE, MASK, VIDEO

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
RANDOM: Final = "random"
"""The option `crop` of a column, where crops are drawn."""

WITHIN: Final = "within"
"""In a request: the part of a picture that counts, (left, top, right, bottom) in its pixels."""
STATED: Final = "stated"
"""In a request: what the source says is the picture's (width, height)."""
CROP: Final = "crop"
"""The column of a source that says what is WITHIN."""
SIZE: Final = "size"
"""The column of a source that says what is STATED."""
LIKE: Final = "like"
"""In a request: the picture with which an image is placed in its bucket."""

FRAMED: Final = frozenset({IMAGE, MASK})
"""The roles of what a sample's own crop cuts."""


def caption_key(fingerprint: str, caption: str) -> Key:
    """The key of a caption that is encoded alone, by the text recipe of this fingerprint."""
    return input_key(fingerprint, {CAPTION: digest_text(caption)}, {})


def options_for(options: Mapping[str, Json], extras: Mapping[str, Json]) -> Mapping[str, Json]:
    """The options of a column for one sample, by its columns: with the resolution of its source, its own crop and its stated size."""
    by_source: Mapping[str, Json] | None = options.get(RESOLUTIONS)
    own = framing_of(extras)
    if by_source is None:
        return {**options, **own} if own else options
    plain = {name: value for name, value in options.items() if name != RESOLUTIONS}
    return plain | own | {"resolution": by_source.get(str(extras.get(SOURCE)), plain["resolution"])}


def framing_of(extras: Mapping[str, Json]) -> dict[str, Json]:
    """What a sample's columns say of its picture alone. Of older stores they may hold anything: what is no such numbers says nothing."""
    told = ((WITHIN, CROP, 4), (STATED, SIZE, 2))
    return {name: extras[column] for name, column, count in told if are_whole(extras.get(column), count)}


def are_whole(value: Json, count: int) -> bool:
    """Whether a value is a list of exactly so many whole numbers."""
    numbers = cast("list[object]", value) if isinstance(value, list) else []
    return len(numbers) == count and all(type(number) is int for number in numbers)


def cells_each(options: Mapping[str, Json]) -> int:
    """How many cells a column has for each of its inputs: of each variant each clip, each followed by its mirrored one if there is one."""
    return _number(options, "variants") * _number(options, "clips") * sides_each(options)


def _number(options: Mapping[str, Json], name: str) -> int:
    """So many variants or clips; what is no such number counts as one."""
    number = options.get(name, 1)
    return number if isinstance(number, int) and number > 0 else 1


def sides_each(options: Mapping[str, Json]) -> int:
    """How many cells a column has for each of its views: two where each is mirrored as well."""
    return 2 if options.get("flip") else 1


def companions(role: str, options: Mapping[str, Json]) -> tuple[str, ...]:
    """The roles of a sample's other images that the cells of a column are made from too."""
    if role == CAPTION:
        return (str(options[SHOWN]),) if options.get(SHOWN) is not None else ()
    is_placed = role == MASK or (role == CONTROL and options.get("crop") == RANDOM)
    return (IMAGE,) if is_placed else ()


def request_for(
    role: str, options: Mapping[str, Json], value: str, images: Mapping[str, Sequence[str]], number: int = 0
) -> dict[str, Json]:
    """What the encoder of a column is asked to make of one caption, or of one reference: `value`.

    `number` is that of the cell among those of its input. `images` are the sample's references by role; those of the role that the
    column's options name come with a caption. The sample's own crop is of its picture and mask.
    """
    if role == CAPTION:
        shown = options.get(SHOWN)
        return {"caption": value} if shown is None else {"caption": value, "images": {shown: list(images.get(shown, ()))}}
    sides, clips = sides_each(options), _number(options, "clips")
    left_out = {"variants", "flip"} if role in FRAMED else {"variants", "flip", WITHIN, STATED}
    request: dict[str, Json] = {VIDEO: value} if role == VIDEO else {"image": value, "role": role}
    request |= {name: option for name, option in options.items() if name not in left_out}
    if options.get("crop") == RANDOM:
        request["variant"] = number // (clips * sides)
    if clips > 1:
        request["clip"] = number // sides % clips
    if number % sides:
        request["flip"] = True
    like = next((images[role][0] for role in companions(role, options) if images.get(role)), None)
    return request if like is None else {**request, LIKE: like}


def is_of_files(role: str, options: Mapping[str, Json]) -> bool:
    """Whether the cells of a column are made from files; captions alone are in the plan itself."""
    return role != CAPTION or SHOWN in options


def references_of(request: Mapping[str, Json]) -> list[str]:
    """The files that a unit is made from, in order; none for a caption alone."""
    shown: Mapping[str, Sequence[str]] = request.get("images", {})
    own = [str(request[name]) for name in ("image", VIDEO, LIKE) if name in request]
    return own + [reference for references in shown.values() for reference in references]


def digests_of(request: Mapping[str, Json], contents: Sequence[bytes]) -> dict[str, str]:
    """SHA-256 (hex) of what the encoder sees, by role (a second image's is `ROLE.2`); `contents` are the bytes behind `references_of`."""
    if "image" in request:
        names = (str(request.get("role", IMAGE)), IMAGE)
        return {name: digest_bytes(content) for name, content in zip(names, contents, strict=False)}
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

    Of several files it is the sum of the sizes, and in the place of the time a digest over each one's size and time.
    """
    if len(stats) == 1:
        return stats[0]
    if not stats or NO_STAT in stats:
        return NO_STAT
    digest = digest_parts("cachestore-stats", canonical([list(stat) for stat in stats]))
    return sum(size for size, _time in stats), in_place_of_time(digest)


def in_place_of_time(digest: bytes) -> int:
    """The first 63 bits of a digest: what stands in a `Stat` where there is no one time."""
    return int.from_bytes(digest[:8], "big") >> 1
