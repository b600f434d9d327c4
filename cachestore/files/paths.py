"""Every path of a store is made and parsed here. Opens nothing.

One table of templates makes and parses every name. A name that does not parse is not from cachestore. Numbers have no leading zeros.
"""

import re
import secrets
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, Generic, Literal, NamedTuple, TypeVar
from urllib.parse import quote, unquote

from cachestore.core import system
from cachestore.core.arguments import as_path, as_word
from cachestore.core.errors import BadInput, FormatError
from cachestore.files import in_use

if TYPE_CHECKING:
    from typing_extensions import Self

MARKER: Final = "cachestore.json"
"""The file that makes a folder a store."""
CACHE_MARKER: Final = "cachestore-cache.json"
"""The file that makes a folder a place for local copies of stores at addresses."""

_FILE_CHARACTERS: Final = 32
"""Two numbers of 9 digits, the longest ending, and separators."""
_NAMES: Final = 1 << 15
"""How many parsed names of claims and ledgers are cached: thousands are listed again and again."""
_NAME_LIMIT: Final = 200
PARTITION_LIMIT: Final = 4096
"""The most partitions that the units of a recipe have. A name with a higher number is not from cachestore."""
_LONGEST: Final = 120
"""So many characters the longest path below a store takes, but for those with a data set's name; the one of an attempt has 98."""
Value = TypeVar("Value")
_FIELD: Final = re.compile(r"\{(\w+)\}")
_DIGEST: Final = "([0-9a-f]{32})"
_TEXTS: Final[Mapping[str, str]] = {
    "digest": _DIGEST,
    "worker": _DIGEST,
    "fan": "([0-9a-f]{2})",
    "fingerprint": "([0-9a-f]{64})",
    "name": "([^/]+)",
    "any": r"(?!cachestore\.json)([^/]+)",
}
"""Regular expressions for the text fields of a template."""
_NUMBER: Final = "(0|[1-9][0-9]{0,17})"
"""The regular expression for all other fields."""
Access = Literal["private", "group"]
"""A `Mode` as callers spell it."""


class Mode(Enum):
    """Who may write the store. It decides the permission bits of all its files and folders, whatever the umask."""

    PRIVATE = "private"
    GROUP = "group"

    @classmethod
    def asked(cls, access: object) -> "Mode | None":
        """Return the mode that a caller asks for with `access`, None for None. Raises BadInput."""
        return None if access is None else cls(as_word("access", access, [one.value for one in cls]))

    @property
    def folder_bits(self) -> int:
        """Permission bits of folders."""
        return 0o755 if self is Mode.PRIVATE else 0o2775

    @property
    def file_bits(self) -> int:
        """Permission bits of small files."""
        return 0o644 if self is Mode.PRIVATE else 0o664


class IndexName(NamedTuple):
    """The fields of an index file's name. They sort by number, then by digest, so that every reader picks the same index."""

    number: int
    digest: str


class ClaimName(NamedTuple):
    """The fields of a claim's name: the n-th claim of a range of partitions in a round; `last` is in the range."""

    round: int
    recipe: int
    first: int
    last: int
    n: int

    @property
    def partitions(self) -> range:
        """The partitions of the range."""
        return range(self.first, self.last + 1)


class LedgerName(NamedTuple):
    """The fields of a ledger's name: a range of partitions of a round."""

    round: int
    recipe: int
    first: int
    last: int

    @property
    def partitions(self) -> range:
        """The partitions of the range."""
        return range(self.first, self.last + 1)


class BlockName(NamedTuple):
    """The fields of the name of a block: its first and its last entry."""

    first: int
    last: int


class AttemptName(NamedTuple):
    """The fields of an attempt's name: the n-th unit that a worker does alone, by its unit index."""

    worker: str
    n: int
    unit: int


def _claim(*fields: int) -> ClaimName | None:
    name = ClaimName(*fields)
    return name if name.first <= name.last < PARTITION_LIMIT else None


def _ledger(*fields: int) -> LedgerName | None:
    name = LedgerName(*fields)
    return name if name.first <= name.last < PARTITION_LIMIT else None


class FileKind(Generic[Value]):
    """One kind of file in a store: its folder, and the template that makes and parses its names.

    The template is relative to the store. `value` takes the fields of a name and returns its parsed form, or None for impossible ones.
    """

    def __init__(self, template: str, value: "Callable[..., Value | None]") -> None:
        self.template = template
        self.folder, _slash, name = template.rpartition("/")
        self._form = _FIELD.sub("{}", name)
        self._pattern = re.compile(_pattern_of(name))
        self._fields = [str if field in _TEXTS else int for field in _FIELD.findall(name)]
        self._value = value

    def make(self, *fields: object) -> str:
        """Return the name with these fields."""
        return self._form.format(*fields)

    def parse(self, name: str) -> Value | None:
        """Return what a name says, or None if `make` does not make such a name."""
        match = self._pattern.fullmatch(name)
        return self._value(*(read(text) for read, text in zip(self._fields, match.groups(), strict=True))) if match else None


