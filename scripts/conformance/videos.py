"""Compare decoded videos with what FFmpeg's own command makes of them: `python scripts/conformance/videos.py`.

Makes clips of many codecs, forms of pixels, rotations, rates and containers with that command, decodes each with it, by its documented
filters, and with cachestore, at the file's own rate and at another. Prints what differs of each, and a table (docs/numerics.md).
The command is that of Debian's ffmpeg, or of the package imageio-ffmpeg. Exit code 1 if a clip differs by more than is allowed.
"""

import argparse
import importlib
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np

WIDTH, HEIGHT, SECONDS = 96, 64, 1.6
RATE: Final = 7
"""The other rate at which each clip is decoded: no multiple of any."""
MOST: Final = 1
"""The largest difference in levels that two builds of FFmpeg may have."""
AS_HERE: Final = "scale=interl=-1:flags=bilinear+accurate_rnd+full_chroma_int"
ALPHAS, ANIMATIONS, TURNS = "alpha", "animations", "turns"
RATES, CONTAINERS = "rates, also variable ones", "containers, time stamps, fields"
_LEFT: Final = ("h264", "hevc", "mpeg2", "mpeg4", "libx264")
"""Clips of these codecs say that their chroma lies at the left pixel of two, which the command has to be told."""
_ALPHA: Final = "format=rgba,geq=r='r(X,Y)':g='g(X,Y)':b='b(X,Y)':a='255*X/W'"


@dataclass(frozen=True)
class Case:
    """A clip, by the arguments that make it."""

    name: str
    suffix: str
    output: Sequence[str]
    filters: str = ""
    rate: str = "25"
    remux: Sequence[str] = ()
    """If given, the clip is copied once more with these arguments in front of its name."""
    decoder: str = ""
    """The decoder that the command is told to use."""
    has_alpha: bool = False
    kind: str = "codecs and forms of pixels"


def cases() -> Iterator[Case]:
    """Yield all clips."""
    yield from _of_codecs()
    yield from _with_alpha()
    yield from _in_other_ways()


def _of_codecs() -> Iterator[Case]:
    codecs = {
        "h264": ("libx264", "mp4", ("yuv420p", "yuv422p", "yuv444p", "yuv420p10le")),
        "hevc": ("libx265", "mp4", ("yuv420p", "yuv422p10le", "yuv444p", "yuv420p12le")),
        "vp8": ("libvpx", "webm", ("yuv420p",)),
        "vp9": ("libvpx-vp9", "webm", ("yuv420p", "yuv422p", "yuv444p", "yuv420p10le", "gbrp")),
        "av1": ("libaom-av1", "mkv", ("yuv420p", "yuv420p10le", "yuv444p")),
        "mpeg2": ("mpeg2video", "mpg", ("yuv420p",)),
        "mpeg2 in ts": ("mpeg2video", "ts", ("yuv422p",)),
        "mpeg4": ("mpeg4", "avi", ("yuv420p",)),
        "prores": ("prores_ks", "mov", ("yuv422p10le", "yuv444p10le")),
        "ffv1": ("ffv1", "mkv", ("yuv420p", "yuv422p10le", "gbrp", "bgr0", "gray", "gray16le", "yuv410p", "rgb48le")),
        "mjpeg": ("mjpeg", "mov", ("yuvj420p", "yuvj422p", "yuvj444p")),
        "qtrle": ("qtrle", "mov", ("rgb24",)),
        "utvideo": ("utvideo", "avi", ("yuv422p", "gbrp")),
        "png": ("png", "mov", ("rgb24", "pal8")),
        "wmv2": ("wmv2", "wmv", ("yuv420p",)),
        "flv": ("flv", "flv", ("yuv420p",)),
        "theora": ("libtheora", "ogv", ("yuv420p",)),
        "dnxhr": ("dnxhd", "mov", ("yuv422p",)),
    }
    for name, (encoder, suffix, forms) in codecs.items():
        for form in forms:
            more = ["-profile:v", "dnxhr_hq"] if name == "dnxhr" else ["-cpu-used", "8"] if name == "av1" else []
            larger = "scale=256:128,setsar=1" if name == "dnxhr" else ""
            yield Case(f"{name} {form}", suffix, ["-c:v", encoder, "-pix_fmt", form, *more], larger)


