"""What an adapter replaces, and what it refuses by name."""

import importlib
import sys
from textwrap import dedent

import pytest

from cachestore.live.adapter import Adapter, Refused

SOURCE = """
import functools, math
tool = math
OLD = "old"
LIMIT = None
def load(path, device="cpu"): return ["theirs", path, device]
def decorated(function):
    @functools.wraps(function)
    def inner(*args): return function(*args)
    return inner
wrapped = decorated(load)
class Base:
    def inherited(self): return "theirs"
class Cache(Base):
    def load(self, path): return ["theirs", path]
    @property
    def size(self): return 1
    @classmethod
    def make(cls, x): return [cls.__name__, x]
    @staticmethod
    def still(x): return x
    @functools.cached_property
    def lazy(self): return 1
    part = functools.partial(int, base=2)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of a trainer's modules. They are forgotten afterwards."""
    before = {*sys.modules}
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "toylib.py").write_text(SOURCE)
    yield tmp_path
    for name in {*sys.modules} - before:
        del sys.modules[name]


@pytest.fixture
def toylib(folder):
    return importlib.import_module("toylib")


def test_functions_methods_properties_and_variables_are_replaced_and_get_the_trainers_own(toylib):
    adapter = Adapter("toy")
    adapter.replace("toylib", "load")(lambda own, path, device: ["ours", *own(path, device)])
    adapter.replace("toylib", "Cache.load")(lambda own, self, path: ["ours", *own(self, path)])
    adapter.replace("toylib", "Cache.size")(lambda own, self: own(self) + 10)
    adapter.replace("toylib", "Cache.make")(lambda own, cls, x: ["ours", *own(cls, x)])
    adapter.replace("toylib", "Cache.still")(lambda own, *args, **kwargs: ["ours", own(*args, **kwargs)])
    adapter.change("toylib", "OLD")(lambda old: f"{old} and new")
    adapter.change("toylib", "LIMIT")(lambda old: (old, 1))
    adapter.plug_into(toylib)
    cache = toylib.Cache()
    assert toylib.load("a") == ["ours", "theirs", "a", "cpu"]  # the trainer's default, which ours does not have
    assert toylib.load(device="b", path="a") == ["ours", "theirs", "a", "b"]
    assert (cache.load("a"), cache.size) == (["ours", "theirs", "a"], 11)
    assert (toylib.Cache.make(1), cache.still(x=2)) == (["ours", "Cache", 1], ["ours", 2])
    assert (toylib.OLD, toylib.LIMIT) == ("old and new", (None, 1))


def test_a_second_time_nothing_is_replaced_again(toylib):
    adapter = Adapter("toy")
    adapter.replace("toylib", "load")(lambda own, path, device: ["ours", *own(path, device)])
    adapter.plug_into(toylib)
    adapter.plug_into(toylib)
    assert toylib.load("a", "b") == ["ours", "theirs", "a", "b"]


def test_a_function_that_a_decorator_of_the_trainer_marked_as_ours_is_replaced_too(toylib):
    adapter = Adapter("toy")
    adapter.replace("toylib", "load")(lambda own, path, device: "ours")
    adapter.plug_into(toylib)
    toylib.wrapped = toylib.decorated(toylib.load)
    adapter.replace("toylib", "wrapped")(lambda own, path, device: "ours too")
    adapter.plug_into(toylib)
    assert toylib.wrapped("a") == "ours too"


def test_a_name_that_another_module_took_before_becomes_ours_and_one_of_a_library_does_not(folder, toylib):
    (folder / "toyuser.py").write_text("from toylib import load as mine, math\n")
    toyuser = importlib.import_module("toyuser")
    toylib.sqrt = toylib.math.sqrt
    adapter = Adapter("toy")
    adapter.replace("toylib", "load")(lambda own, path, device: "ours")
    adapter.replace("toylib", "sqrt")(lambda own, *args, **kwargs: "ours")
    adapter.plug_into(toylib)
    assert toyuser.mine("a", "b") == "ours"
    assert (toylib.sqrt(4), toylib.math.sqrt(4)) == ("ours", 2)


