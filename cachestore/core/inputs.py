"""What a unit is made from: a caption, an image, an image with the one that decides its crop, or a caption with images.

A request is a JSON object in the plan: `{"caption": TEXT}` (also with `"captions": {ENCODER: TEXT}`), `{"image": REF, "role": ROLE, ...}`
(also with `"like": REF`) or `{"video": REF, ...}`. With `"images": {ROLE: [REF, ...]}` the encoder reads further images too. A video with
a `"role"` stands for its own frame of that role. The caller reads the files.

The options of an image column, each left out at its default, are `resolution`, `step`, `upscale` (false: small pictures are not scaled up),
`buckets` (the trainer whose rule is used), `bucket_min` and `bucket_max`, `pixels` ("as-trainer"), `crop` ("random", with its `seed`),
`variants` (the number of random crops) and `flip` (each is also encoded mirrored). Videos also have `frames` (counts to choose from), `fps`
(instead of the file's own) and `clips` (the number of parts of each); columns made from masks `alpha` ("mask": a picture or video that is
its own mask gives its alpha).
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal, cast

from cachestore.core.keys import Json, Key, canonical, digest_parts, digest_text, input_key
from cachestore.core.samples import CAPTION, IMAGE, MASK, ROLES, VIDEO, images_of, role_of

Stat = tuple[int, int]
"""The stat record of a file: (size in bytes, stamp). `files.stat_record` makes it, and says what equal records prove."""
NO_STAT: Final[Stat] = (-1, -1)
"""For a unit without a file, or with a file that changed so recently that its stat record proves nothing."""
IMAGES: Final = "images"
"""Option of a column: the role, or a list of roles, of the images that the encoder reads beside the caption, or beside the column's own."""
SOURCE: Final = "source"
"""The column with the name of a sample's source, if there are several sources."""
SOURCE_WEIGHT: Final = "source_weight"
"""The column that says how often a sample comes in an epoch, if that is not once for all sources."""
OWN_CAPTION: Final = "caption."
"""How a column of a source begins that has the caption of one text encoder: `caption.text_encoder_2`."""
CAPTIONS: Final = "captions"
"""In a request: captions by text encoder, of those that do not read the sample's caption."""
RESOLUTIONS: Final = "resolutions"
"""Option of an image column: the resolution by source, if it differs between sources."""
BUCKETS: Final = "buckets"
"""Option of an image column: the trainer whose rule chooses bucket, resized size and crop; left out for the rule of this project."""
Buckets = Literal["cachestore", "sd-scripts", "musubi", "simpletuner", "ai-toolkit", "diffusers"]
OWN: Final[Buckets] = "cachestore"
"""The rule of this project."""
READ_HERE: Final[tuple[Buckets, ...]] = (OWN, "diffusers")
"""The buckets of who trains with cachestore's loader, or with diffusers' scripts. The others are of trainers with caches of their own."""
BUCKET_MIN: Final = "bucket_min"
BUCKET_MAX: Final = "bucket_max"
"""Options of an image column: the limits of a bucket's sides in pixels; left out where the rule has none."""
PIXELS: Final = "pixels"
"""Option of an image column: with the value `AS_TRAINER`, pictures are read as the trainer of `BUCKETS` reads them."""
Pixels = Literal["own", "as-trainer"]
OWN_PIXELS: Final[Pixels] = "own"
AS_TRAINER: Final[Pixels] = "as-trainer"
ALPHA: Final = "alpha"
"""Option of a column that is made from masks: with the value "mask", a picture or video that is its own mask gives its alpha."""
Alpha = Literal["white", "mask"]
RANDOM: Final = "random"
"""The value of the option `crop` for random crops."""
WITHIN: Final = "within"
"""In a request: the part of the picture to use, (left, top, right, bottom) in its pixels."""
STATED: Final = "stated"
"""In a request: the picture's (width, height) as given by the source."""
CROP: Final = "crop"
"""The column of a source that becomes `WITHIN` in requests."""
SIZE: Final = "size"
"""The column of a source that becomes `STATED` in requests."""
LIKE: Final = "like"
"""In a request: the picture that decides this image's bucket or crop."""
FRAMED: Final = frozenset({IMAGE, *(row.name for row in ROLES.values() if row.follows == IMAGE and row.is_cut_alike)})
"""Roles of the images to which a sample's own crop applies."""


