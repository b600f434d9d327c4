"""Which files of a folder belong to another file, by where they are: `masks/cat.png` and `cat-masklabel.png` to `cat.jpg`.

Knows references alone. Their stems are in Unicode form NFC, without suffix.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cachestore.core.samples import BESIDE, CONTROL, FIRST_FRAME, IMAGE, LAST_FRAME, MASK, REFERENCE, ROLES
from cachestore.core.spelling import option
from cachestore.core.words import first_of, listed
from cachestore.sources.captions import folded
from cachestore.sources.reading import ListingOptions
from cachestore.sources.remarks import Remarks

_FOLDERS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("mask", "masks", "matte", "mattes", "alpha", "alphas", "masklabel", "masklabels", "segmentation"), MASK),
    **dict.fromkeys(("control", "controls", "conditioning", "conditionings", "condition", "conditions", "cond", "conds"), CONTROL),
    **dict.fromkeys(("conditioning_image", "conditioning_images", "condition_images", "control_image", "control_images"), CONTROL),
    **dict.fromkeys(("condlabel", "condlabels", "canny", "depth", "depths", "pose", "poses", "openpose", "normal", "normals"), CONTROL),
    **dict.fromkeys(("edge", "edges", "hed", "lineart", "scribble", "scribbles", "softedge", "mlsd"), CONTROL),
    **dict.fromkeys(("reference", "references", "ref", "refs", "reference_images"), REFERENCE),
    **dict.fromkeys(("first_frame", "first_frames"), FIRST_FRAME),
    **dict.fromkeys(("last_frame", "last_frames"), LAST_FRAME),
}
"""Names of folders, in small letters with underlines, that trainers use for images of a role."""
_ENDINGS: Final[Mapping[str, str]] = {"masklabel": MASK, "condlabel": CONTROL, "mask": MASK, "control": CONTROL, "conditioning": CONTROL}
"""What trainers put after the name of a picture: `cat-masklabel.png`."""
_ENDING: Final = re.compile(rf"[-_]({'|'.join(_ENDINGS)})$", re.IGNORECASE)
_MOST_COMPARED: Final = 8
"""How many folders one folder is compared with."""


def named_role(stem: str, roles: Sequence[str]) -> tuple[str, str] | None:
    """Return what a stem such as `cat.mask` or `cat.control.1` says: the stem that it belongs to, and its role there."""
    name, _dot, role = stem.rpartition(".")
    if role.isdecimal():
        name, _dot, role = name.rpartition(".")
    return (name, role.lower()) if name and role.lower() in {*BESIDE, *roles} else None


@dataclass(frozen=True, slots=True)
class _BelowFolder:
    """A file inside a folder that was asked for or is known by its name: its own path there, and the folder's path."""

    parent: str
    """Empty, or with `/` at its end."""
    own: str


def _part_in(stem: str, folder: str) -> _BelowFolder | None:
    """Split a stem at the folder of this path, with `/` at its end; None if it is in no such folder. Case does not count."""
    wanted, parts = folded(folder).removesuffix("/").split("/"), stem.split("/")
    for start in range(len(parts) - len(wanted)):
        if [folded(part) for part in parts[start : start + len(wanted)]] == wanted:
            return _BelowFolder("".join(f"{part}/" for part in parts[:start]), "/".join(parts[start + len(wanted) :]))
    return None


class _Owners:
    """Finds the stem beside a folder, or in one other folder beside it, that a file in it belongs to."""

    def __init__(self, stems: Collection[str], parents: Collection[str]) -> None:
        self._stems = stems
        self._beside: dict[tuple[str, str], list[str]] = defaultdict(list)
        for stem in stems:
            for parent in parents:
                if stem.startswith(parent):
                    folder, slash, own = stem[len(parent) :].partition("/")
                    if slash and folder:
                        self._beside[parent, own].append(stem)

    def of(self, part: _BelowFolder) -> list[str]:
        """All stems that it may belong to: the one beside its folder alone, if there is one."""
        beside = f"{part.parent}{part.own}"
        return [beside] if beside in self._stems else self._beside.get((part.parent, part.own), [])


def role_by_location(stem: str, how: ListingOptions) -> tuple[str, str] | None:
    """Return the (role, where) of --roles that names this stem, such as ("mask", "masks/"); None if none does."""
    for role, where in how.locations:
        is_there = _part_in(stem, where) is not None if where.endswith("/") else len(stem) > len(where) and stem.endswith(where)
        if is_there:
            return role, where
    return None


def located_in(stems: Iterable[str], how: ListingOptions, remarks: Remarks) -> dict[str, tuple[str, str]]:
    """Return the (role, where) of the stems that --roles names as images of a role. Adds a remark for a `where` in which no file is."""
    if not how.locations:
        return {}
    found = {stem: by for stem in stems if (by := role_by_location(stem, how)) is not None}
    remarks.nowhere += [f"{role}={where}" for role, where in how.locations if (role, where) not in found.values()]
    return {stem: by for stem, by in found.items() if by[0] != IMAGE}


