"""How this and other trainers choose a picture's bucket, resize the picture and crop it. Pure; opens no picture.

A rule is a row of `RULES`. Its bucket and its resized size follow from the picture's size and `BucketSettings` alone. All rules were
compared with the trainers' own code on recorded sizes (`tests/encode/pictures/test_bucket_rules.py`). A row also has the trainer's resizer,
and how the trainer reads a picture.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import product
from math import ceil, floor, isqrt, sqrt
from typing import Final, NamedTuple

from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.core.inputs import BUCKET_MAX, BUCKET_MIN, OWN, Buckets
from cachestore.core.keys import Json
from cachestore.core.spelling import option
from cachestore.encode.families.resamplers import DEFAULT, Resample
from cachestore.encode.pictures.buckets import SHORTEST_SIDE, CropBox, Size, bucket_list, choose, crop_box, offset

STEP: Final = 64
"""The step between buckets if a request gives none, as in kohya's scripts."""
_FINEST: Final = 16
"""The step of musubi-tuner, and the least that other trainers use."""
_SIMPLETUNER_EDGES: Final[Mapping[float, int]] = {0.25: 512, 0.5: 768, 1.0: 1024, 2.0: 1536, 4.0: 2048}
"""By megapixels: the side of SimpleTuner's square bucket, for resolutions that are as near as `_NEAR`."""
_NEAR: Final = 0.05


class BucketSettings(NamedTuple):
    """How a data set puts pictures into buckets, for any rule."""

    resolution: int
    step: int = STEP
    upscales: bool = True
    shortest: int | None = None
    longest: int | None = None
    """The limits of a bucket's sides, in pixels; None for those of `bucket_list`."""

    @classmethod
    def of(cls, options: Mapping[str, Json], resolution: int | None = None) -> "BucketSettings":
        """Return the settings in the options of an image column, or in a request."""
        resolution = int(options["resolution"]) if resolution is None else resolution
        limits = options.get(BUCKET_MIN), options.get(BUCKET_MAX)
        return cls(resolution, int(options.get("step", STEP)), bool(options.get("upscale", True)), *limits)


@dataclass(frozen=True, slots=True)
class PixelReading:
    """How a trainer reads a picture, for `--pixels as-trainer`. None of them converts colours by a profile."""

    is_turned: bool
    """Whether the picture is set upright by its EXIF orientation."""
    keeps_alpha: bool = False
    """Whether RGBA is resized as a whole and loses its alpha then. Otherwise it loses it before. No trainer puts it on a colour."""

    def as_json(self) -> dict[str, Json]:
        """Return what it adds to the key of a value."""
        alpha = "after resizing" if self.keeps_alpha else "before resizing"
        return {"profile": "ignored", "alpha dropped": alpha, "orientation": "applied" if self.is_turned else "ignored"}

    def in_words(self) -> str:
        """Return what becomes of profile, transparency and orientation."""
        turned = "pictures are turned upright by their EXIF orientation" if self.is_turned else "the EXIF orientation is ignored"
        return f"colour profiles are ignored, transparency is dropped, {turned}"


@dataclass(frozen=True, slots=True)
class BucketRule:
    """The rule of one trainer."""

    bucket: Callable[[Size, BucketSettings], Size]
    resized: Callable[[Size, Size, BucketSettings], Size]
    """Returns the size to which a picture is resized for its bucket: (picture, bucket, settings)."""
    step: Callable[[int], int]
    """Returns the step between buckets, if none is given, for a VAE whose buckets must be multiples of this many pixels."""
    centre: Callable[[int], int] = lambda excess: excess // 2
    """Returns how many of the excess pixels a centre crop cuts off at the left or top."""
    mirrors_first: bool = False
    """Whether a picture is mirrored before it is cropped. If an odd number of pixels is cut off, that is another part of the picture."""
    has_own_step: bool = False
    """Whether the trainer has no setting for the step."""
    may_not_upscale: bool = False
    """Whether the trainer has a setting by which small pictures are not scaled up."""
    may_limit: bool = False
    """Whether the trainer has settings for the shortest and the longest side."""
    limits: tuple[int | None, int | None] = (None, None)
    """The shortest and the longest side, if they are not set."""
    resample: Resample = DEFAULT
    reading: PixelReading | None = None
    """How the trainer reads a picture; None for this project's own way."""

    def limits_at(self, *, upscales: bool) -> tuple[int | None, int | None]:
        """Return the limits if none are set. Buckets of a rule that does not scale up follow from the pictures alone."""
        return self.limits if upscales else (None, None)