def caption_key(fingerprint: str, caption: str) -> Key:
    """Return the key of a caption that is encoded alone, by the text recipe with this fingerprint."""
    return input_key(fingerprint, {CAPTION: digest_text(caption)}, {})


def own_captions(extras: Mapping[str, Json]) -> dict[str, str]:
    """Return the captions that a sample's columns give for single text encoders, by encoder."""
    own = {column: text for column, text in extras.items() if column.startswith(OWN_CAPTION) and isinstance(text, str)}
    return {column.removeprefix(OWN_CAPTION): text for column, text in own.items()}


def options_for(options: Mapping[str, Json], extras: Mapping[str, Json]) -> Mapping[str, Json]:
    """Return an image column's options for one sample, with the resolution of its source, its own crop and its stated size."""
    by_source: Mapping[str, Json] | None = options.get(RESOLUTIONS)
    own = framing_of(extras)
    if by_source is None:
        return {**options, **own} if own else options
    plain = {name: value for name, value in options.items() if name != RESOLUTIONS}
    return plain | own | {"resolution": by_source.get(str(extras.get(SOURCE)), plain["resolution"])}


def framing_of(extras: Mapping[str, Json]) -> dict[str, Json]:
    """Return the crop and size that a sample's columns give for its picture. Other values are ignored."""
    columns = ((WITHIN, CROP, 4), (STATED, SIZE, 2))
    return {name: extras[column] for name, column, count in columns if are_whole(extras.get(column), count)}


def are_whole(value: Json, count: int) -> bool:
    """Return whether `value` is a list of exactly `count` whole numbers."""
    numbers = cast("list[object]", value) if isinstance(value, list) else []
    return len(numbers) == count and all(type(number) is int for number in numbers)


def cells_each(options: Mapping[str, Json]) -> int:
    """Return how many cells a column has for each input. Order: by variant, then by clip; a mirrored cell follows its plain one."""
    return _number(options, "variants") * clips_each(options) * sides_each(options)


def _number(options: Mapping[str, Json], name: str) -> int:
    """Return the number of variants or clips; a missing or invalid one counts as 1."""
    number = options.get(name, 1)
    return number if isinstance(number, int) and number > 0 else 1


def clips_each(options: Mapping[str, Json]) -> int:
    """Return how many clips a column has of each video; 1 for pictures."""
    return _number(options, "clips")


def sides_each(options: Mapping[str, Json]) -> int:
    """Return how many cells a column has for each variant: two if it is also mirrored, else one."""
    return 2 if options.get("flip") else 1


def _shown(options: Mapping[str, Json]) -> tuple[str, ...]:
    shown = options.get(IMAGES)
    return (shown,) if isinstance(shown, str) else tuple(shown or ())


def _followed(role: str, options: Mapping[str, Json]) -> str | None:
    """Return the role that decides the crops of a column's cells, if it is not their own."""
    row = role_of(role)
    return row.follows if row.is_cut_alike or options.get("crop") == RANDOM else None


def companions(role: str, options: Mapping[str, Json]) -> tuple[str, ...]:
    """Return the roles of the sample's other images that a column's cells are also made from."""
    followed = None if role == CAPTION else _followed(role, options)
    return (*(() if followed is None else (followed,)), *_shown(options))


