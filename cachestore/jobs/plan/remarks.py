"""What a user should know of a plan: images and captions that some samples lack or no encoder reads, paths that moved."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from cachestore.core.inputs import companions
from cachestore.core.keys import Json, Recipe
from cachestore.core.samples import CAPTION, IMAGE, MASK, VIDEO, role_of
from cachestore.core.words import first_of, listed, noun, plural
from cachestore.jobs.plan.columns import own_inputs, rows_with_any, rows_without_picture
from cachestore.jobs.plan.options import PrecomputeRequest
from cachestore.jobs.plan.recorded_paths import gone_paths
from cachestore.jobs.share.plan import Plan
from cachestore.store.format.catalog import Catalog

if TYPE_CHECKING:
    from cachestore.encode.needs import Need


def remarks_on(plan: Plan, needs: "Sequence[Need]") -> Iterator[str]:
    """Yield remarks on captions of single text encoders, and on images that some samples lack or that the model does not read."""
    yield from _remark_own_captions(plan)
    yield from _remark_partly(plan, needs)
    yield from _remark_unread(plan)


def references_of(plan: Plan) -> Iterator[str]:
    """Yield the references of all samples, and the names of those that cannot be used: they have a row."""
    yield from (reference for _at, named in plan.images.values() for reference in named)
    yield from (sample for sample, _reason in plan.refused)


def count_reread_files(plan: Plan, previous: Catalog | None) -> dict[str, Json]:
    """Return how many files of the model were read, and how many differ from those in the recipes of an earlier catalog."""

    def files_in(recipes: Iterable[Recipe]) -> dict[tuple[str, str], str]:
        return {(one.encoder, name): digest for one in recipes for name, digest in one.make.get("files", {}).items()}

    now, before = files_in(plan.recipes), files_in(() if previous is None else previous.recipes.values())
    return {"model_files": len(now), "model_files_changed": sum(name in before and digest != before[name] for name, digest in now.items())}


def remarks_on_paths(plan: Plan, previous: Catalog | None, request: PrecomputeRequest) -> tuple[str, ...]:
    """Remark on paths that the data set records and that are gone: it will record those of this request."""
    hints = request.hints()
    gone = () if previous is None else gone_paths(previous.request, {column.encoder: hints for column in plan.columns})
    return (f"{first_of(gone)} is no longer there: the data set {plan.catalog!r} records the paths of this run instead",) if gone else ()


def not_made(needs: "Sequence[Need]", plan: Plan) -> tuple[str, ...]:
    """Describe the needs that are not made: all but those met by images of each sample's own."""
    found: list[str] = []
    for need in needs:
        starts = _starts(plan, need.role)
        starts = [plan.images[role][0] for role in need.wants if role in plan.images] if starts and need.wants else starts
        having = rows_with_any(starts)
        if need.role is None or not having.any():
            found.append(need.words)
            continue
        trained = rows_with_any(_starts(plan, role_of(need.role).follows or need.role))
        if lacking := (trained & ~having).nonzero()[0].tolist():
            named = first_of(plan.ids[row] for row in lacking)
            roles = " or ".join(need.wants or (need.role,))
            found.append(f"{need.what} of {len(lacking)} of {trained.sum()} samples, which have no {roles} ({named})")
    return tuple(found)


def remark_without_picture(plan: Plan, named: Sequence[str]) -> str:
    """A remark if only some samples have a picture, as a column's name may be misspelt; none on captions alone. `named` are the rows."""
    lacking = rows_without_picture(_starts(plan, IMAGE, VIDEO))
    first = first_of(named or (plan.ids[row] for row in lacking))
    which = f"{plural(len(lacking), 'sample has', 'samples have')} no picture ({first})"
    return f"{which}: batches of such samples hold no latents" if lacking else ""


def _remark_partly(plan: Plan, needs: "Sequence[Need]") -> Iterator[str]:
    """Remark on images that some samples have and others lack, as a name may be misspelt. Those that the model needs are named there."""
    named = {role for need in needs for role in (need.role, *need.wants)}
    for role, (at, _references) in plan.images.items():
        if role in {IMAGE, VIDEO, *named} or role_of(role).is_own or role not in _read_roles(plan):
            continue
        if lacking := rows_without_picture([at]):
            then = "the whole picture counts" if role == MASK else f"its list of {role}s in the batch is empty"
            which = f"{len(lacking)} of {plural(len(plan.ids), 'sample')} {noun(len(lacking), 'has', 'have')} no {role}"
            yield f"{which} ({first_of(plan.ids[row] for row in lacking)}): {then}"


def _remark_unread(plan: Plan) -> Iterator[str]:
    """Remark on images that the model's encoders do not read, if they read any."""
    read = _read_roles(plan)
    for role, (at, _references) in plan.images.items():
        if role not in read and not read.isdisjoint((IMAGE, VIDEO)):
            have = plural(int(rows_with_any([at]).sum()), "sample has", "samples have")
            yield f"{have} a {role}, which this model is not trained with here: nothing is made of it"


def _remark_own_captions(plan: Plan) -> Iterator[str]:
    """Remark on samples with captions of single text encoders, if text is encoded."""
    if any(column.role == CAPTION for column in plan.columns):
        having = [own for row in range(len(plan.ids)) if (own := own_inputs(plan, row, CAPTION))]
        if having:
            names = listed(sorted({name for own in having for name in own}))
            yield f"{plural(len(having), 'sample has a caption', 'samples have captions')} for {names} alone"


def _read_roles(plan: Plan) -> set[str]:
    return {one for column in plan.columns for one in (column.role, column.encoder, *companions(column.role, column.options))}


def _starts(plan: Plan, *roles: str | None) -> list[Sequence[int]]:
    """Where the cells of each row start, in the columns of these roles."""
    return [starts for column, (starts, _units) in zip(plan.columns, plan.cells, strict=True) if column.role in roles]
