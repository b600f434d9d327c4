"""A plan: rows of samples and units, the catalog's name and the recipes. It has no file sizes, mtimes, absolute paths or bytes.

Every node that lists the same source builds the same plan, byte for byte, under the same name. Its table:

    ids, captions (+ captions/at), images/<role> (+ /at), extras     one row per sample, as in a catalog
    column/<c>/at, column/<c>/units     for key column c: the units of each row's cells
    units/id, units/request             sorted by recipe, then by id; the request is the JSON that the encoder resolves
    units/at                            where each recipe's units start

    refused/sample, refused/reason      what the source has and fails alone, as far as it is named

The header repeats the number of samples and `units_at`, and counts what fails alone: to count, it is enough to read the header.
"""

import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from cachestore.core.errors import WRONG_FIELDS, BadInput, BadUsage, FormatError
from cachestore.core.keys import KEY_BYTES, Json, Key, Recipe, canonical, digest_parts
from cachestore.core.samples import Sample
from cachestore.files.opening import names_in
from cachestore.files.paths import Layout
from cachestore.files.publish import publish
from cachestore.files.table import (
    Column,
    Digests,
    Table,
    Texts,
    digest_column,
    encode_table,
    never_falls,
    number_column,
    offsets_of,
    read_header,
    read_table,
    string_columns,
)

FORMAT: Final = "cachestore-plan"
VERSION: Final = 1

Request = Mapping[str, Json]
"""What an encoder is asked to make, as JSON: a caption, or a reference with resolution and crop."""


@dataclass(frozen=True, slots=True)
class PlanColumn:
    """One key column of the future catalog: its recipe, role and options."""

    recipe: int
    encoder: str
    role: str
    options: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class ColumnRequest:
    """A column, and the function that returns a sample's requests for it, in the order of the cells."""

    column: PlanColumn
    requests: Callable[[Sample], Sequence[Request]]
    needs_cells: bool = False
    """Whether the column is left out if it has no cells, even as its recipe's first one. So is the recipe then, if it is the last one."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One piece of encode work; `index` is its unit index."""

    index: int
    id: bytes
    recipe: int
    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A plan as it was built or read."""

    name: str
    """The folder's name: digest of request and content."""
    request: str
    """Digest of the catalog's name, the arguments that change keys, and the fingerprints."""
    content: str
    """Digest of what the source lists."""
    catalog: str = ""
    """Name of the data set; empty for a plan without one (`fill` without `publish_as`)."""
    recipes: tuple[Recipe, ...]
    columns: tuple[PlanColumn, ...] = ()
    ids: Sequence[str] = ()
    captions_at: Sequence[int] = (0,)
    captions: Sequence[str] = ()
    images: Mapping[str, tuple[Sequence[int], Sequence[str]]] = field(default_factory=dict[str, tuple[Sequence[int], Sequence[str]]])
    extras: Sequence[str] = ()
    cells: tuple[tuple[Sequence[int], Sequence[int]], ...] = ()
    """For each column: where each row's cells start, and the unit index of each cell."""
    units_at: Sequence[int]
    unit_ids: Sequence[bytes]
    unit_requests: Sequence[str]
    ids_are_keys: bool = False
    """Whether a unit's id is its key (`fill`)."""
    remarks: tuple[str, ...] = ()
    """Remarks from listing the source: a rank that takes over the plan does not list it again."""
    texts: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """How a row's captions were made from those of the source; empty if it is the first one, unchanged."""
    prompts: Sequence[tuple[str, str]] = ()
    """(prompt, negative prompt) of each prompt for validation. Their units are among the text encoder's."""
    without_picture: str = ""
    """A remark on samples that have no picture while others have one; empty for none."""
    refused: Sequence[tuple[str, str]] = ()
    """(sample or place, reason) of rows, members and files of the source that cannot be used. They are no samples; each fails alone."""
    refused_count: int = 0
    """How many there are; `refused` names only the first ones."""
    checksums: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The checksums of the columns as they were read; empty for a plan that was just built."""

    @property
    def unit_count(self) -> int:
        """The number of units over all recipes."""
        return len(self.unit_ids)

    def units_of(self, recipe: int) -> range:
        """Return the unit indices of a recipe."""
        return range(self.units_at[recipe], self.units_at[recipe + 1])

    def recipe_of(self, index: int) -> int:
        """Return the number of a unit's recipe."""
        return bisect_right(self.units_at, index) - 1

    def unit(self, index: int) -> Unit:
        """Return a unit. Raises FormatError if its request is not JSON."""
        try:
            request = json.loads(self.unit_requests[index])
        except (ValueError, RecursionError) as error:
            raise FormatError(
                f"the request of unit {index} of plan {self.name} is not JSON; `cachestore repair` moves the plan aside"
            ) from error
        return Unit(index, self.unit_ids[index], self.recipe_of(index), request)


