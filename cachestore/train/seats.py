"""Seats: which batches each rank of a training takes. Told by numbers or a mesh, or found in torch.distributed or the environment.

Ranks that read the same batches, such as those of one tensor-parallel group, have equal seats.
"""

import os
import sys
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from cachestore.core.arguments import as_whole, refuse
from cachestore.core.errors import BadInput
from cachestore.core.ranks import RankInfo, discover
from cachestore.core.spelling import option
from cachestore.core.words import listed
from cachestore.train.callers import Callers

Split = Literal["outside", "found"]
"""How ranks share the batches if they are not given: the trainer splits them ("outside"), or the sampler finds the ranks ("found")."""

_MODEL: Final = {"tp", "cp", "sp", "pp", "ep"}
"""Usual names of a mesh's dimensions whose processes share batches."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Which batches a rank takes: those of number `rank` of `replicas`."""

    rank: int | None
    """None if unknown."""
    replicas: int
    is_joint: bool = False
    """Whether other ranks are meant to take the same batches, as in a mesh."""
    yields_all: bool = False
    """Whether the sampler yields the batches of all ranks, for somebody else to deal."""

    @property
    def first(self) -> int:
        """The number of the first batch that the sampler yields in this process."""
        return 0 if self.yields_all else self.rank or 0

    @property
    def step(self) -> int:
        """How far apart the batches are that the sampler yields in this process."""
        return 1 if self.yields_all else self.replicas


def numbered_seat(rank: int | None, replicas: int | None, split: Split | None) -> Seat | None:
    """Return the seat with these numbers; None if there are none. Raises BadInput."""
    if rank is None and replicas is None:
        return None
    rank = None if rank is None else as_whole("rank", rank)
    replicas = None if replicas is None else as_whole("num_replicas", replicas)
    if rank is None or replicas is None or split is not None or not 0 <= rank < replicas:
        got = f"got rank {rank}, num_replicas {replicas}, split {split!r}"
        raise BadInput(f"rank and num_replicas go together, rank from 0 up, and without split; {got}", option="rank")
    return Seat(rank, replicas)


def find_ranks() -> RankInfo:
    """Find the processes that train together: by torch.distributed if initialised, else by the launcher's environment, else one process.

    Tasks of a job array, and processes numbered by CACHESTORE_RANK, only encode together. They need not train together.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return RankInfo(int(distributed.get_rank()), int(distributed.get_world_size()), found_in="torch.distributed")
    return discover({name: text for name, text in os.environ.items() if not name.startswith(("CACHESTORE_", "SLURM_ARRAY_"))})


def find_seat(split: Split | None) -> Seat:
    """Return the seat by the ranks that are found. Raises BadInput if there are several, but not how they share batches."""
    found = find_ranks()
    if split == "outside":
        return Seat(found.rank, found.world_size, yields_all=found.world_size > 1)
    if found.world_size > 1 and (split is None or found.rank is None):
        reason = "was not told how they share batches" if split is None else f"cannot tell which rank it is ({found.conflict})"
        raise BadInput(
            f"{found.world_size} processes train together ({found.found_in}), but this sampler {reason}: pass rank=... and"
            f" num_replicas=... (Fabric, plain torchrun), or {option('split', 'outside')} (accelerate, which splits them itself)",
            option="split",
        )
    return Seat(found.rank, found.world_size)


def seat_in(mesh: Any) -> Seat:
    """Return the seat of what `make_loader` takes as `mesh`: the data-parallel part of a device mesh that this process belongs to.

    Raises BadInput if it is no mesh or process group, has no dimension for data, or does not contain this process.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    is_pair = isinstance(mesh, tuple) and len(cast("Any", mesh)) == 2
    given, names = cast("Any", mesh if is_pair else (mesh, None))
    outside = "this process is not in the mesh that was passed: give it a loader of its own, or none"
    if distributed is not None and isinstance(given, getattr(distributed, "ProcessGroup", ())):
        rank, replicas = int(distributed.get_rank(given)), int(distributed.get_world_size(given))
        if rank < 0:
            raise BadInput(outside, option="mesh")
        return Seat(rank, replicas, is_joint=True)
    if not hasattr(given, "mesh_dim_names") or not hasattr(given, "get_local_rank"):
        refuse("mesh", 'a DeviceMesh, (mesh, "name of its dimension") or a process group', cast("Any", mesh))
    if given.get_coordinate() is None:
        raise BadInput(outside, option="mesh")
    known: tuple[str, ...] = given.mesh_dim_names or ()
    has = listed(map(repr, known)) or "none with a name"
    if names is None:
        data = [number for number, name in enumerate(known) if name.startswith("dp") or name == "data"]
        dimensions = [0] if given.ndim == 1 and not _MODEL & set(known) else data
    else:
        names = [names] if isinstance(names, str) else names
        if unknown := [name for name in names if name not in known]:
            raise BadInput(f"the mesh has no dimension {unknown[0]!r}; it has {has}", option="mesh")
        dimensions = [known.index(name) for name in names]
    if not dimensions:
        raise BadInput(
            f'which dimension of the mesh is for data is unclear: it has {has}, and none begins with "dp"; pass mesh=(mesh, "name"), or'
            " several names in a tuple",
            option="mesh",
        )
    rank, replicas = 0, 1
    for dimension in dimensions:  # the last one counts fastest
        rank, replicas = rank * given.size(dimension) + given.get_local_rank(dimension), replicas * given.size(dimension)
    return Seat(rank, replicas, is_joint=True)


def seat_among(callers: Callers, seat: Seat) -> Seat | None:
    """Return which batches this process gets in the end. None if the caller deals them in a way that is not known."""
    if callers.dealt is not None:
        return Seat(*callers.dealt, is_joint=True)  # accelerate has a mesh of its own
    return None if seat.yields_all or seat.rank is None else seat


def check_dealing(callers: Callers, seat: Seat) -> None:
    """Raise BadInput if the batches are dealt to ranks twice, by nobody, or among other ranks than was said."""
    if seat.replicas == 1:
        return
    if callers.dealt is None:
        if seat.yields_all and callers.is_direct:
            raise BadInput(
                f"this loader yields the batches of all {seat.replicas} ranks, and nothing deals them: pass it to `accelerator.prepare`,"
                f" and iterate over what that returns. Without accelerate, leave {option('split', 'outside')}"
                f" ({option('framework', 'accelerate')}) out",
                option="split",
            )
        return
    if not seat.yields_all:
        raise BadInput(
            f"the batches are dealt to {seat.replicas} ranks twice, by this sampler and by accelerate, so most of the samples would be"
            f" left out: pass {option('split', 'outside')} instead of ranks (make_loader: {option('framework', 'accelerate')}), or do not"
            " pass the loader to `accelerator.prepare`",
            option="split",
        )
    if callers.dealt[1] != seat.replicas:
        named = "its mesh has" if seat.is_joint else "it found"
        raise BadInput(
            f"accelerate deals the batches to {callers.dealt[1]} ranks, but this sampler expects {seat.replicas}, as {named}: pass"
            " mesh=accelerator.torch_device_mesh, so that both count the same",
            option="mesh",
        )
