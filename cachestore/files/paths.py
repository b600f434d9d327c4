"""Every path of a store, made and parsed in one place. Knows the grammar of names; opens nothing.

    cachestore.json
    segments/<2 hex>/<32 hex>.safetensors
    index/<n>-<32 hex>.lmdb
    catalogs/<name>/<n>.safetensors
    catalogs/<name>/<n>.dropped
    listings/<name>/<n>.json
    listings/<name>/<n>.ended
    recipes/<64 hex>.json
    plans/<32 hex>/plan.safetensors
    plans/<32 hex>/<pass>/rounds/<round>.json
    plans/<32 hex>/<pass>/claims/<round>.<recipe>.<partition>.<n>
    plans/<32 hex>/<pass>/ledgers/<round>.<recipe>.<partition>.json
    plans/<32 hex>/<pass>/attempts/<worker>.<n>.<unit>
    plans/<32 hex>/<pass>/done.json
    workers/<32 hex>.json  workers/<32 hex>.lock
    digests/<host>-<32 hex>.json
    condemned/<32 hex>.json
    locks/<word>.lock
    quarantine/<name>  quarantine/<32 hex>.lost.json
    tmp/<32 hex>.tmp

A name is parsed by the function beside the one that makes it; what does not parse is not ours. Numbers have no leading zeros.
"""

import re
import secrets
import shlex
import unicodedata
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple, Self
from urllib.parse import quote, unquote

from cachestore.core.arguments import as_path
from cachestore.core.errors import BadInput

MARKER: Final = "cachestore.json"
"""The file that makes a folder a store."""

_NAMES: Final = 1 << 15
"""Names of claims and ledgers whose parts are remembered: thousands are listed again at every look."""

_NUMBER = r"(0|[1-9][0-9]{0,17})"
_SEGMENT = re.compile(r"([0-9a-f]{32})\.safetensors")
_INDEX = re.compile(_NUMBER + r"-([0-9a-f]{32})\.lmdb")
_CATALOG = re.compile(_NUMBER + r"\.safetensors")
_DROPPED = re.compile(_NUMBER + r"\.dropped")
_LISTING = re.compile(_NUMBER + r"\.json")
_LISTED = re.compile(_NUMBER + r"\.ended")
_ROUND = re.compile(_NUMBER + r"\.json")
_CLAIM = re.compile(rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}\.{_NUMBER}")
_LEDGER = re.compile(rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}\.json")
_ATTEMPT = re.compile(rf"([0-9a-f]{{32}})\.{_NUMBER}\.{_NUMBER}")
_PASS = re.compile(_NUMBER)
_DIGEST = re.compile(r"[0-9a-f]{32}")
_FINGERPRINT = re.compile(r"([0-9a-f]{64})\.json")
_WORKER = re.compile(r"([0-9a-f]{32})\.json")
_WORKER_LOCK = re.compile(r"([0-9a-f]{32})\.lock")
_CONDEMNED = re.compile(r"([0-9a-f]{32})\.json")
_LOST = re.compile(r"([0-9a-f]{32})\.lost\.json")
_TEMP = re.compile(r"[0-9a-f]{32}\.tmp")
_NAME_LIMIT = 200
_INSIDE = re.compile(
    r"(.*?)/(?:cachestore\.json|segments/[0-9a-f]{2}/[^/]+|index/[^/]+\.lmdb|catalogs/[^/]+/[0-9]+\.(?:safetensors|dropped)|listings/[^/]+/[0-9]+\.(?:json|ended)"
    r"|recipes/[0-9a-f]{64}\.json|plans/[0-9a-f]{32}/(?:plan\.safetensors|[0-9]+/(?:done\.json|[a-z]+/[^/]+))"
    r"|(?:workers|condemned|digests|locks|quarantine|tmp)/(?!cachestore\.json)[^/]+)"
)
"""A file in a store, by its path: (the store)."""