def _with_alpha() -> Iterator[Case]:
    for label, (encoder, suffix, form, decoder) in {
        "vp8": ("libvpx", "webm", "yuva420p", "libvpx"),
        "vp9": ("libvpx-vp9", "webm", "yuva420p", "libvpx-vp9"),
        "prores 4444": ("prores_ks", "mov", "yuva444p10le", ""),
        "qtrle": ("qtrle", "mov", "argb", ""),
        "ffv1": ("ffv1", "mkv", "bgra", ""),
        "ffv1 yuva": ("ffv1", "mkv", "yuva420p", ""),
        "utvideo": ("utvideo", "avi", "gbrap", ""),
        "png": ("png", "mov", "rgba", ""),
    }.items():
        more = ["-auto-alt-ref", "0"] if label == "vp8" else []
        yield Case(
            f"{label} with alpha", suffix, ["-c:v", encoder, "-pix_fmt", form, *more], _ALPHA, decoder=decoder, has_alpha=True, kind=ALPHAS
        )
    for form, suffix in (("gif", "gif"), ("apng", "apng")):
        yield Case(form, suffix, ["-c:v", form, "-plays" if form == "apng" else "-loop", "0"], rate="20", kind=ANIMATIONS)
        yield Case(
            f"{form} with alpha", suffix, ["-c:v", form], f"{_ALPHA},lut=a='255*gt(val,127)'", rate="10", has_alpha=True, kind=ANIMATIONS
        )


def _in_other_ways() -> Iterator[Case]:
    h264 = ("-c:v", "libx264", "-pix_fmt", "yuv420p")
    for ranges, matrix in ((r, m) for r in ("tv", "pc") for m in ("bt601", "bt709", "bt2020")):
        named = {"bt601": "smpte170m", "bt709": "bt709", "bt2020": "bt2020nc"}[matrix]
        colours = f"scale=out_color_matrix={matrix}:out_range={ranges},format=yuv420p"
        yield Case(
            f"h264 {matrix} {ranges}", "mp4", [*h264, "-colorspace", named, "-color_range", ranges], colours, kind="matrices and ranges"
        )
    for turn in ("90", "180", "270"):
        yield Case(
            f"h264 turned by {turn}", "mp4", ("-c:v", "libx264", "-pix_fmt", "yuv444p"), remux=("-display_rotation", turn), kind=TURNS
        )
    yield Case(
        "hevc turned and mirrored",
        "mov",
        ("-c:v", "libx265", "-pix_fmt", "yuv444p", "-tag:v", "hvc1"),
        remux=("-display_rotation", "90", "-display_hflip"),
        kind=TURNS,
    )
    for rate in ("24000/1001", "30000/1001", "60", "12.5"):
        yield Case(f"h264 at {rate}", "mp4", h264, rate=rate, kind=RATES)
        yield Case(f"vp9 at {rate}", "webm", ("-c:v", "libvpx-vp9", "-deadline", "realtime"), rate=rate, kind=RATES)
    drops = "select='not(eq(mod(n,3),1))*not(between(n,11,17))'"
    for suffix, encoder in (("mkv", "libx264"), ("mp4", "libx264"), ("webm", "libvpx"), ("mov", "prores_ks")):
        yield Case(f"{encoder} of variable rate in {suffix}", suffix, ("-c:v", encoder, "-fps_mode", "vfr"), drops, kind=RATES)
    plain: list[Case] = [
        Case("h264 in ts", "ts", h264),
        Case("h264 in ts from 50 s on", "ts", (*h264, "-output_ts_offset", "50")),
        Case("h264 in ts whose clock wraps", "ts", (*h264, "-output_ts_offset", "95441")),
        Case("h264 in m2ts", "m2ts", h264),
        Case("h264 in 3gp", "3gp", h264),
        Case("h264 in fragments", "mp4", (*h264, "-g", "10", "-movflags", "frag_keyframe+empty_moov")),
        Case("h264 with many b frames", "mkv", (*h264, "-bf", "8", "-g", "30")),
        Case("h264 cut by an edit list", "mp4", (*h264, "-g", "10"), remux=("-ss", "0.5")),
        Case("h264 in fields", "mp4", (*h264, "-flags", "+ilme+ildct", "-x264opts", "tff=1")),
        Case("mpeg2 in fields", "mpg", ("-c:v", "mpeg2video", "-flags", "+ilme+ildct", "-b:v", "3M")),
        Case("mpeg2 alone", "m2v", ("-c:v", "mpeg2video", "-b:v", "3M")),
        Case("av1 in mp4", "mp4", ("-c:v", "libsvtav1", "-pix_fmt", "yuv420p10le", "-preset", "10"), "scale=128:96,setsar=1"),
    ]
    yield from (replace(case, kind=CONTAINERS) for case in plain)


def make(case: Case, ffmpeg: str, folder: Path) -> Path:
    """Make a clip. Raises CalledProcessError."""
    path = folder / f"{case.name.replace(' ', '-').replace('/', '_')}.{case.suffix}"
    source = f"testsrc2=size={WIDTH}x{HEIGHT}:rate={case.rate}:duration={SECONDS}"
    filters = ["-vf", case.filters] if case.filters else []
    quality = [] if case.suffix in {"gif", "apng"} else ["-b:v", "3M"]
    _run([ffmpeg, "-f", "lavfi", "-i", source, *filters, "-threads", "1", *quality, *case.output, str(path)])
    if not case.remux:
        return path
    copy = path.with_stem(f"{path.stem}-copy")
    _run([ffmpeg, *case.remux, "-i", str(path), "-c", "copy", str(copy)])
    return copy


