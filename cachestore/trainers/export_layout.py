"""Which columns of a data set are exported, for which family, and under which file names. Reads no entries."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from cachestore.core.errors import BadInput, EncodeFailed
from cachestore.core.inputs import RANDOM, RESOLUTIONS, SOURCE, WITHIN, cells_each, clips_each, framing_of, is_trained_on, sides_each
from cachestore.core.keys import Json, Key, Recipe
from cachestore.core.raw_tensors import Scale
from cachestore.core.samples import CAPTION, IMAGE, MASK, VIDEO, Source
from cachestore.core.spelling import option
from cachestore.core.words import listed, plural
from cachestore.sources.combined import is_alone, labels_of
from cachestore.sources.memory import MEMORY
from cachestore.store.format.catalog import Catalog, KeyColumn
from cachestore.trainers.exported import Named
from cachestore.trainers.families import FAMILIES, Family, families_of_pipeline, family_named
from cachestore.trainers.format import Extra, Format, Writing
from cachestore.trainers.matching import ClipFrames

STEP: Final = 64
"""Sides of buckets are multiples of this many pixels, unless the data set says otherwise."""


@dataclass(frozen=True)
class ExportLayout:
    """The columns of a data set and the names of their files."""

    catalog: Catalog
    format: Format
    writing: Writing
    given: Family | None
    """The family that the user named; None: find it from the data set."""
    resolution: int | None
    crop_number: int | None
    leave_out: Collection[str]
    """What is not exported: `flips`, `masks`. `resolution` and `crop_number` choose one of several resolutions and random crops."""
    command: str = "cachestore export"
    """The command that exports so, for errors."""

    @cached_property
    def captions(self) -> KeyColumn | None:
        """The column of captions that is exported; None if there is none, or if the format has no files for its text."""
        return None if self.unwritten is not None else self._captions

    @cached_property
    def unwritten(self) -> str | None:
        """In words, which text is left out because the format has no files for it; None if there is no such text."""
        if self._captions is None or self.format.trainer.has_text(family := self.family(self._captions)):
            return None
        texts = plural(len(self._captions.keys), "caption")
        able = listed((one.name for one in self.format.trainer.families_with_text()), "and")
        return f"text of {texts}: cachestore can write {self.format.name}'s files for text of {able}, but not of {family.name}"

    @property
    def _captions(self) -> KeyColumn | None:
        return next((one for one in self.catalog.columns if one.role == CAPTION), None)

    @cached_property
    def visuals(self) -> tuple[KeyColumn, ...]:
        """The columns of pictures and videos, each for every exported resolution. Raises BadInput if the data set lacks the chosen one."""
        roles = (IMAGE, VIDEO) if "videos" in self.writing.takes else (IMAGE,)
        found = tuple(one for one in self.catalog.columns if one.role in roles and is_trained_on(one.role, one.options))
        if self.resolution is None:
            return found
        chosen = tuple(one for one in found if _resolution(one) == self.resolution)
        if not chosen:
            known = ", ".join(str(one) for one in _resolutions(found) if one is not None) or "none that is known"
            raise BadInput(
                f"{self.catalog.name!r} has no latents at the resolution {self.resolution}; it has {known}", option="resolution_only"
            )
        return chosen

    @cached_property
    def masks(self) -> tuple[KeyColumn, ...]:
        """The columns of masks that are exported."""
        return () if "masks" in self.leave_out else tuple(one for one in self.catalog.columns if one.encoder == MASK)

    @cached_property
    def columns(self) -> tuple[KeyColumn, ...]:
        """The columns that are exported: captions, then pictures."""
        return (*(() if self.captions is None else (self.captions,)), *self.visuals)

    @cached_property
    def family_of(self) -> Mapping[str, Family]:
        """The family of each exported encoder."""
        return {column.encoder: self.family(column) for column in self.columns}

    @cached_property
    def roots(self) -> Mapping[str, Path]:
        """The folder of each source, by label; empty if there is only one source."""
        hints = (self.catalog.request.get(column.encoder, {}) for column in self.columns)
        sources = [Source(**source) for source in next((hint["sources"] for hint in hints if hint.get("sources")), ())]
        return {} if is_alone(sources) else {label: _folder(one.data) for label, one in zip(labels_of(sources), sources, strict=True)}

    def source(self, row: int) -> str:
        """Return the label of a row's source; empty if there is only one source."""
        return str(json.loads(self.catalog.extras[row]).get(SOURCE, "")) if self.roots else ""

    def root_of(self, source: str) -> Path:
        """Return the folder to which the references of a source are relative."""
        hints = self.catalog.request.get(self.columns[-1].encoder, {})
        return self.roots.get(source) or _folder(str(hints.get("data", "")))

    def tree_of(self, source: str, column: KeyColumn) -> str:
        """Return the folder of a source's files: `SOURCE/RESOLUTION/videos/`, without the parts that nothing needs."""
        has_each, is_within = self.writing.resolutions == "a folder each", self.writing.resolutions == "a folder within"
        resolution = str(_resolution(column)) if (has_each or is_within) and len(_resolutions(self.visuals)) > 1 else ""
        kind = f"{column.role}s" if has_each and len({one.role for one in self.visuals if len(one.keys)}) > 1 else ""
        return "".join(f"{part}/" for part in (source, resolution, kind) if part)

    def inside(self, tree: str, path: str) -> str:
        """Return the path of a file in a folder that `tree_of` returned: above the trainer's own folders, or within the first of them."""
        first, _, rest = path.partition("/")
        return f"{first}/{tree}{rest}" if self.writing.resolutions == "a folder within" else f"{tree}{path}"

    def text_trees(self, row: int) -> Sequence[str]:
        """Return the folders in which the trainer looks for a row's text."""
        if self.writing.text_by == "caption":
            return ("",)
        source, own = self.source(row), [column for column in self.visuals if column.count(row)]
        return tuple(dict.fromkeys(self.tree_of(source, column) for column in own or self.visuals)) or (f"{source}/" if source else "",)

    def check(self) -> None:
        """Raise BadInput if the format cannot hold the family or something in the data set."""
        for column in self.columns:
            self.format.trainer.written_as(self.family_of[column.encoder])  # raises if the trainer has no name for it
        if self.unwritten is not None and not self.visuals:
            raise BadInput(f"nothing can be exported: {self.catalog.name!r} has no latents, and {self.unwritten}")
        if self.writing.is_joined and not (self._captions and self.visuals):
            lacking = "text" if self.visuals else "latents"
            both = f"{self.format.name} keeps text and latents in one file, but {self.catalog.name!r} has no {lacking}"
            raise BadInput(f"{both}: add them with `cachestore precompute` under the same name")
        for column in self.visuals:
            if sides_each(column.options) > 1 and "flips" not in self.leave_out:
                self._check_takes("flips", "mirrored pictures")
            self._check_crops(column.options)
        if len(self.visuals) > 1 and self.family_of[self.visuals[0].encoder].name in self.writing.one_resolution:
            several = ", ".join(map(str, _resolutions(self.visuals)))
            raise BadInput(
                f"{self.format.name} keeps only one resolution of this family in a file: pass {option('resolution_only')} with one of"
                f" {several}",
                option="resolution_only",
            )
        if any(len(masks.keys) for masks in self.masks):
            self._check_takes("masks", "masks, which it reads from their own files")

    def _check_crops(self, options: Mapping[str, Any]) -> None:
        if options.get("crop") == RANDOM and "drawn crops" not in self.writing.takes:
            raise BadInput(
                f"{self.format.name} finds only latents of centre crops, but these are of random crops: precompute with"
                f" {option('crop', 'center')} under another {option('name')}, and export that",
                option="name",
            )
        crops, crop_number = cells_each(options) // sides_each(options) // clips_each(options), self.crop_number
        if crops > 1 and crop_number is None:
            of = f"{self.format.name} keeps one crop of each picture, but {self.catalog.name!r} has {crops}"
            raise BadInput(f"{of}: pass {option('variant_only')} with a number from 0 to {crops - 1}", option="variant_only")
        if crop_number is not None and not 0 <= crop_number < crops:
            known = f"from 0 to {crops - 1}" if crops > 1 else "0"
            raise BadInput(
                f"{option('variant_only')} must be {known}, not {crop_number}: {self.catalog.name!r} has {crops} crops of each picture",
                option="variant_only",
            )

    def _check_takes(self, what: Extra, words: str) -> None:
        if what not in self.writing.takes:
            leave_out = option("leave_out", what)
            raise BadInput(f"an export for {self.format.name} has no {words}: pass {leave_out} to export the rest", option="leave_out")

    def family(self, column: KeyColumn) -> Family:
        """Return a column's family: as imported, of its pipeline, or by the VAE; if that leaves several open, the one that the user named.

        Raises BadInput if it is not known, and if the user named one that the data set is not of.
        """
        alike = families_of(self.catalog, column)
        if self.given is not None:
            possible = alike or families_with_vae(self.catalog.recipes[column.fingerprint])
            if self.given not in possible:
                stored = " or ".join(one.name for one in possible) or "another VAE"
                what = f"the data set {self.catalog.name!r} is of {stored}, not of {self.given.name} ({column.encoder})"
                raise BadInput(f"{what}: leave {option('family')} out, or pass the right one", option="family")
            return self.given
        trainer, cached = self.format.name, self.format.trainer.cached
        alike = [one for one in alike if one.name in cached] or alike
        if not alike:
            unknown = f"the model family of the latents of {self.catalog.name!r} is not known"
            raise BadInput(f"{unknown}: pass {option('family')}, such as flux", option="family")
        if len({cached.get(one.name) for one in alike}) > 1:
            lines = " or ".join(f"`{self.command} --family {one.name}`" for one in alike)
            raise BadInput(
                f"{self.catalog.name!r} does not say which model made it, and {trainer} needs to know: run {lines}", option="family"
            )
        return alike[0]

    def named(self, row: int, column: KeyColumn, index: int) -> Named:
        """Return what the name of a cell's file is made from."""
        images = self.catalog.row_images(row)
        reference = next((images[role][0] for role in (column.role, IMAGE, VIDEO) if role in images), None)
        is_prompt, reference = reference is None, self.catalog.ids[row] if reference is None else reference
        source, facts = self.source(row), column.cell(index).facts
        captions = self.catalog.row_captions(row)
        number = index - column.at[row] if column.role == CAPTION else 0
        widths = {"size": 2, "bucket": 2, "resized": 2, "crop": 4}
        known: dict[str, Any] = {name: tuple(facts[name][:width]) for name, width in widths.items() if name in facts}
        known |= {"tokens": facts["tokens"][0]} if "tokens" in facts else {}
        known |= {"span": ClipFrames(facts["start"][0], facts["bucket"][2])} if column.role == VIDEO and "start" in facts else {}
        known |= {"fps": facts["fps"][0] / facts["fps"][1]} if facts.get("fps", (0,))[0] else {}
        known |= {"is_part": WITHIN in framing_of(json.loads(self.catalog.extras[row])), "is_prompt": is_prompt}
        known |= {"is_flipped": (index - column.at[row]) % sides_each(column.options) == 1} if column.role != CAPTION else {}
        caption = captions[number] if number < len(captions) else ""
        if reference.removeprefix(f"{source}/").startswith(MEMORY):
            reference = self.catalog.ids[row]
        return Named(reference.removeprefix(f"{source}/") if source else reference, caption, **known)

    def key(self, column: KeyColumn, index: int) -> Key:
        """Return the key of a cell. Raises EncodeFailed if it was not encoded."""
        if (key := column.cell(index).key) is None:
            raise EncodeFailed("it was not encoded; `cachestore why STORE SAMPLE` says why")
        return key

    def check_picture(self, row: int, column: KeyColumn) -> None:
        """Raise EncodeFailed if the format has no file for a row's picture or video."""
        if (pictures := column.count(row) // cells_each(column.options)) > 1:
            keeps = f"{self.format.name} keeps one for each sample: give each a row of its own"
            raise EncodeFailed(f"it has {plural(pictures, 'picture')}, but {keeps}")
        if "own crops" not in self.writing.takes and WITHIN in framing_of(json.loads(self.catalog.extras[row])):
            raise EncodeFailed(f"it has its own crop, but {self.format.name} puts whole pictures into buckets: crop the file itself")

    def indices(self, row: int, column: KeyColumn) -> Sequence[int]:
        """Return the cells of a row's first picture or video that are exported: those of one crop, plain and mirrored, and of all clips."""
        sides, each = sides_each(column.options), sides_each(column.options) * clips_each(column.options)
        first = column.at[row] + (self.crop_number or 0) * each
        return range(first, first + each, sides if "flips" in self.leave_out else 1) if column.count(row) else ()


def families_of(catalog: Catalog, column: KeyColumn) -> Sequence[Family]:
    """Return the families that a column may be of; empty if none is sure. Text says it of latents too."""
    own, texts = column.fingerprint, [one.fingerprint for one in catalog.columns if one.role == CAPTION]
    for make in (catalog.recipes[fingerprint].make for fingerprint in (own, *texts)):
        if "family" in make:
            return [family_named(str(make["family"]))]
        if alike := families_of_pipeline(str(make.get("pipeline"))):
            return alike
    return families_of_vae(catalog.recipes[own])


def families_of_vae(recipe: Recipe) -> Sequence[Family]:
    """Return the families whose VAE has the class, the channels and the constants of this recipe."""
    scale, own = Scale.of(recipe.read), recipe.read.get("channels")
    constants, has_class = (scale.factor, scale.shift or None), bool(_classes(recipe))
    return [
        one
        for one in families_with_vae(recipe)
        if own == one.channels and ((has_class and not one.scale.is_known) or (one.scale.factor, one.scale.shift or None) == constants)
    ]


def families_with_vae(recipe: Recipe) -> Sequence[Family]:
    """Return the families whose VAE has the class of this recipe, and its channels, if any of them has these; all for text.

    A small stand-in of a VAE has fewer channels than the released one.
    """
    classes, channels = _classes(recipe), recipe.read.get("channels")
    alike = [one for one in FAMILIES if channels is None or not classes or one.vae_class in classes]
    return [one for one in alike if one.channels == channels] or alike


def _classes(recipe: Recipe) -> set[str]:
    components: Mapping[str, Json] = recipe.make.get("components", {})
    return {str(one).rpartition(".")[2] for one in components.values()}


def _resolutions(columns: Sequence[KeyColumn]) -> list[int | None]:
    return list(dict.fromkeys(map(_resolution, columns)))


def _resolution(column: KeyColumn) -> int | None:
    """Return the resolution of a column of pictures; None if it was imported, or differs between sources."""
    return None if RESOLUTIONS in column.options else column.options.get("resolution")


def _folder(data: str) -> Path:
    """Return the folder to which the references of a source are relative; for a manifest, the folder it lies in."""
    path = Path(data)
    return path.parent if path.suffix.lower() == ".jsonl" and not path.is_dir() else path
