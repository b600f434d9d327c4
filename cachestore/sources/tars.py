"""List tars of pictures and videos with captions (in webdataset's form) as samples. Members are read inside the tar; nothing is unpacked.

Members whose names agree up to the first dot belong together: `a/001.jpg`, `a/001.txt`, `a/001.json`, `a/001.mask.png`. With the option
`tar_names="last-dot"` they must agree up to the last one, but for a role: `22.05.jpg`, `22.05.txt`, `22.05.mask.png`.
"""

import os
import re
import tarfile
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from cachestore.core.errors import BadInput
from cachestore.core.inputs import NO_STAT, Stat
from cachestore.core.samples import BESIDE, IMAGE, VIDEO, Sample, goes_with
from cachestore.files.opening import FOREIGN_LIMIT_BYTES, open_foreign, refuse_size
from cachestore.files.stat_record import proof_of, stat_of
from cachestore.sources.animated import SUFFIXES as ANIMATED
from cachestore.sources.animated import is_animated
from cachestore.sources.captions import TEXT_BYTES, by_spelling, captions_in, decode_text, folded, normal
from cachestore.sources.files import IMAGE_SUFFIXES, MEDIA_SUFFIXES, VIDEO_SUFFIXES
from cachestore.sources.leftovers import LOOK_BYTES, Leftovers
from cachestore.sources.listing import Listing, list_samples
from cachestore.sources.reading import PLAIN, ListingOptions
from cachestore.sources.remarks import Problems, RefusedItem, Remarks, taken
from cachestore.sources.roles import asked_about, located_in, owners_by_location
from cachestore.sources.rows import from_row, named_row, note_columns
from cachestore.sources.tables import is_metadata, json_row
from cachestore.sources.unused import HIDDEN, NO_FRAMES, NO_OWNER, NOT_DATA, REPLACED, SECOND_CAPTION
from cachestore.sources.walk import Names, split_name

_COMPRESSED: Final[Mapping[str, str]] = {
    **dict.fromkeys((".tar.gz", ".tgz"), "gunzip"),
    **dict.fromkeys((".tar.bz2", ".tbz2"), "bunzip2"),
    **dict.fromkeys((".tar.xz", ".txz"), "unxz"),
    ".tar.zst": "zstd -d",
}
"""Suffixes of compressed tars, and the command that unpacks each."""
SUFFIX: Final = ".tar"
_TEXTS: Final = ("txt", "caption")
_RANGE: Final = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MOST: Final = 1_000_000
_HEADER_BYTES: Final = 1 << 20
"""More than any header of a member has: a long name, or a list of properties."""


@dataclass(frozen=True, slots=True)
class Member:
    """Where the bytes of a member are in its tar."""

    tar: Path
    listed: os.stat_result
    """The tar's status when its members were listed."""
    offset: int
    size: int

    @contextmanager
    def open_tar(self) -> Generator[tuple[BinaryIO, Stat]]:
        """Open its tar; also gives the member's stat record: its size, and the stamp of its tar. Raises OSError if the tar was replaced.

        The stat record is NO_STAT for a tar that was touched since it was listed: it may hold other members now.
        """
        with open_foreign(self.tar) as file:
            now = os.fstat(file.fileno())
            if (now.st_size, now.st_mtime_ns) != (self.listed.st_size, self.listed.st_mtime_ns):
                raise OSError(f"{self.tar} changed since its members were listed; run the same command again")
            found = proof_of(now) if stat_of(now) == stat_of(self.listed) else NO_STAT
            yield file, found if found == NO_STAT else (self.size, found[1])

    def read(self) -> tuple[bytes, Stat]:
        """Read its bytes, fewer if the tar ends within it, and its stat record. Raises OSError, also if it is too large."""
        refuse_size(self.tar, self.size)
        with self.open_tar() as (file, found):
            file.seek(self.offset)
            return file.read(self.size), found


