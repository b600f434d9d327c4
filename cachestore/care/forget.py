"""Forget samples: take them out of all data sets, and with `now` remove their values and all that names them.

docs/design/removal.md has the order of the steps, and what a crash leaves. What nothing needs any more is otherwise left to `gc`.
"""

import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from cachestore.care.collect import refuse_lost_catalogs
from cachestore.care.gc import mark, plan_removal, remove_marked
from cachestore.care.lines import entry_numbers, keys_of_entries, tidy_line
from cachestore.care.usage import owner_of
from cachestore.core.arguments import as_id, as_many, as_path, as_switch, as_text
from cachestore.core.errors import BadInput, FormatError, Incomplete, WriteFailed
from cachestore.core.inputs import caption_key
from cachestore.core.keys import Json, Key
from cachestore.core.samples import CAPTION
from cachestore.core.words import first_of, human_bytes, in_short, named_prompt, noun
from cachestore.files.checksum import read_blocks
from cachestore.files.failpoints import failpoint
from cachestore.files.locks import locked
from cachestore.files.marker import check_for_reading, noticing_its_end
from cachestore.files.opening import free_bytes, names_in, opened
from cachestore.files.paths import PASS_KINDS, Layout, is_temporary, parse_worker
from cachestore.files.removal import remove_file
from cachestore.jobs.plan.recorded_paths import source_paths
from cachestore.jobs.share.ledgers import read_ledgers
from cachestore.jobs.share.passes import PassRef, list_passes, list_rounds
from cachestore.jobs.share.plan import is_published, read_outline, read_plan
from cachestore.jobs.share.retention import at_work, keys_of_passes, keys_of_plans, list_plans, open_passes, remove_plan
from cachestore.jobs.share.workers import read_heartbeat
from cachestore.store.format.catalog import HAVE_SOURCES, Catalog, cells_of, list_names, read_catalog, rows_of, without_rows
from cachestore.store.format.line import list_line, path_of, read_entry
from cachestore.store.format.marked import read_marked
from cachestore.store.format.segment import StoredEntry
from cachestore.store.read.rows import read_data_set
from cachestore.store.read.snapshot import load_snapshot, open_layout
from cachestore.store.read.unfinished import list_data_sets, not_there
from cachestore.store.write.catalog_writer import draft_of, publish_draft
from cachestore.store.write.folding import make_table
from cachestore.store.write.listing_numbers import listing_number
from cachestore.store.write.made import what_made
from cachestore.store.write.publish import publish_without
from cachestore.store.write.writer import open_store

_LOCK_SECONDS: Final = 60.0
"""How long to wait for another `forget` in this store."""
_TRIES: Final = 100
"""How often a generation is tried while others publish, and values are looked for while others copy them."""
ELSEWHERE: Final = (
    "what was pushed, pulled, exported or backed up elsewhere keeps it, and so do pages of `cachestore report` and trainings that run now"
)


@dataclass(frozen=True, slots=True, repr=False)
class ForgetReport:
    """What `forget` did, or would do."""

    applied: bool
    samples: tuple[str, ...]
    generations: Mapping[str, int]
    """By data set that had one of the samples: its generation without them."""
    older: Mapping[str, tuple[int, ...]]
    """By data set, older generations that name a sample. With `now` they are removed, else `gc` removes them as any other."""
    values: int
    """Values that were removed, with `now`."""
    copied: int
    """Other values of the same segments, which were copied first."""
    kept: Mapping[str, str]
    """By key, what else needs a value of the samples: with `now`, it stays therefore."""
    plans: tuple[str, ...]
    """Plans that list a sample. With `now` they are removed, with their passes, finished or not."""
    freed_bytes: int
    left: tuple[str, ...]
    """With `now`: what in the store names a sample or holds its value all the same, and what to do."""
    remarks: tuple[str, ...]
    """What is beyond the reach of this command."""

    __repr__ = in_short

    def as_json(self) -> dict[str, Json]:
        """Return the object that `cachestore forget --json` prints."""
        return asdict(self)


