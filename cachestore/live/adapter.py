"""What an adapter says: which functions of a trainer's modules it replaces, and by what. Plug points are put in as modules are imported."""

import hashlib
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import wraps
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any, Final, NoReturn

from cachestore.core.words import did_you_mean
from cachestore.files.opening import read_foreign

USAGE: Final = 2
DIGITS: Final = 12
_MARK: Final = "_cachestore_live"
"""The attribute of a function of ours with its plug point: a decorator of the trainer's copies it to functions that are not replaced."""
_MISSING: Final = object()
_WRAPPERS: Final[tuple[Any, ...]] = (staticmethod, classmethod)


class Refused(SystemExit):
    """The trainer cannot run with the store: a plug point is not there, or the self-test failed. Ends the process with exit code 2.

    It is a SystemExit so that a trainer's own `except Exception` does not hide it.
    """

    def __init__(self, text: str) -> None:
        """Say on stderr what does not fit, as a worker of a DataLoader has no other way to tell."""
        super().__init__(USAGE)
        self.text = text
        print(f"cachestore.live: error: {text}", file=sys.stderr, flush=True)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class PlugPoint:
    """One function, method or global variable of a trainer that is replaced."""

    module: str
    """A module's dotted name, or a pattern with `*`."""
    name: str
    """`function`, `Class.method` or the name of a global variable."""
    new: Callable[..., Any]
    is_call: bool
    """Whether `new` takes the place of a function, whose parameters are compared."""
    is_optional: bool


