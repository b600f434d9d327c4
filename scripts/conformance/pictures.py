#!/usr/bin/env python3
"""Compare the pixels of 300 drawn pictures with those that formulas give, and print the table of docs/numerics.md.

    python3 scripts/conformance/pictures.py [--ffmpeg PATH]

With ffmpeg, files of lossy formats are decoded by it in place of Pillow (JPEG, AVIF), and lossless ones are compared with it as well.
"""

import argparse
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from cachestore.encode.pictures.images import decode
from tests.encode import drawn_pictures


class Ffmpeg:
    """Decodes a picture by ffmpeg's command: no profile, no turning."""

    def __init__(self, command: str, folder: Path) -> None:
        self.command, self.path = command, folder / "picture"

    def __call__(self, data: bytes, channels: int) -> np.ndarray:
        """Return the samples: float [height, width, channels], 0..255."""
        if data[4:12] == b"ftypavif" and channels == 4:  # its alpha is a second stream for ffmpeg
            return drawn_pictures.by_pillow_raw(data)
        self.path.write_bytes(data)
        kind = {1: "gray", 3: "rgb24", 4: "rgba"}[channels]
        scale = ["-vf", "scale=flags=accurate_rnd+full_chroma_int+full_chroma_inp"]
        how = ["-v", "error", "-noautorotate", "-i", str(self.path), "-frames:v", "1", *scale, "-f", "rawvideo", "-pix_fmt", kind, "-"]
        made = subprocess.run([self.command, *how], check=True, stdout=subprocess.PIPE).stdout
        shape = drawn_pictures.HEIGHT, drawn_pictures.WIDTH, channels
        return np.frombuffer(made, np.uint8).reshape(shape).astype(float)


def main() -> None:
    """Print a row for each group: how many pictures, the largest difference, and the median of their largest ones."""
    parser = argparse.ArgumentParser(description="Compare the pixels of drawn pictures with those that formulas give.")
    parser.add_argument("--ffmpeg", help="its command; by default lossy files are decoded by Pillow, without any conversion")
    command, found = parser.parse_args().ffmpeg, defaultdict(list)
    with TemporaryDirectory() as folder:
        for drawn in drawn_pictures.draw(Ffmpeg(command, Path(folder))) if command else drawn_pictures.draw():
            found[drawn.group].append(np.abs(np.asarray(decode(drawn.data)).astype(float) - drawn.expected).max())
    print("| pictures | number | largest | median |\n|---|---|---|---|")
    for group, values in sorted(found.items()):
        print(f"| {group} | {len(values)} | {max(values):.1f} | {np.median(values):.1f} |")
    print(f"| all | {sum(map(len, found.values()))} | | |")


if __name__ == "__main__":
    main()
