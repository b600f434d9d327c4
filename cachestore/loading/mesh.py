"""Which of the data-parallel parts of a device mesh this process belongs to: all processes of a part read the same batches."""

import sys
from collections.abc import Sequence
from typing import Any, Final, cast

from cachestore.core.arguments import refuse
from cachestore.core.errors import BadInput
from cachestore.core.words import listed

_MODEL: Final = {"tp", "cp", "sp", "pp", "ep"}
"""Usual names of dimensions whose processes share batches."""


def seat_in(mesh: Any) -> tuple[int, int]:
    """Return (number of this process's part, number of parts) of what `make_loader` takes as `mesh`.

    Raises BadInput if it is no mesh or process group, has no dimension for data, or does not contain this process.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    is_pair = isinstance(mesh, tuple) and len(cast("Any", mesh)) == 2
    given, names = cast("Any", mesh if is_pair else (mesh, None))
    if distributed is not None and isinstance(given, getattr(distributed, "ProcessGroup", ())):
        return _member(int(distributed.get_rank(given)), int(distributed.get_world_size(given)))
    if not hasattr(given, "mesh_dim_names") or not hasattr(given, "get_local_rank"):
        refuse("mesh", 'a DeviceMesh, (mesh, "name of its dimension") or a process group', cast("Any", mesh))
    return _of_mesh(given, [names] if isinstance(names, str) else names)


def _of_mesh(mesh: Any, names: Sequence[str] | None) -> tuple[int, int]:
    """The place in these dimensions of a mesh, the last one counting fastest; None for those that are named after data."""
    known: Sequence[str] = mesh.mesh_dim_names or ()
    if mesh.get_coordinate() is None:
        return _member(-1, 0)
    if names is None:
        names = [name for name in known if name.startswith("dp") or name == "data"]
        dimensions = [0] if mesh.ndim == 1 and not _MODEL & set(known) else [known.index(name) for name in names]
    elif unknown := [name for name in names if name not in known]:
        raise BadInput(f"the mesh has no dimension {unknown[0]!r}; it has {listed(map(repr, known)) or 'none with a name'}")
    else:
        dimensions = [known.index(name) for name in names]
    if not dimensions:
        raise BadInput(
            f"which dimension of the mesh is for data is unclear: it has {listed(map(repr, known)) or 'none with a name'}, and none begins"
            ' with "dp"; pass mesh=(mesh, "name"), or several names in a tuple'
        )
    rank, parts = 0, 1
    for dimension in dimensions:
        rank, parts = rank * mesh.size(dimension) + mesh.get_local_rank(dimension), parts * mesh.size(dimension)
    return rank, parts


def _member(rank: int, parts: int) -> tuple[int, int]:
    if rank < 0:
        raise BadInput("this process is not in the mesh that was passed: give it a loader of its own, or none")
    return rank, parts