def _pattern_of(template: str) -> str:
    parts = _FIELD.split(template)
    return "".join(_TEXTS.get(part, _NUMBER) if number % 2 else re.escape(part) for number, part in enumerate(parts))


_SEGMENT: Final = FileKind("segments/{fan}/{digest}.safetensors", str)
_INDEX: Final = FileKind("index/{number}-{digest}.lmdb", IndexName)
_CATALOG: Final = FileKind("catalogs/{name}/{number}.safetensors", int)
_DROPPED: Final = FileKind("catalogs/{name}/{number}.dropped", int)
_LISTING: Final = FileKind("listings/{name}/{number}.json", int)
_LISTED: Final = FileKind("listings/{name}/{number}.ended", int)
_ENTRY: Final = FileKind("catalogs/{name}/{number}.changes", int)
_BLOCK: Final = FileKind("catalogs/{name}/{first}-{last}.changes", BlockName)
_RECIPE: Final = FileKind("recipes/{fingerprint}.json", str)
_ROUND: Final = FileKind("plans/{digest}/{number}/rounds/{number}.json", int)
_CLAIM: Final = FileKind("plans/{digest}/{number}/claims/{round}.{recipe}.{first}-{last}.{n}", _claim)
_LEDGER: Final = FileKind("plans/{digest}/{number}/ledgers/{round}.{recipe}.{first}-{last}.json", _ledger)
_ATTEMPT: Final = FileKind("plans/{digest}/{number}/attempts/{worker}.{n}.{unit}", AttemptName)
_WORKER: Final = FileKind("workers/{worker}.json", str)
_WORKER_LOCK: Final = FileKind("workers/{worker}.lock", str)
_MARKED: Final = FileKind("marked/{digest}.json", str)
_LOST: Final = FileKind("quarantine/{digest}.lost.json", str)
_TEMPORARY: Final = FileKind("tmp/{digest}.tmp", str)
_PLAN_FOLDER: Final = FileKind("plans/{digest}", str)
_PASS_FOLDER: Final = FileKind("plans/{digest}/{number}", int)
PASS_KINDS: Final = (_ROUND, _CLAIM, _LEDGER, _ATTEMPT)
_FILES: Final[tuple[str, ...]] = (
    MARKER,
    *(
        kind.template
        for kind in (
            _SEGMENT,
            _INDEX,
            _CATALOG,
            _DROPPED,
            _ENTRY,
            _BLOCK,
            _LISTING,
            _LISTED,
            _RECIPE,
            *PASS_KINDS,
            _WORKER,
            _WORKER_LOCK,
            _MARKED,
        )
    ),
    "plans/{digest}/plan.safetensors",
    "plans/{digest}/{number}/done.json",
    *(f"{folder}/{{any}}" for folder in ("digests", "locks", "quarantine", "tmp")),
)
_FILE: Final = re.compile("|".join(map(_pattern_of, _FILES)))
_FOLDER: Final = re.compile("|".join({_pattern_of(str(folder)) for file in _FILES for folder in PurePosixPath(file).parents[:-1]}))
_INSIDE: Final = re.compile(rf"(.*?)/(?:{_FILE.pattern})")
"""The path of a file in a store; the group is the store."""
FOLDERS: Final = tuple(dict.fromkeys(top for file in _FILES for top, slash, _rest in [file.partition("/")] if slash))
"""The folders at the root of a store."""
parse_segment = _SEGMENT.parse
parse_index = _INDEX.parse
parse_catalog = _CATALOG.parse
parse_dropped = _DROPPED.parse
parse_listing = _LISTING.parse
parse_listed = _LISTED.parse
parse_entry = _ENTRY.parse
parse_block = _BLOCK.parse
parse_recipe = _RECIPE.parse
parse_round = _ROUND.parse
parse_claim = lru_cache(_NAMES)(_CLAIM.parse)
parse_ledger = lru_cache(_NAMES)(_LEDGER.parse)
parse_attempt = _ATTEMPT.parse
parse_worker = _WORKER.parse
parse_worker_lock = _WORKER_LOCK.parse
parse_marked = _MARKED.parse
parse_lost = _LOST.parse
parse_plan = _PLAN_FOLDER.parse
parse_pass = _PASS_FOLDER.parse


