"""The lines of `docs/sources.md`, run with small models."""

import io
from importlib.util import find_spec
from typing import Any

import pytest
from PIL import Image

import cachestore as cs
from cachestore.cli import make_parser
from cachestore.cli.precompute import request_from
from cachestore.core.samples import Source
from tests.encode import tiny
from tests.pages import blocks, text_of
from tests.sources.test_tars import pack

pytestmark = pytest.mark.torch

BLOCKS = blocks(text_of("sources.md"), "python", "toml")


def picture(number):
    buffer = io.BytesIO()
    Image.new("RGB", (96, 64), (number * 20, 90, 30)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def names(tmp_path, monkeypatch):
    """What the lines suppose: sources in this folder, and a model; encoded here, as the lines about processes are tested elsewhere."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for number in range(8):
        (tmp_path / f"photos/{number}.png").write_bytes(picture(number))
        (tmp_path / f"photos/{number}.txt").write_text(f"photo {number}")
    pack(tmp_path / "faces.tar", {"a.png": picture(9), "b.png": picture(10)})
    tiny.sd15().save_pretrained(tmp_path / "path-or-id")
    real: Any = cs.precompute
    small = {"resolution": 64, "inline": True, "device": "cpu"}
    monkeypatch.setattr(cs, "precompute", lambda data, **options: real(data, **{**options, **small}))
    return {"cs": cs}


def test_the_lines_encode_and_load(names):
    assert [kind for kind, _text in BLOCKS] == ["python", "python", "toml", "python", "python"]
    path, several, _toml, memory, hub = (text for _kind, text in BLOCKS)
    exec(path, names)
    assert names["report"].complete
    exec(several.replace("resolution=256", "resolution=128"), names)
    assert len(names["data"]) == 8 + 10 * 2
    batches = list(names["loader"])
    assert {source for batch in batches for source in batch["source"]} <= {"photos", "faces"}
    assert batches
    names["pairs"] = [(picture(1), "bytes"), (Image.new("RGB", (96, 64)), "an image"), ("photos/0.png", "a path")]
    exec(memory, names)
    assert (names["report"].samples, names["report"].failed) == (3, 0)
    if find_spec("datasets") is not None:
        import datasets

        pictures = [{"bytes": picture(number), "path": None} for number in range(3)]
        made = datasets.Dataset.from_dict({"image": pictures, "text": ["x", "y", "z"]})
        names |= {"datasets": datasets, "photos_of_the_hub": made.cast_column("image", datasets.Image())}
        exec(hub, names)
        assert (names["report"].samples, names["report"].failed) == (3, 0)


def test_the_file_says_what_the_lines_say(tmp_path):
    [text] = [text for kind, text in BLOCKS if kind == "toml"]
    (tmp_path / "train.toml").write_text(text)
    request = request_from(make_parser().parse_args(["precompute", "--config", str(tmp_path / "train.toml")]))
    assert request.sources == (Source("photos/"), Source("faces.tar", name="faces", resolution=256, repeats=10))