def fit_box(
    name: Buckets, size: Size, settings: BucketSettings, at: Fraction | None = None, *, is_flipped: bool = False
) -> tuple[Size, CropBox]:
    """Return the bucket of a picture, and how it is resized and cropped, at the centre or `at` a place, as `crop_box`.

    The box is that of the picture before it is mirrored. BadInput if there are no buckets, EncodeFailed if none is for this size.
    """
    rule = RULES[name]
    bucket = rule.bucket(size, settings)
    resized = rule.resized(size, bucket, settings) if min(bucket) > 0 else Size(0, 0)
    if not (0 < bucket.width <= resized.width and 0 < bucket.height <= resized.height):
        raise EncodeFailed(
            f"the rule of {name} has no bucket for a picture of {size.width} x {size.height} pixels at the resolution"
            f" {settings.resolution}: leave the picture out, or use another {option('buckets')}"
        )
    across, down = resized.width - bucket.width, resized.height - bucket.height
    left, top = (rule.centre(across), rule.centre(down)) if at is None else (offset(across, at), offset(down, at))
    if is_flipped and at is None and rule.mirrors_first:
        left = across - left
    return bucket, CropBox(resized, (left, top, left + bucket.width, top + bucket.height))


def find_settings(name: Buckets, pairs: Collection[tuple[Size, Size]]) -> BucketSettings | None:
    """Return settings with which a rule gives each of these (picture, bucket) pairs; None if there are none, or no pairs.

    Of several the one whose resolution is a multiple of 64 and nearest to the largest bucket's side. Its square is that bucket's area.
    """
    rule, side = RULES[name], isqrt(max((bucket.width * bucket.height for _size, bucket in pairs), default=0))
    near = range(side * 9 // 10 // _FINEST * _FINEST, side * 11 // 10 + _FINEST, _FINEST)
    resolutions = sorted(near, key=lambda one: (one % STEP > 0, abs(one - side)))
    steps = dict.fromkeys((rule.step(_FINEST), *(() if rule.has_own_step else (STEP, STEP // 2, _FINEST))))
    for upscales in (True, False) if rule.may_not_upscale else (True,):
        for resolution, step in product(resolutions, steps):
            for limits in _usual_limits(rule, resolution, step) if upscales else [(None, None)]:
                settings = BucketSettings(resolution, step, upscales, *limits)
                if pairs and step <= resolution and all(rule.bucket(size, settings) == bucket for size, bucket in pairs):
                    return settings
    return None


def _usual_limits(rule: BucketRule, resolution: int, step: int) -> list[tuple[int | None, int | None]]:
    """Return the limits that people use: the trainer's own, if they suit the resolution, and half of it to twice of it."""
    least, most = rule.limits
    if least is None or most is None:
        return [(None, None)]
    suits = least // step * step <= resolution <= -(-most // step) * step
    return [*([rule.limits] if suits else []), (min(SHORTEST_SIDE, resolution // 2), 2 * resolution // step * step)]


def rule_named(name: str) -> Buckets:
    """Return the name as one of `Buckets`. Raises BadInput for an unknown one, such as that of a newer version."""
    for known in RULES:
        if known == name:
            return known
    raise BadInput(f"the buckets {name!r} are not known; known are {', '.join(RULES)}: a newer version of cachestore may know them")


def _own(size: Size, settings: BucketSettings) -> Size:
    limits = {"shortest": settings.shortest, "longest": settings.longest}
    return choose(size, settings.resolution, settings.step, upscales=settings.upscales, **limits)


def _sd_scripts(size: Size, settings: BucketSettings) -> Size:
    """That size, else the nearest aspect ratio, the first of equally near ones. Without scaling up: the resized sides cut to steps."""
    if not settings.upscales:
        return Size(*(side // settings.step * settings.step for side in _shrunk(size, settings)))
    buckets = bucket_list(settings.resolution, settings.step, settings.shortest, settings.longest)
    return size if size in buckets else _nearest(size, buckets)


def _sd_scripts_resized(size: Size, bucket: Size, settings: BucketSettings) -> Size:
    if not settings.upscales:
        return _shrunk(size, settings)
    is_wider = size.width / size.height > bucket.width / bucket.height
    return _scaled(size, bucket.height / size.height if is_wider else bucket.width / size.width)


def _shrunk(size: Size, settings: BucketSettings) -> Size:
    """Shrink a picture of more than the resolution's area so that one of its sides is a multiple of the step; else return its size.

    Of both sides the one is taken that keeps the shape better. (0, 0) for a picture that is too long for any bucket.
    """
    own, area, step = size.width / size.height, settings.resolution**2, settings.step
    if size.width * size.height <= area:
        return size
    wide = sqrt(area * own)
    across, down = _stepped(wide, step), _stepped(area / wide, step)
    its_down, its_across = _stepped(across / own, step), _stepped(down * own, step)
    if not its_down or not down:
        return Size(0, 0)
    is_by_width = abs(across / its_down - own) < abs(its_across / down - own)
    return Size(across, int(across / own + 0.5)) if is_by_width else Size(int(down * own + 0.5), down)


def _musubi(size: Size, settings: BucketSettings) -> Size:
    """The nearest aspect ratio, the first of equally near ones. Without scaling up: the sides of a small picture cut to steps."""
    if not settings.upscales and size.width * size.height <= settings.resolution**2:
        return Size(*(side // settings.step * settings.step for side in size))
    return _nearest(size, _musubi_buckets(settings.resolution, settings.step))


@lru_cache(maxsize=64)
def _musubi_buckets(resolution: int, step: int) -> tuple[Size, ...]:
    """Return musubi-tuner's buckets, sorted. Some are wider than the resolution by up to one step."""
    area = resolution * resolution
    found: set[Size] = set()
    for width in range(max(step, resolution // 2 // step * step), resolution + step, step):
        if height := area // width // step * step:
            found |= {Size(width, height), Size(height, width)}
    if not found:
        raise BadInput(f"resolution {resolution} gives no bucket of musubi-tuner: it must be at least {step}", option="resolution")
    return tuple(sorted(found))


def _ai_toolkit(size: Size, settings: BucketSettings) -> Size:
    """Of the four buckets around the picture's shape, with at most the resolution's area, the one with the nearest area.

    A small picture is scaled up to the next step at most.
    """
    (width, height), step, most = size, settings.step, settings.resolution**2
    wanted = min(width * height, most)
    scale = sqrt(wanted / (width * height))
    across, down = width * scale / step, height * scale / step
    around = [Size(one(across) * step, other(down) * step) for one in (floor, ceil) for other in (floor, ceil)]
    fitting = [bucket for bucket in around if 0 < bucket.width * bucket.height <= most]
    least = Size(max(step, floor(across) * step), max(step, floor(down) * step))
    return min(fitting or [least], key=lambda bucket: abs(bucket.width * bucket.height - wanted))


def _ai_toolkit_resized(size: Size, bucket: Size, _settings: BucketSettings) -> Size:
    scale = max(bucket.width / size.width, bucket.height / size.height)
    return Size(ceil(size.width * scale), ceil(size.height * scale))


def _simpletuner(size: Size, settings: BucketSettings) -> Size:
    """The resolution's area in the picture's aspect ratio of two digits, each side rounded to the step: `crop_aspect=preserve`."""
    bucket = _simpletuner_target(size, settings)
    if not bucket.height or _ratio(bucket) != 1:
        return bucket
    near = (edge for megapixels, edge in _SIMPLETUNER_EDGES.items() if abs(_megapixels(settings) - megapixels) < _NEAR)
    square = _to_step(next(near, sqrt(_megapixels(settings) * 1e6)), settings.step)
    return Size(square, square)


def _simpletuner_target(size: Size, settings: BucketSettings) -> Size:
    own, edge = _ratio(size), _to_step(int(sqrt(_megapixels(settings) * 1e6)), settings.step)
    if size.width == size.height:
        return Size(edge, edge)
    if own == 0:
        return Size(0, 0)
    return Size(_to_step(edge * sqrt(own), settings.step), _to_step(edge / sqrt(own), settings.step))


def _simpletuner_resized(size: Size, bucket: Size, settings: BucketSettings) -> Size:
    """Scale by the bucket's shorter side; then by the other, if that leaves it uncovered. Sides are rounded down."""
    width, height = _simpletuner_target(size, settings)
    own = size.width / size.height
    if size.width == size.height:
        across, down = width, height
    else:
        across, down = (width, int(width / own)) if width < height else (int(height * own), height)
        if width > across:
            across, down = width, down + int((width - across) / own)
        elif height > down:
            across, down = across + int((height - down) * own), height
    return bucket if _ratio(bucket) == 1 and across < bucket.width else Size(across, down)


def _megapixels(settings: BucketSettings) -> float:
    return settings.resolution * settings.resolution / 1000**2


def _ratio(size: Size) -> float:
    return round(size.width / size.height, 2)


def _to_step(side: float, step: int) -> int:
    return max(step, round(side / step) * step)


def _diffusers_resized(size: Size, bucket: Size, _settings: BucketSettings) -> Size:
    """Scale the shorter side to the square's; the longer one is rounded down."""
    side, shorter = bucket.width, min(size)
    return Size(*(side if length == shorter else int(side * length / shorter) for length in size))


def _nearest(size: Size, buckets: tuple[Size, ...]) -> Size:
    own = size.width / size.height
    return min(buckets, key=lambda bucket: abs(bucket.width / bucket.height - own))


def _scaled(size: Size, scale: float) -> Size:
    return Size(int(size.width * scale + 0.5), int(size.height * scale + 0.5))


def _stepped(side: float, step: int) -> int:
    return int(side + 0.5) // step * step


RULES: Final[Mapping[Buckets, BucketRule]] = {
    OWN: BucketRule(
        _own, lambda size, bucket, _settings: crop_box(size, bucket).resized, lambda _multiple: STEP, may_not_upscale=True, may_limit=True
    ),
    "sd-scripts": BucketRule(
        _sd_scripts,
        _sd_scripts_resized,
        lambda _multiple: STEP,
        may_not_upscale=True,
        may_limit=True,
        limits=(256, 1024),
        resample="area",
        reading=PixelReading(is_turned=False),
    ),
    "musubi": BucketRule(
        _musubi,
        lambda size, bucket, _settings: _scaled(size, max(bucket.width / size.width, bucket.height / size.height)),
        lambda _multiple: _FINEST,
        has_own_step=True,
        may_not_upscale=True,
        resample="area",
        reading=PixelReading(is_turned=False, keeps_alpha=True),
    ),
    "simpletuner": BucketRule(
        _simpletuner, _simpletuner_resized, lambda _multiple: STEP, resample="cv2-linear", reading=PixelReading(is_turned=False)
    ),
    "ai-toolkit": BucketRule(
        _ai_toolkit,
        _ai_toolkit_resized,
        lambda multiple: 2 * multiple,
        mirrors_first=True,
        resample="bicubic",
        reading=PixelReading(is_turned=True),
    ),
    "diffusers": BucketRule(
        lambda _size, settings: Size(settings.resolution, settings.resolution),  # as its scripts with `--center_crop`
        _diffusers_resized,
        lambda multiple: multiple,
        centre=lambda excess: round(excess / 2),
        has_own_step=True,
        reading=PixelReading(is_turned=True),
    ),
}