def is_own_file(where: str) -> bool:
    """Return whether a path relative to a store can be that of a file of cachestore."""
    return _FILE.fullmatch(where) is not None


def is_own_folder(where: str) -> bool:
    """Return whether a path relative to a store can be that of a folder of cachestore."""
    top, _slash, name = where.partition("/")
    return _FOLDER.fullmatch(where) is not None and (not name or top not in {"catalogs", "listings"} or decode_name(name) is not None)


def is_worker(text: object) -> bool:
    """Return whether this names a worker: 32 hex digits. Text from a claim or an attempt is checked before a path is made of it."""
    return isinstance(text, str) and re.fullmatch(_DIGEST, text) is not None


def is_temporary(name: str) -> bool:
    """Return whether cachestore makes such names in `tmp/`."""
    return _TEMPORARY.parse(name) is not None


class _Inside:
    """A file or folder with the same path below the `root` of every store, or of every pass."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __get__(self, owner: "Layout | PassFolder", kind: object = None) -> Path:
        return owner.root / self._where


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of one store, the mode of its files, and its id."""

    root: Path
    mode: Mode = Mode.PRIVATE
    store_id: str = ""
    """The id in the marker of the opened store; empty if the path was not opened."""
    address: str = ""
    """Where the store is, if this folder only has copies of some of its files; else empty."""

    marker = _Inside(MARKER)
    segments = _Inside("segments")
    indexes = _Inside("index")
    catalogs = _Inside("catalogs")
    listings = _Inside("listings")
    recipes = _Inside("recipes")
    plans = _Inside("plans")
    workers = _Inside("workers")
    digests = _Inside("digests")
    marked = _Inside("marked")
    quarantine = _Inside("quarantine")
    temporary = _Inside("tmp")

    @classmethod
    def at(cls, path: object, argument: str = "path") -> "Self":
        """Return the paths of the store at a caller's path; errors call it `argument`. Raises BadInput for something that is not a path."""
        root = as_path(argument, path).absolute()
        if why := in_use.refused_length(root, _LONGEST):
            raise BadInput(f"{argument}: {why}")
        return cls(root)

    def command(self, words: str) -> str:
        """Return a command for this store, ready to paste: `repair --refill` gives "`cachestore repair STORE --refill`".

        For a store in an object store, where no other command works, it is the one that brings what is lost.
        """
        return f"`cachestore push STORE {system.quoted(self.address)} --check`" if self.address else _command(words, self.root)

    @property
    def shown(self) -> str:
        """The store's path or address, for messages."""
        return self.address or str(self.root)

    def relative(self, path: Path) -> str:
        """Return a path in the store, relative to its root, as messages and reports name it."""
        return path.relative_to(self.root).as_posix()

    def segment(self, digest: str) -> Path:
        """The path of a segment with this digest."""
        return self.segments / digest[:2] / _SEGMENT.make(digest)

    def index(self, name: IndexName) -> Path:
        """The path of an index."""
        return self.indexes / _INDEX.make(*name)

    def catalog_folder(self, name: str) -> Path:
        """The folder of a data set's catalogs."""
        return _named(self.catalogs, name)

    def catalog(self, name: str, generation: int) -> Path:
        """The path of one generation of a catalog."""
        return self.catalog_folder(name) / _CATALOG.make(generation)

    def dropped(self, name: str, generation: int) -> Path:
        """The path of the mark that a data set was dropped, up to a generation."""
        return self.catalog_folder(name) / _DROPPED.make(generation)

    def entry(self, name: str, number: int) -> Path:
        """The path of an entry of a data set's line."""
        return self.catalog_folder(name) / _ENTRY.make(number)

    def block(self, name: str, block: BlockName) -> Path:
        """The path of several entries of a data set's line as one file."""
        return self.catalog_folder(name) / _BLOCK.make(*block)

    def listing_folder(self, name: str) -> Path:
        """The folder of one data set's listing numbers."""
        return _named(self.listings, name)

    def listing(self, name: str, number: int) -> Path:
        """The path of a listing number of a data set."""
        return self.listing_folder(name) / _LISTING.make(number)

    def listed(self, name: str, number: int) -> Path:
        """The path of a listing number that was given back."""
        return self.listing_folder(name) / _LISTED.make(number)

    def recipe(self, fingerprint: str) -> Path:
        """The path of a recipe."""
        return self.recipes / _RECIPE.make(fingerprint)

    def plan_folder(self, plan: str) -> Path:
        """The folder of one plan and its passes."""
        return self.plans / _PLAN_FOLDER.make(plan)

    def plan(self, plan: str) -> Path:
        """The path of a plan's rows."""
        return self.plan_folder(plan) / "plan.safetensors"

    def pass_folder(self, plan: str, number: int) -> Path:
        """The folder of one pass over a plan."""
        return self.plan_folder(plan) / _PASS_FOLDER.make(number)

    def worker(self, worker: str) -> Path:
        """The path of a worker's heartbeat."""
        return self.workers / _WORKER.make(worker)

    def worker_lock(self, worker: str) -> Path:
        """The path of the lock that a worker holds while it runs."""
        return self.workers / _WORKER_LOCK.make(worker)

    def marked_list(self, digest: str) -> Path:
        """The path of a list of segments marked for deletion, by the digest of its bytes."""
        return self.marked / _MARKED.make(digest)

    def lost_list(self, digest: str) -> Path:
        """The path of the list of entries that were lost with a segment."""
        return self.quarantine / _LOST.make(digest)

    def lock(self, word: str) -> Path:
        """The path of a lock."""
        return self.root / "locks" / f"{word}.lock"

    def new_temporary(self, digest: str = "") -> Path:
        """A new path in `tmp/`, or the one with these 32 hex digits."""
        return self.temporary / _TEMPORARY.make(digest or secrets.token_hex(16))


