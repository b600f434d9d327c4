"""Find this process's rank and world size in the environment. They are only hints for the order of work.

A wrong answer costs time, never correctness. So unknown or contradictory values mean "no preference", never rank 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cachestore.core.arguments import as_whole
from cachestore.core.errors import BadInput
from cachestore.core.spelling import option

_Found = tuple[str, int | None, int | None]
"""(where it was found, rank, world size); None for an unknown number."""
_MPI: Final = {"Open MPI": "OMPI_COMM_WORLD", "PMI": "PMI", "MVAPICH": "MV2_COMM_WORLD", "LSF": "JSM_NAMESPACE"}
"""The prefixes of each launcher's variables, before `_RANK` and `_SIZE`."""
_LOCAL: Final = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "JSM_NAMESPACE_LOCAL_RANK")
ARRAY: Final = "SLURM array"
_LOCAL_SIZES: Final = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "SLURM_NTASKS_PER_NODE",
    "JSM_NAMESPACE_LOCAL_SIZE",
)


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The rank of this process. `rank` and `world_size` are both known, or `rank` is None: no preference."""

    rank: int | None = 0
    world_size: int = 1
    local_rank: int = 0
    launch: str | None = None
    """The name of the launch, the same in all its processes; None if unknown."""
    found_in: str = "single process"
    conflict: str | None = None
    """The contradiction that was found, in words, to be reported once."""
    local_world_size: int = 1
    """Processes of this launch on this machine; 1 if unknown."""


def discover(
    environment: Mapping[str, str], *, rank: int | None = None, world_size: int | None = None, distributed: tuple[int, int] | None = None
) -> RankInfo:
    """Find rank and world size. Order: arguments, CACHESTORE_*, an initialised process group, torchrun, Fabric, MPI, SLURM, job array.

    `environment` is like `os.environ`; read it when you need the answer, as Fabric and Ray set theirs late. `distributed` is (rank, world
    size) of an initialised torch.distributed. Raises BadInput if `rank` and `world_size` do not fit each other.
    """
    here = RankInfo(
        local_rank=_first_number(environment, _LOCAL, 0),
        launch=launch_name(environment),
        local_world_size=max(1, _first_number(environment, _LOCAL_SIZES, 1)),
    )
    if rank is not None or world_size is not None:
        rank = None if rank is None else as_whole("rank", rank)
        world_size = None if world_size is None else as_whole("world_size", world_size)
        if rank is None or world_size is None or not 0 <= rank < world_size:
            given = f"got rank {rank}, world size {world_size}"
            both = f"pass both {option('rank')} and {option('world_size')}"
            raise BadInput(f"the rank must be smaller than the world size: {given}; {both}", option="rank")
        return replace(here, rank=rank, world_size=world_size, found_in="arguments")
    in_order_of_trust = (
        _pair(environment, "cachestore", "CACHESTORE_RANK", "CACHESTORE_WORLD_SIZE"),
        ("torch.distributed", *(distributed or (None, None))),
        _fabric(environment) or _pair(environment, "torchrun", "RANK", "WORLD_SIZE"),
        *(_pair(environment, found_in, f"{prefix}_RANK", f"{prefix}_SIZE") for found_in, prefix in _MPI.items()),
        _slurm(environment),
        _array(environment),
    )
    for found_in, found_rank, found_world in in_order_of_trust:
        if found_rank is None and found_world in (None, 1):
            continue
        if found_rank is None or found_world is None or not 0 <= found_rank < found_world:
            conflict = (
                f"{found_in} says rank {found_rank} of {found_world}, which is not possible, so this process continues without a rank"
            )
            return replace(here, rank=None, world_size=max(found_world or 1, 1), found_in=found_in, conflict=conflict)
        return replace(here, rank=found_rank, world_size=found_world, found_in=found_in)
    return here


def _pair(environment: Mapping[str, str], found_in: str, rank: str, world: str) -> _Found:
    return found_in, _number(environment, rank), _number(environment, world)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "").strip()
    return int(text) if text.isdecimal() else None


def _fabric(environment: Mapping[str, str]) -> _Found | None:
    """Lightning Fabric's child processes have no RANK. Without LOCAL_WORLD_SIZE their rank is known on the first node only."""
    node, local, world = (_number(environment, name) for name in ("NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if "RANK" in environment or node is None or local is None or world is None:
        return None
    here = _number(environment, "LOCAL_WORLD_SIZE")
    return "Lightning Fabric", None if node > 0 and here is None else node * (here or 0) + local, world


def _slurm(environment: Mapping[str, str]) -> _Found:
    """Return the rank in a SLURM step. In a batch script or an interactive allocation it is unknown: SLURM_PROCID is 0 everywhere."""
    if not environment.get("SLURM_STEP_ID", "").isdecimal() or environment.get("SLURM_JOB_NAME") in {"bash", "interactive"}:
        return "SLURM", None, None
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS") or _number(environment, "SLURM_NTASKS")
    if tasks == 1 and _array(environment)[2] is not None:
        return "SLURM", None, None  # each task of the array runs one `srun`: its rank is the one in the array
    return "SLURM", _number(environment, "SLURM_PROCID"), tasks


def _array(environment: Mapping[str, str]) -> _Found:
    """Return the rank in a job array: the task's number between the first and the last, in steps."""
    task, count, first = (_number(environment, f"SLURM_ARRAY_TASK_{word}") for word in ("ID", "COUNT", "MIN"))
    if task is None or count is None or first is None:
        return ARRAY, None, None
    return ARRAY, (task - first) // (_number(environment, "SLURM_ARRAY_TASK_STEP") or 1), count


def _first_number(environment: Mapping[str, str], names: Sequence[str], default: int) -> int:
    found = (_number(environment, name) for name in names)
    return next((number for number in found if number is not None), default)


def launch_name(environment: Mapping[str, str]) -> str | None:
    """Return a name that all processes of one launch share and no other launch has; None if unknown."""
    if name := environment.get("CACHESTORE_LAUNCH"):
        return name
    run = environment.get("TORCHELASTIC_RUN_ID", "none")
    if run != "none":  # torchrun's default
        # Scripts often use the same id again, but the port that the agents agree on differs in each launch.
        return f"torchrun:{run}:{environment.get('MASTER_PORT', '')}"
    if environment.get("SLURM_ARRAY_JOB_ID") and _slurm(environment)[1] is None and _array(environment)[1] is not None:
        return f"slurm-array:{environment['SLURM_ARRAY_JOB_ID']}"
    if environment.get("SLURM_STEP_ID", "").isdecimal() and environment.get("SLURM_JOB_ID"):
        return f"slurm:{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"
    for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"):
        if environment.get(name):
            return f"mpi:{environment[name]}"
    return None
