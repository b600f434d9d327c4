"""Reconcile: compare what is wanted with what is present, reopen what is missing, commit when nothing is.

It opens a pass (round 0: what is not known to be present), closes each round, and makes the catalog. Any worker may do any of it:
every file is create-only, and what is present is read from the segments, not from ledgers. All of it works on columns, so that a
pass over a million units that are there takes seconds.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Final, Protocol

import numpy as np

from cachestore.core.errors import FormatError, Superseded
from cachestore.core.inputs import (
    CROP,
    FRAMED,
    NO_STAT,
    SIZE,
    Stat,
    cells_each,
    combined_digest,
    combined_stat,
    companions,
    digests_of,
    framing_of,
    is_of_files,
    references_of,
    request_for,
)
from cachestore.core.keys import INPUT_BYTES, KEY_BYTES, Json, Key, Recipe, digest_opened
from cachestore.core.samples import CAPTION, IMAGE, MASK, VIDEO
from cachestore.files.failpoints import failpoint
from cachestore.files.paths import Layout
from cachestore.files.table import Digests, run_of
from cachestore.storage.catalog import FACTS, Catalog, KeyColumn, last_generation, newest_catalog, read_catalog
from cachestore.storage.catalog_writer import draft_of, publish_again, publish_draft
from cachestore.storage.commit import commit
from cachestore.storage.listing_numbers import listing_numbers
from cachestore.storage.snapshot import Snapshot, visible_segments
from cachestore.work.ledgers import read_ledgers
from cachestore.work.outcomes import FAILED, FOUND, MADE, Bytes, Cells, Mask, Numbers, Outcomes
from cachestore.work.passes import ROUND_LIMIT, Done, PassRef, Round, list_rounds, publish_done, publish_round, read_round
from cachestore.work.plan import Plan, PlanColumn, Unit
from cachestore.work.stages import sum_stages
from cachestore.work.workers import read_beats, seconds_of_pass

_NAMED_FAILURES: Final = 10_000
_NAMED_CHANGES: Final = 100
_LOOK_SECONDS: Final = 5.0
_FEW: Final = 8
"""Keys are looked up one by one where the store holds more than so many times as many."""
_TOGETHER: Final = 65_536


class Source(Protocol):
    """Looks at the files that units were made from."""

    def stat(self, reference: str) -> tuple[int, int] | None:
        """(size, mtime_ns) now; None where the file is gone."""
        ...

    def read(self, reference: str) -> tuple[bytes, tuple[int, int]]:
        """Bytes and (size, mtime_ns). Raises OSError."""
        ...

    def open(self, reference: str) -> AbstractContextManager[tuple[BinaryIO, tuple[int, int]]]:
        """The same to be read in places. Raises OSError."""
        ...


@dataclass(slots=True)
class _History:
    """What the rounds and ledgers of a pass say so far."""

    outcomes: Outcomes
    earlier: Mask
    """Units recorded before this launch opened a round: their files may have changed since, and failures may have passed."""
    tries: "np.ndarray[Any, np.dtype[np.int8]]"
    """In how many rounds a unit was."""


@dataclass(slots=True)
class Reconciler:
    """Opens and closes the rounds of one pass."""

    layout: Layout
    plan: Plan
    ref: PassRef
    source: Source
    launch: str
    key_of: Callable[[Unit], Key | None] = lambda _unit: None
    """The key of a unit where it is known without reading anything: of captions."""
    request: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """What the catalog's header keeps as hints."""
    rise: Callable[[], None] = lambda: None
    """Called now and then while files are looked at and ledgers read, so that others see this worker live."""
    listing: int = 0
    """The number of this worker's own listing of the source (`storage/listing_numbers`)."""
    compare: Callable[[Catalog], object] = lambda _previous: None
    """Compares the plan with the catalog that it would replace. Raises RecipeMismatch where that was not asked for."""
    seconds: Callable[[], float] = lambda: 0.0
    """How long the pass has gone on, as far as this worker knows."""

    def open_pass(self, snapshot: Snapshot) -> None:
        """Begin round 0 with the units that the newest catalog does not show to be present and unchanged."""
        if 0 in list_rounds(self.ref.folder(self.layout)):
            return
        catalog = self._newest()
        kept = self._kept(self._known_before(catalog), snapshot)
        any_kept = bool(kept.any())
        units = self._by_recipe(~kept) if any_kept else tuple(self.plan.units_of(recipe) for recipe in range(len(self.plan.recipes)))
        opened = Round(0, units, self.launch, time.time(), catalog.generation if catalog is not None and any_kept else None)
        publish_round(self.layout, self.ref, self.plan, opened)

    def unknown(self, snapshot: Snapshot) -> list[int]:
        """Units that neither an unfinished pass nor the newest catalog shows to be present; no file is read for it."""
        known = self.outcomes()
        if list_rounds(self.ref.folder(self.layout)):
            kept = self._present(known, snapshot) & (known.states != FAILED)
        else:
            kept = self._kept(known, snapshot)
        return np.flatnonzero(~kept).tolist()

    def held_elsewhere(self, places: Sequence[int], snapshot: Snapshot) -> list[int]:
        """Of units that are not known to be present those whose entry is in the store, such as captions of another data set.

        Looks at those whose key is known without reading anything.
        """
        keys = ((place, self.key_of(self.plan.unit(place))) for place in places)
        known = [(place, key) for place, key in keys if key is not None]
        if not known or not len(snapshot):
            return []
        held = _held(snapshot, np.frombuffer(b"".join(key for _place, key in known), np.uint8).reshape(-1, KEY_BYTES))
        return [place for (place, _key), is_held in zip(known, held.tolist(), strict=True) if is_held]

    def outcomes(self) -> Outcomes:
        """What is known of each unit: from what round 0 left out, and from all ledgers, later ones last; before that, from the catalog."""
        if list_rounds(self.ref.folder(self.layout)):
            return self._history().outcomes
        return self._known_before(self._newest())

    def close_round(self, opened: Round, snapshot: Snapshot) -> Done | None:
        """Reopen what is missing and return None, or commit, publish the catalog and end the pass.

        Every partition of the round must have a ledger. None also where something that was counted on went meanwhile, such as by garbage
        collection: look again, with a newer snapshot.
        """
        history = self._history()
        missing = self._missing(history, snapshot)
        reopened = self._reopen(missing, history)
        if reopened.any():
            again = Round(opened.number + 1, self._by_recipe(reopened), self.launch, time.time(), opened.generation)
            publish_round(self.layout, self.ref, self.plan, again)
            return None
        failed = {place: history.outcomes.reason(place) for place in np.flatnonzero(missing).tolist()}
        return self._finish(history.outcomes, failed, snapshot)

    def _by_recipe(self, chosen: Mask) -> tuple[list[int], ...]:
        """The chosen units of each recipe, by place."""
        ranges = (self.plan.units_of(recipe) for recipe in range(len(self.plan.recipes)))
        return tuple((np.flatnonzero(chosen[units.start : units.stop]) + units.start).tolist() for units in ranges)

    # What is known

    def _newest(self) -> Catalog | None:
        return newest_catalog(self.layout, self.plan.catalog, io="mmap") if self.plan.catalog else None

    def _catalog(self, generation: int | None) -> Catalog | None:
        """A generation of the plan's catalog; None without one, or where it is damaged: its units are then missing, and come back."""
        if generation is None:
            return None
        try:
            return read_catalog(self.layout.catalog(self.plan.catalog, generation), generation=generation, io="mmap")
        except (FormatError, FileNotFoundError):
            return None

    def _known_before(self, catalog: Catalog | None) -> Outcomes:
        """What is known of units before a pass: cells of the newest catalog, and keys of units that no row refers to."""
        known = Outcomes(self.plan.unit_count, FACTS)
        if self.plan.ids_are_keys:
            known.keys[:] = _rows(self.plan.unit_ids, KEY_BYTES)
            known.states[:] = FOUND
            return known
        referenced = np.zeros(self.plan.unit_count, np.bool_)
        for _at, units in self.plan.cells:
            referenced[_numbers(units)] = True
        for place in np.flatnonzero(~referenced).tolist():
            if (key := self.key_of(self.plan.unit(place))) is not None:
                known.keys[place] = np.frombuffer(key, np.uint8)
                known.states[place] = FOUND
        if catalog is not None:
            self._take_cells(known, catalog)
        return known

    def _take_cells(self, known: Outcomes, catalog: Catalog) -> None:
        """Cells of an earlier catalog as outcomes of this plan's units: the same recipe, options, caption or reference."""
        for number, column in enumerate(self.plan.columns):
            earlier = _matching(catalog, column.encoder, column.role, self.plan.recipes[column.recipe].fingerprint, column.options)
            if earlier is None:
                continue
            at, units = self.plan.cells[number]
            places = self._earlier_cells(catalog, earlier, at)
            cells = _cells_of(earlier).take(places)
            made = (places >= 0) & cells.keys.any(axis=1)
            known.put(_numbers(units)[made], cells if made.all() else cells.take(np.flatnonzero(made)))

    def _earlier_cells(self, catalog: Catalog, earlier: KeyColumn, at: Sequence[int]) -> Numbers:
        """For each cell of this plan, its place in an earlier column; -1 where the sample, caption or reference is another now.

        A caption is another where the references to the images that are shown beside it are others; a mask where its picture's is. A
        picture is another where the sample's own crop is, or the size that it should have.
        """
        others, each = companions(earlier.role, earlier.options), cells_each(earlier.options)
        has_same_rows = all(_has_same_rows(self.plan, catalog, role) for role in (earlier.role, *others))
        has_frames = earlier.role in FRAMED and not _has_same_extras(self.plan, catalog)
        has_same_rows = has_same_rows and not has_frames
        if has_same_rows and np.array_equal(_numbers(at), _numbers(earlier.at)):
            return np.arange(int(at[-1]), dtype=np.int64)
        rows = {sample: row for row, sample in enumerate(catalog.ids)}
        at_now, now = _inputs(self.plan, earlier.role)
        at_before, before = _inputs(catalog, earlier.role)
        found = np.full(int(at[-1]), -1, np.int64)
        for row, sample in enumerate(self.plan.ids):
            other = rows.get(sample)
            if other is None or any(_images_in(self.plan, row, role) != _images_in(catalog, other, role) for role in others):
                continue
            if has_frames and _framing(self.plan, row) != _framing(catalog, other):
                continue
            cells = zip(range(at[row], at[row + 1]), range(earlier.at[other], earlier.at[other + 1]), strict=False)
            for number, (cell, place) in enumerate(cells):
                n = number // each
                is_there = at_now[row] + n < at_now[row + 1] and at_before[other] + n < at_before[other + 1]
                if is_there and now[at_now[row] + n] == before[at_before[other] + n]:
                    found[cell] = place
        return found

    def _kept(self, known: Outcomes, snapshot: Snapshot) -> Mask:
        """Units that are present, and whose file is as it was recorded."""
        kept = self._present(known, snapshot)
        for place in np.flatnonzero(kept & self._of_files()).tolist():
            self.rise()
            kept[place] = self._is_unchanged(place, known)
        return kept

    def _present(self, known: Outcomes, snapshot: Snapshot) -> Mask:
        """Units whose key is known and in the store."""
        keyed = known.keyed
        present = np.zeros(len(known), np.bool_)
        present[keyed] = _held(snapshot, known.keys[keyed])
        return present

    def _of_files(self) -> Mask:
        """Units that are made from files; captions alone are in the plan itself."""
        of_files = np.zeros(self.plan.unit_count, np.bool_)
        for column in self.plan.columns:
            if is_of_files(column.role, column.options):
                units = self.plan.units_of(column.recipe)
                of_files[units.start : units.stop] = True
        return of_files

    def _is_unchanged(self, place: int, known: Outcomes) -> bool:
        """Whether the files of a unit are as they were recorded."""
        references = references_of(self.plan.unit(place).request)
        stat = (int(known.stats[place, 0]), int(known.stats[place, 1]))
        return not references or (stat != NO_STAT and self._stat(references) == stat)

    def _stat(self, references: Sequence[str]) -> Stat | None:
        """What stands for (size, mtime_ns) of these files now; None where one is gone."""
        stats = [self.source.stat(reference) for reference in references]
        there = [stat for stat in stats if stat is not None]
        return combined_stat(there) if len(there) == len(stats) else None

    def _digest(self, request: Mapping[str, Json]) -> tuple[bytes, Stat]:
        """Digest of what a request's unit would be made from now, and what stands for (size, mtime_ns). Raises OSError."""
        if VIDEO in request:
            with self.source.open(str(request[VIDEO])) as (file, stat):
                return bytes.fromhex(digest_opened(file)), stat
        read = [self.source.read(reference) for reference in references_of(request)]
        inputs = digests_of(request, [data for data, _stat in read])
        return bytes.fromhex(combined_digest(inputs)), combined_stat([stat for _data, stat in read])

    # What is missing

    def _history(self) -> "_History":
        """Read the rounds and ledgers of the pass, once."""
        folder, count = self.ref.folder(self.layout), self.plan.unit_count
        history = _History(Outcomes(count, FACTS), np.zeros(count, np.bool_), np.zeros(count, np.int8))
        began = False
        for number in list_rounds(folder):
            opened = read_round(self.layout, self.ref, self.plan, number)
            if opened.launch == self.launch and not began:
                # Opening it, this launch looked at all that was there. Were others' later ledgers looked at again each time, two
                # launches at once would reopen what fails for good for ever.
                began = True
                history.earlier[:] = False
            worked = np.zeros(count, np.bool_)
            for units in opened.units:
                worked[_numbers(units)] = True
            if number == 0 and not worked.all():
                history.outcomes = self._known_before(self._catalog(opened.generation))
                history.outcomes.forget(worked)
                history.earlier = history.outcomes.known & (not began)
            history.tries += worked
            for ledger in read_ledgers(folder, number):
                self.rise()
                places = [outcome.unit for outcome in ledger.outcomes]
                if max(places, default=0) >= max(count, 1):  # of another plan: its units count as missing
                    continue
                history.outcomes.record(ledger.outcomes)
                history.earlier[places] = not (began or ledger.launch == self.launch)
        return history

    def _missing(self, history: "_History", snapshot: Snapshot) -> Mask:
        """Units without a present entry. Those recorded before this launch whose file has another time are digested again."""
        outcomes = history.outcomes
        missing = ~self._present(outcomes, snapshot) | (outcomes.states == FAILED)
        for place in np.flatnonzero(history.earlier & ~missing & self._of_files()).tolist():
            self.rise()
            if not self._is_unchanged(place, outcomes) and self._has_other_bytes(place, outcomes):
                missing[place] = True
        return missing

    def _has_other_bytes(self, place: int, outcomes: Outcomes) -> bool:
        """Whether the files behind a unit hold other bytes now. If only their time changed, the new time is kept."""
        try:
            digest, stat = self._digest(self.plan.unit(place).request)
        except OSError:
            return True
        if digest != outcomes.inputs[place].tobytes():
            return True
        outcomes.stats[place] = stat
        return False

    def _reopen(self, missing: Mask, history: "_History") -> Mask:
        """Which missing units deserve another round: not those that failed for good now, nor those that had three rounds."""
        is_final = (history.outcomes.states == FAILED) & ~history.outcomes.transient
        return missing & (history.earlier | (~is_final & (history.tries < ROUND_LIMIT)))

    # The end

    def _finish(self, outcomes: Outcomes, failed: Mapping[int, str], snapshot: Snapshot) -> Done | None:
        """Commit, publish the catalog and end the pass. None where a segment that was counted on went or was condemned meanwhile."""
        failpoint("reconcile.before_commit")
        with closing(commit(self.layout, snapshot=snapshot)) as committed:
            failpoint("reconcile.after_commit")
            generation, digest, usable, listing = committed.generation, "", None, 0
            if self.plan.catalog:
                catalog, generation, digest = self._publish(outcomes, failed)
                usable, listing = _count_complete(catalog), catalog.listing
            failpoint("reconcile.before_done")
            # Who collects garbage condemns before it looks what catalogs need; this looks what is condemned after its catalog stands.
            # So one of the two sees the other, however long either was stopped in between.
            if not snapshot.listed <= visible_segments(self.layout):
                return None
            report = self._report(outcomes, failed, generation, digest, committed)
        beats = [beat for beat in read_beats(self.layout, plan=self.plan.name) if beat["pass"] == self.ref.number]
        report |= {"stages": sum_stages(beats), "usable": usable, "listing": listing}
        return publish_done(self.layout, self.ref, report, [*(str(beat["launch"]) for beat in beats), self.launch], self.request)

    def _publish(self, outcomes: Outcomes, failed: Mapping[int, str]) -> tuple[Catalog, int, str]:
        """Publish the catalog as the generation after the one that it was compared with; returns it with its generation and digest.

        If another generation was published meanwhile, that one is compared too. Raises RecipeMismatch, Superseded.
        """
        while True:
            last = last_generation(self.layout, self.plan.catalog)  # looked up first: one that comes now has the number that is tried
            previous = self._newest()
            if previous is not None:
                self.compare(previous)
            draft = draft_of(self._make_catalog(outcomes, failed, previous))
            if previous is not None:
                may_follow = self._may_follow(previous)
                is_same = draft.is_same_as(previous) and not self._is_awaited(previous)
                if is_same or (draft.digest == previous.digest and not may_follow):
                    return draft.catalog, previous.generation, previous.digest
                if not may_follow:
                    raise Superseded(self._superseded_by(previous))
            if publish_draft(self.layout, draft, after=last):
                return draft.catalog, last + 1, draft.digest

    def _may_follow(self, previous: Catalog) -> bool:
        """Whether this listing may replace that of an earlier catalog: a newer one may, and this pass's own.

        An older one may add an encoder to the same samples: it replaces nothing that the newer one made.
        """
        if self.listing > previous.listing:
            return True
        made = {column.encoder for column in self.plan.columns}
        adds = made.isdisjoint(column.encoder for column in previous.columns)
        return _lists_the_same(self.plan, previous) and (adds or 0 < self.listing == previous.listing)

    def _superseded_by(self, previous: Catalog) -> str:
        return (
            f"another run listed the source of the data set {previous.name!r} after this run did, and published it as generation"
            f" {previous.generation} ({len(previous.ids)} samples; this run lists {len(self.plan.ids)}). This run replaced nothing, and"
            " what it encoded is in the store. Run the same command again to list the source as it is now"
        )

    def _is_awaited(self, previous: Catalog) -> bool:
        """Whether a listing that is older than this one and newer than the newest catalog's may still be published.

        A catalog equal to the newest is then published all the same, so that the older listing finds a newer one there.
        """
        return any(previous.listing < number < self.listing for number in listing_numbers(self.layout, previous.name))

    def rebuild_catalog(self, generation: int, digest: str, listing: int) -> bool:
        """Publish a generation that this pass ended with once more, from plan and ledgers; False where it would not have its digest.

        So nothing is published that was not published before.
        """
        outcomes = self._history().outcomes
        without = (outcomes.states == FAILED) | ~outcomes.keyed
        catalog = self._make_catalog(outcomes, dict.fromkeys(np.flatnonzero(without).tolist(), ""), self._newest())
        return publish_again(self.layout, replace(catalog, listing=listing), generation, digest)

    def _make_catalog(self, outcomes: Outcomes, failed: Mapping[int, str], previous: Catalog | None) -> Catalog:
        columns = tuple(self._column(number, outcomes, failed) for number in range(len(self.plan.columns)))
        made = {column.encoder for column in columns}
        # Masks are made beside the pictures they belong to, where there are any.
        made |= {MASK} if any(column.role == IMAGE for column in columns) else set()
        kept = (
            tuple(self._kept_column(previous, column) for column in previous.columns if column.encoder not in made)
            if previous is not None
            else ()
        )
        everything = (*kept, *columns)
        recipes = {recipe.fingerprint: recipe for recipe in self.plan.recipes}
        recipes |= _recipes_of(previous, kept)
        return Catalog(
            name=self.plan.catalog,
            request={**_requests_of(previous, kept), **{column.encoder: dict(self.request) for column in columns}},
            recipes={column.fingerprint: recipes[column.fingerprint] for column in everything},
            ids=self.plan.ids,
            captions_at=self.plan.captions_at,
            captions=self.plan.captions,
            images=self.plan.images,
            extras=self.plan.extras,
            columns=tuple(sorted(everything, key=lambda column: (column.encoder, column.role))),
            texts=self.plan.texts,
            listing=max(self.listing, previous.listing if previous is not None else 0),
        )

    def _column(self, number: int, outcomes: Outcomes, failed: Mapping[int, str]) -> KeyColumn:
        """A key column of this plan; a failed cell keeps what it was made from, and has no key."""
        column = self.plan.columns[number]
        at, units = self.plan.cells[number]
        places = _numbers(units)
        cells = outcomes.cells(places)
        cells.keys[np.isin(places, list(failed))] = 0
        return _key_column(column, self.plan.recipes[column.recipe].fingerprint, at, cells)

    def _kept_column(self, previous: Catalog, column: KeyColumn) -> KeyColumn:
        """An earlier encoder's column under the same name: a cell stays only while what it was made from is what the sample has now."""
        inputs_at, values = _inputs(self.plan, column.role)
        each = cells_each(column.options)
        at = inputs_at if each == 1 else (_numbers(inputs_at) * each).tolist()
        places = self._earlier_cells(previous, column, at)
        cells = _cells_of(column).take(places)
        if is_of_files(column.role, column.options):
            for cell in np.flatnonzero(places >= 0).tolist():
                self.rise()
                row = int(np.searchsorted(_numbers(at), cell, side="right")) - 1
                images = {role: _images_in(self.plan, row, role) for role in companions(column.role, column.options)}
                request = request_for(column.role, column.options, values[cell // each], images, cell % each)
                stat = (int(cells.stats[cell, 0]), int(cells.stats[cell, 1]))
                if not self._is_same_input(request, stat, cells.inputs[cell].tobytes()):
                    places[cell] = -1
            cells = _cells_of(column).take(places)
        return _key_column(column, column.fingerprint, at, cells)

    def _is_same_input(self, request: Mapping[str, Json], stat: Stat, digest: bytes) -> bool:
        if stat != NO_STAT and self._stat(references_of(request)) == stat:
            return True
        try:
            return self._digest(request)[0] == digest
        except OSError:
            return False

    def _report(self, outcomes: Outcomes, failed: Mapping[int, str], generation: int, digest: str, snapshot: Snapshot) -> dict[str, Json]:
        made, size_bytes = self._made(outcomes, failed, snapshot)
        return {
            "complete": not failed,
            "samples": len(self.plan.ids),
            "wanted": self.plan.unit_count,
            "reused": self.plan.unit_count - made - len(failed),
            "encoded": made,
            "failed": len(failed),
            "missing": 0,
            "seconds": round(max(self.seconds(), seconds_of_pass(self.layout, self.ref.plan, self.ref.number)), 3),
            "bytes": size_bytes,
            "store": str(self.layout.root),
            "name": self.plan.catalog,
            "plan": self.plan.name,
            "pass": self.ref.number,
            "generation": generation,
            "catalog_digest": digest,
            "failures": self._failures(failed),
            "changed": self._changed(outcomes),
        }

    def _changed(self, outcomes: Outcomes) -> list[Json]:
        """References whose file is another now than when it was read: the pass holds what it was. Looks for a few seconds at most.

        Of a unit of several files all are named, as which one it was is not recorded.
        """
        found: set[str] = set()
        until = time.monotonic() + _LOOK_SECONDS
        for place in np.flatnonzero(self._of_files() & (outcomes.states == MADE) & (outcomes.stats[:, 0] >= 0)).tolist():
            if time.monotonic() > until or len(found) >= _NAMED_CHANGES:
                break
            if not self._is_unchanged(place, outcomes):
                found.update(references_of(self.plan.unit(place).request))
        return list[Json](sorted(found))

    def _made(self, outcomes: Outcomes, failed: Mapping[int, str], snapshot: Snapshot) -> tuple[int, int]:
        """How many keys this pass made, each once, and the bytes of their entries."""
        made = outcomes.states == MADE
        made[list(failed)] = False
        keys = np.unique(_as_text(outcomes.keys[made]))
        count = size_bytes = 0
        for start in range(0, len(keys), _TOGETHER):
            some = Digests(memoryview(keys[start : start + _TOGETHER].tobytes()), KEY_BYTES)
            sizes = [places[0].size_bytes for places in snapshot.find([Key(raw) for raw in some]) if places]
            count, size_bytes = count + len(sizes), size_bytes + sum(sizes)
        return count, size_bytes

    def _failures(self, failed: Mapping[int, str]) -> list[Json]:
        """A row for each sample affected; units that no sample refers to, such as the empty caption, stand with an empty sample.

        Where several units of a sample fail for one reason, as all views of a damaged picture do, it stands once.
        """
        if not failed:
            return []
        rows: dict[tuple[str, str, str], Json] = {}
        named: set[int] = set()
        for number, column in enumerate(self.plan.columns):
            at, units = self.plan.cells[number]
            for cell in np.flatnonzero(np.isin(_numbers(units), list(failed))).tolist():
                row = int(np.searchsorted(_numbers(at), cell, side="right")) - 1
                named.add(units[cell])
                sample, reason = self.plan.ids[row], failed[units[cell]]
                rows[sample, column.encoder, reason] = {"sample": sample, "encoder": column.encoder, "reason": reason}
        alone = [
            {"sample": self._name_alone(place), "encoder": self.plan.recipes[self.plan.recipe_of(place)].encoder, "reason": failed[place]}
            for place in sorted(set(failed) - named)
        ]
        return [*rows.values(), *alone][:_NAMED_FAILURES]

    def _name_alone(self, place: int) -> str:
        """What to call a unit that no sample refers to: its key for `fill`."""
        return self.plan.unit_ids[place].hex() if self.plan.ids_are_keys else ""


def _held(snapshot: Snapshot, keys: Bytes) -> Mask:
    """Which of these keys the store holds."""
    if len(keys) * _FEW < len(snapshot):
        found = snapshot.find([Key(raw) for raw in Digests(memoryview(keys.tobytes()), KEY_BYTES)])
        return np.array([bool(places) for places in found], np.bool_)
    return _among(keys, np.frombuffer(snapshot.raw_keys(), np.uint8).reshape(-1, KEY_BYTES))


def _among(keys: Bytes, present: Bytes) -> Mask:
    """Which keys are among others. By their first halves, which is four times as fast as by texts; those that share one by the whole."""
    if not len(present):
        return np.zeros(len(keys), np.bool_)
    halves, wanted = _first_halves(present), _first_halves(keys)
    order = np.argsort(halves, kind="stable")
    halves, present = halves[order], present[order]
    places = np.minimum(np.searchsorted(halves, wanted), len(halves) - 1)
    found = (present[places] == keys).all(axis=1)
    doubtful = ~found & (halves[places] == wanted)
    if doubtful.any():
        found[doubtful] = np.isin(_as_text(keys[doubtful]), _as_text(present))
    return found


def _first_halves(keys: Bytes) -> "np.ndarray[Any, np.dtype[np.uint64]]":
    return np.ascontiguousarray(keys).view(np.uint64).reshape(-1, 2)[:, 0]


def _as_text(keys: Bytes) -> Any:
    """Keys as numpy's fixed-width strings, which compare as bytes do where all have one length."""
    return np.ascontiguousarray(keys).view(f"S{KEY_BYTES}").reshape(-1)


def _rows(values: Sequence[bytes], width: int) -> Bytes:
    """Digests as rows of bytes, without a copy where they lie in one buffer."""
    return np.frombuffer(run_of(values), np.uint8).reshape(-1, width)


def _numbers(values: Sequence[int]) -> Numbers:
    """Numbers as an array, without a copy where they lie in one buffer."""
    if isinstance(values, range):
        return np.arange(values.start, values.stop, dtype=np.int64)
    return np.frombuffer(values, np.int64) if isinstance(values, memoryview) else np.array(values, np.int64)


def _inputs(rows: Plan | Catalog, role: str) -> tuple[Sequence[int], Sequence[str]]:
    """Where each row's captions, or references of a role, start; and all of them."""
    if role == CAPTION:
        return rows.captions_at, rows.captions
    return rows.images.get(role, ([0] * (len(rows.ids) + 1), ()))


def _images_in(rows: Plan | Catalog, row: int, role: str) -> list[str]:
    """The references of a role in a row."""
    at, references = _inputs(rows, role)
    return [references[place] for place in range(at[row], at[row + 1])]


def _has_same_rows(plan: Plan, catalog: Catalog, role: str) -> bool:
    """Whether samples and inputs are the same, row for row, as the checksums of their columns say."""
    inputs = "captions" if role == CAPTION else f"images/{role}"
    names = [f"{column}{part}" for column in ("ids", inputs) for part in (".text", ".offsets")]
    return bool(plan.checksums) and all(plan.checksums.get(name) == catalog.checksums.get(name) for name in [*names, f"{inputs}/at"])


def _has_same_extras(plan: Plan, catalog: Catalog) -> bool:
    """Whether the further columns of all samples are the same, as the checksums say."""
    names = ("extras.text", "extras.offsets")
    return bool(plan.checksums) and all(plan.checksums.get(name) == catalog.checksums.get(name) for name in names)


def _lists_the_same(plan: Plan, catalog: Catalog) -> bool:
    """Whether plan and catalog have the same samples, inputs and further columns, as the checksums say."""
    roles = (CAPTION, *plan.images)
    same_inputs = set(plan.images) == set(catalog.images) and all(_has_same_rows(plan, catalog, role) for role in roles)
    return same_inputs and _has_same_extras(plan, catalog)


def _framing(rows: Plan | Catalog, row: int) -> Mapping[str, Json]:
    """What a row says of its picture alone. Most say nothing, and are not parsed."""
    text = rows.extras[row]
    return framing_of(json.loads(text)) if any(f'"{column}"' in text for column in (CROP, SIZE)) else {}


def _cells_of(column: KeyColumn) -> Cells:
    """A catalog's key column as arrays."""
    facts = {name: _numbers(values).reshape(-1, FACTS[name]) for name, values in column.facts.items()}
    return Cells(_rows(column.keys, KEY_BYTES), _rows(column.inputs, INPUT_BYTES), _numbers(column.stats).reshape(-1, 2), facts)


def _key_column(column: PlanColumn | KeyColumn, fingerprint: str, at: Sequence[int], cells: Cells) -> KeyColumn:
    """A key column from arrays; facts that no cell has are left out."""
    return KeyColumn(
        column.encoder,
        column.role,
        fingerprint,
        column.options,
        at,
        Digests(_flat(cells.keys), KEY_BYTES),
        Digests(_flat(cells.inputs), INPUT_BYTES),
        _flat(cells.stats).cast("q"),
        {name: _flat(cells.facts[name]).cast("q") for name in FACTS if name in cells.facts and (cells.facts[name] >= 0).any()},
    )


def _count_complete(catalog: Catalog) -> int:
    """How many rows have no empty cell in any column."""
    complete = np.ones(len(catalog), np.bool_)
    for column in catalog.columns:
        empty = np.concatenate([[0], np.cumsum(~_rows(column.keys, KEY_BYTES).any(axis=1))])
        at = _numbers(column.at)
        complete &= empty[at[1:]] == empty[at[:-1]]
    return int(complete.sum())


def _flat(array: Bytes | Numbers) -> memoryview:
    return memoryview(array.tobytes())


def _recipes_of(previous: Catalog | None, kept: Sequence[KeyColumn]) -> dict[str, Recipe]:
    return {column.fingerprint: previous.recipes[column.fingerprint] for column in kept} if previous is not None else {}


def _requests_of(previous: Catalog | None, kept: Sequence[KeyColumn]) -> dict[str, Json]:
    return {column.encoder: previous.request.get(column.encoder, {}) for column in kept} if previous is not None else {}


def _matching(catalog: Catalog, encoder: str, role: str, fingerprint: str, options: Mapping[str, Json]) -> KeyColumn | None:
    wanted = (encoder, role, fingerprint, dict(options))
    return next((c for c in catalog.columns if (c.encoder, c.role, c.fingerprint, dict(c.options)) == wanted), None)