@pytest.mark.parametrize(
    ("name", "new", "says"),
    [
        ("lode", lambda own, path, device: 0, "'load'"),
        ("Cash.load", lambda own, self, path: 0, "is missing"),
        ("Cache.lode", lambda own, self, path: 0, "'load'"),
        ("Cache.inherited", lambda own, self: 0, "toylib.Base"),
        ("load", lambda own, path: 0, "(path, device), not (path)"),
        ("load", lambda own, device, path: 0, "(path, device), not (device, path)"),
        ("load", lambda own, path, device="cuda": 0, "default for device: 'cpu'"),
        ("Cache.lazy", lambda own, self: 0, "cached_property"),
        ("Cache.part", lambda own, text: 0, "partial"),
        ("Cache", lambda own, *args, **kwargs: 0, "type"),
        ("OLD", lambda own: 0, "str"),
        ("OLD.upper", lambda own, self: 0, "is missing"),
    ],
)
def test_a_plug_point_that_does_not_fit_is_refused_by_name_and_nothing_is_changed(toylib, capsys, name, new, says):
    adapter, before = Adapter("toy"), dict(vars(toylib))
    adapter.replace("toylib", name)(new)
    with pytest.raises(Refused) as refused:
        adapter.plug_into(toylib)
    assert refused.value.code == 2
    assert f"toylib.{name} " in capsys.readouterr().err
    assert says in str(refused.value)
    assert dict(vars(toylib)) == before


def test_a_variable_that_is_not_there_is_refused_and_an_optional_point_is_not(toylib):
    adapter = Adapter("toy")
    adapter.replace("toylib", "nothing", optional=True)(lambda own: 0)
    adapter.change("toylib", "nothing", optional=True)(lambda old: 0)
    adapter.plug_into(toylib)
    adapter.change("toylib", "nothing")(lambda old: 0)
    with pytest.raises(Refused):
        adapter.plug_into(toylib)


def test_what_stands_in_the_main_script_cannot_be_a_plug_point():
    with pytest.raises(ValueError):
        Adapter("toy").replace("__main__", "load")


def test_an_adapter_tells_which_modules_concern_it():
    adapter = Adapter("toy")
    adapter.replace("lib.cache", "load")(lambda own: 0)
    adapter.replace("lib.kind_*", "load")(lambda own: 0)
    names = ("lib.cache", "lib.kind_sd", "cache", "other.cache", "kind_sd", "lib", "lib.caches")
    assert [name for name in names if adapter.concerns(name)] == ["lib.cache", "lib.kind_sd"]
    assert [name for name in names if adapter.may_concern(name)] == ["lib.cache", "lib.kind_sd", "cache", "other.cache", "kind_sd"]
    assert adapter.lies_at("/x/lib/cache.py") == ["lib.cache"]
    assert adapter.lies_at("/x/lib/cache/__init__.py") == ["lib.cache"]
    assert adapter.lies_at("/x/lib/kind_sd.py") == ["lib.kind_*"]
    assert adapter.lies_at("/x/cache.py") == []


def test_a_module_under_another_name_or_under_two_is_refused():
    adapter = Adapter("toy")
    adapter.replace("lib.cache", "load")(lambda own: 0)
    adapter.check_name("other.cache", "/x/other/cache.py")
    adapter.check_name("lib.cache", "/x/lib/cache.py")
    adapter.check_name("lib.cache", "/x/lib/cache.py")
    with pytest.raises(Refused, match="as cache"):
        adapter.check_name("cache", "/y/lib/cache.py")
    with pytest.raises(Refused, match=r"as lib\.cache and as all\.lib\.cache"):
        adapter.check_name("all.lib.cache", "/x/lib/cache.py")


def test_only_sources_that_were_tested_are_known(folder, toylib):
    assert Adapter("toy").version(toylib) is None
    digest = Adapter("toy", tested={"toylib": ["0" * 12]}).version(toylib) or ""
    assert len(digest) == 12
    assert Adapter("toy", tested={"toylib": [digest]}).version(toylib) is None
    (folder / "toylib.py").write_text(dedent(SOURCE) + "\n")
    assert Adapter("toy", tested={"toylib": [digest]}).version(toylib) not in {None, digest}
