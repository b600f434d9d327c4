"""Reconcile: compare what is wanted with what is present, reopen what is missing, commit when nothing is.

It opens a pass (round 0: what is not known to be present), closes each round, and makes the catalog. Any worker may do any of it:
every file is create-only, and what is present is read from the segments, not from ledgers.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final, Protocol, cast

from cachestore.errors import FormatError
from cachestore.files.failpoints import failpoint
from cachestore.files.paths import Layout
from cachestore.keys import Json, Key, Recipe, digest_bytes, digest_text
from cachestore.samples import CAPTION
from cachestore.storage.catalog import (
    FACTS,
    NO_INPUT,
    Catalog,
    Cell,
    KeyColumn,
    make_column,
    newest_catalog,
    read_catalog,
)
from cachestore.storage.catalog_writer import publish_catalog
from cachestore.storage.commit import commit
from cachestore.storage.snapshot import Snapshot
from cachestore.work.ledgers import NO_STAT, Outcome, read_ledgers
from cachestore.work.passes import ROUND_LIMIT, Done, PassRef, Round, list_rounds, publish_done, publish_round, read_round
from cachestore.work.plan import Plan, Unit
from cachestore.work.workers import read_beats

_NAMED_FAILURES: Final = 10_000


class Source(Protocol):
    """Looks at the files that units were made from."""

    def stat(self, reference: str) -> tuple[int, int] | None:
        """(size, mtime_ns) now; None where the file is gone."""
        ...

    def read(self, reference: str) -> tuple[bytes, tuple[int, int]]:
        """Bytes and (size, mtime_ns). Raises OSError."""
        ...


@dataclass(slots=True)
class _History:
    """What the rounds and ledgers of a pass say so far."""

    outcomes: dict[int, Outcome] = field(default_factory=dict[int, Outcome])
    earlier: set[int] = field(default_factory=set[int])
    """Units recorded before this launch opened a round: their files may have changed since, and failures may have passed."""
    tries: dict[int, int] = field(default_factory=dict[int, int])
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
    """The key of a unit where it is known without reading anything: of captions, and of what `fill` is given."""
    request: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """What the catalog's header keeps as hints."""

    def open_pass(self, snapshot: Snapshot) -> None:
        """Begin round 0 with the units that the newest catalog does not show to be present and unchanged."""
        if 0 in list_rounds(self.ref.folder(self.layout)):
            return
        catalog = newest_catalog(self.layout, self.plan.catalog) if self.plan.catalog else None
        kept = self._kept(self._known_before(catalog), snapshot)
        units = tuple(
            [place for place in self.plan.units_of(recipe) if place not in kept] if kept else self.plan.units_of(recipe)
            for recipe in range(len(self.plan.recipes))
        )
        opened = Round(0, units, self.launch, time.time(), catalog.generation if catalog is not None and kept else None)
        publish_round(self.layout, self.ref, self.plan, opened)

    def unknown(self, snapshot: Snapshot) -> list[int]:
        """Units that neither an unfinished pass nor the newest catalog shows to be present; no file is read for it."""
        known = self.outcomes()
        if list_rounds(self.ref.folder(self.layout)):
            present = self._present([outcome.key for outcome in known.values() if outcome.key is not None], snapshot)
            kept = {place for place, outcome in known.items() if outcome.result != "failed" and outcome.key in present}
        else:
            kept = self._kept(known, snapshot)
        return [place for place in range(self.plan.unit_count) if place not in kept]

    def _known_before(self, catalog: Catalog | None) -> dict[int, Outcome]:
        """What is known of units before a pass: cells of the newest catalog, and keys of units that no row refers to."""
        referenced = {place for _at, units in self.plan.cells for place in units}
        alone = (self.plan.unit(place) for place in range(self.plan.unit_count) if place not in referenced)
        known = {unit.place: Outcome(unit.place, "found", key) for unit in alone if (key := self.key_of(unit)) is not None}
        return known | (self._known_from(catalog) if catalog is not None else {})

    def _kept(self, known: Mapping[int, Outcome], snapshot: Snapshot) -> set[int]:
        """Units that are present, and whose file is as it was recorded."""
        present = self._present([outcome.key for outcome in known.values() if outcome.key is not None], snapshot)
        return {place for place, outcome in known.items() if outcome.key in present and self._is_unchanged(place, outcome)}

    def close_round(self, opened: Round, snapshot: Snapshot) -> Done | None:
        """Reopen what is missing and return None, or commit, publish the catalog and end the pass.

        Every partition of the round must have a ledger.
        """
        history = self._history()
        outcomes = history.outcomes
        missing = self._missing(history, snapshot)
        if reopened := self._reopen(missing, history):
            listed = tuple([place for place in self.plan.units_of(recipe) if place in reopened] for recipe in range(len(self.plan.recipes)))
            publish_round(self.layout, self.ref, self.plan, Round(opened.number + 1, listed, self.launch, time.time(), opened.generation))
            return None
        failed = {place: _reason(outcomes.get(place)) for place in missing}
        return self._finish(outcomes, failed, snapshot)

    def outcomes(self) -> dict[int, Outcome]:
        """What is known of each unit: from what round 0 left out, and from all ledgers, later ones last; before that, from the catalog."""
        if list_rounds(self.ref.folder(self.layout)):
            return self._history().outcomes
        return self._known_before(newest_catalog(self.layout, self.plan.catalog) if self.plan.catalog else None)

    def _history(self) -> "_History":
        """Read the rounds and ledgers of the pass, once."""
        folder = self.ref.folder(self.layout)
        history = _History()
        began = False
        for number in list_rounds(folder):
            opened = read_round(self.layout, self.ref, self.plan, number)
            if opened.launch == self.launch and not began:
                # Opening it, this launch looked at all that was there. Were others' later ledgers looked at again each time, two
                # launches at once would reopen what fails for good for ever.
                began = True
                history.earlier.clear()
            worked = {place for units in opened.units for place in units}
            if number == 0 and len(worked) < self.plan.unit_count:
                before = self._known_before(self._catalog(opened.generation))
                history.outcomes = {place: outcome for place, outcome in before.items() if place not in worked}
                history.earlier = set() if began else set(history.outcomes)
            for place in worked:
                history.tries[place] = history.tries.get(place, 0) + 1
            for ledger in read_ledgers(folder, number):
                places = {outcome.unit for outcome in ledger.outcomes}
                history.outcomes.update({outcome.unit: outcome for outcome in ledger.outcomes})
                history.earlier = history.earlier - places if began or ledger.launch == self.launch else history.earlier | places
        return history

    def _catalog(self, generation: int | None) -> Catalog | None:
        """A generation of the plan's catalog; None without one, or where it is damaged: its units are then missing, and come back."""
        if generation is None:
            return None
        try:
            return read_catalog(self.layout.catalog(self.plan.catalog, generation), generation=generation)
        except (FormatError, FileNotFoundError):
            return None

    def _known_from(self, catalog: Catalog) -> dict[int, Outcome]:
        """Cells of an earlier catalog as outcomes of this plan's units: the same recipe, options, caption or reference."""
        rows = {sample: row for row, sample in enumerate(catalog.ids)}
        known: dict[int, Outcome] = {}
        for number, column in enumerate(self.plan.columns):
            earlier = _matching(catalog, column.encoder, column.role, self.plan.recipes[column.recipe].fingerprint, column.options)
            if earlier is None:
                continue
            at, units = self.plan.cells[number]
            for row, sample in enumerate(self.plan.ids):
                if sample not in rows:
                    continue
                cells = self._same_inputs(catalog, earlier, rows[sample], row, column.role)
                known |= {
                    units[place]: _as_outcome(units[place], cell)
                    for place, cell in zip(range(at[row], at[row + 1]), cells, strict=False)
                    if cell
                }
        return known

    def _same_inputs(self, catalog: Catalog, column: KeyColumn, earlier: int, row: int, role: str) -> list[Cell | None]:
        """The cells of an earlier row, None where the caption's digest or the image's reference is another now."""
        cells = column.row_cells(earlier)
        if role == CAPTION:
            now = [bytes.fromhex(digest_text(caption)) for caption in self._captions(row)]
            same = [cell.input == digest for cell, digest in zip(cells, now, strict=False)]
        else:
            same = [
                one == other
                for one, other in zip(_references(catalog.images, role, earlier), _references(self.plan.images, role, row), strict=False)
            ]
        return [cell if is_same and cell.key is not None else None for cell, is_same in zip(cells, same, strict=False)]

    def _captions(self, row: int) -> list[str]:
        return [self.plan.captions[place] for place in range(self.plan.captions_at[row], self.plan.captions_at[row + 1])]

    def _is_unchanged(self, place: int, outcome: Outcome) -> bool:
        """Whether the file of a unit is as it was recorded. Captions are in the plan itself."""
        reference = self.plan.unit(place).request.get("image")
        if not isinstance(reference, str):
            return True
        return outcome.stat != NO_STAT and self.source.stat(reference) == outcome.stat

    def _present(self, keys: Iterable[Key], snapshot: Snapshot) -> set[Key]:
        wanted = list(set(keys))
        return {key for key, places in zip(wanted, snapshot.find(wanted), strict=True) if places}

    def _missing(self, history: "_History", snapshot: Snapshot) -> set[int]:
        """Units without a present entry. Those recorded before this launch whose file has another time are digested again."""
        outcomes = history.outcomes
        present = self._present([outcome.key for outcome in outcomes.values() if outcome.key is not None], snapshot)
        missing = {place for place in range(self.plan.unit_count) if place not in outcomes or outcomes[place].key not in present}
        missing |= {place for place, outcome in outcomes.items() if outcome.result == "failed"}
        for place in sorted(history.earlier - missing):
            if not self._is_unchanged(place, outcomes[place]) and self._has_other_bytes(place, outcomes):
                missing.add(place)
        return missing

    def _has_other_bytes(self, place: int, outcomes: dict[int, Outcome]) -> bool:
        """Whether the file behind a unit holds other bytes now. If only its time changed, the new time is kept."""
        outcome = outcomes[place]
        reference = str(self.plan.unit(place).request["image"])
        try:
            data, stat = self.source.read(reference)
        except OSError:
            return True
        if digest_bytes(data) != outcome.input:
            return True
        outcomes[place] = Outcome(place, outcome.result, outcome.key, outcome.input, stat, outcome.facts)
        return False

    def _reopen(self, missing: set[int], history: "_History") -> set[int]:
        """Which missing units deserve another round: not those that failed for good now, nor those that had three rounds."""
        reopened: set[int] = set()
        for place in missing:
            outcome = history.outcomes.get(place)
            is_final = outcome is not None and outcome.result == "failed" and not outcome.is_transient
            if place in history.earlier or (not is_final and history.tries.get(place, 0) < ROUND_LIMIT):
                reopened.add(place)
        return reopened

    def _finish(self, outcomes: Mapping[int, Outcome], failed: Mapping[int, str], snapshot: Snapshot) -> Done:
        failpoint("reconcile.before_commit")
        with closing(commit(self.layout, snapshot=snapshot)) as committed:
            failpoint("reconcile.after_commit")
            generation, digest = self._publish_catalog(outcomes, failed) if self.plan.catalog else (committed.generation, "")
            failpoint("reconcile.before_done")
            report = self._report(outcomes, failed, generation, digest, committed)
        launches = [str(beat["launch"]) for beat in read_beats(self.layout, plan=self.plan.name) if beat["pass"] == self.ref.number]
        return publish_done(self.layout, self.ref, report, [*launches, self.launch])

    def _publish_catalog(self, outcomes: Mapping[int, Outcome], failed: Mapping[int, str]) -> tuple[int, str]:
        previous = newest_catalog(self.layout, self.plan.catalog)
        columns = tuple(self._column(number, outcomes, failed) for number in range(len(self.plan.columns)))
        made = {column.encoder for column in columns}
        kept = (
            tuple(self._kept_column(previous, column) for column in previous.columns if column.encoder not in made)
            if previous is not None
            else ()
        )
        everything = (*kept, *columns)
        recipes = {recipe.fingerprint: recipe for recipe in self.plan.recipes}
        recipes |= _recipes_of(previous, kept)
        catalog = Catalog(
            name=self.plan.catalog,
            request={**_requests_of(previous, kept), **{column.encoder: dict(self.request) for column in columns}},
            recipes={column.fingerprint: recipes[column.fingerprint] for column in everything},
            ids=self.plan.ids,
            captions_at=self.plan.captions_at,
            captions=self.plan.captions,
            images=self.plan.images,
            extras=self.plan.extras,
            columns=tuple(sorted(everything, key=lambda column: (column.encoder, column.role))),
        )
        return publish_catalog(self.layout, catalog)

    def _column(self, number: int, outcomes: Mapping[int, Outcome], failed: Mapping[int, str]) -> KeyColumn:
        column = self.plan.columns[number]
        at, units = self.plan.cells[number]
        cells = {place: _as_cell(outcomes[place], is_failed=place in failed) for place in set(units) if place in outcomes}
        rows = ([cells.get(units[place], Cell()) for place in range(at[row], at[row + 1])] for row in range(len(self.plan.ids)))
        return make_column(column.encoder, column.role, self.plan.recipes[column.recipe].fingerprint, column.options, rows)

    def _kept_column(self, previous: Catalog, column: KeyColumn) -> KeyColumn:
        """An earlier encoder's column under the same name: a cell stays only while what it was made from is what the sample has now."""
        rows = {sample: row for row, sample in enumerate(previous.ids)}
        cells = [self._kept_cells(previous, column, rows.get(sample), row) for row, sample in enumerate(self.plan.ids)]
        return make_column(column.encoder, column.role, column.fingerprint, column.options, cells)

    def _kept_cells(self, previous: Catalog, column: KeyColumn, earlier: int | None, row: int) -> list[Cell]:
        count = len(self._captions(row)) if column.role == CAPTION else len(_references(self.plan.images, column.role, row))
        if earlier is None:
            return [Cell()] * count
        cells = self._same_inputs(previous, column, earlier, row, column.role)
        if column.role != CAPTION:
            references = _references(self.plan.images, column.role, row)
            cells = [
                cell if cell and self._is_same_file(cell, reference) else None for cell, reference in zip(cells, references, strict=False)
            ]
        filled = [cell or Cell() for cell in cells]
        return [*filled, *[Cell()] * (count - len(filled))]

    def _is_same_file(self, cell: Cell, reference: str) -> bool:
        if cell.stat != NO_STAT and self.source.stat(reference) == cell.stat:
            return True
        try:
            data, _stat = self.source.read(reference)
        except OSError:
            return False
        return digest_bytes(data) == cell.input.hex()

    def _report(
        self, outcomes: Mapping[int, Outcome], failed: Mapping[int, str], generation: int, digest: str, snapshot: Snapshot
    ) -> dict[str, Json]:
        made = self._made(outcomes, failed, snapshot)
        opened = read_round(self.layout, self.ref, self.plan, 0)
        return {
            "complete": not failed,
            "samples": len(self.plan.ids),
            "wanted": self.plan.unit_count,
            "reused": self.plan.unit_count - len(made) - len(failed),
            "encoded": len(made),
            "failed": len(failed),
            "missing": 0,
            "seconds": round(max(0.0, time.time() - opened.started), 3),
            "bytes": sum(made.values()),
            "store": str(self.layout.root),
            "name": self.plan.catalog,
            "plan": self.plan.name,
            "pass": self.ref.number,
            "generation": generation,
            "catalog_digest": digest,
            "failures": self._failures(failed),
        }

    def _made(self, outcomes: Mapping[int, Outcome], failed: Mapping[int, str], snapshot: Snapshot) -> dict[Key, int]:
        """Keys that this pass made, each once, with the bytes of their entries."""
        keys = sorted(
            {
                outcome.key
                for place, outcome in outcomes.items()
                if outcome.result == "made" and place not in failed and outcome.key is not None
            }
        )
        return {key: places[0].size_bytes for key, places in zip(keys, snapshot.find(keys), strict=True) if places}

    def _failures(self, failed: Mapping[int, str]) -> list[Json]:
        """A row for each sample affected; units that no sample refers to, such as the empty caption, stand with an empty sample."""
        rows: list[Json] = []
        named: set[int] = set()
        for number, column in enumerate(self.plan.columns):
            at, units = self.plan.cells[number]
            for row, sample in enumerate(self.plan.ids):
                for place in range(at[row], at[row + 1]):
                    if units[place] in failed:
                        named.add(units[place])
                        rows.append({"sample": sample, "encoder": column.encoder, "reason": failed[units[place]]})
        rows += [
            {"sample": "", "encoder": self.plan.recipes[self.plan.recipe_of(place)].encoder, "reason": failed[place]}
            for place in sorted(set(failed) - named)
        ]
        return rows[:_NAMED_FAILURES]


