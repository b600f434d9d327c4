"""Videos against what was written, and against FFmpeg's own command (`scripts/conformance/videos.py`)."""

from collections import Counter
from fractions import Fraction
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from conformance import videos as conformance_videos

from cachestore.encode.pictures import videos
from cachestore.encode.pictures.buckets import CropBox
from tests.encode.footage import numbered, numbers_of, write
from tests.fakes import ROOT

COMMAND = conformance_videos.find_ffmpeg()
CASES = {case.name: case for case in conformance_videos.cases()}

EXACT: dict[str, dict[str, Any]] = {
    "ffv1": {"codec": "ffv1", "pix_fmt": "bgr0"},
    "ffv1 of 16 bits": {"codec": "ffv1", "pix_fmt": "gbrp16le"},
    "ffv1 with alpha": {"codec": "ffv1", "pix_fmt": "bgra"},
    "qtrle": {"kind": "mov", "codec": "qtrle", "pix_fmt": "rgb24"},
    "qtrle with alpha": {"kind": "mov", "codec": "qtrle", "pix_fmt": "argb"},
    "png": {"kind": "mov", "codec": "png", "pix_fmt": "rgb24"},
    "png with alpha": {"kind": "mov", "codec": "png", "pix_fmt": "rgba"},
    "utvideo": {"kind": "avi", "codec": "utvideo", "pix_fmt": "gbrp"},
    "utvideo with alpha": {"kind": "avi", "codec": "utvideo", "pix_fmt": "gbrap"},
    "h264": {"kind": "mp4", "codec": "libx264rgb", "pix_fmt": "bgr0", "options": {"qp": "0"}},
    "apng": {"kind": "apng", "codec": "apng", "pix_fmt": "rgb24"},
    "apng with alpha": {"kind": "apng", "codec": "apng", "pix_fmt": "rgba"},
    "vp9": {"kind": "webm", "codec": "libvpx-vp9", "pix_fmt": "gbrp", "options": {"lossless": "1"}},
}


@pytest.mark.parametrize("name", EXACT)
def test_a_lossless_clip_is_what_was_written_at_any_rate(name):
    """Transparency is put on white by the plain formula, and a frame at a rate is the one shown in the middle of its time."""
    frames, rate = numbered(12), Fraction(7)
    if "alpha" in name:
        alphas = [np.random.default_rng(100 + number).integers(0, 256, (16, 32, 1), np.uint8) for number in range(12)]
        for alpha in alphas:
            alpha[0, 0] = 255  # of the pixel with the number
        painted = [np.concatenate(pair, axis=-1) for pair in zip(frames, alphas, strict=True)]
        shares = [alpha / 255 for alpha in alphas]
        shown = [frame * share + 255 * (1 - share) for frame, share in zip(frames, shares, strict=True)]
    else:
        painted, shown = frames, frames
    data = write(painted, rate=25, **EXACT[name])
    video = videos.measure(BytesIO(data))
    whole = CropBox(video.size, (0, 0, video.size.width, video.size.height))
    found = videos.take(BytesIO(data), video.timeline.take(None, 0, 12), video.size, whole)
    assert np.abs(found - np.stack(shown)).max() <= (1 if "alpha" in name else 0)
    at_seven = videos.take(BytesIO(data), video.timeline.take(rate, 0, 3), video.size, whole)
    assert numbers_of(at_seven) == [int((number + Fraction(1, 2)) / rate * 25) for number in range(3)]


@pytest.mark.slow
@pytest.mark.skipif(COMMAND is None, reason="needs FFmpeg's command: pip install imageio-ffmpeg, or apt install ffmpeg")
@pytest.mark.parametrize("name", CASES)
def test_a_clip_is_what_ffmpegs_command_makes_of_it(name, tmp_path):
    """Frame by frame, at its own rate and at another."""
    path = conformance_videos.make(CASES[name], str(COMMAND), tmp_path)
    for rate in (None, conformance_videos.RATE):
        found = conformance_videos.compared(CASES[name], str(COMMAND), path, rate)
        assert found.frames > 0
        assert found.is_equal, found


def test_the_page_has_the_table_that_the_script_prints():
    page = (ROOT / "docs/numerics.md").read_text(encoding="utf-8")
    kinds = Counter(case.kind for case in CASES.values())
    assert kinds.total() >= 60
    assert [f"| {kind} | {count} |" for kind, count in kinds.items() if f"| {kind} | {count} |" not in page] == []
