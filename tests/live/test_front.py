"""The front door: a toy trainer is run by it as Python would have run it, with the adapter in this process and in all that it starts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cachestore.core.errors import BadInput
from cachestore.live import front
from cachestore.live.arming import ADAPTERS, load_adapter
from tests import fakes

pytestmark = pytest.mark.processes

ADAPTER = """
from cachestore import live
adapter = live.Adapter("toy", tested={"toylib": ["000"]}, reads_exports=True)
@adapter.replace("toylib", "Cache.load")
def load(own, self, path): return "ours " + path
@adapter.replace("toylib", "plain")
def plain(own, x):
    import beside  # as late as a function may import
    return own(x) + 1
adapter.change("extensions.*", "np", optional=True)(lambda own: own)
"""
LIBRARY = """
def plain(x): return x
import incircle
class Cache:
    def load(self, path): return "theirs " + path
"""
SCRIPT = """
import os, sys
if "chdir" in sys.argv: os.chdir("/")
from toylib import plain, Cache
import incircle, toylib
import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor
class Mine:
    def __init__(self): self.cache = Cache()
    def __call__(self, x): return [self.cache.load("a"), plain(x), toylib.plain(x), incircle.taken(x)]
WANT = ["ours a", 2, 2, 2]
def child(): sys.exit(4 if Mine()(1) == WANT else 1)
if __name__ == "__main__":
    print(Mine()(1) == WANT, sys.argv, sys.path[0], __file__, sys.modules["__main__"].child is child)
    for kind in sys.argv[1].split(","):
        context = mp.get_context(kind)
        with context.Pool(1) as pool: print(kind, "pool", pool.map(Mine(), [1]) == [WANT])
        with ProcessPoolExecutor(1, mp_context=context) as pool: print(kind, "executor", pool.submit(Mine(), 1).result() == WANT)
        process = context.Process(target=child)
        process.start(); process.join()
        print(kind, "process", process.exitcode)
"""
PAST = """
import sys, importlib.util
spec = importlib.util.spec_from_file_location("toylib", sys.path[0] + "/toylib.py")
sys.modules["toylib"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["toylib"])
"""


@pytest.fixture
def place(tmp_path):
    """A folder with an adapter in adapters/ and a trainer in trainer/."""
    files = {"adapters/toyadapter.py": ADAPTER, "adapters/beside.py": "", "trainer/toylib.py": LIBRARY, "trainer/train.py": SCRIPT}
    files |= {
        "trainer/incircle.py": "from toylib import plain as taken\n",
        "trainer/inner/__init__.py": "",
        "trainer/inner/train.py": SCRIPT,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def start(place, *arguments, options=(), **variables):
    """A run of `python -m cachestore.live` from adapters/."""
    path = os.pathsep.join([str(fakes.ROOT), *filter(None, [variables.pop("PYTHONPATH", "")])])
    environment = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    return subprocess.Popen(
        [sys.executable, "-m", "cachestore.live", "toyadapter", "--store", str(place / "store"), *options, *map(str, arguments)],
        cwd=place / "adapters",
        env={**environment, "PYTHONPATH": path, "PYTHONSAFEPATH": "", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(place, *arguments, **more):
    """(exit code, lines of stdout, stderr)."""
    process = start(place, *arguments, **more)
    out, err = process.communicate(timeout=100)
    return process.returncode, out.splitlines(), err


def script(place, text):
    (place / "trainer" / "other.py").write_text(text)
    return "../trainer/other.py"


def last(err):
    return [line for line in err.splitlines() if line.startswith("cachestore.live: ") and ("data set" in line or "asked for" in line)]


@pytest.mark.parametrize("kinds", ["fork,spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["relative", pytest.param("chdir", marks=pytest.mark.slow), pytest.param("module", marks=pytest.mark.slow)])
def test_every_process_of_a_trainer_is_armed_before_it_runs_the_script(place, kinds, how):
    trainer = place / "trainer"
    called = {"relative": ["../trainer/train.py", kinds], "chdir": [trainer / "train.py", kinds, "chdir"]}
    code, out, err = run(place, *called.get(how, ["-m", "inner.train", kinds]), PYTHONPATH=str(trainer) if how == "module" else "")
    assert code == 0, err
    file = trainer / "inner" / "train.py" if how == "module" else trainer / "train.py"
    seen = {"relative": "../trainer/train.py"}.get(how, str(file))
    words = [seen, kinds, *(["chdir"] if how == "chdir" else [])]
    folder = place / "adapters" if how == "module" else trainer
    shown = place / "adapters" / "../trainer/train.py" if how == "relative" else file
    assert out[0] == f"True {words} {folder} {shown} True"
    assert out[1:] == [f"{kind} {end}" for kind in kinds.split(",") for end in ("pool True", "executor True", "process 4")]
    assert err.count("not in a version that this adapter was tested with") == 1  # not again in each process
    assert last(err) == ["cachestore.live: the trainer asked for no cached value"]


POOLS = """
import multiprocess, sys
from toylib import Cache
def child(x): return Cache().load(x)
if __name__ == "__main__":
    for kind in sys.argv[1:]:
        with multiprocess.get_context(kind).Pool(1) as pool: print(kind, pool.map(child, "a"))
