"""What an adapter says: which functions of a trainer's modules it replaces, and by what. Plug points are put in as modules are imported."""

import hashlib
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NoReturn

from cachestore.core.words import did_you_mean

USAGE: Final = 2
DIGITS: Final = 12


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

    def __init__(self, name: str, *, tested: Mapping[str, Collection[str]] | None = None, data_set: str = "") -> None:
        """`tested`: by module, the first 12 digits of the SHA-256 of its source in the checkouts that the adapter was tested with.

        `data_set`: what stands for the configuration's name in the name of the data set, if all configurations share their values.
        """
        self.name, self.data_set = name, data_set
        self.tested = dict(tested or {})
        self.points: list[PlugPoint] = []

    def replace(self, module: str, name: str, *, optional: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Replace a function or method: the decorated one gets the trainer's own first, then what the trainer passes.

        Its parameters after the first must have the names of the trainer's, in their order; a function that ends in `*args, **kwargs`
        takes any. With `optional` a module may lack it.
        """
        return self._add(module, name, is_call=True, is_optional=optional)

    def change(self, module: str, name: str, *, optional: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Change a global variable of a module, such as `np` or `load_file`: the decorated function is called with it and returns the new."""
        return self._add(module, name, is_call=False, is_optional=optional)

    def _add(self, module: str, name: str, *, is_call: bool, is_optional: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def keep(new: Callable[..., Any]) -> Callable[..., Any]:
            self.points.append(PlugPoint(module, name, new, is_call, is_optional))
            return new

        return keep

    def concerns(self, module: str) -> bool:
        """Whether a module has plug points."""
        return any(fnmatchcase(module, point.module) for point in self.points)

    def needs(self, module: str) -> bool:
        """Whether a module has plug points that it must not lack."""
        return any(fnmatchcase(module, point.module) and not point.is_optional for point in self.points)

    def plug_into(self, module: ModuleType) -> None:
        """Put in what this adapter replaces in a module. Raises Refused, naming the plug point that is not as it should be."""
        for point in self.points:
            if fnmatchcase(module.__name__, point.module):
                _plug(self.name, module, point)

    def remarks(self, module: ModuleType) -> list[str]:
        """Say whether this module's source is one that the adapter was tested with."""
        known = self.tested.get(module.__name__)
        file = getattr(module, "__file__", None)
        if not known or not file:
            return []
        digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:DIGITS]
        if digest in known:
            return []
        return [f"{module.__name__} is not in a version that this adapter was tested with ({digest}); the self-test decides"]


def _plug(adapter: str, module: ModuleType, point: PlugPoint) -> None:
    *path, last = point.name.split(".")
    holder: Any = module
    for part in path:
        holder = getattr(holder, part, None)
    # Of a class, only its own attribute counts: a method of its parent is another plug point.
    own = vars(holder).get(last) if holder is not None else None
    if own is None:
        if point.is_optional:
            return
        near = did_you_mean(last, [] if holder is None else list(vars(holder)))
        refuse(f"{module.__name__} has no {point.name}{near}, which the {adapter} adapter replaces", module)
    if not point.is_call:
        setattr(holder, last, point.new(own))
        return
    function = own.__func__ if isinstance(own, staticmethod | classmethod) else own
    if getattr(function, "_cachestore_live", False):
        return
    theirs, ours = list(inspect.signature(function).parameters), list(inspect.signature(point.new).parameters)[1:]
    if ours[-2:] != ["args", "kwargs"] and theirs != ours:
        refuse(
            f"{module.__name__}: {point.name} takes ({', '.join(theirs)}), where the {adapter} adapter expects ({', '.join(ours)})", module
        )

    @wraps(function)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return point.new(function, *args, **kwargs)

    replaced._cachestore_live = True  # type: ignore[attr-defined]
    setattr(holder, last, type(own)(replaced) if isinstance(own, staticmethod | classmethod) else replaced)


def refuse(text: str, module: ModuleType | None = None) -> NoReturn:
    """Raise Refused, and say which file is meant and what can be done."""
    where = f" ({module.__file__})" if module is not None and getattr(module, "__file__", None) else ""
    raise Refused(f"{text}{where}; nothing was encoded. Use a version of the trainer that fits, or its own cache with `cachestore export`")
