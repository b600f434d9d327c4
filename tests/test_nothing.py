"""Empty, missing and misspelt input: every row of the table in nothing.md is run, and ends as the table says.

A row has what is wrong with the input, the call, what it ends with, and how its sentence begins. A call is a command, or Python in which
these are known: `cs`, `store` and `bare` (open stores), `data` and `none` (data sets, the latter without a sample) and `encode`. In the
folder in which it runs there are the stores `store/` and `trained/` (each with a data set `train` of three samples), `own/` (without a
data set) and `bare/` (without an entry), the folders `empty/`, `foreign/` (a file of somebody else's), `pictures/` and `clips/` (a
video), and FILES. `nowhere` is not there.
"""

import io
import os
import re
import shlex
import shutil
import tarfile
from contextlib import redirect_stderr, redirect_stdout

import pytest

import cachestore as cs
from cachestore.cli import COMMANDS, main
from cachestore.core.errors import CacheStoreError
from cachestore.jobs.plan import planning as request
from cachestore.store.write.commit import create_store
from tests import fakes
from tests.fakes import encode
from tests.test_public import RESULTS, is_error
from tests.train.stores import Row, make_store, recipes

PAGE = fakes.ROOT / "tests" / "nothing.md"
KINDS = {"empty", "missing", "misspelt", "foreign"}
FILES = {
    "foreign/notes.txt": "somebody else's",
    "clips/a.mp4": "a video",
    "nothing.jsonl": "\n",
    "nothing.txt": "\n \n",
    "prompts.txt": "a cat\na dog\n",
    "misspelt.jsonl": '{"image": "pictures/00.png", "captoin": "a cat"}\n',
    "neither.jsonl": '{"imgae": "pictures/00.png", "captoin": "a cat"}\n',
    "pictureless.jsonl": '{"imgae": "pictures/00.png", "caption": "a cat"}\n',
    "both.jsonl": '{"image": "pictures/00.png", "caption": "a cat", "text": "a dog"}\n',
    "table.csv": "a,b\n",
    "table.xlsx": "a,b\n",
    "none/metadata.csv": "file_name,text\n",
    "nothing.toml": "",
    "misspelt.toml": 'modle = "model"\n',
}


def rows():
    """(kind, call, end, sentence) of the table."""
    table = PAGE.read_text(encoding="utf-8")
    found = [re.split(r"(?<!\\) ?\| ?", line.strip())[1:-1] for line in table.splitlines() if re.match(r"\| \w+ \| `", line)]
    return [(kind, call.strip("`"), end.strip("`"), says.strip("`")) for kind, call, end, says in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder that rows are run in."""
    root = tmp_path_factory.mktemp("nothing")
    for name, text in FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    (root / "empty").mkdir()
    tarfile.open(root / "nothing.tar", "w").close()
    fakes.captioned(root / "pictures", 3)
    create_store(root / "bare")
    with cs.open(root / "own", mode="a") as store:
        cs.fill(store, [(cs.key("own"), 1)], encode)
    make_store(root / "trained", [Row(f"{number}.png") for number in range(3)], recipes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request, "make_encoders", fakes.Makers())
        fakes.work_here(patch)
        patch.chdir(root)
        assert call_command("cachestore precompute pictures --model model --store store --quiet")[0] == "0"
    return root


def call_command(call):
    """(exit code, what was printed) of a command."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(shlex.split(call)[1:])
        except SystemExit as ended:
            code = ended.code
    reported = err.getvalue().strip() if code else (out.getvalue().strip() or err.getvalue().strip())
    lines = [line for line in reported.splitlines() if not line.startswith(("usage:", " "))]
    return str(code), (lines or [""])[0] if code in {0, 3, 4} else (lines or [""])[-1]


def call_python(call):
    """(class of the error, or the value; its sentence) of a call."""
    with cs.open("store", mode="a") as store, cs.open("bare", mode="a") as bare:
        data, closed = cs.CachedDataset("trained"), cs.open("own", mode="a")
        closed.close()
        names = {"cs": cs, "store": store, "bare": bare, "closed": closed, "encode": encode, "data": data, "none": data.select([])}
        try:
            return repr(eval(call, names)), ""
        except (CacheStoreError, AttributeError) as error:
            return type(error).__name__, str(error)


def outcome(call):
    end, reported = call_command(call) if call.startswith("cachestore") else call_python(call)
    cwd = os.getcwd()
    return end, re.sub(r"^cachestore( \S+)?: (error: )?", "", reported).replace(f"{cwd}/", "").replace(cwd, ".").replace("|", "\\|")


def differs(call, end, says):
    """How a call ends, if that is not what a row says."""
    ended, reported = outcome(call)
    return "" if ended == end and reported.startswith(says) else f"{ended}: {reported}"


@pytest.fixture
def _here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    makers, real = fakes.Makers(), request.make_encoders
    monkeypatch.setattr(
        request, "make_encoders", lambda layout, asked, **how: (makers if asked.model == "model" else real)(layout, asked, **how)
    )
    fakes.work_here(monkeypatch)


@pytest.mark.torch
@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(("kind", "call", "end", "says"), rows(), ids=lambda value: value)
def test_a_row_of_the_table_ends_as_it_says(kind, call, end, says):
    assert kind in KINDS
    assert differs(call, end, says) == ""
    made = [name for name in os.listdir() if name.startswith(("new", "nowhere"))]
    for name in made:
        shutil.rmtree(name)  # so that this row alone fails
    assert made == []


@pytest.mark.torch
@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("row", [("10", "there is a store"), ("0", "there is no store"), ("1", "")])
def test_a_row_that_is_wrong_is_found(row):
    assert differs("cachestore verify nowhere", "10", "there is no store at nowhere") == ""
    assert differs("cachestore verify nowhere", *row).startswith("10: there is no store at nowhere")


@pytest.mark.torch
def test_every_command_and_every_public_call_has_its_rows():
    table = rows()
    for command in COMMANDS:
        kinds = {kind for kind, call, _end, _says in table if call.split()[:2] == ["cachestore", command]}
        assert kinds == KINDS, command
    for name in set(cs.__all__) - {*RESULTS, "ExportedFiles", "Finding", "ModelReadThrough", "Store"} - set(filter(is_error, cs.__all__)):
        assert [call for _kind, call, _end, _says in table if f"cs.{name}(" in call or f"cs.{name}." in call], name
    assert len(table) == len({call for _kind, call, _end, _says in table})


def test_only_what_is_empty_may_end_well():
    ends = {call: end for kind, call, end, _says in rows() if kind != "empty"}
    well = [call for call, end in ends.items() if end == "0" or not (end.isdigit() or issubclass(getattr(cs, end, int), Exception))]
    assert well == ['cs.ReadThrough(store, on_miss="skip")([(cs.key("nowhere"), 1)])', 'cs.opne("store")']
