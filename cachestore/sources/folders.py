"""List folders of images, metadata files, manifests and prompt lists as samples."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Final, NamedTuple

from cachestore.core.errors import BadInput
from cachestore.core.samples import IMAGE, VIDEO, Sample, goes_with
from cachestore.sources.animated import is_animated_path
from cachestore.sources.captions import by_spelling, folded, normal, side_car
from cachestore.sources.files import IMAGE_SUFFIXES, TEXT_SUFFIXES, VIDEO_SUFFIXES, Folder
from cachestore.sources.leftovers import Leftovers
from cachestore.sources.listing import Listing, list_samples, list_tables
from cachestore.sources.reading import PLAIN, ListingOptions
from cachestore.sources.remarks import RefusedItem, Remarks
from cachestore.sources.roles import asked_about, located_in, named_role, owners_by_location, same_names
from cachestore.sources.rows import from_manifest, from_metadata, from_prompts
from cachestore.sources.tables import TABLE_SUFFIXES, metadata_of
from cachestore.sources.unused import BESIDE_TARS, BROKEN_LINK, NO_FRAMES, NO_OWNER, NO_ROW, SECOND_CAPTION, SECOND_METADATA, Unused
from cachestore.sources.walk import Names, Walk, split_name


def list_source(data: str | Path, how: ListingOptions = PLAIN) -> Listing:
    """List a folder, a file of rows (such as `.jsonl`) or a prompt list (`.txt`). Raises BadInput if nothing of it can be used."""
    path = Path(data)
    if os.path.isdir(path):  # noqa: PTH112 - as below
        if not os.access(path, os.R_OK | os.X_OK):
            raise BadInput(f"{path} cannot be read: let this user read and enter the folder")
        if found := metadata_of(path):
            listing = list_tables(path, [one.path for one in found], partial(from_metadata, found, how), how)
            return replace(listing, left=partial(_beside_rows, path, [one.path for one in found], how))
        there = {name for name in ("state.json", "dataset_info.json", "dataset_dict.json") if (path / name).is_file()}
        if "dataset_dict.json" in there or len(there) == 2:
            raise BadInput(f"{path} was written by save_to_disk of datasets: pass datasets.load_from_disk({str(path)!r}) to cs.precompute")
        return list_samples(Folder(path.absolute()), partial(_from_folder, path, how), path, how)
    suffix = path.suffix.lower()
    if suffix == ".txt" and os.path.isfile(path):  # noqa: PTH113
        own = replace(how, caption_lines="whole", roles=(), caption_column=None)
        return list_tables(path.parent, [path], partial(from_prompts, path), own)
    if suffix in TABLE_SUFFIXES and os.path.isfile(path):  # noqa: PTH113
        return list_tables(path.parent, [path], partial(from_manifest, path, how), how)
    if not os.path.exists(path):  # noqa: PTH110 - Path's raises if access is refused
        raise BadInput(f"{path} does not exist, or this user may not read it: check the path")
    if suffix == ".arrow":
        raise BadInput(f"{path}: pass it to cs.precompute as datasets.load_dataset('arrow', data_files={str(path)!r}, split='train')")
    kinds = ", ".join(TABLE_SUFFIXES)
    raise BadInput(f"{path} is not a folder of images, a file of rows ({kinds}), a list of prompts (.txt) or a tar")


_KINDS: Final = dict.fromkeys(IMAGE_SUFFIXES, IMAGE) | dict.fromkeys(VIDEO_SUFFIXES, VIDEO)


class _SampleFile(NamedTuple):
    reference: str
    kind: str
    stem: str
    """The reference without suffix, in Unicode form NFC."""


@dataclass(slots=True)
class _Texts:
    """The files of a folder that are no pictures or videos. Those that may be captions are sorted by what they may belong to."""

    names: Names
    files: list[str] = field(default_factory=list[str])
    by_owner: dict[str, list[tuple[str, str]]] = field(default_factory=dict[str, list[tuple[str, str]]])
    """By the folded name of the owner: (the owner as it is spelled, in NFC; the name of the caption)."""
    first: set[str] = field(default_factory=set[str])
    """The names of those that are read."""
    further: set[str] = field(default_factory=set[str])

    def add(self, name: str, stem: str, suffix: str) -> None:
        """Add a file."""
        self.files.append(name)
        if suffix in TEXT_SUFFIXES:
            self.by_owner.setdefault(folded(stem), []).append((normal(stem), name))

    def of(self, name: str, spelled: Callable[[], AbstractSet[str]]) -> list[str]:
        """Return the captions of a picture, best first: `a.txt`, `a.caption`, `a.json`, then `a.png.txt`, `a.png.caption`, `a.png.json`.

        Case does not count, but `A.txt` belongs to `a.png` only if no picture is called `A`. `spelled` returns the stems and the names of
        all pictures and videos, with their folders, in NFC.
        """
        found: list[str] = []
        for owner in (split_name(name)[0], name):
            those = self.by_owner.get(folded(owner), ())
            exact = normal(owner)
            others = [by for by, _text in those if by != exact]
            if len(those) > 1 or others:
                prefix, known = normal(self.names.prefix), spelled() if others else frozenset[str]()
                free = [(by != exact, text) for by, text in those if by == exact or f"{prefix}{by}" not in known]
                # in small letters first: of a.txt and a.TXT, a.txt is the caption
                ordered = sorted((is_other, TEXT_SUFFIXES.index(split_name(text)[1]), text.swapcase(), text) for is_other, text in free)
                found += [text for *_order, text in ordered]
            else:
                found += [text for _by, text in those]
        self.first.update(found[:1])
        self.further.update(found[1:])
        return found

    def account(self, left: Leftovers) -> None:
        """Count what is not used of these files."""
        unclaimed: list[str] = []
        for name in self.files:
            if name in self.first:
                left.unused.texts += 1
            elif name in self.names.broken:
                left.unused.add(BROKEN_LINK, f"{self.names.prefix}{name}")
            elif name in self.further:
                left.unused.add(SECOND_CAPTION, f"{self.names.prefix}{name}")
            else:
                unclaimed.append(name)
        left.sort(self.names, unclaimed)


def _files_in(walk: Walk, root: Path, how: ListingOptions) -> tuple[list[_SampleFile], dict[str, _Texts]]:
    """Return the pictures and videos below a folder, sorted, and the other files by the prefix of their folder."""
    found: list[_SampleFile] = []
    texts: dict[str, _Texts] = {}
    for names in walk.folders_below(root):
        here = texts[names.prefix] = _Texts(names)
        for name in names.files:
            stem, suffix = split_name(name)
            kind = _KINDS.get(suffix)
            if kind is None:
                here.add(name, stem, suffix)
                continue
            if kind == IMAGE and how.videos and is_animated_path(names.path / name):
                kind = VIDEO
            found.append(_SampleFile(f"{names.prefix}{name}", kind, normal(f"{names.prefix}{stem}")))
    found.sort(key=lambda one: by_spelling(one.reference))
    return found, texts


def _owners_of(found: Sequence[_SampleFile], how: ListingOptions, remarks: Remarks) -> dict[str, tuple[str, str]]:
    """Return the (stem, role) of each reference that belongs to another file, by its name or its folder. The stem is empty if none fits."""
    located = located_in((one.stem for one in found), how, remarks)
    stems = {one.stem for one in found if one.stem not in located}
    owners = owners_by_location(located, stems, how) if located else {}
    belonging: dict[str, tuple[str, str]] = {}
    for one in found:
        if one.kind == VIDEO and not how.videos:
            continue
        if one.stem in located:
            belonging[one.reference] = (owners.get(one.stem, ""), located[one.stem][0])
        elif (named := named_role(one.stem, how.roles)) is not None and named[0] in stems:
            belonging[one.reference] = named
    remarks.beside += [reference for reference, (owner, _role) in belonging.items() if owner]
    plain = [one.stem for one in found if one.reference not in belonging]
    remarks.asks += asked_about(stems, plain, how)
    remarks.same_names += [] if remarks.asks else [f"{folder}/ and {other or '.'}/" for folder, other in same_names(plain, how)]
    return belonging


def _from_folder(root: Path, how: ListingOptions, remarks: Remarks) -> Iterator[Sample]:
    walk, left = Walk(remarks.unused), Leftovers(remarks.unused)
    found, texts = _files_in(walk, root, how)
    belonging = _owners_of(found, how, remarks)
    beside: dict[str, dict[str, list[str]]] = {}
    for reference, (owner, role) in belonging.items():
        beside.setdefault(owner, {}).setdefault(role, []).append(reference)
    plain = [file for file in found if file.reference not in belonging]
    kinds, spellings = dict[str, set[str]](), dict[str, list[str]]()
    for file in plain:
        kinds.setdefault(file.stem, set()).add(file.kind)
        if not file.reference.isascii():
            spellings.setdefault(normal(file.reference), []).append(file.reference)
    used = set[str]()
    spelled = cache(lambda: {*kinds, *(normal(file.reference) for file in found)})
    for file in plain:
        if file.kind == VIDEO and not how.videos:
            left.unread.add(folded(file.stem))
            remarks.unused.add(NO_FRAMES, file.reference)
            continue
        name = normal(file.reference)
        images = {role: refs for role, refs in beside.get(file.stem, {}).items() if goes_with(role, file.kind, kinds[file.stem])}
        if len(same := spellings.get(name, ())) > 1:
            words = "are two spellings (Unicode forms) of one name, so they would be one sample: rename one of them"
            remarks.refused.append(RefusedItem(name, f"{same[0]!a} and {same[1]!a} {words}"))
            continue
        try:
            captions = _captions_of(file, texts, spelled, how=how, remarks=remarks, left=left)
        except BadInput as error:
            remarks.refused.append(RefusedItem(name, str(error)))
            continue
        used.update(reference for references in images.values() for reference in references)
        yield Sample(name, {file.kind: (file.reference,)} | {role: (*refs,) for role, refs in images.items()}, captions)
    for reference in sorted(belonging.keys() - used):
        is_of_video = VIDEO in kinds.get(belonging[reference][0], ()) and not how.videos
        remarks.unused.add(NO_FRAMES if is_of_video else NO_OWNER, reference)
    for here in texts.values():
        here.account(left)
    remarks.captions_elsewhere += left.captions_elsewhere(str(root)) if how.caption is None else ()
    walk.problems.refuse(root)


def _captions_of(
    file: _SampleFile,
    texts: Mapping[str, _Texts],
    spelled: Callable[[], AbstractSet[str]],
    *,
    how: ListingOptions,
    remarks: Remarks,
    left: Leftovers,
) -> tuple[str, ...]:
    prefix, slash, name = file.reference.rpartition("/")
    here = texts[f"{prefix}{slash}"]
    files = here.of(name, spelled)
    left.note(file.stem, here.names.prefix, has_caption=bool(files))
    captions = side_car([here.names.path / text for text in files], how, normal(file.reference), remarks)
    if files and not captions:  # such as a .json without a caption
        here.first.difference_update(files)
        left.fieldless[f"{here.names.prefix}{files[0]}"] = None
    left.has_json |= bool(captions) and files[0].endswith(".json")
    left.count(has_caption=bool(captions))
    return captions


def _beside_rows(root: Path, tables: Sequence[Path], how: ListingOptions, references: Iterable[str]) -> Unused:
    """Account for a folder whose samples are the rows of metadata files. `references` are those that the rows name."""
    unused = Unused(texts=len(tables))
    walk, left = Walk(unused), Leftovers(unused, media=NO_ROW, metadata=SECOND_METADATA)
    found, texts = _files_in(walk, root, how)
    named = {os.path.normpath(reference) for reference in references}
    for one in found:
        if one.reference in named:
            left.note(one.stem, f"{one.reference.rpartition('/')[0]}/".removeprefix("/"), has_caption=True)
        else:
            unused.add(NO_ROW, one.reference)
            left.unread.add(folded(one.stem))
    for here in texts.values():
        here.files = [name for name in here.files if here.names.path / name not in tables]
        here.account(left)
    return unused


def beside_tars(root: Path, tars: Sequence[Path], unused: Unused) -> None:
    """Account for a folder whose tars are a source: for every other file in it."""
    left = Leftovers(unused, media=BESIDE_TARS)
    for names in Walk(unused).folders_below(root):
        left.sort(names, [name for name in names.files if names.path / name not in tars])
