"""`fill`: the pass loop with keys and an encoder of the caller's, in the caller's process."""

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NoReturn

from cachestore.core.arguments import as_pairs, as_switch, as_whole, check_calls, check_function, refuse
from cachestore.core.errors import BadInput
from cachestore.core.keys import Json, Key, Recipe, by_key
from cachestore.encode.unit import Prepared, Read, Resolved, Result
from cachestore.files.marker import noticing_its_end
from cachestore.jobs.options import allowed_failures
from cachestore.jobs.pass_loop import Report, held_to, run_pass
from cachestore.jobs.placement import find_placement, launch_of, say_conflict
from cachestore.jobs.task import Cancel, Job, OnProgress
from cachestore.store.reader import AnyKey
from cachestore.store.writer import Store
from cachestore.work.agreement import Intent, check_agreement
from cachestore.work.plan import is_published, plan_of_keys, publish_plan
from cachestore.work.progress import Observer
from cachestore.work.workers import Beat

FILL_BATCH: Final = 16
"""`fill` hands over so many items at once where the caller does not say."""

_log = logging.getLogger("cachestore")


@dataclass(slots=True)
class _CallerEncoder:
    """The caller's own `encode`, as an encoder of the loop. A unit's id is its key."""

    recipe: Recipe
    items: Mapping[Key, Any]
    function: Callable[[list[tuple[Key, Any]]], Mapping[Any, Mapping[str, Any]]]
    limit: int
    group_by: Callable[[Any], Hashable] | None

    def resolve(self, request: Mapping[str, Json], read: Read) -> Resolved:
        del read
        key = Key.parse(request["key"])
        return Resolved(key, self.items[key], {}, {"encoder": self.recipe.encoder})

    def prepare(self, resolved: Resolved) -> Prepared:
        return Prepared(resolved.item, self.group_by(resolved.item) if self.group_by else None)

    @property
    def window(self) -> int:
        return self.limit

    def batch_limit(self, group: Hashable) -> int:
        del group
        return self.limit

    def submit(self, batch: Sequence[tuple[Key, Any]]) -> Result:
        """Call the caller's function, now and here; its keys may be in any form."""
        made = by_key(self.function(list(batch)))
        return lambda: made

    def close(self) -> None:
        """The caller's model is the caller's."""


class _NoSource:
    """`fill` has no files: items are the caller's, and nothing here is called."""

    def read(self, reference: str) -> NoReturn:
        raise OSError(f"fill reads no files, but {reference!r} was asked for")

    open = stat = read


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
) -> Report:
    """Make values of your own, on any number of ranks; what the store holds is not made again.

    Args:
        store: open with `mode="a"`; it shows the new entries afterwards.
        wanted: (key, item) pairs; every rank passes the same keys. None at all is fine. Of equal keys the first item counts.
        encode: called in this process and thread with a list of (key, item); returns `{key: {name: tensor}}` for exactly these
            keys, torch tensors or numpy arrays. If it raises, the batch is tried in halves, and what fails alone is a failure;
            BadInput says that nothing can be encoded like this, and ends the run.
        batch_size: items in one call at most; "auto" is 16, halved for a group that runs out of memory.
        group_by: items of one call have equal `group_by(item)`.
        rank: this process's rank, with `world_size`; found in the environment where not given.
        world_size: the number of ranks.
        strict: raise if a unit failed.
        max_failures: how many may fail (a count, or a share such as "2%").
        on_progress: called in this thread, about once a second and at the end, with units published so far over all ranks:
            `{"plan", "pass", "reused", "encoded", "failed", "total"}`.
        cancel: anything with `is_set()`; set, it ends the work after the present batch.

    Returns:
        The report of the pass, the same on every rank.

    Raises:
        BadInput: a malformed key or option.
        EncodeFailed: with `strict`, if a unit failed.
        Incomplete: cancelled, or stuck; the same call goes on from there.
        WriteFailed: the disk refuses.
    """
    if not isinstance(store, Store):  # pyright: ignore[reportUnnecessaryIsInstance] - what callers without types pass
        refuse("store", 'what cs.open(path, mode="a") returned', store)
    check_function("encode", encode)
    if group_by is not None:
        check_function("group_by", group_by)
    check_calls(on_progress, cancel)
    strict = as_switch("strict", strict)
    limit = FILL_BATCH if batch_size == "auto" else as_whole("batch_size", batch_size, least=1)
    _ = store.snapshot  # raises where the store is closed
    if store.mode != "a":
        raise BadInput(f'{store.layout.root} is open for reading; open it with mode="a" to fill it')
    allowed_failures(str(max_failures), 0)  # refused now, not after the work
    items: dict[Key, Any] = {}
    for key, item in as_pairs("wanted", wanted):
        items.setdefault(Key.parse(key), item)
    encoder = _CallerEncoder(Recipe("values", {"kind": "values"}), items, encode, limit, group_by)
    placement = find_placement(rank, world_size)
    plan = plan_of_keys(encoder.recipe, items)
    if not is_published(store.layout, plan.name):
        publish_plan(store.layout, plan)
    say_conflict(placement, _log.warning)
    observer, launch = Observer(store.layout), launch_of(placement)
    tell = observer.following(on_progress) if on_progress else None
    with noticing_its_end(store.layout), Beat(store.layout, "", 0, launch, placement.rank, placement.world_size) as beat:
        intent = Intent(plan.request, {}, plan.content, plan.name)
        beat.detail = intent.as_json()
        beat.write()
        # Two trainers that fill one store with values of their own are no mismatch: only ranks of one launch are held to one plan.
        check_agreement(store.layout, intent, beat, _log.debug, strict=False)
        report = run_pass(Job(store.layout, plan, [encoder], _NoSource(), placement, launch, cancel=cancel, on_progress=tell, beat=beat))
    store.refresh()
    if on_progress and (ended := observer.newest(report.plan)) is not None:
        on_progress(ended.counts())
    return held_to(report, allowed_failures(str(max_failures), report.wanted), strict=strict)