def owners_by_location(located: Mapping[str, tuple[str, str]], stems: Collection[str], how: ListingOptions) -> dict[str, str]:
    """Return the one of `stems` that each located stem belongs to. Left out are those that belong to none, or to several."""
    parts = {stem: part for stem, (_role, where) in located.items() if where.endswith("/") and (part := _part_in(stem, where))}
    owners = _Owners(stems, {part.parent for part in parts.values()})
    found: dict[str, str] = {}
    for stem, (role, where) in located.items():
        endings = [ending for other, ending in how.locations if other == role and not ending.endswith("/")]
        if stem not in parts:
            candidates = [stem.removesuffix(where)] if stem.removesuffix(where) in stems else []
        else:
            part = parts[stem]
            own = [part.own, *(part.own.removesuffix(ending) for ending in endings if part.own.endswith(ending))]
            own += [named[0] for named in (named_role(part.own, how.roles),) if named is not None and named[1] == role]
            candidates = next(filter(None, (owners.of(_BelowFolder(part.parent, one)) for one in own)), list[str]())
        if len(candidates) == 1:
            found[stem] = candidates[0]
    return found


def asked_about(stems: Collection[str], plain: Iterable[str], how: ListingOptions) -> list[str]:
    """Return one sentence if names look like those of masks or other images of a role, and --roles does not say what they are.

    `plain` are the stems that belong to no other file, out of all `stems`.

    These are names such as OneTrainer's `cat-masklabel.png` beside `cat.png`, and folders with a known name such as `masks/`, in which
    every file has the name of one beside the folder or in a folder beside it.
    """
    examples: dict[tuple[str, str], str] = {}
    inside: dict[tuple[str, str], list[tuple[str, _BelowFolder]]] = defaultdict(list)
    for stem in plain:
        if role_by_location(stem, how) is not None:
            continue
        ending = _ENDING.search(stem)
        if ending is not None and stem[: ending.start()] in stems:
            examples.setdefault((_ENDINGS[ending[1].lower()], ending[0]), stem)
        folder = next((part for part in stem.split("/")[:-1] if _word(part) in _FOLDERS or part in how.roles), None)
        if folder is not None and (part := _part_in(stem, f"{folder}/")) is not None:
            inside[folder, part.parent].append((stem, part))
    owners = _Owners(stems, {parent for _folder, parent in inside})
    for (folder, parent), those in inside.items():
        own = f"{parent}{folder}/"
        if all(any(not owner.startswith(own) for owner in owners.of(part)) for _stem, part in those):
            role = folder if folder in how.roles else _FOLDERS[_word(folder)]
            examples.setdefault((role, f"{folder}/"), those[0][0])
    if not examples:
        return []
    given = [*how.roles, *(f"{role}={where}" for role, where in how.locations)]
    as_roles = ",".join([*given, *(f"{role}={where}" for role, where in examples)])
    as_images = ",".join([*given, *(f"{IMAGE}={where}" for _role, where in examples)])
    what = listed(sorted({role for role, _where in examples}))
    words = (
        f"files such as {first_of(examples.values())} have the names of other pictures: if they go with these ({what}),"
        f" pass {option('roles', as_roles)}; if they are pictures to train on, pass {option('roles', as_images)}"
    )
    return [words]


def _word(folder: str) -> str:
    return folder.lower().replace("-", "_").replace(" ", "_")


def same_names(stems: Iterable[str], how: ListingOptions) -> Iterator[tuple[str, str]]:
    """Yield (folder, other folder) where every name in one is in the other too. Folders that --roles names are left out."""
    names: dict[str, set[str]] = defaultdict(set)
    folders: dict[str, list[str]] = defaultdict(list)
    for stem in stems:
        if role_by_location(stem, how) is None:
            folder, _slash, name = stem.rpartition("/")
            if name not in names[folder]:
                names[folder].add(name)
                folders[name].append(folder)
    if len(names) < 2:
        return
    paired: set[str] = set()
    for folder, own in sorted(names.items(), reverse=True):
        others = [other for other in folders[min(own)][: _MOST_COMPARED + 1] if other != folder and other not in paired]
        larger = next((other for other in others if own <= names[other]), None)
        if larger is not None:
            paired.add(folder)
            yield folder, larger


def split_roles(entries: Iterable[str]) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Split the entries of --roles, `depth` or `mask=masks/`, into the user's own roles and the (role, where) of locations."""
    pairs = [entry.partition("=") for entry in entries]
    own = dict.fromkeys(role for role, _equals, _where in pairs if role not in ROLES)
    return tuple(own), tuple((role, where) for role, equals, where in pairs if equals)
