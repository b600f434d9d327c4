"""The errors of cachestore, grouped by what the caller does next. Knows nothing else of the project.

    CacheStoreError
    ├── StoreNotFound     point at another path, or create the store
    ├── BadInput          change what was passed in: DATA, an option, a value
    │   ├── BadUsage          ask for something else: exit code 2
    │   ├── MissingExtra      install the extra that the message names
    │   └── RecipeMismatch    use the model the store was made with, or ask for it to be replaced
    ├── MissingEntry      encode it (`cachestore precompute`), or skip it
    ├── CorruptEntry      run `cachestore repair`
    ├── FormatError       the file is damaged
    │   └── NewerFormat       install a newer cachestore
    ├── ReadFailed        fix the file system, or this user's rights, then run the same command again
    │   └── RemoteFailed      check the address, the credentials or the network, then run the same command again
    ├── WriteFailed       make room, or fix the file system, then run the same command again
    ├── LockTimeout       wait, or see who holds the lock
    ├── EncodeFailed      this input cannot be encoded: fix or remove it
    ├── RanksDiffer       open the same data set, with the same options, on every rank of the training
    ├── Superseded        run the same command again: it lists the source anew
    └── Incomplete        run the same command again: it continues where it stopped

Every class takes one message, because the error of a DataLoader worker is built again from its text.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Final, TypeVar


class CacheStoreError(Exception):
    """Base class of everything that cachestore raises on purpose."""


class StoreNotFound(CacheStoreError, FileNotFoundError):
    """There is no store at that path."""


class BadInput(CacheStoreError, ValueError):
    """An argument or an input cannot be used. The message says what, where, and how to fix it.

    `option` is Python's name of the argument that would have to change, if one would; empty in a worker of a DataLoader.
    """

    def __init__(self, message: str = "", *, option: str = "") -> None:
        super().__init__(message)
        self.option = option


class BadUsage(BadInput):
    """The request cannot be met, and nothing was done: the source has nothing to encode, or `strict` refuses the model. Exit code 2."""


class RecipeMismatch(BadInput):
    """Model files or settings differ from those a catalog or an entry was made with."""


class MissingEntry(CacheStoreError, LookupError):
    """No valid copy of this key is in the store."""


class CorruptEntry(CacheStoreError):
    """The bytes on disk do not match the checksum that is bound to the key."""


class FormatError(CacheStoreError):
    """A file of the store is malformed, or written by a newer version of cachestore."""

    what: str | None = None
    """The message without `advice`, where there is one: for callers that know a better one."""
    advice: str = ""
    """What helps, where the message ends with it."""


class NewerFormat(FormatError):
    """A file was written by a newer version of cachestore. It is no damage: nothing mends it, moves it or relies on what it says."""


WRONG_FIELDS: Final = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What taking the fields of a JSON value that anybody may have written can raise: one lacks, has another type, or is far too large."""


def newer(where: object, written_as: str, newest: str) -> NewerFormat:
    """Return the error for a file of a newer format; `newest` is the highest that can be read."""
    return NewerFormat(f"{where} has format {written_as}; this cachestore reads up to {newest}: install a newer one")


class ReadFailed(CacheStoreError, OSError):
    """The file system refused to read something, so its contents are unknown."""


class RemoteFailed(ReadFailed):
    """An object store refused a request or did not answer. The message says what, and what to check; it never holds a credential."""


class WriteFailed(CacheStoreError, OSError):
    """The file system refused a write; nothing was acknowledged."""


Failed = TypeVar("Failed", ReadFailed, WriteFailed)


def numbered(failed: Failed, error: Exception) -> Failed:
    """Return `failed` with the `errno` of `error`, or None if it has none."""
    failed.errno = error.errno if isinstance(error, OSError) else None
    return failed


class LockTimeout(CacheStoreError, TimeoutError):
    """A wait took too long. The message names what was waited for and who holds it."""


class MissingExtra(BadInput, ImportError):
    """A package of an optional extra is not installed, or a package cannot be loaded. The message names it, and the extra."""


class EncodeFailed(CacheStoreError):
    """An encoder refused an input for good, or returned something unusable."""


class RanksDiffer(CacheStoreError):
    """The ranks of a training are about to read batches that do not belong together. Raised on every rank, before the first batch."""


class Superseded(CacheStoreError):
    """Another run listed the data set's source later and has published it. What this run encoded stays in the store."""


class Incomplete(CacheStoreError):
    """The work is not finished. What is published stays, and the same command continues from there."""

    signal: int | None = None
    """The signal that stopped every worker, if one did."""


_EXTRAS: Final[Mapping[str, str]] = {
    "torch": "torch",
    **dict.fromkeys(("diffusers", "transformers", "accelerate", "huggingface_hub", "PIL", "ftfy", "bs4"), "encode"),
    "av": "video",
    "cv2": "area",
    "ray": "ray",
    "obstore": "objects",
}
"""The extra that installs a package, by the package's import name."""
_MOST_OF_A_REASON: Final = 300


@contextmanager
def naming_extras() -> Generator[None]:
    """Raise MissingExtra if the block imports a package of an extra that is not installed, or a package that cannot be loaded."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        raise MissingExtra(f"{package} is not installed. {how_to_install(_EXTRAS[package])}") from error
    except ImportError as error:
        if isinstance(error, CacheStoreError) or (error.name or "").startswith("cachestore"):
            raise
        raise _cannot_load("a library", error) from error


@contextmanager
def importing(what: str) -> Generator[None]:
    """Raise MissingExtra if the block, which only imports `what`, cannot: it is not installed, damaged, or finds no room in memory."""
    with naming_extras():
        try:
            yield
        except (ModuleNotFoundError, MissingExtra):
            raise
        except (ImportError, OSError, MemoryError) as error:  # a library for which there is no room is an ImportError or an OSError
            raise _cannot_load(what, error) from error


def _cannot_load(what: str, error: Exception) -> MissingExtra:
    reason = " ".join(str(error).split())[:_MOST_OF_A_REASON] or "out of memory"
    return MissingExtra(f"{what} cannot be loaded ({reason}): free memory (see `ulimit -v`), or install it again")


def how_to_install(extra: str) -> str:
    """Return the sentence that says how to install an extra."""
    return f"The extra [{extra}] brings it: run `pip install '.[{extra}]'` in a clone of cachestore"