def expected(case: Case, ffmpeg: str, path: Path, size: tuple[int, int], rate: int | None) -> "np.ndarray[Any, Any]":
    """Decode a clip by the command: uint8 [frames, height, width, 3], transparency on white, by the plain formula."""
    chosen = "" if rate is None else f"fps={rate},"
    form = "rgba" if case.has_alpha else "rgb24"
    decoder = ["-c:v", case.decoder] if case.decoder else []
    chroma = ":in_chroma_loc=left" if case.name.startswith(_LEFT) and case.name != "hevc yuv422p10le" else ""
    filters = ["-vf", f"{chosen}{AS_HERE}{chroma},format={form}", "-fps_mode", "passthrough", "-f", "rawvideo", "-"]
    raw = _run([ffmpeg, *decoder, "-i", str(path), "-map", "0:v:0", *filters])
    frames = np.frombuffer(raw, np.uint8).reshape(-1, size[1], size[0], 4 if case.has_alpha else 3)
    if not case.has_alpha:
        return frames
    opacity = frames[..., 3:].astype(np.float64) / 255
    return np.floor(frames[..., :3] * opacity + 255 * (1 - opacity) + 0.5).astype(np.uint8)


def found(path: Path, rate: int | None) -> "np.ndarray[Any, Any]":
    """Decode a clip by cachestore."""
    from cachestore.encode.pictures import videos
    from cachestore.encode.pictures.buckets import CropBox

    file = BytesIO(path.read_bytes())
    video = videos.measure(file)
    whole = CropBox(video.size, (0, 0, video.size.width, video.size.height))
    wanted = None if rate is None else Fraction(rate)
    times = video.timeline.take(wanted, 0, video.timeline.count(wanted))
    return videos.take(file, times, video.size, whole)


@dataclass(frozen=True)
class Compared:
    """How a clip differs."""

    frames: int
    more: int
    """How many more frames the command has."""
    levels: int
    far: int
    """Frames that differ by more than `MOST`."""

    @property
    def is_equal(self) -> bool:
        """Whether it is as near as two builds of FFmpeg."""
        return self.far == 0 and self.more == 0


def compared(case: Case, ffmpeg: str, path: Path, rate: int | None) -> Compared:
    """Compare the two ways for one clip and rate. Where the command has a frame more or less at its end, the others are compared."""
    ours = found(path, rate)
    theirs = expected(case, ffmpeg, path, (ours.shape[2], ours.shape[1]), rate)
    both = min(len(ours), len(theirs))
    levels = np.abs(ours[:both].astype(np.int16) - theirs[:both]).reshape(both, -1).max(axis=1)
    return Compared(len(ours), len(theirs) - len(ours), int(levels.max(initial=0)), int((levels > MOST).sum()))


def _run(arguments: list[str]) -> bytes:
    return subprocess.run(
        [arguments[0], "-v", "error", "-nostdin", "-y", *arguments[1:]], check=True, capture_output=True, timeout=120
    ).stdout


def find_ffmpeg() -> str | None:
    """Return the path of FFmpeg's command; None if there is none."""
    try:
        return str(importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe())
    except (ImportError, RuntimeError):
        return shutil.which("ffmpeg")


def main() -> int:
    """Compare all clips; 1 if one differs or there is no command."""
    parser = argparse.ArgumentParser(description="Compare decoded videos with what FFmpeg's own command makes of them.")
    parser.add_argument("--ffmpeg", default=find_ffmpeg(), help="its path (default: that of imageio-ffmpeg, or on PATH)")
    parser.add_argument("--only", default="", help="clips with this in their name")
    arguments = parser.parse_args()
    if arguments.ffmpeg is None:
        print("there is no ffmpeg: pip install imageio-ffmpeg, or apt install ffmpeg", file=sys.stderr)
        return 1
    found: dict[str, list[Compared]] = {}
    clips, wrong = Counter[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        for case in cases():
            if arguments.only not in case.name:
                continue
            try:
                path = make(case, arguments.ffmpeg, Path(folder))
                both = [compared(case, arguments.ffmpeg, path, rate) for rate in (None, RATE)]
            except Exception as error:  # noqa: BLE001 - of either decoder: the clip is named, and the others go on
                print(f"{case.name}: {getattr(error, 'stderr', None) or error}")
                wrong += 1
                continue
            found.setdefault(case.kind, []).extend(both)
            clips[case.kind] += 1
            wrong += not all(one.is_equal for one in both)
            print(f"{case.name}: {both[0]}; at {RATE} a second {both[1]}", flush=True)
    print("\n| clips | number | frames | frames chosen otherwise | largest difference in levels |\n|---|---|---|---|---|")
    for kind, those in found.items():
        other = sum(one.far + abs(one.more) for one in those)
        print(f"| {kind} | {clips[kind]} | {sum(one.frames for one in those)} | {other} | {max(one.levels for one in those)} |")
    print(f"{clips.total()} clips, {wrong} of them differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
