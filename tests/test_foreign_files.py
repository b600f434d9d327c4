"""Files that are not ours may be traps: every place that opens one refuses a fifo, an endless device and a giant, and waits for none."""

import json
import os
import socket
from contextlib import nullcontext
from pathlib import Path

import pytest

import cachestore as cs
from cachestore.cli import USAGE, main
from cachestore.cli.config import read_config
from cachestore.core.errors import BadInput, EncodeFailed, LockTimeout
from cachestore.encode.models import folders as models
from cachestore.encode.models.single_file import read_shapes
from cachestore.files.fingerprints import digest_file, fingerprint
from cachestore.files.locks import LifeLock, locked
from cachestore.sources.combined import list_path
from cachestore.sources.files import Folder
from cachestore.sources.prompts import read_prompts
from cachestore.trainers.caption_files import text_beside
from cachestore.trainers.diffusion_pipe import format as diffusion_pipe
from cachestore.trainers.export_target import NOTE, Target
from tests.fakes import tells_of
from tests.train import stores

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no fifos here")

GIANT = 1 << 41
OF_SDXL = stores.recipes(None, "sample", scaling_factor=0.13025, shift_factor=None)


def giant(path):
    path.touch()
    os.truncate(path, GIANT)


def a_socket(path):
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path must be short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


TRAPS = {
    "a fifo": os.mkfifo,
    "a link to a fifo": lambda path: (os.mkfifo(path.parent / "elsewhere"), path.symlink_to("elsewhere")),
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a giant": giant,
    "a socket": a_socket,
}


def samples_of(path):
    return list(list_path(path).samples())


def opened(path):
    with Folder(path.parent).open(path.name) as (file, _stat):
        return file.read(1)


READERS = {
    "a picture": ("a.png", lambda path: Folder(path.parent).read(path.name)),
    "a video": ("a.mp4", opened),
    "the captions of a picture": ("a.txt", lambda path: (path.with_suffix(".png").touch(), samples_of(path.parent))),
    "a manifest": ("rows.jsonl", samples_of),
    "a list of prompts": ("prompts.txt", samples_of),
    "metadata": ("metadata.jsonl", lambda path: samples_of(path.parent)),
    "metadata as CSV": ("metadata.csv", lambda path: samples_of(path.parent)),
    "a tar": ("a.tar", samples_of),
    "prompts for validation": ("prompts.json", read_prompts),
    "a configuration": ("c.toml", read_config),
    "a model's description": ("config.json", models.read_json),
    "a weight file": ("w.safetensors", read_shapes),
    "a model's file": ("w.bin", lambda path: digest_file(path, {})),
    "a file for a fingerprint": ("w.bin", lambda path: fingerprint([path])),
    "a table of diffusion-pipe": ("metadata.db", lambda path: diffusion_pipe.locations_in(path.parent, path.name)),
}


@pytest.mark.parametrize(
    ("reader", "trap"),
    # SQLite reads the parts that it needs of a giant, and finds no tables
    [(reader, trap) for reader in READERS for trap in TRAPS if (reader, trap) != ("a table of diffusion-pipe", "a giant")],
)
def test_a_trap_is_refused_at_once(tmp_path, reader, trap):
    name, read = READERS[reader]
    TRAPS[trap](tmp_path / name)
    with pytest.raises((BadInput, EncodeFailed, OSError)):
        read(tmp_path / name)


@pytest.mark.parametrize("trap", [trap for trap in TRAPS if trap != "a giant"])
def test_a_trap_beside_a_picture_is_no_caption_of_it(tmp_path, trap):
    TRAPS[trap](tmp_path / "a.txt")
    assert text_beside(Folder(tmp_path), "a.png") is None


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("name", ["a.npz", NOTE])
def test_what_stands_in_the_folder_of_an_export_is_not_read_without_end(tmp_path, name, trap):
    TRAPS[trap](tmp_path / name)
    target = Target(tmp_path, "sd-scripts", may_replace=False)
    assert target.put("a.npz", b"mine") is (name == NOTE)
    assert target.foreign == ([] if name == NOTE else ["a.npz"])
    target.close()
    assert "format" in json.loads((tmp_path / NOTE).read_bytes())