@dataclass(slots=True)
class _Mentions:
    """Where a store names samples."""

    samples: set[str] = field(default_factory=set[str])
    """Those that are named anywhere."""
    keys: set[Key] = field(default_factory=set[Key])
    beside: set[Key] = field(default_factory=set[Key])
    """With `now`: other keys that only what is removed names, of values of sessions. Nothing could forget these later."""
    current: dict[str, Catalog] = field(default_factory=dict[str, Catalog])
    """The data sets that have one now, as they are."""
    generations: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    entries: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """By data set, the last numbers of entries and blocks."""
    plans: list[str] = field(default_factory=list[str])

    @property
    def is_empty(self) -> bool:
        """Whether nothing names any."""
        return not (self.current or self.generations or self.entries or self.plans)


def forget(path: str | Path, samples: Iterable[str], *, name: str | None = None, now: bool = False, apply: bool = True) -> ForgetReport:
    """Take samples out of all data sets, because their owner withdraws them.

    Each data set that has one is published without it. Older generations stay until `gc` removes them, and then the values. The source is
    not touched: a later `precompute` of a folder that has the picture makes it again. The same call goes on after an interruption.

    Args:
        path: the store.
        samples: their ids; an empty list does nothing.
        name: the data set; by default all that have one of them.
        now: remove at once also the older generations that name a sample, plans and records of runs that list it, and its values, unless
            something else needs them: another sample with the same caption or picture, a prompt, or what `fill` made.
        apply: do it; otherwise only report what would be done.

    Raises:
        StoreNotFound: there is no store at this path.
        BadInput: nothing names a sample, there is no such data set, or a worker works on a plan that lists a sample.
        FormatError: a catalog, entry or plan is damaged, so what is needed cannot be found out: run `cachestore repair`.
        LockTimeout: another `forget` runs in this store.
        WriteFailed: the disk refused to write, or has no room for copies.
    """
    layout = open_layout(Layout.at(as_path("path", path)))
    ids = tuple(dict.fromkeys(as_id("samples", one) for one in as_many("samples", samples, "the ids of samples, in a list")))
    is_now, is_applied = as_switch("now", now), as_switch("apply", apply)
    plans = {plan: read_outline(layout, plan).catalog for plan in list_plans(layout) if is_published(layout, plan)}
    names = sorted({*list_names(layout), *filter(None, plans.values())})
    if name is not None:
        if as_text("name", name) not in names:
            raise not_there(layout, name, list_data_sets(layout))
        names = [name]
    if not ids:
        return ForgetReport(is_applied, (), {}, {}, 0, 0, {}, (), 0, (), ())
    if not is_applied:
        return _forget(layout, names, ids, is_now=is_now, is_applied=False)
    with locked(layout.lock("forget"), seconds=_LOCK_SECONDS, mode=layout.mode):
        return _forget(layout, names, ids, is_now=is_now, is_applied=True)


