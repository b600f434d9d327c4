"""A plan: rows of samples and units, the catalog's name and the recipes. Pure: no stat, no mtime, no absolute path, no bytes.

Every node that lists the same source builds the same plan, byte for byte, under the same name. Its table:

    ids, captions (+ captions/at), images/<role> (+ /at), extras     one row a sample, as in a catalog
    column/<c>/at, column/<c>/units     for key column c, which units make a row's cells
    units/id, units/request             sorted by recipe, then by id; the request is the JSON that the encoder resolves
    units/at                            where each recipe's units start

The header says the number of samples and `units_at` once more, so that who only counts reads the header alone.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cachestore.errors import FormatError
from cachestore.files.opening import names_in
from cachestore.files.paths import Layout
from cachestore.files.publish import make_folder, publish
from cachestore.files.table import Column, digest_column, encode_table, number_column, offsets_of, read_header, read_table, string_columns
from cachestore.keys import KEY_BYTES, Json, Recipe, canonical, digest_parts
from cachestore.samples import Sample

FORMAT: Final = "cachestore-plan"
VERSION: Final = 1

Request = Mapping[str, Json]
"""What an encoder is asked to make, as JSON: a caption, or a reference with resolution and crop."""


@dataclass(frozen=True, slots=True)
class PlanColumn:
    """One key column of the catalog to be: which recipe makes it, of which role, with which options."""

    recipe: int
    encoder: str
    role: str
    options: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class ColumnRequest:
    """A column, and what it asks of each sample, in the order of its cells."""

    column: PlanColumn
    requests: Callable[[Sample], Sequence[Request]]


@dataclass(frozen=True, slots=True)
class Unit:
    """One piece of encode work."""

    place: int
    """Its number in the plan."""
    id: bytes
    recipe: int
    request: Request


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan as it was built or read."""

    name: str
    """The folder's name: digest of request and content."""
    request: str
    """Digest of the catalog's name, the arguments that change keys, and the fingerprints."""
    content: str
    """Digest of what the source lists."""
    catalog: str
    """Name of the catalog; empty for a plan without one (`fill`)."""
    recipes: tuple[Recipe, ...]
    columns: tuple[PlanColumn, ...]
    ids: Sequence[str]
    captions_at: Sequence[int]
    captions: Sequence[str]
    images: Mapping[str, tuple[Sequence[int], Sequence[str]]]
    extras: Sequence[str]
    cells: tuple[tuple[Sequence[int], Sequence[int]], ...]
    """For each column: where each row's cells start, and the unit of each cell."""
    units_at: Sequence[int]
    unit_ids: Sequence[bytes]
    unit_requests: Sequence[str]

    @property
    def unit_count(self) -> int:
        """How many units there are, over all recipes."""
        return len(self.unit_ids)

    def units_of(self, recipe: int) -> range:
        """The places of a recipe's units."""
        return range(self.units_at[recipe], self.units_at[recipe + 1])

    def recipe_of(self, place: int) -> int:
        """The recipe of a unit."""
        return next(recipe for recipe in range(len(self.recipes)) if place < self.units_at[recipe + 1])

    def unit(self, place: int) -> Unit:
        """A unit with its request."""
        return Unit(place, self.unit_ids[place], self.recipe_of(place), json.loads(self.unit_requests[place]))


@dataclass(frozen=True, slots=True)
class Outline:
    """What a plan's header alone tells: enough to count."""

    name: str
    catalog: str
    """Name of the catalog; empty for a plan without one (`fill`)."""
    samples: int
    units_at: tuple[int, ...]
    """Where each recipe's units start, and where the last one's end."""

    @property
    def unit_count(self) -> int:
        """How many units there are, over all recipes."""
        return self.units_at[-1]


def plan_name(request: str, content: str) -> str:
    """The name of the plan for a request over a content."""
    return digest_parts("cachestore-plan", request, content).hex()[:32]


def unit_id(recipe: Recipe, request: Request) -> bytes:
    """The id of a unit: equal requests of one recipe are one unit."""
    return digest_parts("cachestore-unit", recipe.fingerprint, canonical(dict(request)))[:KEY_BYTES]