class Mode(Enum):
    """Who may write the store. Decides the permission bits of everything in it, whatever the umask."""

    PRIVATE = "private"
    GROUP = "group"

    @property
    def folder_bits(self) -> int:
        """Permission bits of folders."""
        return 0o755 if self is Mode.PRIVATE else 0o2775

    @property
    def file_bits(self) -> int:
        """Permission bits of small files."""
        return 0o644 if self is Mode.PRIVATE else 0o664


class IndexName(NamedTuple):
    """What an index file's name says. Sorts by number; equal numbers sort by digest, so that every reader picks the same."""

    number: int
    digest: str


class ClaimName(NamedTuple):
    """What a claim's name says: the n-th claim of a partition in a round."""

    round: int
    recipe: int
    partition: int
    n: int


class LedgerName(NamedTuple):
    """What a ledger's name says."""

    round: int
    recipe: int
    partition: int


class AttemptName(NamedTuple):
    """What an attempt's name says: the n-th unit that a worker does alone, by its place in the plan."""

    worker: str
    n: int
    unit: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of one store, the mode its files are made with, and which store it is."""

    root: Path
    mode: Mode = Mode.PRIVATE
    store_id: str = ""
    """The id in the marker of the store that was opened; empty for a path that was not opened."""

    @classmethod
    def at(cls, path: object, argument: str = "path") -> Self:
        """The paths of the store at a caller's path; `argument` is what the caller knows it as. Raises BadInput for what is no path."""
        return cls(as_path(argument, path).absolute())

    def command(self, words: str) -> str:
        """A command for this store as it can be pasted: of `repair --refill`, "`cachestore repair STORE --refill`"."""
        return _command(words, self.root)

    @property
    def marker(self) -> Path:
        """The file that makes a folder a store."""
        return self.root / MARKER

    @property
    def segments(self) -> Path:
        """The folder of segments."""
        return self.root / "segments"

    def segment(self, digest: str) -> Path:
        """The path of a segment with this digest."""
        return self.segments / digest[:2] / f"{digest}.safetensors"

    @property
    def indexes(self) -> Path:
        """The folder of index files."""
        return self.root / "index"

    def index(self, name: IndexName) -> Path:
        """The path of an index."""
        return self.indexes / f"{name.number}-{name.digest}.lmdb"

    @property
    def catalogs(self) -> Path:
        """The folder of catalogs by name."""
        return self.root / "catalogs"

    def catalog_folder(self, name: str) -> Path:
        """The folder of one name's generations."""
        return self.catalogs / encode_name(name)

    def catalog(self, name: str, generation: int) -> Path:
        """The path of one generation of a catalog."""
        return self.catalog_folder(name) / f"{generation}.safetensors"

    def dropped(self, name: str, generation: int) -> Path:
        """The path of what says that a data set was dropped, up to a generation."""
        return self.catalog_folder(name) / f"{generation}.dropped"

    @property
    def listings(self) -> Path:
        """The folder of listing numbers by data set."""
        return self.root / "listings"

    def listing_folder(self, name: str) -> Path:
        """The folder of one data set's listing numbers."""
        return self.listings / encode_name(name)

    def listing(self, name: str, number: int) -> Path:
        """The path of a listing number of a data set."""
        return self.listing_folder(name) / f"{number}.json"

    def listed(self, name: str, number: int) -> Path:
        """The path of a listing number that was given back."""
        return self.listing_folder(name) / f"{number}.ended"

    @property
    def recipes(self) -> Path:
        """The folder of recipes."""
        return self.root / "recipes"

    def recipe(self, fingerprint: str) -> Path:
        """The path of a recipe."""
        return self.recipes / f"{fingerprint}.json"

    @property
    def plans(self) -> Path:
        """The folder of plans."""
        return self.root / "plans"

    def plan_folder(self, plan: str) -> Path:
        """The folder of one plan and its passes."""
        return self.plans / plan

    def plan(self, plan: str) -> Path:
        """The path of a plan's rows."""
        return self.plan_folder(plan) / "plan.safetensors"

    def pass_folder(self, plan: str, number: int) -> Path:
        """The folder of one pass over a plan."""
        return self.plan_folder(plan) / str(number)

    @property
    def workers(self) -> Path:
        """The folder of the workers' beats and locks."""
        return self.root / "workers"

    def worker(self, worker: str) -> Path:
        """The path of a worker's beat."""
        return self.workers / f"{worker}.json"

    def worker_lock(self, worker: str) -> Path:
        """The path of the lock that a worker holds for life."""
        return self.workers / f"{worker}.lock"

    @property
    def digests(self) -> Path:
        """The folder of cached digests of model files."""
        return self.root / "digests"

    @property
    def condemned(self) -> Path:
        """The folder of lists of segments that are to go."""
        return self.root / "condemned"

    def condemned_list(self, digest: str) -> Path:
        """The path of a list of segments that are to go, by the digest of its bytes."""
        return self.condemned / f"{digest}.json"

    def lost_list(self, digest: str) -> Path:
        """The path of the list of entries that were lost with a segment."""
        return self.quarantine / f"{digest}.lost.json"

    def lock(self, word: str) -> Path:
        """The path of a lock that saves work."""
        return self.root / "locks" / f"{word}.lock"

    @property
    def quarantine(self) -> Path:
        """The folder where repair puts damaged files."""
        return self.root / "quarantine"

    @property
    def temporary(self) -> Path:
        """The folder of files that have no final name yet."""
        return self.root / "tmp"

    def new_temporary(self) -> Path:
        """A path in `tmp/` that nobody uses."""
        return self.temporary / f"{secrets.token_hex(16)}.tmp"