def _forget(layout: Layout, names: Sequence[str], ids: Sequence[str], *, is_now: bool, is_applied: bool) -> ForgetReport:
    with noticing_its_end(layout):
        below = _files_below(layout, names, ids)
        samples = frozenset([*ids, *below])
        named = _find(layout, names, samples)
        check_for_reading(layout)
        if unknown := [one for one in ids if one not in named.samples and not any(each.startswith(f"{one}/") for each in below)]:
            lists = f"{layout.command('ls --samples')} lists those that there are"
            where = f"nothing in {layout.root} names the {noun(len(unknown), 'sample')} {first_of(map(repr, unknown))}"
            raise BadInput(f"{where}: it was forgotten already, or its id is another one ({lists})", option="samples")
        if heartbeats := at_work(layout, now=time.time(), plans=frozenset(named.plans)):
            raise BadInput(
                f"{heartbeats[0]} is working on a plan that lists {first_of(map(repr, ids))}: stop it, or wait until it has ended"
            )
        sources = dict.fromkeys(source for catalog in named.current.values() for source in source_paths(catalog.request))
        generations = {
            name: _publish(layout, catalog, samples) if is_applied else list_line(layout, name).highest + 1
            for name, catalog in named.current.items()
        }
        if is_applied:
            named = replace(_find(layout, names, samples), samples=named.samples)
        if is_now:
            named.beside = _keys_beside(layout, named)
            named.keys |= named.beside
        removed = _remove(layout, names, samples, named, is_applied=is_applied) if is_now else _Removed()
        ids = [*ids, *below]
        check_for_reading(layout)
    again = f" ({first_of(sources)})" if sources else ""
    remarks = [
        f"remove it from its source{again} too: the next `cachestore precompute`, or your program, makes it again",
        f"values that nothing names any more, such as those before an edit, go by {layout.command('gc --apply')}, twice, a day apart",
        ELSEWHERE,
    ]
    if is_now and named.generations:
        remarks.append("a training of an older generation ends with an error when it opens that again: start it anew")
    return ForgetReport(
        applied=is_applied,
        samples=tuple(ids),
        generations=generations,
        older={name: tuple(numbers) for name, numbers in sorted(named.generations.items())},
        values=removed.values,
        copied=removed.copied,
        kept={str(key): who for key, who in sorted(removed.kept.items()) if key not in named.beside},
        plans=tuple(named.plans),
        freed_bytes=removed.freed_bytes,
        left=tuple(removed.left),
        remarks=tuple(remarks),
    )


# What names a sample


def _files_below(layout: Layout, names: Sequence[str], ids: Sequence[str]) -> list[str]:
    """Return the files whose paths begin with one of these and a slash, now or before: a trainer's cache has a folder for each picture."""
    starts, below = tuple(f"{one}/" for one in ids), set[str]()
    for name in names:
        line = list_line(layout, name)
        with suppress(FileNotFoundError):  # gone meanwhile: `_find` looks again
            if not line.tables or what_made(layout, name) != "files":
                continue
            for generation in line.tables:
                catalog = read_catalog(layout.catalog(name, generation), generation=generation, io="mmap")
                below.update(one for one in catalog.ids if one.startswith(starts))
            for _last, number in entry_numbers(layout, name):
                below.update(one for one in read_entry(layout, name, number).changes if one.startswith(starts))
    return sorted(below.difference(ids))


def _find(layout: Layout, names: Sequence[str], samples: frozenset[str]) -> _Mentions:
    """Find out what names these samples. Raises FormatError for a damaged catalog, entry or plan."""
    found = _Mentions()
    for name in names:
        for generation in list_line(layout, name).tables:
            with suppress(FileNotFoundError):
                catalog = read_catalog(layout.catalog(name, generation), generation=generation, io="mmap")
                if _note(found, catalog, samples):
                    found.generations.setdefault(name, []).append(generation)
        for last, number in entry_numbers(layout, name):
            with suppress(FileNotFoundError):
                entry = read_entry(layout, name, number)
                is_named = entry.table is not None and _note(found, entry.table, samples)
                for sample in samples.intersection(entry.changes):
                    is_named = True
                    found.samples.add(sample)
                    found.keys.update(key for cells in entry.changes[sample].parts.values() for key in cells)
                if is_named:
                    found.entries.setdefault(name, []).append(last)
        if list_line(layout, name).tables:
            current = read_data_set(layout, name)
            if _note(found, current, samples):
                found.current[name] = current
    for plan in list_plans(layout):
        if listed := _listed_by(layout, plan, names, samples, found.keys):
            found.plans.append(plan)
            found.samples |= listed
    return found


