"""`fill`: runs the pass loop with the caller's keys and encode function, in the caller's process."""

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal, NoReturn, cast

from cachestore.core.arguments import as_pairs, as_switch, as_text, as_whole, check_calls, check_function, normal_id, refuse
from cachestore.core.errors import BadInput, naming_extras
from cachestore.core.keys import Json, Key, Recipe, by_key
from cachestore.core.words import plural
from cachestore.encode.batching.unit import Prepared, Read, Resolved, Result
from cachestore.files.marker import noticing_its_end
from cachestore.jobs.plan.option_types import allowed_failures
from cachestore.jobs.run.pass_loop import run_pass
from cachestore.jobs.run.task import Cancel, Job, OnProgress
from cachestore.jobs.share.agreement import Intent, check_agreement
from cachestore.jobs.share.pace import with_pace
from cachestore.jobs.share.plan import Plan, plan_of_keys, publish_plan
from cachestore.jobs.share.progress import Observer
from cachestore.jobs.share.report import Report, held_to
from cachestore.jobs.share.workers import Heartbeat
from cachestore.jobs.start.ranks import find_rank, launch_of, say_conflict
from cachestore.store.format.catalog import NO_KEY
from cachestore.store.format.line import FILLED, OWNER, VALUE, Cells, list_line
from cachestore.store.read.reader import AnyKey
from cachestore.store.write.made import begin
from cachestore.store.write.publish import replace_rows
from cachestore.store.write.writer import Store

FILL_BATCH: Final = 16
"""Items in one call of `encode`, if the caller passes no batch size."""

_log = logging.getLogger("cachestore")


@dataclass(slots=True)
class _CallerEncoder:
    """The caller's `encode` function as an encoder of the pass loop. A unit's id is its key."""

    recipe: Recipe
    items: Mapping[Key, Any]
    function: Callable[[list[tuple[Key, Any]]], Mapping[Any, Mapping[str, Any]]]
    limit: int
    group_by: Callable[[Any], Hashable] | None
    meta: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """More fields of each entry's JSON value."""
    has_warned: bool = False

    def resolve(self, request: Mapping[str, Json], read: Read) -> Resolved:
        del read
        key = Key.parse(request["key"])
        return Resolved(key, self.items[key], {}, {"encoder": self.recipe.encoder, **self.meta})

    def prepare(self, resolved: Resolved) -> Prepared:
        return Prepared(resolved.item, self.group_by(resolved.item) if self.group_by else None)

    @property
    def window(self) -> int:
        return self.limit

    def batch_limit(self, _group: Hashable) -> int:
        return self.limit

    def submit(self, batch: Sequence[tuple[Key, Any]]) -> Result:
        """Call the caller's function in this thread. The keys that it returns may be in any form."""
        made = by_key(self.function(list(batch)))
        if len(batch) > 1 and made.keys() != {key for key, _item in batch} and not self.has_warned:
            self.has_warned = True
            wrong = f"encode returned {plural(len(made), 'key')} for a batch of {len(batch)}, or other keys than it got"
            _log.warning("%s: such batches are encoded again in halves, which takes longer", wrong)
        return lambda: made

    def close(self) -> None:
        """Do nothing: the model belongs to the caller."""


class _NoFiles:
    """The source of `fill`, which reads no files: nothing here is called."""

    def read(self, reference: str) -> NoReturn:
        raise OSError(f"fill reads no files, but {reference!r} was asked for")

    open = stat = read


def id_of(item: Any) -> str:
    """Return the id of the row that an item is for. Raises BadInput if it has none."""
    found: Any = getattr(item, "id", None)
    if isinstance(item, str):
        found = item
    elif isinstance(item, Mapping):
        found = cast("Mapping[str, Any]", item).get("id")
    if not isinstance(found, str) or not found:
        needs = "publish_as needs an id for each row: an item that is a text, or one with an `id`"
        kind = type(cast("object", item)).__name__
        raise BadInput(f"{needs}; an item of the type {kind} has none", option="wanted")
    return found


