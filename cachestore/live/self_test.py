"""The self-test of an adapter: what the trainer's reader returns is bit for bit what its writer was given."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from cachestore.core.keys import Key
from cachestore.files.scratch import scratch_folder
from cachestore.live.adapter import refuse
from cachestore.store.write.writer import open_store


def round_trip(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a store returns for these arrays, as numpy. The store is a temporary one."""
    with scratch_folder() as folder, open_store(folder, mode="a") as store:
        key = Key(bytes([1] * 16))
        store.put(key, value)
        return store.get(key, as_numpy=True)


def check_same(point: str, written: Any, read: Any) -> None:
    """End the run with exit code 2, naming the plug point and the difference, unless both are equal to the bit.

    Arrays, tensors, numbers and texts, and lists and mappings of them. Not a number equals itself.
    """
    if (difference := _difference(written, read)) is not None:
        refuse(f"self-test: {point} does not return what was written: {difference}")


def check_among(point: str, written: Mapping[str, Any], read: Sequence[Any]) -> None:
    """End the run with exit code 2 unless each part of what a reader returned is one of the arrays that were written, or None."""
    for number, part in enumerate(read):
        if part is not None and all(_array_difference(one, part, "") is not None for one in written.values()):
            refuse(f"self-test: {point} returns as part {number} what is none of {', '.join(sorted(written))} as they were written")


@contextmanager
def called_once(thing: Any, *methods: str) -> Generator[None]:
    """Within the block, these methods of an object are called once at most: afterwards each returns what the first call returned."""
    made: list[Any] = []

    def once(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not made:
                made.append(own(*args, **kwargs))
            return made[0]

        return call

    before: dict[str, Any] = {name: cast("dict[str, Any]", vars(thing)).get(name) for name in methods}
    for name in methods:
        setattr(thing, name, once(getattr(thing, name)))
    try:
        yield
    finally:
        for name, own in before.items():
            delattr(thing, name) if own is None else setattr(thing, name, own)


def _difference(written: Any, read: Any, where: str = "") -> str | None:
    pairs: list[tuple[str, Any, Any]]
    if isinstance(written, Mapping) and isinstance(read, Mapping):
        written, read = cast("Mapping[Any, Any]", written), cast("Mapping[Any, Any]", read)
        if {*written} != {*read}:
            return f"{where or 'the value'} has the names {sorted(map(str, read))}, not {sorted(map(str, written))}"
        pairs = [(f"{where}[{name!r}]", value, read[name]) for name, value in written.items()]
    elif _is_several(written) and _is_several(read):
        written, read = cast("Sequence[Any]", written), cast("Sequence[Any]", read)
        if len(written) != len(read):
            return f"{where or 'the value'} has {len(read)} parts, not {len(written)}"
        pairs = [(f"{where}[{number}]", one, two) for number, (one, two) in enumerate(zip(written, read, strict=True))]
    else:
        return _array_difference(written, read, where or "the value")
    return next((text for name, one, two in pairs if (text := _difference(one, two, name)) is not None), None)


def _is_several(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _array_difference(written: Any, read: Any, where: str) -> str | None:
    import numpy as np

    one, two = (np.asarray(_as_array(value)) for value in (written, read))
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return f"{where} is {two.dtype} {list(two.shape)}, not {one.dtype} {list(one.shape)}"
    if one.dtype == object:
        return None if written == read else f"{where} is {read!r:.80}, not {written!r:.80}"
    if one.tobytes() != two.tobytes():
        return f"{where} has other numbers"
    return None


def _as_array(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return value.view(torch.uint16).numpy() if value.dtype == torch.bfloat16 else value.numpy()
    return value
