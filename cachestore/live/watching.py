"""A trainer's settings, watched while its encoders run: what they read and the adapter does not know ends the run."""

from collections.abc import Collection, Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from cachestore.live.adapter import refuse


@contextmanager
def watched(things: Iterable[Any], *known: Collection[str]) -> Generator[None]:
    """Within the block, reading a field of these objects that is in none of the lists ends the run with exit code 2, naming the field.

    For settings of which a trainer has hundreds, such as those of its command line, and its encoders read a few. The object's class must be
    one of Python's own, such as `argparse.Namespace`.
    """
    names = frozenset(name for some in known for name in some)
    with ExitStack() as stack:
        for one in {id(one): one for one in things if one is not None}.values():
            stack.enter_context(_watched(one, names))
        yield


@contextmanager
def _watched(thing: Any, names: frozenset[str]) -> Generator[None]:
    own: Any = cast("Any", type(thing))
    if own.__name__ == "Watched":  # another thread's block, or one around this
        yield
        return

    class Watched(own):
        def __getattribute__(self, name: str) -> Any:
            if name not in names and not name.startswith("__") and name in vars(self):
                # Within this frame the class is one that refuses: a message must not read the field again.
                refuse(f"the trainer's encoder reads {name} of its settings ({own.__qualname__}), on which values may depend")
            return own.__getattribute__(self, name)

    try:
        thing.__class__ = Watched
    except TypeError as error:
        refuse(f"the trainer's settings are a {own.__module__}.{own.__qualname__}, which cannot be watched: {error}")
    try:
        yield
    finally:
        thing.__class__ = own
