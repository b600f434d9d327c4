"""Which units of a plan are present and unchanged: compares catalogs and ledgers with the store and the files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cachestore.core.inputs import (
    NO_STAT,
    Stat,
    cells_each,
    combined_digest,
    combined_stat,
    companions,
    digests_of,
    is_of_files,
    references_of,
)
from cachestore.core.keys import KEY_BYTES, Json, Key, digest_opened
from cachestore.jobs.plan.columns import cells_of, has_own_inputs, has_same_rows, has_same_texts, images_in, inputs, own_inputs
from cachestore.jobs.run.task import FileReader
from cachestore.jobs.share.outcomes import FOUND, Outcomes
from cachestore.jobs.share.plan import Plan, Unit
from cachestore.store.format.arrays import Mask, Numbers, numbers, rows
from cachestore.store.format.catalog import FACTS, Catalog, KeyColumn
from cachestore.store.read.held import held_keys
from cachestore.store.read.snapshot import Snapshot


@dataclass(slots=True)
class Presence:
    """Finds out what is known of the units of a plan, and whether it is still true."""

    plan: Plan
    files: FileReader
    key_of: Callable[[Unit], Key | None] = lambda _unit: None
    """Returns a unit's key if it is known without reading a file, as for captions; else None."""
    rise: Callable[[], None] = lambda: None
    """Called now and then while files are checked, so that others see that this worker lives."""
    is_recheck: bool = False
    """Whether no stat record is trusted, so that every file is read again."""

    def known_before(self, catalog: Catalog | None) -> Outcomes:
        """Return what is known of units before a pass: cells of the newest catalog, and keys of units that no row refers to."""
        known = Outcomes(self.plan.unit_count, FACTS)
        if self.plan.ids_are_keys:
            known.keys[:] = rows(self.plan.unit_ids, KEY_BYTES)
            known.states[:] = FOUND
            return known
        referenced = np.zeros(self.plan.unit_count, np.bool_)
        for _at, units in self.plan.cells:
            referenced[numbers(units)] = True
        for index in np.flatnonzero(~referenced).tolist():
            if (key := self.key_of(self.plan.unit(index))) is not None:
                known.keys[index] = np.frombuffer(key, np.uint8)
                known.states[index] = FOUND
        if catalog is not None:
            self._take_cells(known, catalog)
        return known

    def _take_cells(self, known: Outcomes, catalog: Catalog) -> None:
        """Use the cells of an earlier catalog that have the same recipe, options, and caption or reference."""
        for number, column in enumerate(self.plan.columns):
            wanted = (column.encoder, column.role, self.plan.recipes[column.recipe].fingerprint, dict(column.options))
            earlier = next((c for c in catalog.columns if (c.encoder, c.role, c.fingerprint, dict(c.options)) == wanted), None)
            if earlier is None:
                continue
            at, units = self.plan.cells[number]
            indices = self.earlier_cells(catalog, earlier, at)
            cells = cells_of(earlier).take(indices)
            made = (indices >= 0) & cells.keys.any(axis=1)
            known.put(numbers(units)[made], cells if made.all() else cells.take(np.flatnonzero(made)))

    def earlier_cells(self, catalog: Catalog, earlier: KeyColumn, at: Sequence[int]) -> Numbers:
        """Return for each cell of this plan its index in an earlier column; -1 if the sample, caption or reference has changed.

        A caption has also changed if the images that the encoder sees with it have other references; a mask, if its picture has another
        one; a picture, if the sample's own crop or size is another; a caption, if those of single text encoders are.
        """
        others, each = companions(earlier.role, earlier.options), cells_each(earlier.options)
        is_same = all(has_same_rows(self.plan, catalog, role) for role in (earlier.role, *others))
        has_own = has_own_inputs(earlier.role) and not has_same_texts(self.plan, catalog, "extras")
        if is_same and not has_own and np.array_equal(numbers(at), numbers(earlier.at)):
            return np.arange(int(at[-1]), dtype=np.int64)
        rows = {sample: row for row, sample in enumerate(catalog.ids)}
        at_now, now = inputs(self.plan, earlier.role)
        at_before, before = inputs(catalog, earlier.role)
        found = np.full(int(at[-1]), -1, np.int64)
        for row, sample in enumerate(self.plan.ids):
            other = rows.get(sample)
            if other is None or any(images_in(self.plan, row, role) != images_in(catalog, other, role) for role in others):
                continue
            if has_own and own_inputs(self.plan, row, earlier.role) != own_inputs(catalog, other, earlier.role):
                continue
            cells = zip(range(at[row], at[row + 1]), range(earlier.at[other], earlier.at[other + 1]), strict=False)
            for number, (cell, index) in enumerate(cells):
                n = number // each
                is_there = at_now[row] + n < at_now[row + 1] and at_before[other] + n < at_before[other + 1]
                if is_there and now[at_now[row] + n] == before[at_before[other] + n]:
                    found[cell] = index
        return found

    def reusable(self, known: Outcomes, snapshot: Snapshot) -> Mask:
        """Return which units are present and have unchanged files, as a mask. Reads no file, so with `is_recheck` none of files is."""
        reusable = self.present(known, snapshot)
        for index in np.flatnonzero(reusable & self.of_files()).tolist():
            self.rise()
            reusable[index] = self.is_trusted(index, known)
        return reusable

    def present(self, known: Outcomes, snapshot: Snapshot) -> Mask:
        """Return which units have a known key that is in the store, as a mask."""
        keyed = known.keyed
        present = np.zeros(len(known), np.bool_)
        present[keyed] = held_keys(snapshot, known.keys[keyed])
        return present

    def of_files(self) -> Mask:
        """Return which units are made from files, as a mask; captions are in the plan itself."""
        of_files = np.zeros(self.plan.unit_count, np.bool_)
        for column in () if self.plan.ids_are_keys else self.plan.columns:
            if is_of_files(column.role, column.options):
                units = self.plan.units_of(column.recipe)
                of_files[units.start : units.stop] = True
        return of_files

    def is_trusted(self, index: int, known: Outcomes) -> bool:
        """Return whether the files of a unit are known to be unchanged without reading them."""
        return not self.is_recheck and self.is_unchanged(index, known)

    def is_unchanged(self, index: int, known: Outcomes) -> bool:
        """Return whether the files of a unit have the stat record that they had when they were read."""
        references = references_of(self.plan.unit(index).request)
        stat = (int(known.stats[index, 0]), int(known.stats[index, 1]))
        return not references or (stat != NO_STAT and self.stat(references) == stat)

    def stat(self, references: Sequence[str]) -> Stat | None:
        """Return the combined stat record of these files now; None if one is gone."""
        stats = [self.files.stat(reference) for reference in dict.fromkeys(references)]
        there = [stat for stat in stats if stat is not None]
        return combined_stat(there) if len(there) == len(stats) else None

    def digest(self, request: Mapping[str, Json]) -> tuple[bytes, Stat]:
        """Return the digest of a request's files as they are now, and their combined stat record. Raises OSError."""
        found: dict[str, tuple[str, Stat]] = {}
        for reference in dict.fromkeys(references_of(request)):
            with self.files.open(reference) as (file, stat):
                found[reference] = digest_opened(file), stat
        inputs = digests_of(request, [found[reference][0] for reference in references_of(request)])
        return bytes.fromhex(combined_digest(inputs)), combined_stat([stat for _digest, stat in found.values()])

    def has_other_bytes(self, index: int, outcomes: Outcomes) -> bool:
        """Return whether the files of a unit contain other bytes now. If not, keep their new stat record."""
        try:
            digest, stat = self.digest(self.plan.unit(index).request)
        except OSError:
            return True
        if digest != outcomes.inputs[index].tobytes():
            return True
        outcomes.stats[index] = stat
        return False
