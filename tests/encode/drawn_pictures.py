"""Pictures that are drawn and written here, each with the pixels that it shows, computed by formulas of our own in float64.

Shares no code with `cachestore.encode`: profiles, PNG, TIFF and BMP are written here byte by byte. Files of lossy formats are read once
more by Pillow without any conversion, or by ffmpeg (`raw`), because their samples are not those that were drawn.
"""

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import islice, product

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 44, 30
ALL = 300
BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])
D50 = np.array([0.9642, 1.0, 0.8249])
D65 = (0.3127, 0.3290)


def srgb_light(level):
    return np.where(level <= 0.04045, level / 12.92, ((level + 0.055) / 1.055) ** 2.4)


def srgb_level(light):
    light = np.clip(light, 0, 1)
    return np.where(light <= 0.0031308, light * 12.92, 1.055 * light ** (1 / 2.4) - 0.055)


def power(gamma):
    return lambda level: level**gamma


@dataclass(frozen=True)
class Space:
    name: str
    curve: Callable
    primaries: tuple = ((0.64, 0.33), (0.30, 0.60), (0.15, 0.06))
    white: tuple = D65

    @property
    def matrix(self):
        """To XYZ for D50, by Bradford."""
        columns = np.array([[x / y, 1, (1 - x - y) / y] for x, y in self.primaries]).T
        white = np.array([self.white[0] / self.white[1], 1, (1 - sum(self.white)) / self.white[1]])
        columns = columns @ np.diag(np.linalg.inv(columns) @ white)
        return np.linalg.inv(BRADFORD) @ np.diag(BRADFORD @ D50 / (BRADFORD @ white)) @ BRADFORD @ columns


P3 = ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060))
SRGB = Space("sRGB", srgb_light)
SPACES = {
    "sRGB": SRGB,
    "Display P3": Space("Display P3", srgb_light, P3),
    "P3 named sRGB": Space("P3 D65 with sRGB curve", srgb_light, P3),
    "linear sRGB": Space("sRGB linear", power(1.0)),
    "Adobe RGB": Space("Adobe RGB (1998)", power(563 / 256), ((0.64, 0.33), (0.21, 0.71), (0.15, 0.06))),
    "Rec. 2020": Space("Rec2020", power(2.4), ((0.708, 0.292), (0.170, 0.797), (0.131, 0.046))),
}
GREYS = {"gamma 1.0": power(1.0), "gamma 1.8": power(1.8), "gamma 2.2": power(2.2), "sRGB curve": srgb_light}


def icc(name, curve, matrix=None):
    """A profile of version 2 with curves of 1,024 points: for RGB, or for grey without a matrix."""
    points = np.round(curve(np.arange(1024) / 1023) * 65535).astype(">u2").tobytes()
    trc = b"curv\0\0\0\0" + struct.pack(">I", 1024) + points
    text = name.encode("ascii") + b"\0"
    tags = {b"desc": b"desc\0\0\0\0" + struct.pack(">I", len(text)) + text + bytes(78), b"wtpt": xyz(D50)}
    if matrix is None:
        tags |= {b"kTRC": trc}
    else:
        tags |= {letter + b"XYZ": xyz(matrix[:, at]) for at, letter in enumerate((b"r", b"g", b"b"))}
        tags |= {letter + b"TRC": trc for letter in (b"r", b"g", b"b")}
    table, body, start = struct.pack(">I", len(tags)), b"", 132 + 12 * len(tags)
    for tag, data in tags.items():
        table += tag + struct.pack(">II", start + len(body), len(data))
        body += data + bytes(-len(data) % 4)
    head = bytearray(128)
    struct.pack_into(
        ">I4sI4s4s4s", head, 0, start + len(body), b"none", 0x02400000, b"mntr", b"GRAY" if matrix is None else b"RGB ", b"XYZ "
    )
    head[36:40] = b"acsp"
    head[68:80] = xyz(D50)[8:]
    return bytes(head) + table + body


def xyz(values):
    return b"XYZ \0\0\0\0" + struct.pack(">3i", *(round(float(value) * 65536) for value in values))


def icc_of(space):
    return icc(space.name, space.curve, space.matrix)


