"""push and pull over obstore: through `file://` in every run; in slow ones through SeaweedFS, a real S3 server, and Azurite for Azure."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import cachestore as cs
from cachestore.cli import ERROR, NO_STORE, OK, main
from cachestore.files.paths import Layout, Mode
from cachestore.store.read.snapshot import open_layout
from tests.fakes import ROOT, asks_for, tells_of
from tests.remote.copies import files_of, make, wrong_in
from tests.remote.servers import azurite, seaweed

pytest.importorskip("obstore", reason="the extra [objects] is not installed")
pytestmark = pytest.mark.processes


def test_a_folder_can_be_pushed_to_and_pulled_from(root, tmp_path):
    make(root, [1, 2], [3])
    address = f"file://{tmp_path}/there"
    assert cs.push(root, address, name="train").generations == {"train": (2,)}
    assert cs.push(root, address).files == 1
    assert cs.push(root, address, check=True).files == 0
    pulled = cs.pull(address, tmp_path / "pulled")
    assert (pulled.files, pulled.skipped) == (5, 0)
    assert files_of(tmp_path / "pulled") == files_of(root)
    assert wrong_in(tmp_path / "pulled") == wrong_in(tmp_path / "there") == []


def test_the_commands_print_what_moved(root, tmp_path, capsys):
    make(root, [1, 2], [3])
    address = f"file://{tmp_path}/there"
    assert main(["push", str(root), address, "--dry-run"]) == OK
    assert "5 files with" in (out := capsys.readouterr().out)
    assert "would be sent, with 5 requests; 0 files are there already" in out
    assert not (tmp_path / "there").exists()
    assert main(["push", str(root), address]) == OK
    assert "0 files were there already\ntrain: generation 1, 2\n" in capsys.readouterr().out
    assert main(["ls", address]) == OK
    assert capsys.readouterr().out.startswith("train  generation 1  2 samples  catalog ")
    assert main(["pull", address, str(tmp_path / "pulled"), "--name", "train", "--generation", "1"]) == OK
    assert "train: generation 1\n" in capsys.readouterr().out
    assert main(["pull", f"file://{tmp_path}/nothing", str(tmp_path / "new")]) == NO_STORE
    assert main(["ls", address, "--keys"]) == ERROR


def test_stats_of_an_address_are_those_of_the_folder(root, capsys):
    make(root, [1, 2], [3])
    address, printed = f"file://{root}", []
    for store in (root, address):
        assert main(["stats", str(store), "--json"]) == OK
        printed.append(json.loads(capsys.readouterr().out))
        printed[-1]["recipes"].sort()
    assert printed[0] == printed[1]
    assert printed[0]["catalogs"][0]["samples"] == 3
    assert main(["stats", address, "--name", "trian"]) == ERROR
    assert "did you mean 'train'" in capsys.readouterr().err


def test_a_store_that_pull_makes_is_the_groups_if_that_is_asked_for(root, tmp_path, capsys):
    make(root, [1])
    assert main(["push", str(root), f"file://{tmp_path}/there"]) == OK
    assert main(["pull", f"file://{tmp_path}/there", str(tmp_path / "pulled"), "--access", "group"]) == OK
    assert "is shared with the group" in capsys.readouterr().out
    assert open_layout(Layout(tmp_path / "pulled")).mode is Mode.GROUP
    assert main(["pull", f"file://{tmp_path}/there", str(tmp_path / "pulled"), "--access", "private"]) == ERROR


def test_ctrl_c_ends_with_130_and_says_that_it_can_go_on(root, tmp_path, capsys, monkeypatch):
    make(root, [1])

    def interrupted(*_given, **_named):
        raise KeyboardInterrupt

    monkeypatch.setattr("cachestore.remote.push.call_helper", interrupted)
    assert main(["push", str(root), f"file://{tmp_path}/there"]) == 130
    assert f"push {root} file://{tmp_path}/there" in capsys.readouterr().err


def test_a_bar_is_drawn_on_a_terminal_and_gone_afterwards(root, tmp_path, capsys):
    make(root, [1])
    assert main(["push", str(root), f"file://{tmp_path}/there", "--progress", "bar"]) == OK
    reported = capsys.readouterr()
    assert reported.out.endswith("train: generation 1\n")
    assert "listing what is there" in reported.err


def test_without_the_extra_one_line_names_it(root, tmp_path):
    make(root, [1])
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['obstore'] = None\n")
    surroundings = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "cachestore", "push", str(root), "s3://bucket/cache"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, env=surroundings)
    assert (ended.returncode, ended.stdout) == (ERROR, "")
    assert ended.stderr.splitlines()[1:] == [
        "cachestore: obstore is not installed. The extra [objects] brings it: run `pip install '.[objects]'` in a clone of cachestore"
    ]


# Real servers


@pytest.fixture(scope="module")
def weed(tmp_path_factory):
    with seaweed(tmp_path_factory.mktemp("weed")) as variables:
        yield variables


@pytest.fixture
def keys(weed, monkeypatch):
    for name, value in weed.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def azure(tmp_path_factory, monkeypatch):
    """The address of a new folder in Azurite."""
    with azurite(tmp_path_factory.mktemp("azurite")) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield "az://container/a/cache"


def there_and_back(root, address, pulled, capsys):
    """Everything that push, pull and ls do at an address where nothing is."""
    make(root, [1, 2], [3])
    with cs.open(root, mode="a") as store:
        store.put(cs.key("large"), {"x": np.arange(3 << 20, dtype=np.int64)})
        store.commit()
    assert cs.push(root, address, name="train", generation=1).files == 3
    assert cs.push(root, address).requests == 6 + 1 + 1  # four pieces of 8 MiB and two around them
    assert cs.push(root, address, check=True).files == 0
    assert cs.pull(address, pulled, check=True).files == 6
    assert files_of(pulled) == files_of(root)
    assert wrong_in(pulled) == []
    assert main(["ls", address]) == OK
    assert "train  generation 2  3 samples" in capsys.readouterr().out
    other = make(root.parent / "other", [9])
    with pytest.raises(cs.BadInput, check=asks_for("name")):
        cs.push(other.root, address)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("keys")
def test_a_store_goes_through_seaweedfs_and_back(root, tmp_path, capsys):
    there_and_back(root, "s3://bucket/a/cache", tmp_path / "pulled", capsys)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_store_goes_through_azurite_and_back(root, tmp_path, capsys, azure):
    there_and_back(root, azure, tmp_path / "pulled", capsys)
    with pytest.raises(cs.RemoteFailed, check=tells_of("'nothing'")):
        cs.push(root, "az://nothing/cache")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("keys")
def test_seaweedfs_refuses_a_wrong_key_and_a_missing_bucket_with_a_sentence(root, monkeypatch):
    make(root, [1])
    with pytest.raises(cs.RemoteFailed, check=tells_of("'nothing'")):
        cs.push(root, "s3://nothing/cache")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(cs.RemoteFailed, check=tells_of("403 SignatureDoesNotMatch")):
        cs.push(root, "s3://bucket/cache")


def won_by_four(address):
    """How many of four processes that create the same objects at once created each of them."""
    program = """
import sys
from cachestore.remote.address import parse_address
from cachestore.remote.client import Client
client = Client(parse_address("address", sys.argv[1]))
print([client.put_new(f"claims/{n}", sys.argv[2].encode()) for n in range(20)])
"""
    command = [sys.executable, "-c", program, address]
    running = [subprocess.Popen([*command, str(n)], stdout=subprocess.PIPE, text=True, cwd=ROOT) for n in range(4)]
    won = [eval(process.communicate(timeout=120)[0]) for process in running]
    return [sum(row) for row in zip(*won, strict=True)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("keys")
def test_of_several_processes_that_create_one_object_in_seaweedfs_one_wins():
    assert won_by_four("s3://bucket/race") == [1] * 20


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_of_several_processes_that_create_one_object_in_azurite_one_wins(azure):
    assert won_by_four(azure) == [1] * 20
