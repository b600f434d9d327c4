"""The colours of a picture: which profile they are described by, whether that is sRGB, and the conversion to sRGB. Knows no torch.

A profile is judged by what it does: a grid of colours is converted, and the largest change counts. Only where that is at most `CLOSE`
levels does its name count: a profile that calls itself sRGB is then taken as sRGB. PQ and HLG are refused.

Sources: ICC.1:2022 (tags, `cicp`), ITU-T H.273 (code points), ITU-R BT.2100 (PQ, HLG), Lindbloom (Bradford adaptation).
"""

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from io import BytesIO
from typing import Any, Final, NamedTuple

import numpy as np
from PIL import Image, ImageCms

from cachestore.core.errors import EncodeFailed

CLOSE: Final = 4
"""A profile that changes no colour by more levels (of 255) is as good as sRGB. Of 14 that real programs write as sRGB, none changes one by
more than 1 level; the nearest that is another space, sRGB's primaries with a gamma of 2.2, by 9."""
LARGEST_PROFILE: Final = 16 << 20
"""Bytes; a larger one counts as unusable."""
_MOST_TAGS: Final = 200
_BASES: Final[Mapping[str, str]] = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}
"""The mode in which Pillow converts pictures, by a profile's colour space."""
_PUBLISHED_AS_SRGB: Final = frozenset({"83174717332326ddc198d9df188a4daec27b8979ba152cebbfc470c793d0bb11"})
"""SHA-256 of the ICC's "sRGB v4 preference": its values are sRGB's, but it has a table for prints in place of primaries and curves."""
_SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))


class Gamut(NamedTuple):
    """The chromaticities (x, y) of a colour space."""

    red: tuple[float, float]
    green: tuple[float, float]
    blue: tuple[float, float]
    white: tuple[float, float]


_D65: Final = (0.3127, 0.3290)
_C: Final = (0.310, 0.316)
BT709: Final = Gamut((0.64, 0.33), (0.30, 0.60), (0.15, 0.06), _D65)
"""The primaries of sRGB."""
_NTSC: Final = Gamut((0.63, 0.34), (0.31, 0.595), (0.155, 0.07), _D65)
_GAMUTS: Final[Mapping[int, Gamut]] = {
    1: BT709,
    4: Gamut((0.67, 0.33), (0.21, 0.71), (0.14, 0.08), _C),
    5: Gamut((0.64, 0.33), (0.29, 0.60), (0.15, 0.06), _D65),
    6: _NTSC,
    7: _NTSC,
    8: Gamut((0.681, 0.319), (0.243, 0.692), (0.145, 0.049), _C),
    9: Gamut((0.708, 0.292), (0.170, 0.797), (0.131, 0.046), _D65),
    11: Gamut((0.680, 0.320), (0.265, 0.690), (0.150, 0.060), (0.314, 0.351)),
    12: Gamut((0.680, 0.320), (0.265, 0.690), (0.150, 0.060), _D65),
    22: Gamut((0.630, 0.340), (0.295, 0.605), (0.155, 0.077), _D65),
}
"""By H.273's ColourPrimaries. Others are unspecified or reserved, and count as sRGB's; 10 (XYZ) is refused."""
_GAMMAS: Final[Mapping[int, float]] = {4: 2.2, 5: 2.8, 8: 1.0}
"""By H.273's TransferCharacteristics. The camera curves of television (1, 6, 7, 11, 12, 14, 15) count as sRGB's, as in videos."""
_REFUSED: Final[Mapping[int, str]] = {9: "logarithmic", 10: "logarithmic", 16: "PQ, HDR", 17: "SMPTE ST 428", 18: "HLG, HDR"}
ADOBE_RGB: Final = Gamut((0.64, 0.33), (0.21, 0.71), (0.15, 0.06), _D65)
ADOBE_GAMMA: Final = 563 / 256
_SRGB_CURVE: Final = (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
_XYZ_TO_CONES: Final = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])
_D50: Final = np.array([0.9642, 1.0, 0.8249])


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a profile would do to pictures of a mode."""

    change: int
    """By how many levels the conversion to sRGB would change a colour at most; 255 where that has no meaning (CMYK)."""
    space: str
    """The profile's own colours: GRAY, RGB or CMYK."""
    calls_itself_srgb: bool