@dataclass(frozen=True, slots=True)
class Outline:
    """What a plan's header contains: enough to count."""

    name: str
    catalog: str
    """Name of the data set; empty for a plan without one (`fill` without `publish_as`)."""
    samples: int
    units_at: tuple[int, ...]
    """Where each recipe's units start, and where the last one's end."""
    encoders: tuple[str, ...] = ()
    """The encoder of each recipe."""
    prompts: int = 0
    """How many prompts for validation it has."""

    @property
    def unit_count(self) -> int:
        """The number of units over all recipes."""
        return self.units_at[-1]


def plan_name(request: str, content: str) -> str:
    """Return the name of the plan for these digests of request and content."""
    return digest_parts("cachestore-plan", request, content).hex()[:32]


class _Units:
    """The distinct requests of one recipe, in the order in which they were first added."""

    def __init__(self, recipe: Recipe) -> None:
        self._fingerprint = recipe.fingerprint
        self._numbers: dict[bytes, int] = {}
        self._requests = Texts()

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, request: Request) -> int:
        """Return the number of the unit with this request; a new request gets the next number."""
        text = canonical(dict(request))
        uid = digest_parts("cachestore-unit", self._fingerprint, text)[:KEY_BYTES]
        number = self._numbers.setdefault(uid, len(self._numbers))
        if number == len(self._requests):
            self._requests.append(text)
        return number

    def in_order(self) -> tuple[list[bytes], list[int]]:
        """Return the sorted ids, and for each number its index among them."""
        ids = sorted(self._numbers)
        indices = [0] * len(ids)
        for index, uid in enumerate(ids):
            indices[self._numbers[uid]] = index
        return ids, indices

    def requests(self, ids: Sequence[bytes]) -> Iterator[str]:
        texts = self._requests.strings()
        return (texts[self._numbers[uid]] for uid in ids)


class _References:
    """The references of each role, row after row. Rows before a role's first reference are empty."""

    def __init__(self) -> None:
        self._roles: dict[str, tuple[array[int], Texts]] = {}
        self._rows = 0

    def add_row(self, images: Mapping[str, Sequence[str]]) -> None:
        for role in images:
            if role not in self._roles:
                self._roles[role] = (array("q", bytes(8 * (self._rows + 1))), Texts())
        self._rows += 1
        for role, (at, texts) in self._roles.items():
            for reference in images.get(role, ()):
                texts.append(reference)
            at.append(len(texts))

    def columns(self) -> dict[str, tuple[Sequence[int], Sequence[str]]]:
        return {role: (memoryview(at), texts.strings()) for role, (at, texts) in sorted(self._roles.items())}


def build_plan(
    *,
    catalog: str,
    request: str,
    content: str,
    recipes: Sequence[Recipe],
    samples: Iterable[Sample],
    columns: Sequence[ColumnRequest],
    texts: Mapping[str, Json] | None = None,
    extra: Sequence[tuple[int, Request]] = (),
    prompts: Sequence[tuple[str, str]] = (),
    refuse: Callable[[str, str], None] | None = None,
) -> Plan:
    """Build a plan. `samples` is iterated over once; their captions are encoded as they are.

    `refuse` gets id and reason of a sample whose parts do not go together, which is then left out. Without it, BadInput is raised for one.

    `extra` are (recipe, request) of units that no sample refers to, such as the empty caption; without samples they are left out.
    `prompts` are pairs of texts, whose units are among `extra`. A recipe's further columns, such as that of control images, are left out
    if they have no cells.
    """
    units = [_Units(recipe) for recipe in recipes]
    ids, captions, extras, images = Texts(), Texts(), Texts(), _References()
    captions_at = array("q", [0])
    cells = [(array("q", [0]), array("q")) for _column in columns]
    for sample, wanted in _with_requests(samples, columns, refuse):
        ids.append(sample.id)
        for caption in sample.captions:
            captions.append(caption)
        captions_at.append(len(captions))
        images.add_row(sample.images)
        extras.append(canonical(dict(sample.extras)))
        for one, (at, numbers), some in zip(columns, cells, wanted, strict=True):
            numbers.extend(units[one.column.recipe].number(request_of_cell) for request_of_cell in some)
            at.append(len(numbers))
    optional = {one.column.recipe for one in columns} - {one.column.recipe for one in columns if not one.needs_cells}
    columns, cells = _used(columns, cells)
    for recipe, of_no_sample in extra if len(ids) else ():
        units[recipe].number(of_no_sample)
    while units and not len(units[-1]) and len(units) - 1 in optional:
        units.pop()
    starts = list(offsets_of(map(len, units)))
    ordered = [one.in_order() for one in units]
    requests = Texts()
    for one, (uids, _indices) in zip(units, ordered, strict=True):
        for text in one.requests(uids):
            requests.append(text)
    return Plan(
        name=plan_name(request, content),
        request=request,
        content=content,
        catalog=catalog,
        recipes=tuple(recipes[: len(units)]),
        columns=tuple(one.column for one in columns),
        ids=ids.strings(),
        captions_at=memoryview(captions_at),
        captions=captions.strings(),
        images=images.columns(),
        extras=extras.strings(),
        cells=tuple(
            (memoryview(at), memoryview(array("q", [starts[one.column.recipe] + ordered[one.column.recipe][1][n] for n in numbers])))
            for one, (at, numbers) in zip(columns, cells, strict=True)
        ),
        units_at=starts,
        unit_ids=Digests(memoryview(b"".join(uid for uids, _indices in ordered for uid in uids)), KEY_BYTES),
        unit_requests=requests.strings(),
        texts=texts or {},
        prompts=tuple(prompts) if len(ids) else (),
    )