def shown(levels, space=None, grey=None, alpha=None):
    """What is seen of levels 0..1 [height, width, 1 or 3] on white: float [height, width, 3], 0..255."""
    if grey is not None:
        levels = srgb_level(grey(levels))
    levels = np.repeat(levels, 3, axis=2) if levels.shape[2] == 1 else levels
    if space is not None and space is not SRGB:
        light = space.curve(levels) @ (np.linalg.inv(SRGB.matrix) @ space.matrix).T
        levels = srgb_level(light)
    if alpha is not None:
        levels = levels * alpha[..., None] + 1 - alpha[..., None]
    return levels * 255


def srgb_of_lab(lightness, a, b):
    """CIE L*a*b* for D50, as TIFF has it, to levels of sRGB."""
    f = (lightness + 16) / 116
    f = np.stack([f + a / 500, f, f - b / 200], axis=-1)
    light = np.where(f > 6 / 29, f**3, 3 * (6 / 29) ** 2 * (f - 4 / 29)) * D50
    return srgb_level(light @ np.linalg.inv(SRGB.matrix).T)


def turned(pixels, orientation):
    """Set upright what a file of this EXIF orientation stores."""
    turns = (
        lambda a: a,
        lambda a: a[:, ::-1],
        lambda a: a[::-1, ::-1],
        lambda a: a[::-1],
        lambda a: a.swapaxes(0, 1),
        lambda a: np.rot90(a, 3),
        lambda a: a[::-1, ::-1].swapaxes(0, 1),
        np.rot90,
    )
    return turns[orientation - 1](pixels)