def profile_of(gamut: Gamut, gamma: float | None) -> bytes:
    """Return an ICC profile (version 4) of these primaries; its curve is a power, or sRGB's for None. Raises ValueError for nonsense."""
    if min(gamut.white[1], gamut.red[1], gamut.green[1], gamut.blue[1]) <= 0:
        raise ValueError(f"no chromaticities: {gamut}")
    white, *primaries = (np.array([x / y, 1, (1 - x - y) / y]) for x, y in (gamut.white, *gamut[:3]))
    matrix = np.stack(primaries, axis=1)
    matrix *= np.linalg.solve(matrix, white)
    scale = np.diag((_XYZ_TO_CONES @ _D50) / (_XYZ_TO_CONES @ white))
    adapted = np.linalg.solve(_XYZ_TO_CONES, scale @ _XYZ_TO_CONES @ matrix)
    if not np.isfinite(adapted).all() or np.abs(adapted).max() > 100:
        raise ValueError(f"no chromaticities: {gamut}")
    tags = {b"wtpt": _xyz(_D50)} | {b"%cXYZ" % name: _xyz(adapted[:, at]) for at, name in enumerate(b"rgb")}
    curve = struct.pack(">4s4xHxx", b"para", 0 if gamma else 3) + _fixed(*((gamma,) if gamma else _SRGB_CURVE))
    tags |= {b"%cTRC" % name: curve for name in b"rgb"}
    table, body, at = struct.pack(">I", len(tags)), b"", 132 + 12 * len(tags)
    for name, data in tags.items():
        table += struct.pack(">4sII", name, at + len(body), len(data))
        body += data
    head = struct.pack(">I4sI4s4s4s12x4s28x", at + len(body), b"", 0x04300000, b"mntr", b"RGB ", b"XYZ ", b"acsp") + _fixed(*_D50)
    return head.ljust(128, b"\0") + table + body


def _xyz(values: Any) -> bytes:
    return b"XYZ \0\0\0\0" + _fixed(*values)


def _fixed(*values: float) -> bytes:
    """Encode as s15Fixed16Number."""
    return struct.pack(f">{len(values)}i", *(round(value * 65536) for value in values))


def profile_of_codes(primaries: int, transfer: int) -> bytes | None:
    """Return the profile of H.273's code points; None for sRGB. Raises EncodeFailed for PQ, HLG and others that are not converted."""
    if transfer in _REFUSED or primaries == 10:
        raise EncodeFailed(_refusal(_REFUSED.get(transfer, "CIE XYZ")))
    gamut, gamma = _GAMUTS.get(primaries, BT709), _GAMMAS.get(transfer)
    return None if gamut == BT709 and gamma is None else profile_of(gamut, gamma)


@cache
def adobe_rgb() -> bytes:
    """Return a profile of Adobe RGB (1998)."""
    return profile_of(ADOBE_RGB, ADOBE_GAMMA)


def profile_of_png(gama: bytes, chrm: bytes) -> bytes | None:
    """Return the profile that the chunks gAMA and cHRM describe; None for sRGB, for none of both, and for nonsense.

    As libpng does, a gamma within 5 % of 1/2.2 is taken as sRGB's curve: programs write it beside pictures in sRGB.
    """
    value = int.from_bytes(gama[:4], "big") / 100_000 if len(gama) >= 4 else 0.0
    gamma = None if not 0.1 <= value <= 10 or abs(value * 2.2 - 1) < 0.05 else 1 / value
    gamut = BT709
    if len(chrm) >= 32:
        white, red, green, blue = ((x / 100_000, y / 100_000) for x, y in struct.iter_unpack(">II", chrm[:32]))
        gamut = Gamut(red, green, blue, white)
    try:
        return None if gamut == BT709 and gamma is None else profile_of(gamut, gamma)
    except (ValueError, np.linalg.LinAlgError):
        return None


def _refusal(what: str) -> str:
    return (
        f"the picture's colours are {what}: how they would look in sRGB is a matter of taste (tone mapping). Convert it to sRGB first, or"
        " remove its sample"
    )


