"""Checks of arguments at the public API. Code inside the package trusts its types.

Numbers may be Python's, numpy's or torch's (in `precompute`: Python's or numpy's). Paths may be strings or `os.PathLike`. The results are
Python's own types.
"""

import operator
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any, Final, NoReturn, cast

from cachestore.core.errors import BadInput
from cachestore.core.words import listed

_MAX_CHARS: Final = 60
"""Longest `repr` of a value that an error shows. For a longer one it names the type."""
_ADDRESS: Final = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
"""The scheme of a URL. It has at least two characters, so a Windows drive is not one."""
_COLLAPSED: Final = re.compile(
    r"(s3[an]?|gs|gcs|az|azure|abfss?|adl|wasbs?|r2|b2|oss|cos|obs|oci|swift|hdfs|dbfs|hf|https?|s?ftp|ssh|file|smb|nfs|webdavs?):/",
    re.IGNORECASE,
)
"""A URL whose `//` became one slash in `pathlib`. Only known schemes count, as a folder may be called `data:`."""
MOST_CHARACTERS: Final = 100_000
"""The most characters of a caption. The text encoder that reads most, of 8,192 tokens, reads about 40,000; what is longer is no caption but
another file or column, and some tokenizers take minutes for it."""
_PULLED: Final = frozenset({"s3", "gs", "az"})
"""Schemes that `push` and `pull` know."""


def refuse(argument: str, wanted: str, given: object) -> NoReturn:
    """Raise BadInput about an argument: `batch_size must be a whole number of at least 1, not '8'`.

    `argument` may also be `source['a']`, or `dropout of a caption policy`.
    """
    shown = repr(given)
    if len(shown) > _MAX_CHARS or shown.startswith("<") or "\n" in shown:
        shown = f"a value of the type {type(given).__name__}"
    raise BadInput(f"{argument} must be {wanted}, not {shown}", option=_option_of(argument))


def _option_of(argument: str) -> str:
    """Return the name of an argument that is called by more than its name; "" for what is no argument."""
    name = re.split(r"\[| of ", argument)[0]
    return name if name.isidentifier() else ""


def as_whole(argument: str, given: object, *, least: int | None = None) -> int:
    """Return a whole number as int. Raises BadInput for anything else, for True and False, and for a number below `least`."""
    number: int | None = None
    if not isinstance(given, bool) and str(getattr(given, "dtype", "")) != "bool":  # numpy before 2.3 takes its bools for numbers
        with suppress(TypeError):
            number = operator.index(cast("Any", given))
    if number is None or (least is not None and number < least):
        refuse(argument, "a whole number" + ("" if least is None else f" of at least {least}"), given)
    return number


def as_number(argument: str, given: object) -> float:
    """Return a number, whole or not; numpy's and torch's are accepted. Raises BadInput for anything else, also for True and False."""
    if not isinstance(given, bool | Real) and hasattr(given, "__float__"):
        with suppress(TypeError, ValueError, RuntimeError):  # an array of several numbers is not one number
            given = float(cast("Any", given))
    if isinstance(given, bool) or not isinstance(given, Real):
        refuse(argument, "a number", given)
    return given if isinstance(given, int | float) and type(given) in {int, float} else float(given)


def as_switch(argument: str, given: object) -> bool:
    """Return True or False; numpy's bools, 1 and 0 are accepted. Raises BadInput for anything else: the text "no" would count as true."""
    is_bool = type(given).__name__ in {"bool", "bool_"}  # numpy's has either name, by its version
    if not is_bool and not (isinstance(given, int) and given in (0, 1)):
        refuse(argument, "True or False", given)
    return bool(given)


def as_text(argument: str, given: object) -> str:
    """Return a text, which may be empty. Raises BadInput for anything else."""
    if not isinstance(given, str):
        refuse(argument, "a text", given)
    return given


def normal_id(sample: str) -> str:
    """Return the id of a sample in Unicode form NFC, in which all ids are kept: one id has one spelling."""
    return sample if sample.isascii() else unicodedata.normalize("NFC", sample)


def as_id(option: str, given: object) -> str:
    """Return the id of a sample as it is kept. Raises BadInput about this option for what is no text, and for an empty one."""
    if not isinstance(given, str) or not given:
        shown = repr(given) if isinstance(given, str | bytes | int | float) else f"a value of the type {type(given).__name__}"
        raise BadInput(f"an id must be a text, and not empty, not {shown:.{_MAX_CHARS}}", option=option)
    return normal_id(given)