def scene(rng, channels, levels):
    """Whole numbers 0..levels-1 [height, width, channels]: slopes, with noise and flat patches."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    planes = []
    for _channel in range(channels):
        slope = rng.normal(size=2)
        plane = slope[0] * x / WIDTH + slope[1] * y / HEIGHT + rng.normal(0, 0.03, (HEIGHT, WIDTH))
        plane = (plane - plane.min()) / np.ptp(plane)
        top, left = rng.integers(0, 20), rng.integers(0, 30)
        plane[top : top + 8, left : left + 10] = rng.random()
        planes.append(plane)
    return np.round(np.stack(planes, axis=-1) * (levels - 1)).astype(int)


# Writers


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(samples, depth, colour, *middle):
    """A PNG of whole numbers [height, width, channels] with chunks before its pixels."""
    height, width, channels = samples.shape
    if depth == 16:
        rows = samples.astype(">u2").tobytes()
        rows = [rows[at : at + width * channels * 2] for at in range(0, len(rows), width * channels * 2)]
    elif depth == 8:
        rows = [row.astype(np.uint8).tobytes() for row in samples]
    else:
        bits = (samples.reshape(height, width, 1) >> np.arange(depth - 1, -1, -1)) & 1
        rows = [np.packbits(row.reshape(-1)).tobytes() for row in bits]
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows), 1))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(middle) + pixels + chunk(b"IEND", b"")


def exif_of(orientation):
    return b"II*\0\x08\0\0\0" + struct.pack("<HHHIHxxI", 1, 0x0112, 3, 1, orientation, 0)


def tiff(samples, depth, photometric, *, extra=None, profile=None, orientation=1, big=False):
    """An uncompressed TIFF of whole numbers [height, width, channels]."""
    order, (height, width, channels) = ">" if big else "<", samples.shape
    pixels = samples.astype(f"{order}u2" if depth == 16 else np.uint8).tobytes()
    data, at = b"", 8 + len(pixels) + len(pixels) % 2
    entries = []

    def tag(number, kind, values):
        nonlocal data
        packed = bytes(values) if kind == 7 else struct.pack(f"{order}{len(values)}{'H' if kind == 3 else 'I'}", *values)
        count = len(values)
        if len(packed) > 4:
            place = at + len(data)
            data += packed + bytes(len(packed) % 2)
            packed = struct.pack(f"{order}I", place)
        entries.append(struct.pack(f"{order}HHI", number, kind, count) + packed.ljust(4, b"\0"))

    tag(256, 4, [width])
    tag(257, 4, [height])
    tag(258, 3, [depth] * channels)
    tag(259, 3, [1])
    tag(262, 3, [photometric])
    tag(273, 4, [8])
    tag(274, 3, [orientation])
    tag(277, 3, [channels])
    tag(278, 4, [height])
    tag(279, 4, [len(pixels)])
    tag(284, 3, [1])
    if extra is not None:
        tag(338, 3, [extra])
    if profile is not None:
        tag(34675, 7, profile)
    directory = struct.pack(f"{order}H", len(entries)) + b"".join(entries) + bytes(4)
    start = at + len(data)
    return (b"MM\0*" if big else b"II*\0") + struct.pack(f"{order}I", start) + pixels + bytes(len(pixels) % 2) + data + directory


def bmp(samples, profile=None):
    """A BMP of version 5, [height, width, 3 or 4] in 24 or 32 bits."""
    height, width, channels = samples.shape
    order = [2, 1, 0, 3][:channels]
    rows = samples[::-1, :, order].astype(np.uint8)
    pixels = b"".join(row.tobytes() + bytes(-len(row.tobytes()) % 4) for row in rows)
    head = struct.pack("<IiiHHIIiiII", 124, width, height, 1, 8 * channels, 3 if channels == 4 else 0, len(pixels), 2835, 2835, 0, 0)
    head += struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000 if channels == 4 else 0)
    head += (b"BGRs" if profile is None else b"DEBM") + bytes(48)
    head += struct.pack("<IIII", 4, 0 if profile is None else 124 + len(pixels), len(profile or b""), 0)
    body = head + pixels + (profile or b"")
    return struct.pack("<2sIHHI", b"BM", 14 + len(body), 0, 0, 138) + body


def by_pillow(samples, mode, name, **options):
    file = BytesIO()
    Image.fromarray(samples.astype(np.uint8).squeeze(), mode).save(file, name, **options)
    return file.getvalue()


def with_jp2_profile(data, profile):
    """Put a profile (method 2) into the colour box of a JPEG 2000 file."""
    header, colour = data.index(b"jp2h") - 4, data.index(b"colr") - 4
    old = int.from_bytes(data[colour : colour + 4], "big")
    box = struct.pack(">I4sBBB", 11 + len(profile), b"colr", 2, 0, 0) + profile
    size = int.from_bytes(data[header : header + 4], "big") + len(box) - old
    return data[:header] + size.to_bytes(4, "big") + data[header + 4 : colour] + box + data[colour + old :]


def by_pillow_raw(data):
    """The samples of a file as Pillow decodes them, converted in no way."""
    with Image.open(BytesIO(data)) as image:
        image.load()
        return np.atleast_3d(np.asarray(image)).astype(float)


# The pictures


@dataclass(frozen=True)
class Drawn:
    group: str
    """What the table of docs/numerics.md calls it."""
    name: str
    data: bytes
    expected: np.ndarray


_KINDS = [
    *(("grey", depth, 0, 1) for depth in (1, 2, 4, 8, 16)),
    *(("grey and alpha", depth, 4, 2) for depth in (8, 16)),
    *(("RGB", depth, 2, 3) for depth in (8, 16)),
    *(("RGBA", depth, 6, 4) for depth in (8, 16)),
    *(("palette", depth, 3, 1) for depth in (1, 2, 4, 8)),
]
PNG_KINDS = [*_KINDS, *(kind for kind in _KINDS for _ in range(3) if "RGB" in kind[0] or "alpha" in kind[0])]
CHUNKS = {
    "gAMA 1.0": ([chunk(b"gAMA", struct.pack(">I", 100_000))], Space("", power(1.0))),
    "gAMA 0.45455": ([chunk(b"gAMA", struct.pack(">I", 45_455))], None),
    "sRGB before gAMA": ([chunk(b"sRGB", b"\0"), chunk(b"gAMA", struct.pack(">I", 100_000))], None),
    "cICP of P3": ([chunk(b"cICP", bytes([12, 13, 0, 1]))], Space("", srgb_light, P3)),
    "gAMA and cHRM of P3": (
        [
            chunk(b"gAMA", struct.pack(">I", 55_556)),
            chunk(b"cHRM", struct.pack(">8I", 31270, 32900, 68000, 32000, 26500, 69000, 15000, 6000)),
        ],
        Space("", power(1.8), P3),
    ),
}


def described_in_png(described, what):
    """The chunks that say so, and by what the samples are to be read: (chunks, space, curve of grey). None if that is no PNG."""
    if described in CHUNKS:
        chunks, space = CHUNKS[described]
        return list(chunks), space, None
    if described is None:
        return [], None, None
    if described in SPACES:
        space = SPACES[described]
        return [chunk(b"iCCP", b"profile\0\0" + zlib.compress(icc_of(space)))], space, None
    grey = GREYS[described]
    return ([chunk(b"iCCP", b"profile\0\0" + zlib.compress(icc(described, grey)))], None, grey) if "grey" in what else None


def draw_png(rng, kind, described, is_keyed, orientation) -> Drawn | None:
    what, depth, colour, channels = kind
    has_alpha = what in ("grey and alpha", "RGBA")
    found = described_in_png(None if (what, depth) == ("grey", 1) else described, what)
    if found is None or (is_keyed and has_alpha):
        return None
    middle, space, grey = found
    middle += [chunk(b"eXIf", exif_of(orientation))] if orientation > 1 else []
    samples, top, alpha = scene(rng, channels, 2**depth), 2**depth - 1, None
    if what == "palette":
        palette, alphas = rng.integers(0, 256, (top + 1, 3)), rng.integers(0, 256, top + 1)
        middle += [chunk(b"PLTE", palette.astype(np.uint8).tobytes())]
        middle += [chunk(b"tRNS", alphas.astype(np.uint8).tobytes())] if is_keyed else []
        levels, alpha = palette[samples[..., 0]] / 255, alphas[samples[..., 0]] / 255 if is_keyed else None
    elif is_keyed:
        key, levels = samples[HEIGHT // 2, WIDTH // 2], samples / top
        middle += [chunk(b"tRNS", key.astype(">u2").tobytes())]
        cut = 8 if (what, depth) == ("RGB", 16) else 0  # the decoded picture has 8 bits, and so the colour that is compared
        alpha = 1.0 - (samples >> cut == key >> cut).all(axis=-1)
    else:
        levels, alpha = (samples[..., :-1] / top, samples[..., -1] / top) if has_alpha else (samples / top, None)
    group = group_of("PNG", what, depth, described, is_keyed=is_keyed)
    expected = turned(shown(levels, space, grey, alpha), orientation)
    return Drawn(group, f"png {kind} {described} tRNS={is_keyed} {orientation}", png(samples, depth, colour, *middle), expected)


LINEAR = ("linear sRGB", "gAMA 1.0", "gamma 1.0")
AS_SRGB = (None, "sRGB", "sRGB curve", "gAMA 0.45455", "sRGB before gAMA")


def group_of(name, what, depth, described, *, is_keyed=False):
    """The row of the table. Pillow decodes colour and alpha of 16 bits to 8; lcms makes a table of a profile for grey."""
    is_grey = what in ("grey", "white is zero", "L")
    if depth == 16 and described not in AS_SRGB and (not is_grey or described not in GREYS):
        return f"16 bits, {what}, " + ("linear profile" if described in LINEAR else "another profile")
    if depth < 16 and is_grey and described == "gamma 1.0" and not is_keyed:
        return "8 bits, grey, linear profile for grey"
    return f"{name}, {what}, 16 bits" if depth == 16 else f"{name}, {what}"


def draw_tiff(rng, kind, described, orientation, big) -> Drawn | None:
    what, depth, photometric, channels, extra = kind
    space, grey, profile = None, None, None
    if described in SPACES:
        space = SPACES[described]
        profile = icc_of(space)
    elif described in GREYS:
        if "grey" not in what:
            return None
        grey = GREYS[described]
        profile = icc(described, grey)
    samples = scene(rng, channels, 2**depth)
    top = 2**depth - 1
    levels, alpha = (samples / top, None) if extra is None else (samples[..., :-1] / top, samples[..., -1] / top)
    if extra == 1 and alpha is not None:  # colours are stored times alpha
        samples = np.concatenate([np.round(samples[..., :-1] * alpha[..., None]), samples[..., -1:]], axis=-1).astype(int)
        levels = np.where(alpha[..., None] > 0, np.clip(samples[..., :-1] / np.maximum(alpha[..., None], 1e-9) / top, 0, 1), 0)
    if what == "white is zero":
        levels = 1 - levels
    elif what == "CMYK":
        levels, space, profile = (1 - levels[..., :3]) * (1 - levels[..., 3:]), None, None
    elif what == "LAB":
        samples[..., 1:] = samples[..., 1:] // 8 - 16  # few colours are outside of sRGB then
        levels, space, profile = srgb_of_lab(samples[..., 0] / 2.55, samples[..., 1], samples[..., 2]), None, None
        samples = samples & 255
    data = tiff(samples, depth, photometric, extra=extra, profile=profile, orientation=orientation, big=big)
    group = group_of("TIFF", what, depth, described)
    return Drawn(group, f"tiff {kind} {described} {orientation} {big}", data, turned(shown(levels, space, grey, alpha), orientation))


TIFF_KINDS = [
    ("grey", 8, 1, 1, None),
    ("grey", 16, 1, 1, None),
    ("white is zero", 8, 0, 1, None),
    ("RGB", 8, 2, 3, None),
    ("RGB", 16, 2, 3, None),
    ("grey and alpha", 8, 1, 2, 2),
    ("RGBA", 8, 2, 4, 2),
    ("RGBA", 16, 2, 4, 2),
    ("RGBA times alpha", 8, 2, 4, 1),
    ("CMYK", 8, 5, 4, None),
    ("LAB", 8, 8, 3, None),
]


def draw_bmp(rng, channels, described) -> Drawn:
    samples = scene(rng, channels, 256)
    space = SPACES.get(described)
    levels, alpha = samples / 255, None
    if channels == 4:
        levels, alpha = levels[..., :3], levels[..., 3]
    data = bmp(samples, None if space is None else icc_of(space))
    return Drawn(f"BMP, {24 if channels == 3 else 32} bits", f"bmp {channels} {described}", data, shown(levels, space, alpha=alpha))


PACKED: dict = {
    "WEBP": {"lossless": True, "exact": True},
    "AVIF": {"quality": 95, "subsampling": "4:4:4"},
    "JPEG": {"quality": 95, "subsampling": 0},
    "JPEG2000": {},
}


def draw_packed(rng, name, mode, described, orientation, raw) -> Drawn | None:
    """WebP, AVIF, JPEG 2000 and JPEG, written by Pillow."""
    channels = len(mode)
    grey = GREYS.get(described) if mode == "L" else None
    space = SPACES.get(described)
    if described is not None and space is None and grey is None:
        return None
    if (mode == "RGBA" and name == "JPEG") or (mode == "L" and name in ("WEBP", "AVIF")):
        return None
    options: dict = dict(PACKED[name])
    profile = None if described is None else icc_of(space) if space else icc(described, grey)
    if profile is not None and name != "JPEG2000":
        options["icc_profile"] = profile
    if name != "JPEG2000" and orientation > 1:
        options["exif"] = b"Exif\0\0" + exif_of(orientation)
    orientation = orientation if name != "JPEG2000" else 1
    data = by_pillow(scene(rng, channels, 256), mode, name, **options)
    data = data if name != "JPEG2000" or profile is None else with_jp2_profile(data, profile)
    samples = raw(data, channels)
    levels, alpha = samples / 255, None
    if mode == "RGBA":
        levels, alpha = levels[..., :3], levels[..., 3]
    drawn = turned(shown(levels, space, grey, alpha), orientation)
    group = group_of({"JPEG2000": "JPEG 2000", "WEBP": "WebP"}.get(name, name), mode, 8, described, is_keyed=name == "JPEG2000")
    return Drawn(group, f"{name} {mode} {described} {orientation}", data, drawn)


def taken(rng, count, *choices) -> list:
    """So many of all combinations, the first of each choice among them."""
    every = list(product(*choices))
    order = rng.permutation(len(every))
    return [every[at] for at in order[:count]]


def draw(raw: Callable = lambda data, channels: by_pillow_raw(data), step: int = 1) -> Iterator[Drawn]:
    """Yield every `step`-th of `ALL` pictures, always the same. `raw` decodes lossy files: [height, width, channels], 0..255."""
    plans: list[tuple[Callable, Sequence]] = []
    pick = np.random.default_rng(47)
    described = [None, *SPACES, *GREYS, *CHUNKS]
    plans += [(draw_png, one) for one in taken(pick, 340, PNG_KINDS, described, [False, True], [1, *range(1, 9)])]
    plans += [(draw_tiff, one) for one in taken(pick, 140, TIFF_KINDS, [None, *SPACES, *GREYS], [1, *range(1, 9)], [False, True])]
    plans += [(draw_bmp, one) for one in taken(pick, 14, [3, 4], [None, *SPACES])]
    packed = [["WEBP", "AVIF", "JPEG2000", "JPEG"], ["L", "RGB", "RGBA"], [None, *SPACES, *GREYS], range(1, 9)]
    plans += [(draw_packed, (*one, raw)) for one in taken(pick, 190, *packed)]
    pick.shuffle(plans)
    numbered = list(enumerate(plans))[::step]
    drawn = (function(np.random.default_rng(number), *arguments) for number, (function, arguments) in numbered)
    yield from islice((one for one in drawn if one is not None), ALL // step)
