"""Write catalogs: encode them, and publish them under a free generation. Reading is in `catalog`, which trainers load."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cachestore.core.keys import INPUT_BYTES, KEY_BYTES, Json, canonical
from cachestore.files.checksum import Buffer, digest_of
from cachestore.files.failpoints import failpoint
from cachestore.files.paths import Layout
from cachestore.files.publish import publish
from cachestore.files.records import encode_record
from cachestore.files.table import Column, digest_column, encode_table, number_column, string_columns
from cachestore.store.format.catalog import FACTS, FORMAT, VERSION, Catalog, encode_values

DROPPED_FORMAT: Final = "cachestore-dropped"
DROPPED_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Draft:
    """A catalog as it will be on disk, without its generation."""

    catalog: Catalog
    header: Mapping[str, Any]
    columns: Mapping[str, Column]

    @property
    def digest(self) -> str:
        """The digest of rows and recipes."""
        return self.header["digest"]

    def chunks(self, generation: int, **more: Json) -> list[Buffer]:
        """The bytes of the file. They contain the generation as the name does, so that a renamed file is noticed."""
        header = {**self.header, "generation": generation, "listing": self.catalog.listing, **more}
        return encode_table(FORMAT, VERSION, header, self.columns)

    def is_same_as(self, other: Catalog) -> bool:
        """Whether another catalog has the same rows, recipes, prompts and stat records."""
        is_same = other.digest == self.digest and tuple(other.prompts) == tuple(self.catalog.prompts)
        return is_same and _stats(other) == _stats(self.catalog)


def _stats(catalog: Catalog) -> list[Column]:
    return [number_column(column.stats) for column in catalog.columns]


def draft_of(catalog: Catalog) -> Draft:
    """Encode the header and columns of a catalog. Writes no file."""
    has_sources = catalog.has_sources
    columns: dict[str, Column] = string_columns("ids", catalog.ids)
    if has_sources:
        columns |= {"captions/at": number_column(catalog.captions_at), **string_columns("captions", catalog.captions)}
        columns |= string_columns("extras", catalog.extras)
    for role, (at, references) in catalog.images.items():
        columns |= {f"images/{role}/at": number_column(at), **string_columns(f"images/{role}", references)}
    for number, column in enumerate(catalog.columns):
        prefix = f"key/{number}"
        columns[f"{prefix}/keys"] = digest_column(column.keys, width=KEY_BYTES)
        if has_sources or not isinstance(column.at, range):
            columns[f"{prefix}/at"] = number_column(column.at)
        if has_sources:
            columns[f"{prefix}/inputs"] = digest_column(column.inputs, width=INPUT_BYTES)
            columns[f"{prefix}/stat"] = number_column(column.stats, width=2)
            columns |= {f"{prefix}/{name}": number_column(values, width=FACTS[name]) for name, values in column.facts.items()}
    kinds: list[Json] = []
    for number, (name, values) in enumerate(catalog.values.items()):
        kind, encoded = encode_values(f"value/{number}", values)
        columns |= encoded
        kinds.append([name, kind])
    header: dict[str, Any] = {
        "name": catalog.name,
        "made": catalog.made,
        "request": dict(catalog.request),
        "recipes": [recipe.as_json() for _fingerprint, recipe in sorted(catalog.recipes.items())],
        "roles": list(catalog.images),
        "columns": [
            {
                "encoder": column.encoder,
                "role": column.role,
                "fingerprint": column.fingerprint,
                "options": dict(column.options),
                "facts": list(column.facts),
            }
            for column in catalog.columns
        ],
    }
    if catalog.line:
        header["line"] = catalog.line
    if catalog.texts:
        header["texts"] = dict(catalog.texts)
    if kinds:
        header["values"] = kinds
    if catalog.prompts:
        header["prompts"] = [list(pair) for pair in catalog.prompts]
    names = ("name", "made", "line", "recipes", "roles", "columns", "texts", "values")
    described = {name: header[name] for name in names if name in header}
    if has_sources:  # a pass that makes the rows of an imported data set publishes nothing
        described["made"] = "precompute"
    rows = {name: digest_of([raw]) for name, (_dtype, _shape, raw) in columns.items() if not name.endswith("/stat")}
    header["digest"] = digest_of([canonical(described), canonical(rows)])
    return Draft(catalog, header, columns)


def publish_draft(layout: Layout, draft: Draft, *, after: int) -> bool:
    """Publish a catalog as generation `after` + 1; False if that exists: compare with it before you try again. Raises WriteFailed."""
    catalog, generation = draft.catalog, after + 1
    failpoint("catalog.before_publish")
    published = publish(layout, layout.catalog(catalog.name, generation), draft.chunks(generation), read_only=True)
    failpoint("catalog.after_publish")
    return published


def mark_dropped(layout: Layout, name: str, generation: int) -> None:
    """Record that a data set was dropped up to a number, durably. So none is used again: a pinned one never means another catalog."""
    record = encode_record(DROPPED_FORMAT, DROPPED_VERSION, {"generation": generation})
    publish(layout, layout.dropped(name, generation), [record], read_only=True)