def _reason(outcome: Outcome | None) -> str:
    """Why a unit that is still missing failed."""
    if outcome is None:
        return "no worker could finish it"
    return outcome.reason or f"it was encoded, but its entry {outcome.key} is not in the store; look at `cachestore verify`"


def _recipes_of(previous: Catalog | None, kept: Sequence[KeyColumn]) -> dict[str, Recipe]:
    return {column.fingerprint: previous.recipes[column.fingerprint] for column in kept} if previous is not None else {}


def _requests_of(previous: Catalog | None, kept: Sequence[KeyColumn]) -> dict[str, Json]:
    return {column.encoder: previous.request.get(column.encoder, {}) for column in kept} if previous is not None else {}


def _matching(catalog: Catalog, encoder: str, role: str, fingerprint: str, options: Mapping[str, Json]) -> KeyColumn | None:
    wanted = (encoder, role, fingerprint, dict(options))
    return next((c for c in catalog.columns if (c.encoder, c.role, c.fingerprint, dict(c.options)) == wanted), None)


def _references(images: Mapping[str, tuple[Sequence[int], Sequence[str]]], role: str, row: int) -> list[str]:
    if role not in images:
        return []
    at, references = images[role]
    return [references[place] for place in range(at[row], at[row + 1])]


def _as_outcome(unit: int, cell: Cell) -> Outcome:
    facts: dict[str, Json] = {name: list(values) for name, values in cell.facts.items()}
    return Outcome(unit, "found", cell.key, cell.input.hex() if cell.input != NO_INPUT else "", cell.stat, facts)


def _as_cell(outcome: Outcome, *, is_failed: bool) -> Cell:
    facts = {name: _numbers(value) for name, value in outcome.facts.items() if name in FACTS}
    digest = bytes.fromhex(outcome.input) if outcome.input else NO_INPUT
    return Cell(None if is_failed else outcome.key, digest, outcome.stat, facts)


def _numbers(value: Json) -> tuple[int, ...]:
    return tuple(map(int, cast("Sequence[int]", value))) if isinstance(value, Sequence) else (int(value),)