def _keys_beside(layout: Layout, named: _Mentions) -> set[Key]:
    """Return the other keys in generations and entries that name a sample, if all copies of their values are of sessions."""
    keys: set[Key] = set()
    for name in {*named.generations, *named.entries}:
        with suppress(FileNotFoundError):
            for generation in named.generations.get(name, ()):
                for column in read_catalog(layout.catalog(name, generation), generation=generation, io="mmap").columns:
                    keys.update(map(Key, column.keys))
            for _last, number in entry_numbers(layout, name) if name in named.entries else ():
                changes = read_entry(layout, name, number).changes.values()
                keys.update(key for change in changes for cells in change.parts.values() for key in cells)
    others = sorted(keys - named.keys)
    with closing(load_snapshot(layout)) as snapshot:
        copies = zip(others, snapshot.find(others), strict=True)
        return {key for key, locations in copies if all(owner_of(location.segment.origin) is not None for location in locations)}


def _note(found: _Mentions, catalog: Catalog, samples: frozenset[str]) -> bool:
    """Note the rows that a catalog has of these samples, and their keys. Returns whether it has one."""
    rows = rows_of(catalog, samples)
    found.samples.update(catalog.ids[row] for row in rows)
    found.keys.update(key for column in catalog.columns for row in rows for key in column.row_keys(row) if key is not None)
    return bool(rows)


def _listed_by(layout: Layout, plan: str, names: Sequence[str], samples: frozenset[str], keys: set[Key]) -> set[str]:
    """Return which samples a plan of these data sets lists; `keys` gets what its passes made of them.

    Of a plan whose rows are gone, as a removal was interrupted, the records are searched.
    """
    folders = [PassRef(plan, number).folder(layout) for number in list_passes(layout, plan)]
    if not is_published(layout, plan):
        inner = [(folder.root / Path(kind.folder).name, kind) for folder in folders for kind in PASS_KINDS]
        records = [path / name for path, kind in inner for name in names_in(path) if kind.parse(name) is not None]
        records += [folder.done for folder in folders if folder.done.name in names_in(folder.root)]
        return {sample for sample in samples if any(_holds(path, _spellings([sample])) for path in records)}
    if read_outline(layout, plan).catalog not in names:
        return set()
    rows = read_plan(layout, plan)
    listed = {row: sample for row, sample in enumerate(rows.ids) if sample in samples}
    units = {units[cell] for at, units in rows.cells for row in listed for cell in range(at[row], at[row + 1])}
    for folder in folders if units else ():
        ledgers = (ledger for number in list_rounds(folder) for ledger in read_ledgers(folder, number))
        keys.update(one.key for ledger in ledgers for one in ledger.outcomes if one.unit in units and one.key is not None)
    return {*listed.values(), *samples.intersection(sample for sample, _reason in rows.refused)}


def _spellings(texts: Iterable[str]) -> list[bytes]:
    """The bytes of texts as tables and as records have them."""
    return [each.encode("utf-8", "surrogatepass") for text in texts for each in {text, json.dumps(text, ensure_ascii=False)[1:-1]}]


def _holds(path: Path, spellings: Collection[bytes]) -> bool:
    """Whether a file contains one of these; False if it is gone or no regular file."""
    tail, overlap = b"", max(map(len, spellings), default=1) - 1
    with suppress(FormatError, OSError), opened(path) as (descriptor, _status):
        for _offset, block in read_blocks(descriptor):
            text = tail + bytes(block)
            if any(one in text for one in spellings):
                return True
            tail = text[-overlap:] if overlap else b""
    return False


# The steps


def _publish(layout: Layout, catalog: Catalog, samples: frozenset[str]) -> int:
    """Publish a data set without these samples. Returns its generation."""
    failpoint("forget.before_publish")
    name = catalog.name
    if catalog.made not in HAVE_SOURCES:
        with open_store(layout.root, mode="a") as store:
            return publish_without(store, name, samples)
    with listing_number(layout, name) as number:  # a run that listed its source before this does not replace what is published here
        for _try in range(_TRIES):
            last = list_line(layout, name).highest
            newest = read_data_set(layout, name)
            rest = without_rows(newest, samples)
            if rest is None:
                return newest.generation
            if publish_draft(layout, draft_of(replace(rest, listing=max(number, newest.listing))), after=last):
                return last + 1
    raise Incomplete(f"others published the data set {name!r} in {layout.root} {_TRIES} times meanwhile; run the same again")