@dataclass(frozen=True, slots=True)
class Publishing:
    """The data set that pairs become, with more fields of each entry's JSON value."""

    name: str
    meta: Mapping[str, Json] = field(default_factory=dict[str, Json])

    def publish(self, store: Store, plan: Plan, allowed: int | None, failed: Mapping[int, str]) -> int:
        """Publish the rows of a plan. A row of several keys of which one failed has none: which is which would not be known.

        Where more than the allowed number failed, or nothing could be encoded, what is there stays: a broken encoder takes no rows away.
        """
        if (allowed is not None and len(failed) > allowed) or (failed and len(failed) == plan.unit_count):
            return list_line(store.layout, self.name).highest
        keys = [Key(raw) for raw in plan.unit_ids]
        [(at, units)] = plan.cells
        rows: dict[str, Cells] = {}
        for row, sample in enumerate(plan.ids):
            of_row = units[at[row] : at[row + 1]]
            rows[sample] = () if failed.keys() & set(of_row) else tuple(keys[unit] for unit in of_row)
        return replace_rows(store, self.name, VALUE, rows)

    def warn(self, report: Report) -> None:
        """Log what could not be encoded, with the first ids and reasons, and what became of the data set."""
        if not report.failed:
            return
        what = f"{report.failed} of {plural(report.wanted, 'value')} of {self.name!r} could not be encoded"
        named = "; ".join(f"{failure['sample']!r}: {failure['reason']}" for failure in report.failures[:3])
        stays = report.failed == report.wanted
        then = "so the data set stays as it was" if stays else "and their rows have no value"
        _log.warning("%s, %s: %s (report.failures lists them)", what, then, named)


@naming_extras()
def fill(
    store: Store,
    wanted: Iterable[tuple[AnyKey, Any]],
    encode: Callable[[list[tuple[Key, Any]]], Mapping[Any, Mapping[str, Any]]],
    *,
    batch_size: int | Literal["auto"] = "auto",
    group_by: Callable[[Any], Hashable] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    strict: bool = False,
    max_failures: int | str = 0,
    on_progress: OnProgress | None = None,
    cancel: Cancel | None = None,
    publish_as: str | None = None,
) -> Report:
    """Encode values with your own function, on any number of ranks. What the store holds already is not encoded again.

    With `publish_as` the pairs become the rows of a data set, under the id of each item: the item itself if it is a text, else its `id`, as
    `cs.Sample` has one, or `item["id"]` of a mapping. Pairs of one id are one row with several keys of the part `value`, in their order. A
    row without an encoded value stays, without keys; if no value at all could be encoded, the data set stays as it was. Rows that are no
    longer wanted leave. The values then belong to that data set: once
    no row names one any more, `gc` may remove it, while values of a plain `fill` stay for ever.

    Args:
        store: a store opened with `mode="a"`; it shows the new entries afterwards.
        wanted: (key, item) pairs, or none. Every rank passes the same keys. For equal keys the first item counts.
        encode: called in this process and thread with a list of (key, item). Returns `{key: {name: tensor}}` for exactly these
            keys, as torch tensors or numpy arrays. If it raises, the batch is tried in halves, and an item that fails alone is a
            failure. If it raises BadInput, the run ends.
        batch_size: the most items in one call. "auto" is 16, halved for a group that runs out of memory.
        group_by: the items of one call have equal `group_by(item)`.
        rank: this process's rank, with `world_size`; default: found in the environment.
        world_size: the number of ranks.
        strict: raise EncodeFailed if more units failed than `max_failures`, and publish no data set then.
        max_failures: how many units may fail: a count, or a share such as "2%".
        on_progress: called in this thread, about once a second and at the end, with the counts over all ranks, as for `precompute`.
        cancel: anything with `is_set()`. Once it is set, the work ends after the current batch.
        publish_as: the name of a data set that these pairs become, once all are encoded or have failed.

    Returns:
        The report of the pass, the same on every rank. With `publish_as` its `generation` is that of the data set.

    Raises:
        BadInput: a malformed key or option; with `publish_as`, an item without an id, or a name that another kind of data set has.
        EncodeFailed: with `strict`, if too many units failed.
        Incomplete: cancelled or stuck; the same call continues from there.
        WriteFailed: writing failed, for example because the disk is full.
    """
    name = None if publish_as is None else as_text("publish_as", publish_as)
    return fill_values(
        store,
        wanted,
        encode,
        batch_size=batch_size,
        group_by=group_by,
        rank=rank,
        world_size=world_size,
        strict=strict,
        max_failures=max_failures,
        on_progress=on_progress,
        cancel=cancel,
        publishing=None if name is None else Publishing(name),
    )