def _with_requests(
    samples: Iterable[Sample], columns: Sequence[ColumnRequest], refuse: Callable[[str, str], None] | None
) -> Iterator[tuple[Sample, list[Sequence[Request]]]]:
    """Yield each sample with its requests for every column. `refuse` as for `build_plan`."""
    for sample in samples:
        try:
            wanted = [one.requests(sample) for one in columns]
        except BadInput as error:
            if refuse is None or isinstance(error, BadUsage):
                raise
            refuse(sample.id, str(error))
        else:
            yield sample, wanted


_Cells = tuple["array[int]", "array[int]"]
"""Where each row's cells start, and the numbers of their units."""


def _used(columns: Sequence[ColumnRequest], cells: Sequence[_Cells]) -> tuple[list[ColumnRequest], list[_Cells]]:
    """Keep each recipe's first column, and further ones with cells. A column that needs cells never counts as the first."""
    firsts = {one.column.recipe: index for index, one in reversed(list(enumerate(columns))) if not one.needs_cells}
    used = [index for index, one in enumerate(columns) if len(cells[index][1]) or firsts.get(one.column.recipe) == index]
    return [columns[index] for index in used], [cells[index] for index in used]


def plan_of_keys(recipe: Recipe, keys: Iterable[Key], *, name: str = "", rows: Mapping[str, Sequence[Key]] | None = None) -> Plan:
    """Build the plan of a set of keys, in any order: one recipe. A unit's id is its key.

    With the `name` of a data set, its `rows` have some of these keys each, and the pass that ends publishes them.
    """
    ordered = sorted(set(keys))
    raw = b"".join(ordered)
    requests = Texts()
    for key in ordered:
        requests.append(canonical({"key": str(key)}))
    request, content = digest_parts("cachestore-fill", recipe.fingerprint).hex(), digest_parts("cachestore-keys", raw).hex()
    listed = rows or {}
    at = array("q", offsets_of(map(len, listed.values())))
    number = {key: index for index, key in enumerate(ordered)} if listed else {}
    units = array("q", [number[key] for some in listed.values() for key in some])
    if name:
        request = digest_parts("cachestore-fill-as", recipe.fingerprint, name).hex()
        content = digest_parts("cachestore-rows", raw, at.tobytes(), units.tobytes(), *listed).hex()
    return Plan(
        name=plan_name(request, content),
        request=request,
        content=content,
        catalog=name,
        recipes=(recipe,),
        columns=(PlanColumn(0, recipe.encoder, "", {}),) if name else (),
        ids=list(listed),
        captions_at=[0] * (len(listed) + 1),
        extras=["{}"] * len(listed),
        cells=((at, units),) if name else (),
        units_at=[0, len(ordered)],
        unit_ids=Digests(memoryview(raw), KEY_BYTES),
        unit_requests=requests.strings(),
        ids_are_keys=True,
    )


def publish_plan(layout: Layout, plan: Plan) -> None:
    """Publish a plan, unless it is there already: then it is the same."""
    if is_published(layout, plan.name):
        return
    columns: dict[str, Column] = {
        **string_columns("ids", plan.ids),
        "captions/at": number_column(plan.captions_at),
        **string_columns("captions", plan.captions),
        **string_columns("extras", plan.extras),
        "units/at": number_column(plan.units_at),
        "units/id": digest_column(plan.unit_ids, width=KEY_BYTES),
        **string_columns("units/request", plan.unit_requests),
    }
    if plan.refused:
        columns |= string_columns("refused/sample", [sample for sample, _reason in plan.refused])
        columns |= string_columns("refused/reason", [reason for _sample, reason in plan.refused])
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
        "ids_are_keys": plan.ids_are_keys,
        "remarks": list(plan.remarks),
        "texts": dict(plan.texts),
        **({"prompts": [list(pair) for pair in plan.prompts]} if plan.prompts else {}),
        **({"without_picture": plan.without_picture} if plan.without_picture else {}),
        **({"refused": plan.refused_count} if plan.refused_count else {}),
        "samples": len(plan.ids),
        "units_at": list(plan.units_at),
        "columns": [asdict(one) for one in plan.columns],
    }
    publish(layout, layout.plan(plan.name), encode_table(FORMAT, VERSION, header, columns), read_only=True)