"""


def test_a_module_whose_name_looks_like_one_of_each_adapter_is_looked_for_as_ever(place):
    code, _out, err = run(place, script(place, "import toylib, xml.spawn\n"))
    assert code == 1
    assert "ModuleNotFoundError: No module named 'xml.spawn'" in err


def test_a_folder_that_is_a_package_without_code_is_none_that_came_past_the_imports(place):
    (place / "trainer" / "extensions" / "inner").mkdir(parents=True)
    code, _out, err = run(place, script(place, "import toylib, extensions.inner\n"))
    assert code == 0
    assert "warning" not in err


@pytest.mark.slow
def test_pools_of_the_copy_of_multiprocessing_that_dill_pickles_for_are_armed(place):
    pytest.importorskip("multiprocess")
    kinds = ["fork", "spawn", "forkserver"]
    code, out, err = run(place, script(place, POOLS), *kinds)
    assert (code, out) == (0, [f"{kind} ['ours a']" for kind in kinds]), err


@pytest.mark.parametrize(
    ("ending", "code", "line"),
    [
        ("sys.exit(7)", 7, 1),
        ("sys.exit('a text')", 1, 1),
        ("raise KeyError", 1, 1),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", -signal.SIGTERM, 0),
        ("os._exit(6)", 6, 0),
        ("sys.stderr.close()", 0, 0),
        ("os.environ.update(RANK='1', WORLD_SIZE='2')", 0, 0),
        ("os.fork() or sys.exit(5); sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))", 5, 1),
    ],
)
def test_the_exit_code_is_the_scripts_and_one_line_stands_at_the_end(place, ending, code, line):
    ended, _out, err = run(place, script(place, f"import os, signal, sys, time, toylib\n{ending}\n"))
    assert (ended, len(last(err))) == (code, line), err


def test_ctrl_c_ends_it_as_it_ends_python_and_the_line_is_said(place):
    process = start(place, script(place, "import time, toylib\nprint('here', flush=True)\ntime.sleep(50)\n"))
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=50)
    assert (process.returncode, len(last(err))) == (-signal.SIGINT, 1)


def test_the_script_is_the_main_module_until_the_process_ends(place):
    text = (
        "import atexit, sys, toylib\ndef f(): pass\natexit.register(lambda: print(sys.modules['__main__'].f is f, __spec__, __package__))\n"
    )
    assert run(place, script(place, text))[1] == ["True None None"]


def test_nothing_heavy_is_imported_before_the_script_can_set_the_environment(place):
    text = "import sys\nprint([name for name in ('numpy', 'torch', 'lmdb') if name in sys.modules])\nimport toylib\n"
    assert run(place, script(place, text))[1] == ["[]"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import importlib, toylib\nimportlib.reload(toylib)\nprint(toylib.plain(1))\nassert toylib.plain(1) == 2\n", ""),
        ("import math\n", "imported nothing that the toy adapter replaces"),
        (PAST, "toylib was not loaded by an import"),
    ],
)
def test_what_was_not_armed_is_said_at_the_end(place, text, says):
    code, _out, err = run(place, script(place, text))
    assert code == 0, err
    assert ("warning" in err) == bool(says)
    assert says in err


@pytest.mark.parametrize(
    ("files", "arguments", "says"),
    [
        ({"trainer/toylib.py": "def plane(x): return x\n"}, ["../trainer/train.py", "fork"], "toylib.Cache.load is missing"),
        ({"trainer/toylib.py": LIBRARY.replace("(self, path)", "(self, path, dtype)")}, ["../trainer/train.py", "fork"], "path, dtype"),
        ({"trainer/toylib/__init__.py": "", "trainer/toylib.py": None}, ["../trainer/train.py", "fork"], "toylib.Cache.load is missing"),
        ({}, ["../trainer/toylib.py"], "has plug points itself"),
        ({"adapters/toylib.py": ""}, ["-m", "toylib"], "has plug points itself"),
        ({}, ["../trainer/nothing.py"], "no script ../trainer/nothing.py"),
        ({}, ["../trainer"], "no script ../trainer"),
        ({}, ["-m", "nothing.at.all"], "no module nothing.at.all"),
        ({"trainer/bytes.py": "\0"}, ["../trainer/bytes.py"], "not a script of Python"),
    ],
)
def test_what_cannot_be_armed_ends_with_2_and_says_why(place, files, arguments, says):
    for name, text in files.items():
        (place / name).unlink() if text is None else (place / name).parent.mkdir(exist_ok=True)
        if text is not None:
            (place / name).write_text(text)
    code, out, err = run(place, *arguments)
    assert (code, out, last(err)) == (2, [], []), err
    assert says in err


def test_what_is_to_be_read_is_looked_for_before_the_script_runs(place):
    code, out, err = run(place, "../trainer/train.py", "fork", options=["--read", "train"])
    assert (code, out) == (2, [])
    assert "there is no store" in err


def test_a_module_that_is_no_source_is_refused(place):
    import py_compile

    py_compile.compile(str(place / "trainer/toylib.py"), cfile=str(place / "trainer/toylib.pyc"))
    (place / "trainer/toylib.py").unlink()
    code, _out, err = run(place, "../trainer/train.py", "fork")
    assert code == 2
    assert "SourcelessFileLoader" in err


def test_python_finds_modules_where_it_would_have_without_us(place):
    (place / "elsewhere").mkdir()
    (place / "elsewhere/linked.py").symlink_to(place / "trainer/train.py")
    assert run(place, "../elsewhere/linked.py", "fork")[0] == 0  # the folder of the file, not of the link
    safe = run(place, "../trainer/train.py", "fork", PYTHONSAFEPATH="1", PYTHONPATH=str(place / "adapters"))
    assert "No module named 'toylib'" in safe[2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sdscripts", "--store", "s", "a.py"], "did you mean 'sd-scripts'?"),
        (["", "--store", "s", "a.py"], "there is no adapter ''"),
        ([".a", "--store", "s", "a.py"], "there is no adapter '.a'"),
        (["json", "--store", "s", "a.py"], "json has no adapter"),
        (["sd-scripts", "--store", "", "a.py"], "--store must be a path"),
        (["sd-scripts", "--store", "s3://a/b", "a.py"], "is the address"),
        (["json", "--store", "nowhere", "--read", "train", "a.py"], "json has no adapter"),
        (["sd-scripts", "a.py"], "required: --store"),
        (["sd-scripts", "--sto", "s", "a.py"], "required: --store"),
    ],
)
def test_a_wrong_command_line_ends_with_2(capsys, arguments, says):
    with pytest.raises(SystemExit) as ended:
        front.main(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_an_adapter_that_lacks_a_module_of_another_says_so(tmp_path, monkeypatch):
    (tmp_path / "lacking.py").write_text("import nowhere_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        load_adapter("lacking")
    with pytest.raises(BadInput):
        load_adapter("lacki")
    sys.modules.pop("lacking", None)


def test_the_name_of_the_data_comes_from_the_configuration_else_the_output_else_the_script(tmp_path):
    config = tmp_path / "my set.toml"
    config.write_text("")
    assert front.name_of("train", ["--dataset_config", str(config), "--output_name", "lora"]) == "my-set"
    assert front.name_of("train", [f"--dataset_config={config}"]) == "my-set"
    assert front.name_of("train", ["--config", "not-there.toml", "--output_name", "my lora"]) == "my-lora"
    assert front.name_of("train", ["--x"]) == "train"


def test_every_adapter_of_ours_has_a_trainers_folder():
    homes = [Path(fakes.ROOT, *module.split(".")[:-1]) for module in ADAPTERS.values()]
    assert all(home.is_dir() for home in homes)