def fill_values(
    store: Store,
    wanted: Iterable[tuple[AnyKey, Any]],
    encode: Callable[[list[tuple[Key, Any]]], Mapping[Any, Mapping[str, Any]]],
    *,
    batch_size: int | Literal["auto"],
    group_by: Callable[[Any], Hashable] | None,
    rank: int | None,
    world_size: int | None,
    strict: bool,
    max_failures: int | str,
    on_progress: OnProgress | None,
    cancel: Cancel | None,
    publishing: Publishing | None,
) -> Report:
    """As `fill`, which publishes more than a name."""
    if not isinstance(store, Store):  # pyright: ignore[reportUnnecessaryIsInstance] - what callers without types pass
        refuse("store", 'what cs.open(path, mode="a") returned', store)
    check_function("encode", encode)
    if group_by is not None:
        check_function("group_by", group_by)
    check_calls(on_progress, cancel)
    _ = store.snapshot  # raises if the store is closed
    if store.mode != "a":
        raise BadInput(f'{store.layout.root} is open for reading; open it with mode="a" to fill it', option="store")
    allowed_failures(str(max_failures), 0)  # raises now, not after the work
    strict = as_switch("strict", strict)
    limit = FILL_BATCH if batch_size == "auto" else as_whole("batch_size", batch_size, least=1)
    name = None if publishing is None else publishing.name
    items: dict[Key, Any] = {}
    rows: dict[str, list[Key]] = {}
    spelled: dict[str, str] = {}
    for raw, item in as_pairs("wanted", wanted):
        key = Key.parse(raw)
        items.setdefault(key, item)
        if name is not None:
            if key == NO_KEY:
                raise BadInput("a key of zeros says that a row has no value: choose another key", option="wanted")
            given = id_of(item)
            sample = normal_id(given)
            if spelled.setdefault(sample, given) != given:
                raise BadInput(f"the id {given!r} comes in two Unicode forms, and ids are kept in NFC: use one of them", option="wanted")
            rows.setdefault(sample, []).append(key)
    if name is not None:
        begin(store.layout, name, "published")
    meta: Mapping[str, Json] = {} if publishing is None else {**publishing.meta, OWNER: publishing.name}
    encoder = _CallerEncoder(Recipe(FILLED, {"kind": "values"}), items, encode, limit, group_by, meta)
    rank_info = find_rank(rank, world_size)
    plan = plan_of_keys(encoder.recipe, items, name=name or "", rows=rows)
    publish_plan(store.layout, plan)
    allowed = allowed_failures(str(max_failures), plan.unit_count)
    say_conflict(rank_info, _log.warning)
    observer, launch = Observer(store.layout), launch_of(rank_info)
    tell = with_pace(on_progress) if on_progress else None
    with noticing_its_end(store.layout), Heartbeat(store.layout, "", 0, launch, rank_info.rank, rank_info.world_size) as heartbeat:
        intent = Intent(plan.request, {}, plan.content, plan.name)
        heartbeat.detail = intent.as_json()
        heartbeat.write()
        # Only ranks of one launch must have the same plan: another trainer may fill the same store with its own values.
        check_agreement(store.layout, intent, heartbeat, _log.debug, strict=False)
        report = run_pass(
            Job(
                store.layout,
                plan,
                [encoder],
                _NoFiles(),
                rank_info,
                launch,
                appends_beside=True,
                cancel=cancel,
                on_progress=observer.following(tell) if tell else None,
                heartbeat=heartbeat,
                publish=None if publishing is None else partial(publishing.publish, store, plan, allowed if strict else None),
            )
        )
    report = replace(report, name=name or "")
    store.refresh()
    if tell and (ended := observer.newest(report.plan)) is not None:
        tell(ended)
    report = held_to(report, allowed_failures(str(max_failures), report.wanted), strict=strict)
    if publishing is not None and rank_info.rank in {0, None}:
        publishing.warn(report)
    return report