@dataclass(slots=True)
class _Removed:
    """What was removed at once."""

    values: int = 0
    copied: int = 0
    kept: dict[Key, str] = field(default_factory=dict[Key, str])
    freed_bytes: int = 0
    left: list[str] = field(default_factory=list[str])


def _remove(layout: Layout, names: Sequence[str], samples: frozenset[str], named: _Mentions, *, is_applied: bool) -> _Removed:
    """Remove values, then what names the samples, as long as everything could be removed until then."""
    removed = _Removed()
    _remove_values(layout, names, samples, named, removed, is_applied=is_applied)
    if is_applied and not removed.left:
        _remove_names(layout, samples, named, removed)
        if not _find(layout, names, samples).is_empty:
            removed.left.append("a run or a session published a sample again meanwhile: stop it, and run the same command again")
    spellings = _spellings([*samples, *map(str, named.keys - removed.kept.keys())])
    for where, what in ((layout.quarantine, "remove it if you do not need it"), (layout.temporary, "`cachestore gc --apply` removes it")):
        for name in names_in(where):
            if (where == layout.quarantine or is_temporary(name)) and _holds(where / name, spellings):
                later = "" if where == layout.quarantine else " a day after it was written"
                removed.left.append(f"{layout.relative(where / name)} names a sample or its value: {what}{later}")
    return removed


def _remove_values(
    layout: Layout, names: Sequence[str], samples: frozenset[str], named: _Mentions, removed: _Removed, *, is_applied: bool
) -> None:
    """Remove the values that nothing else needs. Marks their segments first, then finds out what is needed, as `gc` does in two runs."""
    gone: set[Key] = set()
    without = frozenset[str]() if is_applied else samples  # a sample that is there again now was published meanwhile, and needs its value
    for _try in range(_TRIES):
        removed.kept = _needed(layout, names, without, named)
        going = sorted(named.keys - removed.kept.keys())
        with closing(load_snapshot(layout)) as snapshot:
            copies = [location for locations in snapshot.find(going) for location in locations]
            there = {key for key, locations in zip(going, snapshot.find(going), strict=True) if locations}
            unreadable = [f"segment {digest} may hold a value, but cannot be read ({why})" for digest, why in snapshot.unreadable.items()]
        gone |= there
        removed.values = len(gone)
        if unreadable:
            removed.left += [f"{one}: run {layout.command('repair')}, then the same command again" for one in unreadable]
            return
        if not there or not is_applied:
            return
        segments = {location.segment.digest: location.segment.size_bytes for location in copies}
        if sum(segments.values()) > (free := free_bytes(layout.root)):
            need = f"up to {human_bytes(sum(segments.values()))} are needed in {layout.root} for copies of other values"
            raise WriteFailed(f"{need}, but {human_bytes(free)} are free; make room, then run the same command again")
        marked = mark(layout, segments)
        for name in list_names(layout):
            tidy_line(layout, name, with_fence=True)
        failpoint("forget.after_fences")
        removed.kept = _needed(layout, names, without, named)
        leaves = named.keys - removed.kept.keys()

        def stays(_origin: str, entry: StoredEntry, leaves: Collection[Key] = leaves) -> bool:
            return entry.key not in leaves

        lists = [read_marked(layout.marked_list(marked))] if marked is not None else []
        removals, why = plan_removal(layout, lists, stays)
        copied = [entry for removal in removals for entry in removal.to_copy]
        removed.copied += len(copied)
        removed.freed_bytes += remove_marked(layout, removals) - sum(entry.size_bytes for entry in copied)
        if why:
            removed.left += [f"{one}, then the same command again" for one in why]
            return
    removed.left.append("others copied a value again and again: stop `compact` and `gc`, then run the same command again")