@pytest.mark.parametrize("trap", TRAPS)
def test_an_export_that_may_replace_puts_its_file_in_the_place_of_a_trap(tmp_path, trap):
    TRAPS[trap](tmp_path / "a.npz")
    assert Target(tmp_path, "sd-scripts", may_replace=True).put("a.npz", b"mine")
    assert (tmp_path / "a.npz").read_bytes() == b"mine"
    assert not (tmp_path / "a.npz").is_symlink()


@pytest.mark.parametrize("trap", ["a fifo", "an endless device"])
def test_an_export_ends_where_a_trap_stands_under_a_name_that_it_writes(tmp_path, trap):
    store, out = stores.make_store(tmp_path / "store", [stores.Row("a.png")], OF_SDXL), tmp_path / "out"
    assert cs.export_cache(store, format="sd-scripts", folder=out).written == 1
    (written,) = out.glob("*.npz")
    written.unlink()
    TRAPS[trap](written)
    assert cs.export_cache(store, format="sd-scripts", folder=out).foreign == (written.name,)
    assert cs.export_cache(store, format="sd-scripts", folder=out, replace=True).written == 1


@pytest.mark.parametrize("trap", ["a fifo", "an endless device"])
def test_a_configuration_that_is_no_file_is_one_sentence(tmp_path, capsys, trap):
    TRAPS[trap](tmp_path / "c.toml")
    assert main(["precompute", "--config", str(tmp_path / "c.toml")]) == USAGE
    assert "not a regular file" in capsys.readouterr().err


def test_a_fifo_in_the_place_of_a_lock_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(LockTimeout), locked(tmp_path / "lock", seconds=0.01), locked(tmp_path / "lock", seconds=0.01):
        pass
    LifeLock(tmp_path / "lock").release()


def test_a_line_without_an_end_is_refused_before_it_is_in_memory(tmp_path):
    giant_line = tmp_path / "rows.jsonl"
    giant_line.write_bytes(b'{"caption": "')
    os.truncate(giant_line, 20 << 20)
    with pytest.raises(BadInput, check=tells_of("rows.jsonl, line 1", "16 MiB")):
        samples_of(giant_line)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 5000, '{"caption": ' + "9" * 5000 + "}"])
def test_json_that_is_nested_too_deep_or_has_an_endless_number_is_an_error_of_its_line(tmp_path, text):
    (tmp_path / "rows.jsonl").write_text(text + "\n")
    with pytest.raises(BadInput, check=tells_of("rows.jsonl, line 1")):
        samples_of(tmp_path / "rows.jsonl")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BadInput, check=tells_of(tmp_path / "config.json")):
        models.read_json(tmp_path / "config.json")
    (tmp_path / "prompts.json").write_text(text)
    with pytest.raises(BadInput, check=tells_of(tmp_path / "prompts.json")):
        read_prompts(tmp_path / "prompts.json")


def test_toml_that_is_nested_too_deep_is_one_sentence(tmp_path):
    (tmp_path / "c.toml").write_text("a = " + "[" * 100_000)
    with pytest.raises(BadInput, check=tells_of(tmp_path / "c.toml")):
        read_config(tmp_path / "c.toml")


def test_a_field_of_a_csv_that_is_too_long_is_an_error_of_its_line(tmp_path):
    (tmp_path / "metadata.csv").write_text("file_name,caption\na.png," + "x" * (1 << 20) + "\n")
    with pytest.raises(BadInput, check=tells_of("metadata.csv, line 2")):
        samples_of(tmp_path)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["cachestore.json", "segments", "index", "catalogs", "recipes", "plans", "listings", "marked"])
def test_a_fifo_in_the_place_of_anything_in_a_store_is_not_waited_for(tmp_path, name):
    store = stores.make_store(tmp_path / "store", [stores.Row("a.png")], OF_SDXL)
    where = store / name
    inner = [path for path in where.rglob("*") if path.is_file()] if where.is_dir() else [where]
    for path in inner or [where]:
        path.unlink() if path.exists() else path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)
    for command in (["ls"], ["verify"], ["stats"], ["status"], ["gc"], ["ls", "--samples"]):
        assert main([command[0], str(store), *command[1:]]) in range(11)
    with pytest.raises(cs.CacheStoreError) if name in {"cachestore.json", "segments", "catalogs"} else nullcontext():
        cs.CachedDataset(store)[0]
