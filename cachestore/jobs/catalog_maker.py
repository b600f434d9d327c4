"""The catalog of a pass: a key column for each of the plan's, and those that earlier encoders made under the same name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cachestore.core.inputs import (
    NO_STAT,
    Stat,
    cells_each,
    companions,
    is_of_files,
    references_of,
    request_for,
)
from cachestore.core.keys import Json, Recipe
from cachestore.core.samples import IMAGE, MASK
from cachestore.jobs.columns import cells_of, images_in, inputs, key_column, numbers
from cachestore.jobs.presence import Presence
from cachestore.storage.catalog import Catalog, KeyColumn
from cachestore.work.outcomes import Outcomes
from cachestore.work.plan import Plan


@dataclass(frozen=True, slots=True)
class CatalogMaker:
    """Makes the catalog of a plan."""

    plan: Plan
    presence: Presence
    request: Mapping[str, Json]
    """What the header keeps as hints."""
    listing: int
    """The number of this worker's own listing of the source."""

    def make(self, outcomes: Outcomes, failed: Mapping[int, str], previous: Catalog | None) -> Catalog:
        """The catalog after this pass: its columns, and those of earlier encoders that it does not make."""
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
        places = numbers(units)
        cells = outcomes.cells(places)
        cells.keys[np.isin(places, list(failed))] = 0
        return key_column(column, self.plan.recipes[column.recipe].fingerprint, at, cells)

    def _kept_column(self, previous: Catalog, column: KeyColumn) -> KeyColumn:
        """An earlier encoder's column under the same name: a cell stays only while what it was made from is what the sample has now."""
        inputs_at, values = inputs(self.plan, column.role)
        each = cells_each(column.options)
        at = inputs_at if each == 1 else (numbers(inputs_at) * each).tolist()
        places = self.presence.earlier_cells(previous, column, at)
        cells = cells_of(column).take(places)
        if is_of_files(column.role, column.options):
            for cell in np.flatnonzero(places >= 0).tolist():
                self.presence.rise()
                row = int(np.searchsorted(numbers(at), cell, side="right")) - 1
                images = {role: images_in(self.plan, row, role) for role in companions(column.role, column.options)}
                request = request_for(column.role, column.options, values[cell // each], images, cell % each)
                stat = (int(cells.stats[cell, 0]), int(cells.stats[cell, 1]))
                if not self._is_same_input(request, stat, cells.inputs[cell].tobytes()):
                    places[cell] = -1
            cells = cells_of(column).take(places)
        return key_column(column, column.fingerprint, at, cells)

    def _is_same_input(self, request: Mapping[str, Json], stat: Stat, digest: bytes) -> bool:
        if stat != NO_STAT and self.presence.stat(references_of(request)) == stat:
            return True
        try:
            return self.presence.digest(request)[0] == digest
        except OSError:
            return False


def _recipes_of(previous: Catalog | None, kept: Sequence[KeyColumn]) -> dict[str, Recipe]:
    return {column.fingerprint: previous.recipes[column.fingerprint] for column in kept} if previous is not None else {}


def _requests_of(previous: Catalog | None, kept: Sequence[KeyColumn]) -> dict[str, Json]:
    return {column.encoder: previous.request.get(column.encoder, {}) for column in kept} if previous is not None else {}