def _remove_names(layout: Layout, samples: frozenset[str], named: _Mentions, removed: _Removed) -> None:
    """Remove heartbeats and plans that list a sample, then entries and generations that name one."""
    spellings, plans = _spellings(samples), set(named.plans)
    at_work_now = at_work(layout, now=time.time())
    living = {shown.worker for shown in at_work_now}
    for worker in filter(None, map(parse_worker, names_in(layout.workers))):
        shown = read_heartbeat(layout, worker)
        if worker not in living and ((shown is not None and shown.plan in plans) or _holds(layout.worker(worker), spellings)):
            failpoint("forget.before_removal")
            removed.freed_bytes += remove_file(layout, layout.worker(worker))
    for plan in sorted(plans - {shown.plan for shown in at_work_now}):  # of one that began meanwhile the caller learns by looking again
        failpoint("forget.before_removal")
        removed.freed_bytes += remove_plan(layout, plan)
    for name in sorted({*named.generations, *named.entries}):
        numbers, generations = named.entries.get(name, []), named.generations.get(name, [])
        line = list_line(layout, name)
        newest = line.tables[-1] if line.tables else 0
        if newest in generations or any(number > max(newest, line.dropped) for number in numbers):
            newest = make_table(layout, name) if what_made(layout, name) not in HAVE_SOURCES else newest
        # Entries below the newest table all go, lowest first, as a gap in them would look like a loss.
        limit = max(newest, line.dropped)
        entries = [(last, number) for last, number in entry_numbers(layout, name) if numbers and last <= limit]
        paths = [path_of(layout, name, number) for last, number in entries if last < limit or last in numbers]
        for path in [*paths, *(layout.catalog(name, n) for n in generations if n != newest)]:
            failpoint("forget.before_removal")
            removed.freed_bytes += remove_file(layout, path)


# What else needs a value


def _needed(layout: Layout, names: Sequence[str], without: frozenset[str], named: _Mentions) -> dict[Key, str]:
    """Return by key what else needs it, apart from samples `without` which these data sets are read.

    It reads twice and checks the store in between, as a root that is briefly away lists as empty.
    """
    found = dict(_needs(layout, names, without, named))
    check_for_reading(layout)
    return {**found, **dict(_needs(layout, names, without, named))}


def _needs(layout: Layout, names: Sequence[str], without: frozenset[str], named: _Mentions) -> Iterator[tuple[Key, str]]:
    now = time.time()
    refuse_lost_catalogs(layout)
    for name in list_names(layout):
        left_out = without if name in names else frozenset[str]()
        if list_line(layout, name).tables:
            yield from _needs_of(read_data_set(layout, name), named.keys, left_out)
        for generation in list_line(layout, name).tables:
            if generation not in named.generations.get(name, ()):
                with suppress(FileNotFoundError):
                    path = layout.catalog(name, generation)
                    yield from _needs_of(read_catalog(path, generation=generation, io="mmap"), named.keys, left_out)
        if name not in names:
            yield from ((key, f"the data set {name!r}") for key in keys_of_entries(layout, name, now=now) if key in named.keys)
        elif name not in named.entries:
            yield from ((key, f"the data set {name!r}") for key in keys_of_entries(layout, name, now=now) if key in named.beside)
    yield from ((key, "a `fill`, whose plan has its key") for key in keys_of_plans(layout) if key in named.keys)
    passes = frozenset(one for one in open_passes(layout, now=now) if one.plan not in named.plans)
    yield from ((key, "a run that is not finished") for key in keys_of_passes(layout, passes) if key in named.keys)


def _needs_of(catalog: Catalog, keys: Collection[Key], without: frozenset[str]) -> Iterator[tuple[Key, str]]:
    """Yield those of these keys that a catalog needs for other samples than those `without` which it is read."""
    for column in catalog.columns:
        for row, key in cells_of(column, keys):
            if (sample := catalog.ids[row]) not in without:
                yield key, f"the sample {sample!r} of {catalog.name!r}"
        if column.role == CAPTION and (empty := caption_key(column.fingerprint, "")) in keys:
            yield empty, f"the empty caption of {catalog.name!r}"
    yield from ((key, f"{named_prompt(text)} of {catalog.name!r}") for key, text in catalog.prompt_keys() if key in keys)