@dataclass(frozen=True, slots=True)
class PassFolder:
    """The paths of one pass."""

    root: Path

    @property
    def rounds(self) -> Path:
        """The folder of rounds."""
        return self.root / "rounds"

    def round(self, number: int) -> Path:
        """The path of a round."""
        return self.rounds / f"{number}.json"

    @property
    def claims(self) -> Path:
        """The folder of claims."""
        return self.root / "claims"

    def claim(self, name: ClaimName) -> Path:
        """The path of a claim."""
        return self.claims / ".".join(str(part) for part in name)

    @property
    def ledgers(self) -> Path:
        """The folder of ledgers."""
        return self.root / "ledgers"

    def ledger(self, name: LedgerName) -> Path:
        """The path of a ledger."""
        return self.ledgers / (".".join(str(part) for part in name) + ".json")

    @property
    def attempts(self) -> Path:
        """The folder of attempts; made when the first unit is done alone."""
        return self.root / "attempts"

    def attempt(self, name: AttemptName) -> Path:
        """The path of an attempt."""
        return self.attempts / ".".join(str(part) for part in name)

    @property
    def done(self) -> Path:
        """The file that ends a pass."""
        return self.root / "done.json"


def command_for(words: str, path: Path) -> str:
    """As `Layout.command`, for the store that a file lies in, by the file's place alone; without a store where that is none of ours."""
    match = _INSIDE.fullmatch(str(path))
    return _command(words, Path(match[1] or "/") if match else None)


def to_repair(path: Path) -> str:
    """What mends the store that a file lies in."""
    return command_for("repair", path)


def to_verify(path: Path) -> str:
    """What tells of the store that a file lies in."""
    return command_for("verify", path)


def _command(words: str, root: Path | None) -> str:
    command, _, options = words.partition(" ")
    return f"`{' '.join(filter(None, ('cachestore', command, shlex.quote(str(root)) if root else '', options)))}`"


def parse_segment(name: str) -> str | None:
    """The digest in a segment's file name, or None."""
    match = _SEGMENT.fullmatch(name)
    return match[1] if match else None


def parse_index(name: str) -> IndexName | None:
    """What an index's file name says, or None."""
    match = _INDEX.fullmatch(name)
    return IndexName(int(match[1]), match[2]) if match else None


def parse_catalog(name: str) -> int | None:
    """The generation in a catalog's file name, or None."""
    match = _CATALOG.fullmatch(name)
    return int(match[1]) if match else None