def request_for(
    role: str,
    options: Mapping[str, Json],
    value: str,
    images: Mapping[str, Sequence[str]],
    number: int = 0,
    *,
    captions: Mapping[str, str] | None = None,
) -> dict[str, Json]:
    """Return the request for one cell: `value` is the caption, or the reference of the image. `captions` are the `own_captions`.

    `number` counts the cells of one input. `images` are the sample's references by role; those of the roles that the column's option
    `images` names are read too. The sample's own crop applies only to its picture and mask.
    """
    if role == CAPTION:
        seen = {name: list(images_of(images, name)) for name in _shown(options)}
        rest = {name: option for name, option in options.items() if name != IMAGES} if seen else {}
        own = {encoder: text for encoder, text in (captions or {}).items() if text != value}
        return {"caption": value, **({CAPTIONS: own} if own else {}), **({IMAGES: seen} if seen else {}), **rest}
    shown: dict[str, Json] = {name: list(images.get(name, ())) for name in _shown(options)}
    sides, clips = sides_each(options), clips_each(options)
    left_out = {"variants", "flip", IMAGES, *(() if role in FRAMED else (WITHIN, STATED))}
    followed = _followed(role, options)
    like = next(iter(images.get(followed or "", ())), None)
    request: dict[str, Json] = {VIDEO: value} if role == VIDEO else {"image": value, "role": role}
    if role_of(role).is_own and value == like:  # the sample has none: a frame of the video itself
        request, like = {VIDEO: value, "role": role}, None
    request |= {name: option for name, option in options.items() if name not in left_out}
    if options.get("crop") == RANDOM:
        request["variant"] = number // (clips * sides)
    if clips > 1:
        request["clip"] = number // sides % clips
    if number % sides:
        request["flip"] = True
    request |= {} if like is None else {LIKE: like}
    own = list(images.get(VIDEO, ()))
    given = {name: some for name, some in shown.items() if some and not (role_of(name).is_own and some == own)}
    return {**request, IMAGES: given} if given else request


def is_own_mask(request: Mapping[str, Json], reference: str) -> bool:
    """Return whether the mask of this reference stands for the alpha of the picture or video that it belongs to."""
    return request.get(ALPHA) == MASK and reference == request.get(LIKE, request.get(VIDEO))


def is_trained_on(role: str, options: Mapping[str, Json]) -> bool:
    """Return whether a column is of pictures or videos that are trained on, and not of a condition that is made from them and others."""
    return role in (IMAGE, VIDEO) and IMAGES not in options


def is_of_files(role: str, options: Mapping[str, Json]) -> bool:
    """Return whether a column's cells are made from files. Captions without images are in the plan itself."""
    return role != CAPTION or IMAGES in options


def references_of(request: Mapping[str, Json]) -> list[str]:
    """Return the files that a unit is made from, in order; none for a caption alone."""
    shown: Mapping[str, Sequence[str]] = request.get(IMAGES, {})
    own = [str(request[name]) for name in ("image", VIDEO, LIKE) if name in request]
    return own + [reference for references in shown.values() for reference in references]


def digests_of(request: Mapping[str, Json], digests: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 (hex) of each input by role (`ROLE.2` for a second image); `digests` are those of `references_of`."""
    role = str(request.get("role", IMAGE))
    names = [VIDEO] if VIDEO in request else [role] if "image" in request else []
    names += [role_of(role).follows or IMAGE] if LIKE in request else []
    shown: Mapping[str, Sequence[str]] = request.get(IMAGES, {})
    names += [name if number == 1 else f"{name}.{number}" for name, some in shown.items() for number in range(1, len(some) + 1)]
    texts = {CAPTION: str(request["caption"])} if "caption" in request else {}
    own: Mapping[str, str] = request.get(CAPTIONS, {})
    texts |= {f"{OWN_CAPTION}{encoder}": own[encoder] for encoder in sorted(own)}
    return {name: digest_text(text) for name, text in texts.items()} | dict(zip(names, digests, strict=True))


def combined_digest(inputs: Mapping[str, str]) -> str:
    """Return one digest (hex) for a unit's inputs: that of its only input, else one over all names and digests; empty without inputs."""
    if len(inputs) <= 1:
        return next(iter(inputs.values()), "")
    return digest_parts("cachestore-inputs", canonical([[name, digest] for name, digest in inputs.items()])).hex()


def combined_stat(stats: Sequence[Stat]) -> Stat:
    """Return one stat record for a unit's files: that of its only file; NO_STAT without files, or if one of them has NO_STAT.

    For several files it is the sum of their sizes, and a stamp over all stat records.
    """
    if len(stats) == 1:
        return stats[0]
    if not stats or NO_STAT in stats:
        return NO_STAT
    digest = digest_parts("cachestore-stats", canonical([list(stat) for stat in stats]))
    return sum(size for size, _stamp in stats), stamp_of(digest)


def stamp_of(digest: bytes) -> int:
    """Return the first 63 bits of a digest, as the stamp of a stat record."""
    return int.from_bytes(digest[:8], "big") >> 1