def build_plan(
    *,
    catalog: str,
    request: str,
    content: str,
    recipes: Sequence[Recipe],
    samples: Sequence[Sample],
    columns: Sequence[ColumnRequest],
    extra: Sequence[tuple[int, Request]] = (),
    ids: Mapping[bytes, bytes] | None = None,
) -> Plan:
    """Lay out a plan. `extra` are (recipe, request) of units that no sample refers to, such as the empty caption.

    Without samples and extra units the plan is valid and empty. `ids` overrides a request's id (canonical request -> id), for
    units that are named by their key.
    """
    found: list[dict[bytes, bytes]] = [{} for _recipe in recipes]

    def place_unit(recipe: int, wanted: Request) -> bytes:
        text = canonical(dict(wanted))
        uid = ids[text] if ids is not None else digest_parts("cachestore-unit", fingerprints[recipe], text)[:KEY_BYTES]
        found[recipe].setdefault(uid, text)
        return uid

    fingerprints = [recipe.fingerprint for recipe in recipes]
    for recipe, wanted in extra:
        place_unit(recipe, wanted)
    asked = [[[place_unit(one.column.recipe, wanted) for wanted in one.requests(sample)] for sample in samples] for one in columns]
    ordered = [sorted(units) for units in found]
    starts = list(offsets_of(map(len, ordered)))
    places = [{uid: starts[recipe] + n for n, uid in enumerate(uids)} for recipe, uids in enumerate(ordered)]
    roles = sorted({role for sample in samples for role in sample.images})
    return Plan(
        name=plan_name(request, content),
        request=request,
        content=content,
        catalog=catalog,
        recipes=tuple(recipes),
        columns=tuple(one.column for one in columns),
        ids=[sample.id for sample in samples],
        captions_at=list(offsets_of(len(sample.captions) for sample in samples)),
        captions=[caption for sample in samples for caption in sample.captions],
        images={role: _references(samples, role) for role in roles},
        extras=[canonical(dict(sample.extras)).decode("utf-8", "surrogatepass") for sample in samples],
        cells=tuple(
            (list(offsets_of(map(len, rows))), [places[one.column.recipe][uid] for row in rows for uid in row])
            for one, rows in zip(columns, asked, strict=True)
        ),
        units_at=starts,
        unit_ids=[uid for uids in ordered for uid in uids],
        unit_requests=[found[recipe][uid].decode("utf-8", "surrogatepass") for recipe, uids in enumerate(ordered) for uid in uids],
    )


def _references(samples: Sequence[Sample], role: str) -> tuple[Sequence[int], Sequence[str]]:
    listed = [sample.images.get(role, ()) for sample in samples]
    return list(offsets_of(map(len, listed))), [reference for row in listed for reference in row]


def publish_plan(layout: Layout, plan: Plan) -> None:
    """Publish a plan's rows; one that is there already is the same, and fine."""
    make_folder(layout, layout.temporary)
    make_folder(layout, layout.plan_folder(plan.name))
    columns: dict[str, Column] = {
        **string_columns("ids", plan.ids),
        "captions/at": number_column(plan.captions_at),
        **string_columns("captions", plan.captions),
        **string_columns("extras", plan.extras),
        "units/at": number_column(plan.units_at),
        "units/id": digest_column(plan.unit_ids, width=KEY_BYTES),
        **string_columns("units/request", plan.unit_requests),
    }
    for role, (at, references) in plan.images.items():
        columns |= {f"images/{role}/at": number_column(at), **string_columns(f"images/{role}", references)}
    for number, (at, units) in enumerate(plan.cells):
        columns |= {f"column/{number}/at": number_column(at), f"column/{number}/units": number_column(units)}
    header: dict[str, Json] = {
        "request": plan.request,
        "content": plan.content,
        "catalog": plan.catalog,
        "recipes": [recipe.as_json() for recipe in plan.recipes],
        "roles": list(plan.images),
        "samples": len(plan.ids),
        "units_at": list(plan.units_at),
        "columns": [{"recipe": one.recipe, "encoder": one.encoder, "role": one.role, "options": dict(one.options)} for one in plan.columns],
    }
    publish(layout, layout.plan(plan.name), encode_table(FORMAT, VERSION, header, columns), read_only=True)


def is_published(layout: Layout, name: str) -> bool:
    """Whether a plan's rows are there, by listing."""
    return layout.plan(name).name in names_in(layout.plan_folder(name))


def read_plan(layout: Layout, name: str) -> Plan:
    """Read a published plan. Raises FormatError, FileNotFoundError."""
    table = read_table(layout.plan(name), FORMAT, VERSION)
    header: Mapping[str, Any] = table.header
    return Plan(
        name=name,
        request=header["request"],
        content=header["content"],
        catalog=header["catalog"],
        recipes=tuple(Recipe.from_json(recipe) for recipe in header["recipes"]),
        columns=tuple(PlanColumn(one["recipe"], one["encoder"], one["role"], one["options"]) for one in header["columns"]),
        ids=table.strings("ids"),
        captions_at=table.numbers("captions/at"),
        captions=table.strings("captions"),
        images={role: (table.numbers(f"images/{role}/at"), table.strings(f"images/{role}")) for role in header["roles"]},
        extras=table.strings("extras"),
        cells=tuple((table.numbers(f"column/{n}/at"), table.numbers(f"column/{n}/units")) for n in range(len(header["columns"]))),
        units_at=table.numbers("units/at"),
        unit_ids=table.digests("units/id"),
        unit_requests=table.strings("units/request"),
    )


def read_outline(layout: Layout, name: str) -> Outline:
    """Read what a plan's header tells, without its rows. Raises FormatError, FileNotFoundError."""
    path = layout.plan(name)
    header = read_header(path, FORMAT, VERSION)
    try:
        return Outline(name, str(header["catalog"]), int(header["samples"]), tuple(int(start) for start in header["units_at"]) or (0,))
    except (KeyError, TypeError, ValueError) as error:
        message = f"{path} does not say how many units it has; run `cachestore verify`"
        raise FormatError(message) from error