def parse_dropped(name: str) -> int | None:
    """The generation up to which a data set was dropped, or None."""
    match = _DROPPED.fullmatch(name)
    return int(match[1]) if match else None


def parse_listing(name: str) -> int | None:
    """The number in the file name of a listing number, or None."""
    match = _LISTING.fullmatch(name)
    return int(match[1]) if match else None


def parse_listed(name: str) -> int | None:
    """The number in the file name of a listing number that was given back, or None."""
    match = _LISTED.fullmatch(name)
    return int(match[1]) if match else None


def parse_round(name: str) -> int | None:
    """The number in a round's file name, or None."""
    match = _ROUND.fullmatch(name)
    return int(match[1]) if match else None


@lru_cache(_NAMES)
def parse_claim(name: str) -> ClaimName | None:
    """What a claim's file name says, or None."""
    match = _CLAIM.fullmatch(name)
    return ClaimName(*(int(part) for part in match.groups())) if match else None


@lru_cache(_NAMES)
def parse_ledger(name: str) -> LedgerName | None:
    """What a ledger's file name says, or None."""
    match = _LEDGER.fullmatch(name)
    return LedgerName(*(int(part) for part in match.groups())) if match else None


def parse_attempt(name: str) -> AttemptName | None:
    """What an attempt's file name says, or None."""
    match = _ATTEMPT.fullmatch(name)
    return AttemptName(match[1], int(match[2]), int(match[3])) if match else None


def parse_pass(name: str) -> int | None:
    """The number in a pass folder's name, or None."""
    match = _PASS.fullmatch(name)
    return int(match[1]) if match else None


def parse_plan(name: str) -> str | None:
    """The digest that names a plan's folder, or None."""
    return name if _DIGEST.fullmatch(name) else None


def parse_recipe(name: str) -> str | None:
    """The fingerprint in a recipe's file name, or None."""
    match = _FINGERPRINT.fullmatch(name)
    return match[1] if match else None


def parse_worker(name: str) -> str | None:
    """The worker in the name of a beat, or None."""
    match = _WORKER.fullmatch(name)
    return match[1] if match else None


def is_worker(text: object) -> bool:
    """Whether this names a worker: 32 hex digits. What a claim or an attempt says must be that before a path is made of it."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def parse_worker_lock(name: str) -> str | None:
    """The worker in the name of a lock, or None."""
    match = _WORKER_LOCK.fullmatch(name)
    return match[1] if match else None


def parse_condemned(name: str) -> str | None:
    """The digest in the file name of a list of condemned segments, or None."""
    match = _CONDEMNED.fullmatch(name)
    return match[1] if match else None


def parse_lost(name: str) -> str | None:
    """The segment in the file name of a list of entries that were lost with it, or None."""
    match = _LOST.fullmatch(name)
    return match[1] if match else None


def is_temporary(name: str) -> bool:
    """Whether a name in `tmp/` is of our own making."""
    return _TEMP.fullmatch(name) is not None


def encode_name(name: str) -> str:
    """A data set's name as a folder name: any text, percent-encoded, so that no name leaves its folder.

    Raises BadInput for the empty name, for one longer than 200 bytes when encoded, and for one that is not Unicode text.
    """
    try:
        encoded = quote(unicodedata.normalize("NFC", name), safe=" ")
    except UnicodeEncodeError:  # half a surrogate pair: how Python shows bytes of a file name that are not UTF-8
        encoded = ""
    if encoded.startswith("."):
        encoded = "%2E" + encoded[1:]
    if not encoded.strip() or len(encoded) > _NAME_LIMIT:
        raise BadInput(f"a data set's name has 1 to {_NAME_LIMIT} characters once encoded; {name!r} does not: pass another --name")
    return encoded


def decode_name(folder: str) -> str | None:
    """The data set's name behind a folder name, or None where the folder is not ours."""
    try:
        name = unquote(folder, errors="strict")
        return name if encode_name(name) == folder else None
    except (BadInput, UnicodeDecodeError):
        return None