@lru_cache(maxsize=16)
def judged(profile: bytes, base: str) -> Judgement | None:
    """Return what a profile does to pictures of a base mode (L, RGB, CMYK); None if it is unusable for them.

    A grey picture may have a profile for RGB: its three channels are equal. Raises EncodeFailed for HDR (PQ, HLG).
    """
    source = opened(profile)
    try:
        space, calls_itself_srgb = str(source.profile.xcolor_space).strip(), "sRGB" in (source.profile.profile_description or "")
    except (AttributeError, ValueError):  # no profile, or letters that are none
        return None
    if not (_BASES.get(space) == base or (space == "RGB" and base == "L")):
        return None
    codes = _codes_of(profile)
    if codes is not None and codes[1] in (16, 18):
        raise EncodeFailed(_refusal(_REFUSED[codes[1]]))
    if base == "CMYK":
        return Judgement(255, space, calls_itself_srgb)
    probe = _probe(base if space == "GRAY" else "RGB", is_grey=base == "L")
    try:
        made = ImageCms.profileToProfile(probe, source, _SRGB, renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC, outputMode="RGB")
    except (ImageCms.PyCMSError, OSError):
        return None
    assert made is not None
    change = int(np.abs(np.asarray(made).astype(int) - np.asarray(probe.convert("RGB"))).max())
    if hashlib.sha256(profile).hexdigest() in _PUBLISHED_AS_SRGB:
        change = 0
    if change > CLOSE:
        _refuse_hdr(source, "L" if space == "GRAY" else "RGB")
    return Judgement(change, space, calls_itself_srgb)


def opened(profile: bytes) -> Any:
    """Return an ICC profile opened by lcms; None if it is none."""
    if len(profile) > LARGEST_PROFILE:
        return None
    try:
        return ImageCms.ImageCmsProfile(BytesIO(profile))
    except (ImageCms.PyCMSError, OSError):
        return None


def _codes_of(profile: bytes) -> tuple[int, int] | None:
    count = min(int.from_bytes(profile[128:132], "big"), _MOST_TAGS)
    for at in range(132, 132 + 12 * count, 12):
        if profile[at : at + 4] == b"cicp":
            start = int.from_bytes(profile[at + 4 : at + 8], "big")
            data = profile[start : start + 12]
            return (data[8], data[9]) if len(data) == 12 and data[:4] == b"cicp" else None
    return None


@cache
def _probe(mode: str, *, is_grey: bool) -> Image.Image:
    greys = np.arange(256, dtype=np.uint8)
    if mode == "L":
        return Image.fromarray(greys[:, None])
    steps = np.arange(0, 256, 15, dtype=np.uint8)
    cube = np.stack(np.meshgrid(steps, steps, steps), axis=-1).reshape(-1, 3)
    ramp = np.stack([greys] * 3, axis=-1)
    return Image.fromarray((ramp if is_grey else np.concatenate([ramp, cube]))[:, None])


def _refuse_hdr(source: Any, mode: str) -> None:
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB"))
    intent = ImageCms.Intent.RELATIVE_COLORIMETRIC
    try:
        made = ImageCms.profileToProfile(_probe(mode, is_grey=True), source, lab, renderingIntent=intent, outputMode="LAB")
    except (ImageCms.PyCMSError, OSError):
        return
    assert made is not None
    found = np.asarray(made)[:, 0, 0] / 2.55
    for what, curve in _hdr_curves().items():
        if np.abs(found - curve).max() < 3:
            raise EncodeFailed(_refusal(what))


@cache
def _hdr_curves() -> Mapping[str, Any]:
    """Return the lightness (CIE L*) of 256 greys by BT.2100's curves, white at the top."""
    level = np.arange(256) / 255
    root = level ** (32 / 2523)
    pq = (np.maximum(root - 3424 / 4096, 0) / (2413 / 128 - 2392 / 128 * root)) ** (8192 / 1305)
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    hlg = np.where(level <= 0.5, level**2 / 3, (np.exp((level - c) / a) + b) / 12)
    curves = {"PQ, HDR": pq, "HLG, HDR": hlg, "HLG, HDR (shown at 1000 cd/m²)": hlg**1.2}
    return {name: np.where(y > 216 / 24389, 116 * np.cbrt(y) - 16, 24389 / 27 * y) for name, y in curves.items()}


def in_srgb(image: Image.Image, profile: bytes, mode: str, *, is_exact: bool = False) -> Image.Image:
    """Convert a picture (L, I;16, RGB, RGBA, CMYK) by its profile to sRGB in this mode; return it as it is if lcms cannot.

    By default lcms makes a table of grey profiles, which is up to 10 levels off in the dark greys of a linear one; `is_exact` does without.
    """
    flags = ImageCms.Flags.NOOPTIMIZE if is_exact else ImageCms.Flags.NONE
    source = opened(profile)
    if source is None:
        return image
    try:
        converted = ImageCms.profileToProfile(image, source, _SRGB, outputMode=mode, flags=flags)
    except (ImageCms.PyCMSError, OSError):
        return image
    return image if converted is None else converted