def refuse_address(argument: str, path: str) -> None:
    """Raise BadInput for a URL such as `s3://bucket/cache`: it would become the local folder `./s3:/bucket/cache`."""
    found = _ADDRESS.match(path) or _COLLAPSED.match(path)
    if found is None:
        return
    scheme = found[1].lower()
    instead = f"mount {scheme}:// as a folder or copy it, then pass that folder's path"
    if scheme == "file":
        instead = "pass the path only, without the scheme"
    elif scheme in _PULLED:
        instead = f"`cachestore pull {path} FOLDER` copies a store there into a folder; pass that folder's path"
    what = f"{argument} is the address {path!r}, but cachestore reads and writes folders of this machine"
    raise BadInput(f"{what}: {instead}", option=_option_of(argument))


def as_path_str(argument: str, given: object, wanted: str = "a path (str or pathlib.Path, and not empty)") -> str:
    """Return a path, or a name such as a hub id, as text. Raises BadInput for anything else, and for a URL such as `s3://a/b`.

    The empty text is refused too: a shell makes it from an unset variable, and it would mean the current folder.
    """
    path = os.fspath(cast("os.PathLike[str]", given)) if isinstance(given, os.PathLike) else given
    if not isinstance(path, str) or not path:
        refuse(argument, wanted, cast("object", given))
    refuse_address(argument, path)
    return path


def as_path(argument: str, given: object) -> Path:
    """As `as_path_str`, but returns a Path."""
    return Path(as_path_str(argument, given))


def as_word(argument: str, given: object, words: Sequence[str]) -> str:
    """Return `given` if it is one of `words`. Raises BadInput otherwise."""
    if not isinstance(given, str) or given not in words:
        refuse(argument, listed((f'"{word}"' for word in words), "or"), given)
    return given


def as_mapping(argument: str, given: object, wanted: str) -> Mapping[Any, Any]:
    """Return a mapping. Raises BadInput for anything else; `wanted` describes the mapping in the message."""
    if not isinstance(given, (dict, Mapping)):  # a dict is seen to be one in a fraction of the time
        refuse(argument, wanted, given)
    return cast("Mapping[Any, Any]", given)


def as_many(argument: str, given: object, wanted: str) -> Iterator[Any]:
    """Return an iterator over several items. Raises BadInput for anything else, also for one text or mapping."""
    if not isinstance(given, str | bytes | Mapping):
        with suppress(TypeError):
            return iter(cast("Iterable[Any]", given))
    refuse(argument, wanted, cast("object", given))


def as_pairs(argument: str, given: object) -> Iterator[tuple[Any, Any]]:
    """Yield (key, item) pairs. Raises BadInput for anything else; for a mapping the message says to pass its `items()`."""
    wanted = "(key, item) pairs"
    if isinstance(given, Mapping):
        refuse(argument, f"{wanted} (for a mapping, pass its items())", cast("object", given))
    for index, pair in enumerate(as_many(argument, given, wanted)):
        if not isinstance(pair, tuple | list) or len(cast("Sequence[Any]", pair)) != 2:
            refuse(f"{argument}[{index}]", "a (key, item) pair", cast("object", pair))
        key, item = cast("Sequence[Any]", pair)
        yield key, item


def check_function(argument: str, given: object) -> None:
    """Raise BadInput if `given` cannot be called."""
    if not callable(given):
        refuse(argument, "a function", given)


def check_calls(on_progress: object, cancel: object) -> None:
    """Raise BadInput if `on_progress` cannot be called, or `cancel` has no `is_set()`. Both may be None."""
    if on_progress is not None:
        check_function("on_progress", on_progress)
    if cancel is not None and not callable(getattr(cancel, "is_set", None)):
        refuse("cancel", "an object with is_set()", cancel)


def refuse_caption(text: str, where: object) -> None:
    """Raise BadInput for a caption that cannot be encoded: with a NUL or half a character in it, or longer than any text encoder reads."""
    if "\0" in text:
        raise BadInput(f"{where} has a NUL character in it, often a sign of UTF-16: write it again, and save it as UTF-8")
    if len(text) > MOST_CHARACTERS:
        raise BadInput(f"{where} has {len(text):,} characters, more than {MOST_CHARACTERS:,}, which is no caption: shorten it")
    if not text.isascii() and is_broken(text):
        raise BadInput(f"{where} has half a character in it (a lone surrogate, such as half of an emoji): write the character again")


def is_broken(text: str) -> bool:
    """Return whether a text has lone surrogates in it, so that it has no form in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