def is_published(layout: Layout, name: str) -> bool:
    """Return whether a plan's rows are there, by listing."""
    return layout.plan(name).name in names_in(layout.plan_folder(name))


def read_plan(layout: Layout, name: str, *, io: Literal["pread", "mmap"] = "mmap") -> Plan:
    """Read a published plan. With "mmap", columns that are not read take no memory. Raises FormatError, FileNotFoundError."""
    path, cure = layout.plan(name), f"{layout.command('repair')} moves it aside"
    table = read_table(path, FORMAT, VERSION, io=io)
    try:
        plan = _parse(table, name)
    except WRONG_FIELDS as error:
        raise FormatError(f"{path} lacks a field of a plan, or has a wrong one ({type(error).__name__}: {error}); {cure}") from error
    if not _fits(plan):
        raise FormatError(f"{path} is not the plan that its folder names, or its columns do not fit; {cure}")
    return plan


def _parse(table: Table, name: str) -> Plan:
    header: Mapping[str, Any] = table.header
    return Plan(
        name=name,
        request=str(header["request"]),
        content=str(header["content"]),
        catalog=str(header["catalog"]),
        recipes=tuple(Recipe.from_json(recipe) for recipe in header["recipes"]),
        columns=tuple(
            PlanColumn(int(one["recipe"]), str(one["encoder"]), str(one["role"]), dict(one["options"])) for one in header["columns"]
        ),
        ids=table.strings("ids"),
        captions_at=table.numbers("captions/at"),
        captions=table.strings("captions"),
        images={role: (table.numbers(f"images/{role}/at"), table.strings(f"images/{role}")) for role in header["roles"]},
        extras=table.strings("extras"),
        cells=tuple((table.numbers(f"column/{n}/at"), table.numbers(f"column/{n}/units")) for n in range(len(header["columns"]))),
        units_at=table.numbers("units/at"),
        unit_ids=Digests(table.columns["units/id"], KEY_BYTES),
        unit_requests=table.strings("units/request"),
        ids_are_keys=bool(header["ids_are_keys"]),
        remarks=tuple(map(str, header["remarks"])),
        without_picture=str(header.get("without_picture", "")),
        texts=dict(header.get("texts", {})),
        prompts=tuple((str(prompt), str(negative)) for prompt, negative in header.get("prompts", ())),
        refused=tuple(zip(table.strings("refused/sample"), table.strings("refused/reason"), strict=True)),
        refused_count=int(header.get("refused", 0)),
        checksums=table.checksums,
    )


def _fits(plan: Plan) -> bool:
    """Whether a plan's digests match its name, and every list has exactly one item per row or unit."""
    rows, starts = len(plan.ids), plan.units_at
    lists = [(plan.captions_at, len(plan.captions)), *((at, len(values)) for at, values in plan.images.values())]
    lists += [(at, len(units)) for at, units in plan.cells]
    has_lists = all(len(at) == rows + 1 and at[0] == 0 and at[-1] == total and never_falls(at) for at, total in lists)
    has_units = len(starts) == len(plan.recipes) + 1 and starts[0] == 0 and starts[-1] == len(plan.unit_ids) and never_falls(starts)
    return (
        plan.name == plan_name(plan.request, plan.content)
        and has_lists
        and has_units
        and len(plan.unit_requests) == len(plan.unit_ids)
        and len(plan.extras) == rows
        and all(0 <= column.recipe < len(plan.recipes) for column in plan.columns)
        and all(min(units) >= 0 and max(units) < len(plan.unit_ids) for _at, units in plan.cells if len(units))
    )


def read_outline(layout: Layout, name: str) -> Outline:
    """Read a plan's header, without its rows. Raises FormatError, FileNotFoundError."""
    path = layout.plan(name)
    header = read_header(path, FORMAT, VERSION)
    try:
        starts, encoders = tuple(int(start) for start in header["units_at"]), tuple(str(one["encoder"]) for one in header["recipes"])
        prompts = len(header.get("prompts", ()))
        return Outline(name, str(header["catalog"]), int(header["samples"]), starts or (0,), encoders, prompts)
    except WRONG_FIELDS as error:
        raise FormatError(f"{path} does not say how many units it has; run {layout.command('verify')}") from error