class Adapter:
    """How one trainer meets the store. A module with an adapter has it as its global variable `adapter`.

    adapter = Adapter("my-trainer", tested={"my_trainer.cache": ["0a1b2c3d4e5f"]})

    @adapter.replace("my_trainer.cache", "Cache.load")
    def load(own, self, path):
        ...  # `own` is the trainer's function
    """

    def __init__(
        self, name: str, *, tested: Mapping[str, Collection[str]] | None = None, data_set: str = "", reads_exports: bool = False
    ) -> None:
        """`tested`: by module, the first 12 digits of the SHA-256 of its source in the checkouts that the adapter was tested with.

        `data_set`: what stands for the configuration's name in the name of the data set, if all configurations share their values.
        `reads_exports`: whether it can read a data set of `precompute` (`live.current().exported`): else `--read` is refused.
        """
        self.name, self.data_set, self.reads_exports = name, data_set, reads_exports
        self.tested = dict(tested or {})
        self.points: list[PlugPoint] = []
        self.plugged: set[str] = set()
        """The modules of this process that were plugged into."""
        self._names: set[str] = set()
        self._patterns: set[str] = set()
        self._last: set[str] = set()
        self._last_patterns: set[str] = set()
        self._seen: dict[str, str] = {}

    def replace(self, module: str, name: str, *, optional: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Replace a function, method or property: the decorated one gets the trainer's own first, then what the trainer passes.

        Its parameters after the first must have the names of the trainer's, in their order, and defaults equal to theirs or none; a
        function that ends in `*args, **kwargs` takes any. With `optional` a module may lack it.
        """
        return self._add(module, name, is_call=True, is_optional=optional)

    def change(self, module: str, name: str, *, optional: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Change a global variable of a module, such as `np` or `load_file`: the decorated function gets it and returns the new one."""
        return self._add(module, name, is_call=False, is_optional=optional)

    def _add(self, module: str, name: str, *, is_call: bool, is_optional: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        if module == "__main__":
            raise ValueError("a script has run when it could be changed: replace what is in the modules that it imports")

        def keep(new: Callable[..., Any]) -> Callable[..., Any]:
            self.points.append(PlugPoint(module, name, new, is_call, is_optional))
            last = module.rpartition(".")[2]
            (self._patterns if "*" in module else self._names).add(module)
            (self._last_patterns if "*" in last else self._last).add(last)
            return new

        return keep

    def concerns(self, module: str) -> bool:
        """Whether a module has plug points."""
        return module in self._names or any(fnmatchcase(module, pattern) for pattern in self._patterns)

    def needs(self, module: str) -> bool:
        """Whether a module has plug points that it must not lack."""
        return any(fnmatchcase(module, point.module) and not point.is_optional for point in self.points)

    def may_concern(self, module: str) -> bool:
        """Whether a module's last name is that of one with plug points. It is asked for every module that the process imports."""
        last = module.rpartition(".")[2]
        return last in self._last or any(fnmatchcase(last, pattern) for pattern in self._last_patterns)

    def check_name(self, module: str, file: str) -> None:
        """Raise Refused if a file with plug points is imported under another name than theirs, where nothing would be replaced."""
        before = self._seen.setdefault(file, module)
        if before != module and (self.concerns(module) or self.concerns(before)):
            refuse(f"{file} is imported twice, as {before} and as {module}, and the {self.name} adapter replaces what is in one of them")
        if self.concerns(module):
            return
        for pattern in self.lies_at(file):
            tails = [pattern.split(".", count)[-1] for count in range(1, pattern.count(".") + 1)]
            if any(fnmatchcase(module, tail) for tail in tails):
                refuse(f"{file} is imported as {module}, and the {self.name} adapter replaces what is in {pattern}")

    def lies_at(self, file: str) -> list[str]:
        """Return those of its modules' names that a file could have, from its path."""
        path = PurePath(file).with_suffix("").as_posix().removesuffix("/__init__")
        return [pattern for pattern in (*self._names, *self._patterns) if fnmatchcase(path, f"*/{pattern.replace('.', '/')}")]

    def plug_into(self, module: ModuleType) -> None:
        """Put in what this adapter replaces in a module. Raises Refused, naming the plug point that is not as it should be."""
        for point in self.points:
            if fnmatchcase(module.__name__, point.module):
                trouble = plug(module, point)
                if trouble is not None:
                    refuse(f"{module.__name__}.{point.name} {trouble}; the {self.name} adapter replaces it", module)
        self.plugged.add(module.__name__)

    def version(self, module: ModuleType) -> str | None:
        """Return the first 12 digits of the SHA-256 of a module's source if the adapter was not tested with it; None if it was."""
        known, file = self.tested.get(module.__name__), getattr(module, "__file__", None)
        if not known or not file:
            return None
        digest = hashlib.sha256(read_foreign(Path(file))).hexdigest()[:DIGITS]
        return None if digest in known else digest


def trouble_of(module: ModuleType, point: PlugPoint) -> str | None:
    """Return why a plug point of a module cannot be put in, as the end of a sentence; None if it can, or is one that may be missing."""
    holder, last = _holder(module, point)
    own = _own(holder, last)
    if own is _MISSING:
        return None if point.is_optional else f"is missing{_where_else(holder, last)}"
    function = _function_of(own)
    if not point.is_call or getattr(function, _MARK, None) is point:
        return None
    if not callable(function) or isinstance(own, type) or (isinstance(holder, type) and not hasattr(own, "__get__")):
        return f"is a {type(own).__name__}, and only functions, methods and properties are replaced"
    return _other_parameters(function, point.new)


def _other_parameters(function: Any, new: Any) -> str | None:
    try:
        theirs, ours = (dict(inspect.signature(one).parameters) for one in (function, new))
    except (TypeError, ValueError):
        return "does not tell its parameters"
    del ours[next(iter(ours))]
    if [*ours][-2:] == ["args", "kwargs"]:
        return None
    if [*theirs] != [*ours]:
        return f"takes ({', '.join(theirs)}), not ({', '.join(ours)})"
    # A default of ours would be taken where the trainer leaves an argument out.
    others = [name for name, one in ours.items() if one.default is not one.empty and not _same(one.default, theirs[name].default)]
    return f"has another default for {others[0]}: {theirs[others[0]].default!r}" if others else None


def _with_their_defaults(function: Any, new: Any) -> inspect.Signature | None:
    # Where ours has no default and the trainer's has, the trainer's is handed on.
    ours = inspect.signature(new).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in ours):
        return None
    theirs, needed = inspect.signature(function), {one.name for one in ours if one.default is one.empty}
    return theirs if any(one.default is not one.empty and one.name in needed for one in theirs.parameters.values()) else None


def _same(one: Any, two: Any) -> bool:
    return one is two or (type(one) is type(two) and repr(one) == repr(two))


def _holder(module: ModuleType, point: PlugPoint) -> tuple[Any, str]:
    *path, last = point.name.split(".")
    holder: Any = module
    for part in path:
        holder = _own(holder, part)
        if not isinstance(holder, type | ModuleType):
            return _MISSING, last
    return holder, last


def _own(holder: Any, name: str) -> Any:
    # Of a class, only its own attribute counts: a method of its parent is another plug point.
    names: dict[str, Any] = holder.__dict__ if hasattr(holder, "__dict__") else {}
    return names.get(name, _MISSING)


def _where_else(holder: Any, last: str) -> str:
    parents = [one for one in getattr(holder, "__mro__", ())[1:] if last in vars(one)]
    if parents:
        return f": it is inherited from {parents[0].__module__}.{parents[0].__qualname__}"
    return did_you_mean(last, getattr(holder, "__dict__", {})).removesuffix("?")


def _function_of(own: Any) -> Any:
    # A static or class method, or a property, has the function inside.
    if isinstance(own, _WRAPPERS):
        return own.__func__
    return own.fget if isinstance(own, property) else own


def plug(module: ModuleType, point: PlugPoint) -> str | None:
    """Put one plug point into a module. Returns what does not fit, as `trouble_of`; nothing is changed then."""
    trouble = trouble_of(module, point)
    holder, last = _holder(module, point)
    own = _own(holder, last)
    if trouble is not None or own is _MISSING:
        return trouble
    if not point.is_call:
        setattr(holder, last, point.new(own))
        return None
    function = _function_of(own)
    if getattr(function, _MARK, None) is point:
        return None

    signature = _with_their_defaults(function, point.new)

    @wraps(function)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if signature is not None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            args, kwargs = bound.args, bound.kwargs
        return point.new(function, *args, **kwargs)

    setattr(replaced, _MARK, point)
    if isinstance(own, property):
        setattr(holder, last, property(replaced, own.fset, own.fdel, own.__doc__))
    else:
        setattr(holder, last, type(own)(replaced) if isinstance(own, _WRAPPERS) else replaced)
    if holder is module and getattr(own, "__module__", None) == module.__name__:  # not one that the module itself imported
        _hand_on(own, replaced)
    return None


def _hand_on(own: Any, replaced: Any) -> None:
    # Where `from module import function` took the old one before: in a circle of imports, or where a process was armed late.
    for other in list(sys.modules.values()):
        if isinstance(other, ModuleType):  # pyright: ignore[reportUnnecessaryIsInstance] - anything may stand there
            names: dict[str, Any] = object.__getattribute__(other, "__dict__")  # a lazy module is not loaded by this
            for name in [name for name, value in list(names.items()) if value is own]:
                names[name] = replaced


def refuse(text: str, module: ModuleType | None = None) -> NoReturn:
    """Raise Refused, and say which file is meant and what can be done."""
    where = f" ({module.__file__})" if module is not None and getattr(module, "__file__", None) else ""
    raise Refused(f"{text}{where}; nothing was encoded. Use a version of the trainer that fits, or its own cache with `cachestore export`")