@dataclass(frozen=True, slots=True)
class PassFolder:
    """The paths of one pass."""

    root: Path

    rounds = _Inside("rounds")
    claims = _Inside("claims")
    ledgers = _Inside("ledgers")
    attempts = _Inside("attempts")
    done = _Inside("done.json")

    def round(self, number: int) -> Path:
        """The path of a round."""
        return self.rounds / _ROUND.make(number)

    def claim(self, name: ClaimName) -> Path:
        """The path of a claim."""
        return self.claims / _CLAIM.make(*name)

    def ledger(self, name: LedgerName) -> Path:
        """The path of a ledger."""
        return self.ledgers / _LEDGER.make(*name)

    def attempt(self, name: AttemptName) -> Path:
        """The path of an attempt."""
        return self.attempts / _ATTEMPT.make(*name)


def command_for(words: str, path: Path) -> str:
    """As `Layout.command`, for the store of this file; the store is left out if the path is not one of a store."""
    match = _INSIDE.fullmatch(path.as_posix())
    return _command(words, Path(match[1] or "/") if match else None)


def to_repair(path: Path) -> str:
    """Return the command that repairs the store of this file."""
    return command_for("repair", path)


def damaged(what: str, path: Path) -> FormatError:
    """Return the error for a damaged file of a store: what is wrong with it, and the command that repairs the store."""
    error = FormatError(f"{what}; run {to_repair(path)}")
    error.what, error.advice = what, f"run {to_repair(path)}"
    return error


def to_verify(path: Path) -> str:
    """Return the command that checks the store of this file."""
    return command_for("verify", path)


def _command(words: str, root: Path | None) -> str:
    command, _, options = words.partition(" ")
    return f"`{' '.join(filter(None, ('cachestore', command, system.quoted(str(root)) if root else '', options)))}`"


def encode_name(name: str) -> str:
    """Return a data set's name as a folder name, percent-encoded.

    Raises BadInput if it is empty, has over 200 bytes then, or is no Unicode.
    """
    try:
        encoded = quote(unicodedata.normalize("NFC", name), safe=" ")
    except UnicodeEncodeError:  # a lone surrogate, which is how Python shows bytes of a file name that are not UTF-8
        encoded = ""
    if encoded.startswith("."):
        encoded = "%2E" + encoded[1:]
    if not encoded.strip() or len(encoded) > _NAME_LIMIT:
        raise BadInput(f"the data set name {name!r} must have 1 to {_NAME_LIMIT} characters once encoded: give another", option="name")
    return encoded


def as_stored(name: str) -> str:
    """Return a data set's name as its folder spells it: names that differ in their Unicode form alone are one. Raises as `encode_name`."""
    return unquote(encode_name(name))


def _named(folder: Path, name: str) -> Path:
    """The folder of a data set. Raises BadInput if Windows refuses so long a path."""
    encoded = encode_name(name)
    if why := in_use.refused_length(folder, len(encoded) + _FILE_CHARACTERS):
        raise BadInput(f"the data set name {name!r} is too long here: {why}", option="name")
    return folder / encoded


def decode_name(folder: str) -> str | None:
    """Return the data set's name for a folder name, or None if the folder is not from cachestore."""
    try:
        name = unquote(folder, errors="strict")
        return name if encode_name(name) == folder else None
    except (BadInput, UnicodeDecodeError):
        return None
