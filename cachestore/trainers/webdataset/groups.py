"""Samples in tars that may come from anybody: the members of each, their bytes and their tensors. Knows no store; unpacks nothing."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tarfile import TarInfo
from typing import Final

from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.core.keys import Json, Key
from cachestore.core.raw_tensors import Raw
from cachestore.sources.tars import Member, members_of
from cachestore.trainers.containers import LARGEST_BYTES, read_safetensors
from cachestore.trainers.webdataset.exchange import ExchangedSample, check_tensors, parse_sample

_JSON, _TENSORS, _TEXT = "json", "safetensors", "txt"
_BLOCK: Final = 512
_JSON_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class TarMembers:
    """The members of one sample."""

    name: str
    """What members' names have in common, and the tar: `00000001 in train-000000.tar`."""
    members: Mapping[str, Member]
    """By suffix."""

    def sample(self) -> ExchangedSample:
        """Return the sample of the JSON. Raises BadInput, OSError."""
        sample = parse_sample(self._bytes(_JSON, _JSON_BYTES), f"{self.name}, .{_JSON}")
        text = self._bytes(_TEXT, _JSON_BYTES) if _TEXT in self.members else None
        if text is not None and text != "\n".join(sample.captions).encode("utf-8", "surrogatepass"):
            raise BadInput(f"{self.name}: the text in its .{_TEXT} is not the caption of its .{_JSON}: export the data set again")
        return sample

    def entries(self, keys: Sequence[Key]) -> Iterator[tuple[Key, Mapping[str, Raw], Mapping[str, Json]]]:
        """Yield key, tensors and JSON value of each of its entries, which had these keys. Raises BadInput, EncodeFailed, OSError."""
        sample = self.sample()
        if [one.key for column in sample.columns for one in column.cells] != keys:
            raise EncodeFailed(f"{self.name} has changed since it was listed: run the same command again")
        found = self._tensors(sample)
        for column in sample.columns:
            for one in column.cells:
                own = {name: found[there] for name, there in one.tensors.items()}
                try:
                    check_tensors(column, one, sample.recipes[column.fingerprint], own)
                except EncodeFailed as error:
                    raise EncodeFailed(f"{self.name}: {error}; correct the tensor, and pack the tar again") from error
                yield one.key, own, one.meta

    def _tensors(self, sample: ExchangedSample) -> Mapping[str, Raw]:
        data = self._bytes(_TENSORS, LARGEST_BYTES)
        if hashlib.sha256(data).hexdigest() != sample.digest:
            raise EncodeFailed(f"{self.name}: its .{_TENSORS} has another SHA-256 than its .{_JSON} states: copy the tar again")
        try:
            found = read_safetensors(data).tensors
        except EncodeFailed as error:
            raise EncodeFailed(f"{self.name}, .{_TENSORS}: {error}; copy the tar again") from error
        listed = {name for column in sample.columns for one in column.cells for name in one.tensors.values()}
        if other := sorted(listed ^ found.keys()):
            raise EncodeFailed(
                f"{self.name}: the tensor {other[0]!r:.80} is only in one of its .{_TENSORS} and its .{_JSON}: export it again"
            )
        return found

    def _bytes(self, suffix: str, most: int) -> bytes:
        member = self.members[suffix]
        if member.size > most:
            raise BadInput(f"{self.name}: its .{suffix} has {member.size >> 20} MiB; at most {most >> 20} MiB are read: export it again")
        data, _stat = member.read()
        if len(data) < member.size:
            raise BadInput(f"{self.name}: the tar ends within its .{suffix}: copy it again")
        return data


def groups_in(path: Path, others: list[str]) -> list[TarMembers]:
    """Return the samples of a tar in order; `others` gets the names of members that belong to none. Raises BadInput, OSError."""
    groups: dict[str, dict[str, Member]] = {}
    end = 0
    for info, member in members_of(path):
        if (end := member.offset + -(-member.size // _BLOCK) * _BLOCK) > member.listed.st_size:
            raise BadInput(f"{path} ends within {info.name!r:.200}: copy it again")
        name = _checked_name(path, info)
        if info.isdir():
            continue
        stem, _dot, suffix = name.name.partition(".")
        if not stem or suffix not in {_JSON, _TENSORS, _TEXT}:
            others.append(f"{name} in {path.name}")
            continue
        group = groups.setdefault(str(name.with_name(stem)), {})
        if suffix in group:
            raise BadInput(f"{path} has two members {info.name!r:.200}: remove the tar, and export or copy it again")
        group[suffix] = member
    if path.stat().st_size < end + 2 * _BLOCK:
        raise BadInput(f"{path} ends before the end of a tar, so members may be missing: copy it again")
    return list(_whole(path, groups, others))


def _checked_name(path: Path, info: TarInfo) -> PurePosixPath:
    """Return the name of a member. Raises BadInput for one that leads elsewhere, and for a member that is no plain file or folder."""
    name = PurePosixPath(info.name)
    if not info.name.isprintable() or name.is_absolute() or ".." in name.parts or "\\" in info.name:
        raise BadInput(f"{path} has a member {info.name!r:.200}, whose name leads out of the folder or cannot be printed: rename it")
    if not (info.isdir() or (info.isreg() and not info.issparse())):
        raise BadInput(f"{info.name!r:.200} in {path} is a link, a device or a file with holes: pack it as a plain file")
    return name


def _whole(path: Path, groups: Mapping[str, Mapping[str, Member]], others: list[str]) -> Iterator[TarMembers]:
    for key, members in groups.items():
        if _JSON not in members and _TENSORS not in members:
            others += [f"{key}.{suffix} in {path.name}" for suffix in members]
            continue
        for suffix, other in ((_JSON, _TENSORS), (_TENSORS, _JSON)):
            if suffix not in members:
                what = "say what its tensors are" if suffix == _JSON else "hold its tensors"
                raise BadInput(f"{path} has {key[:200]}.{other}, but no {key[:200]}.{suffix}, which must {what} (docs/design/trainers.md)")
        yield TarMembers(f"{key} in {path}", members)