class _MemberFile(RawIOBase):
    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        super().__init__()
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence])
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(max(0, min(len(buffer), self._size - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


@dataclass(frozen=True, slots=True)
class _Members:
    """Members of tars by reference: the member's name, after the tar's name if there are several tars."""

    members: Mapping[str, Member]

    def read(self, reference: str) -> tuple[bytes, Stat]:
        """The bytes of a member, with its stat record. Raises OSError, also if the tar has changed since it was listed."""
        member = self._member(reference)
        data, found = member.read()
        if len(data) != member.size:
            raise OSError(f"{member.tar} is incomplete, it ends in the middle of {reference}: copy it again")
        return data, found

    @contextmanager
    def open(self, reference: str) -> Generator[tuple[BinaryIO, Stat]]:
        """A member as a file for seeking, with its stat record. Raises as `read`."""
        member = self._member(reference)
        with member.open_tar() as (file, found), BufferedReader(_MemberFile(file, member.offset, member.size)) as part:
            yield part, found

    def stat(self, reference: str) -> Stat | None:
        """A member's size and its tar's stamp now, or None if it is gone."""
        try:
            member = self._member(reference)
            return member.size, stat_of(member.tar.stat())[1]
        except OSError:
            return None

    def _member(self, reference: str) -> Member:
        member = self.members.get(reference)
        if member is None:
            raise FileNotFoundError(f"no tar of this source has a member {reference!r} now: run the same command again")
        return member


def tars_at(data: str | Path) -> list[Path] | None:
    """The tars of a source: one, a range `shards-{000..012}.tar`, or those in a folder without pictures; else None. Raises BadInput."""
    path = Path(data)
    _refuse_compressed(path)
    if os.path.isdir(path):  # noqa: PTH112 - Path's raises if access is refused
        try:
            with os.scandir(path) as entries:
                names = sorted(entry.name for entry in entries if not entry.name.startswith("."))
        except OSError:  # listing its pictures reports that
            names = []
        suffixes = {split_name(name)[1] for name in names}
        has_others = suffixes & IMAGE_SUFFIXES or any(is_metadata(Path(name)) for name in names)
        for name in () if has_others else names:
            _refuse_compressed(path / name)
        return None if has_others or SUFFIX not in suffixes else [path / name for name in names if Path(name).suffix.lower() == SUFFIX]
    if path.suffix.lower() != SUFFIX:
        return None
    expanded = [Path(name) for name in _expanded(str(path))]
    if missing := [one for one in expanded if not os.path.isfile(one)]:  # noqa: PTH113
        raise BadInput(
            f"{missing[0]} does not exist" + (f", nor {len(missing) - 1} more of {path}" if len(missing) > 1 else "") + ": check the path"
        )
    return expanded


def _refuse_compressed(path: Path) -> None:
    suffix = next((suffix for suffix in _COMPRESSED if path.name.lower().endswith(suffix)), None)
    if suffix is not None and not os.path.isdir(path):  # noqa: PTH112
        raise BadInput(
            f"{path} is a compressed tar, but pictures are read where they lie in a tar, which needs a plain one: unpack it with"
            f" `{_COMPRESSED[suffix]} {path.name}`, or into a folder"
        )


def _expanded(name: str) -> Iterator[str]:
    """The names in a range, or the name itself if it has none. With several ranges, the last one counts fastest."""
    found = None if os.path.exists(name) else _RANGE.search(name)  # noqa: PTH110
    if found is None:
        yield name
        return
    first, last = found.groups()
    if int(first) > int(last):
        raise BadInput(f"{name}: the range {found.group()} goes down: write the smaller number first")
    if int(last) > int(first) + _MOST:
        raise BadInput(f"{name}: the range {found.group()} is longer than {_MOST:,}: use shorter ones")
    for number in range(int(first), int(last) + 1):
        yield from _expanded(f"{name[: found.start()]}{number:0{len(first)}}{name[found.end() :]}")


def list_tars(paths: Sequence[Path], how: ListingOptions = PLAIN) -> Listing:
    """List the samples in tars. Ids are the names of pictures and videos, after their tar's name if there are several tars.

    Without `videos` the videos are only counted. Reads every header and the bytes of captions, but no picture. A member that cannot be used
    fails alone. Raises BadInput for files that are no plain tars, for damaged tars, and if no member can be used.
    """
    if twice := next((name for name, count in Counter(path.name for path in paths).items() if count > 1), None):
        one, other = [path for path in paths if path.name == twice][:2]
        raise BadInput(f"two tars of one source have the same name: {one} and {other}; rename one of them")
    members: dict[str, Member] = {}
    groups: dict[str, _Group] = {}
    listed = Remarks()
    unused = listed.unused
    others: dict[str, None] = {}
    problems = Problems()
    where = paths[0] if len(paths) == 1 else f"{len(paths)} tars in {paths[0].parent}" if paths else "no tars"
    for path in paths:
        prefix = f"{path.name}/" if len(paths) > 1 else ""
        for name, member in _members(path, prefix, problems, listed):
            reference = prefix + name
            if reference in members:
                unused.add(REPLACED, reference)
            members[reference] = member  # the later of two members of one name counts, as in unpacking
            is_clip = False
            if how.videos and Path(name).suffix.lower() in ANIMATED:
                with member.open_tar() as (file, _stat), BufferedReader(_MemberFile(file, member.offset, member.size)) as part:
                    is_clip = is_animated(part)
            if not _sort_in(groups, reference, how, listed, is_clip=is_clip):
                others[reference] = None
    problems.refuse(where)
    listed.asks += asked_about(groups, groups, how)
    _join_by_location(groups, how, listed)
    left = Leftovers(unused, peek=partial(_first_bytes, members))
    _account(groups, others, how, left)

    def ids_of(group: _Group) -> list[str]:
        return [normal(reference) for reference in sorted({*group.pictures, *(group.videos if how.videos else ())}, key=by_spelling)]

    def parse(remarks: Remarks) -> Iterator[Sample]:
        remarks.add(listed)
        remarks.captions_elsewhere += left.captions_elsewhere(str(where)) if how.caption is None else ()
        ordered = ((f"{key} in {where}", groups[key]) for key in sorted(groups, key=by_spelling))
        for sample in taken(ordered, partial(_samples, members, how, remarks), ids_of, remarks):
            remarks.origin = ""  # a sample's picture says where it is
            yield sample

    return list_samples(_Members(members), parse, where, how)


@dataclass(slots=True)
class _Group:
    videos: set[str] = field(default_factory=set[str])
    pictures: set[str] = field(default_factory=set[str])
    roles: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    texts: dict[str, str] = field(default_factory=dict[str, str])
    row: str | None = None


def _split(name: str, how: ListingOptions) -> tuple[str, str]:
    if how.tar_names == "first-dot":
        stem, _dot, rest = name.partition(".")
        return stem, rest
    stem, _dot, rest = name.rpartition(".")
    parts = stem.split(".")
    count = 2 if len(parts) > 2 and parts[-1].isdecimal() else 1
    if len(parts) > count and parts[-count].lower() in {*BESIDE, *how.roles}:
        return ".".join(parts[:-count]), ".".join([*parts[-count:], rest])
    return stem, rest


def _sort_in(groups: dict[str, _Group], reference: str, how: ListingOptions, remarks: Remarks, *, is_clip: bool) -> bool:
    """Sort a member into the group of its name. Returns False for one that is no picture, video, caption or row."""
    folder, slash, name = reference.rpartition("/")
    stem, rest = _split(name, how)
    rest = rest.lower()
    suffix = split_name(name)[1]
    if not rest or not stem:
        return False
    if suffix not in MEDIA_SUFFIXES and rest not in {*_TEXTS, "json"}:
        remarks.dotted += [reference] if suffix[1:] in (*_TEXTS, "json") else []
        return False
    group = groups.setdefault(f"{folder}{slash}{stem}", _Group())
    role, _dot, kind = rest.partition(".")
    if rest in _TEXTS:
        group.texts[rest] = reference
    elif rest == "json":
        group.row = reference
    elif kind and role in {*BESIDE, *how.roles} and (how.videos or suffix in IMAGE_SUFFIXES):
        group.roles.setdefault(role, set()).add(reference)
    elif suffix in VIDEO_SUFFIXES or is_clip:
        group.videos.add(reference)
    else:
        group.pictures.add(reference)
    return True


def _join_by_location(groups: dict[str, _Group], how: ListingOptions, remarks: Remarks) -> None:
    """Add the pictures and videos that --roles gives a role, by their folder or the end of their names, to the groups they belong to."""
    located = located_in(groups, how, remarks)
    owners = owners_by_location(located, groups.keys() - located.keys(), how) if located else {}
    for key, (role, _where) in located.items():
        group, owner = groups[key], groups.get(owners.get(key, ""))
        those = group.pictures | (group.videos if how.videos else set[str]())
        (group if owner is None else owner).roles.setdefault(role, set()).update(those)
        group.pictures, group.videos = set(), group.videos - those


def _account(groups: Mapping[str, _Group], others: Iterable[str], how: ListingOptions, left: Leftovers) -> None:
    unclaimed = [*others]
    for key, group in groups.items():
        texts = [group.texts[suffix] for suffix in _TEXTS if suffix in group.texts]
        rows = [group.row] if group.row is not None else []
        samples = len(group.pictures) + (len(group.videos) if how.videos else 0)
        if group.videos and not how.videos:
            left.unread.add(folded(key))
        spare = [(NO_FRAMES, reference) for reference in group.videos if not how.videos]
        if samples:
            left.note(key, key[: key.rfind("/") + 1], has_caption=bool(texts or rows))
            left.count(samples, has_caption=bool(texts or rows))
            left.unused.texts += len(texts[:1]) + len(rows)
            spare += [(SECOND_CAPTION, reference) for reference in texts[1:]]
        else:
            spare += [(NO_FRAMES if group.videos else NO_OWNER, one) for those in group.roles.values() for one in those]
            unclaimed += [*texts, *rows]
        for reason, reference in sorted(spare):
            left.unused.add(reason, reference)
    by_folder: dict[str, list[str]] = {}
    for reference in unclaimed:
        folder, slash, name = reference.rpartition("/")
        by_folder.setdefault(f"{folder}{slash}", []).append(name)
    for prefix, names in by_folder.items():
        left.sort(Names(prefix, Path(prefix), names), names)


def _first_bytes(members: Mapping[str, Member], path: Path) -> bytes:
    member = members.get(path.as_posix())
    try:
        return b"" if member is None else replace(member, size=min(member.size, LOOK_BYTES)).read()[0]
    except OSError:
        return b""


def _samples(members: Mapping[str, Member], how: ListingOptions, remarks: Remarks, group: _Group) -> Iterator[Sample]:
    of_roles = dict.fromkeys(group.videos if how.videos else (), VIDEO) | dict.fromkeys(group.pictures, IMAGE)
    if not of_roles:
        return
    row: Mapping[str, Any] = {}
    given: Mapping[str, Any] = {}
    if group.row is not None:
        where = f"{group.row} in {members[group.row].tar}"
        given = json_row(_text_of(members, group.row), where)
        row = named_row(given, where, how)
    text = next((group.texts[suffix] for suffix in _TEXTS if suffix in group.texts), None)
    raw = None if text is None else _text_of(members, text)
    beside = {role: sorted(references, key=by_spelling) for role, references in group.roles.items()}
    for reference in sorted(of_roles, key=by_spelling):
        name = {"id": reference} if row.get("id") is None or len(of_roles) > 1 else {}
        where = f"{reference} in {members[reference].tar}"
        own = {role: those for role, those in beside.items() if goes_with(role, of_roles[reference], {*of_roles.values()})}
        named = {**row, **name, of_roles[reference]: reference, **own}
        sample = from_row(named, where, how, remarks if raw is None else Remarks())
        if how.caption_column is not None and sample.captions and text is not None and raw is not None:  # who names a field means the JSON
            theirs = captions_in(raw, how.caption_lines, sample.id, Remarks(), f"{text} in {members[text].tar}")
            remarks.compare(sample.id, sample.captions, str(group.row), [(text, theirs)].copy)
        elif text is not None and raw is not None:
            captions = captions_in(raw, how.caption_lines, sample.id, remarks, f"{text} in {members[text].tar}")
            others = [(group.row, sample.captions)] if group.row is not None and sample.captions else []
            remarks.compare(sample.id, captions, text, others.copy)
            sample = replace(sample, captions=captions)
        yield sample
    note_columns(given, remarks)


def _text_of(members: Mapping[str, Member], reference: str) -> str:
    member = members[reference]
    where = f"{reference} in {member.tar}"
    if member.size > TEXT_BYTES:
        raise BadInput(f"{where} has {member.size:,} bytes, which is no text of a sample; correct it")
    try:
        return decode_text(member.read()[0], where)
    except OSError as error:
        raise BadInput(f"{where} cannot be read: {error.strerror or error}") from error


def members_of(path: Path) -> Iterator[tuple[tarfile.TarInfo, Member]]:
    """Yield every member of a tar, of any kind, with where its bytes are. Raises BadInput for a damaged tar; OSError."""
    with open_foreign(path) as file:
        found = os.fstat(file.fileno())
        if found.st_size == 0:
            return
        try:
            with tarfile.open(fileobj=cast("Any", _Headers(file)), mode="r:") as opened:
                while (member := opened.next()) is not None:
                    cast("Any", opened).members.clear()  # tarfile keeps every member it has seen
                    yield member, Member(path, found, member.offset_data, member.size)
                _check_end(file, opened.offset, found.st_size, path)
        except BadInput:
            raise
        except (tarfile.TarError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:  # of a hostile header
            what = f"{path} is not a plain tar, or is damaged ({error})"
            raise BadInput(f"{what}; copy it again, or if it is compressed, unpack it with gunzip") from error


class _Headers:
    """A tar as tarfile reads it: headers alone. A header of another size than headers have is refused, before it is in memory."""

    def __init__(self, file: BinaryIO) -> None:
        self.tell, self.seek = file.tell, file.seek
        self._read = file.read

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._read(size)


def _members(path: Path, prefix: str, problems: Problems, remarks: Remarks) -> Iterator[tuple[str, Member]]:
    """Yield (name, member) of every usable member that is not hidden. A tar that cannot be read to its end is a problem."""
    try:
        for info, member in members_of(path):
            name = info.name.removeprefix("./")
            suffix = split_name(name.rpartition("/")[2])[1]
            if info.isdir():
                continue
            if name.rpartition("/")[2].startswith("."):
                remarks.unused.add(HIDDEN, f"{prefix}{name}")
            elif info.isreg() and not info.issparse():
                yield name, member
            elif suffix in MEDIA_SUFFIXES or suffix[1:] in (*_TEXTS, "json"):
                reason = f"{name} in {path} is a link or a file with holes: pack it as the file itself (`tar --dereference`)"
                remarks.refused.append(RefusedItem(normal(f"{prefix}{name}"), reason))
            else:
                remarks.unused.add(NOT_DATA, f"{prefix}{name}")
    except BadInput as error:
        problems.add(error)
    except OSError as error:
        problems.add(f"{path} cannot be read: {error.strerror or error}")


def _check_end(file: BinaryIO, offset: int, size: int, path: Path) -> None:
    """Raise BadInput unless only zeros follow, and not too many: tarfile takes a damaged or empty header for the end."""
    file.seek(offset)
    if not 0 <= size - offset <= FOREIGN_LIMIT_BYTES or any(any(block) for block in iter(partial(file.read, _HEADER_BYTES), b"")):
        raise BadInput(f"{path} is damaged at byte {offset}: there is neither a member nor the end of the tar; copy it again")
