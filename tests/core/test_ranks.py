"""Who am I: every launcher's variables, and what contradicts itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore.core.errors import BadInput
from cachestore.core.ranks import RankInfo, discover, launch_name
from tests.fakes import asks_for

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "ROLE_RANK": "5",
    "TORCHELASTIC_RUN_ID": "run-7",
    "OMP_NUM_THREADS": "1",
}
STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NAME": "cache",
}
ARRAY = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_STEP": "2"}
BATCH = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "cache"}


def rank_of(environment, **options):
    found = discover(environment, **options)
    return found.rank, found.world_size


def test_an_empty_environment_is_a_single_process():
    assert discover({}) == RankInfo(0, 1, 0, None, "single process", None)


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "2"}, 2),
        ({"SLURM_NTASKS_PER_NODE": "8(x2)"}, 1),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
    ],
)
def test_how_many_processes_share_a_machine_is_one_where_nothing_tells(environment, count):
    assert discover(environment).local_world_size == count
    assert discover(environment, rank=0, world_size=2).local_world_size == count


@pytest.mark.parametrize(
    ("found_in", "environment", "expected"),
    [
        ("torchrun", TORCHRUN, (5, 8, 1)),
        ("torchrun", {**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no", "FORK_LAUNCHED": "0"}, (5, 8, 1)),
        ("torchrun", {"RANK": "1", "WORLD_SIZE": "2", "CROSS_RANK": "0", "LOCAL_SIZE": "2", "LOCAL_RANK": "1"}, (1, 2, 1)),
        ("Lightning Fabric", {"NODE_RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 1)),
        ("Lightning Fabric", {"NODE_RANK": "2", "LOCAL_RANK": "1", "WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "4"}, (9, 12, 1)),
        ("torchrun", {"RANK": "3", "NODE_RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, (3, 4, 1)),
        ("Open MPI", {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, (2, 4, 0)),
        ("PMI", {"PMI_RANK": "2", "PMI_SIZE": "4"}, (2, 4, 0)),
        ("MVAPICH", {"MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "2"}, (2, 4, 2)),
        ("LSF", {"JSM_NAMESPACE_RANK": "2", "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "1"}, (2, 4, 1)),
        ("SLURM", STEP, (3, 4, 1)),
        ("SLURM", {**STEP, "SLURM_STEP_NUM_TASKS": "8"}, (3, 8, 1)),
        ("SLURM array", ARRAY, (3, 4, 0)),
        ("SLURM array", {**ARRAY, **BATCH}, (3, 4, 0)),
        ("SLURM array", {**ARRAY, **STEP, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}, (3, 4, 0)),
        ("SLURM", {**ARRAY, **STEP}, (3, 4, 1)),
        ("cachestore", {"CACHESTORE_RANK": "1", "CACHESTORE_WORLD_SIZE": "3"}, (1, 3, 0)),
    ],
)
def test_each_launchers_variables_say_rank_world_size_and_local_rank(found_in, environment, expected):
    found = discover(environment)
    assert (found.rank, found.world_size, found.local_rank) == expected
    assert (found.found_in, found.conflict) == (found_in, None)


@pytest.mark.parametrize(
    "environment",
    [BATCH, {**STEP, "SLURM_JOB_NAME": "bash"}, {**STEP, "SLURM_JOB_NAME": "interactive"}, {**STEP, "SLURM_STEP_ID": "interactive"}],
)
def test_a_batch_script_and_an_interactive_allocation_say_nothing(environment):
    assert discover(environment) == RankInfo(0, 1, discover(environment).local_rank, launch_name(environment))


def test_a_torchrun_under_slurm_is_torchruns():
    assert discover({**STEP, **TORCHRUN}).found_in == "torchrun"
    assert rank_of({**BATCH, **TORCHRUN}) == (5, 8)


def test_arguments_precede_our_own_variables_and_these_a_process_group_and_that_the_launchers():
    environment = {**STEP, **ARRAY, **TORCHRUN, "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
    ours = {**environment, "CACHESTORE_RANK": "1", "CACHESTORE_WORLD_SIZE": "3"}
    assert rank_of(ours, rank=0, world_size=2, distributed=(6, 7)) == (0, 2)
    assert rank_of(ours, distributed=(6, 7)) == (1, 3)
    assert rank_of(environment, distributed=(6, 7)) == (6, 7)
    assert rank_of(environment) == (5, 8)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "3"}, "rank 3 of None"),
        ({"WORLD_SIZE": "4"}, "rank None of 4"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "rank 4 of 4"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "rank None of 4"),
        ({"RANK": "two", "WORLD_SIZE": "4"}, "rank None of 4"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "rank 0 of 0"),
        ({"NODE_RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}, "rank None of 4"),
        ({"NODE_RANK": "0", "LOCAL_RANK": "4", "WORLD_SIZE": "4"}, "rank 4 of 4"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "Open MPI says rank 1"),
        ({"CACHESTORE_RANK": "9", "CACHESTORE_WORLD_SIZE": "3", **TORCHRUN}, "cachestore says rank 9 of 3"),
    ],
)
def test_what_contradicts_itself_is_reported_and_means_no_preference_never_rank_0(environment, says):
    found = discover(environment)
    assert found.rank is None
    assert says in str(found.conflict)
    assert found.world_size >= 1


def test_a_world_of_one_without_a_rank_is_a_single_process():
    assert discover({"WORLD_SIZE": "1"}) == RankInfo(0, 1)


@pytest.mark.parametrize("options", [{"rank": 0}, {"world_size": 2}, {"rank": 2, "world_size": 2}, {"rank": -1, "world_size": 2}])
def test_explicit_arguments_that_do_not_fit_are_refused(options):
    with pytest.raises(BadInput, check=asks_for("rank")):
        discover({}, **options)


NAMES = sorted({*TORCHRUN, *STEP, *ARRAY, "NODE_RANK", "PMI_RANK", "PMI_SIZE", "CACHESTORE_RANK", "CACHESTORE_WORLD_SIZE"})


@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["", "0", "1", "2", "7", "8", "-1", "x", " 3 ", "1.5", "²", "٣"])))
def test_whatever_the_environment_says_a_rank_is_below_its_world_or_unknown(environment):
    found = discover(environment)
    assert found.world_size >= 1
    assert found.rank is None or 0 <= found.rank < found.world_size
    assert (found.conflict is not None) == (found.rank is None)


def test_the_environment_is_read_when_asked_not_when_imported():
    environment = {}
    assert rank_of(environment) == (0, 1)
    environment.update(TORCHRUN)
    assert rank_of(environment) == (5, 8)


# Which launch


def test_nothing_names_the_launch_of_a_process_that_stands_alone():
    assert launch_name({}) is None


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"CACHESTORE_LAUNCH": "procs:1", **TORCHRUN, **STEP}, "procs:1"),
        (STEP, "slurm:77.0"),
        ({"PMIX_NAMESPACE": "prterun-1"}, "mpi:prterun-1"),
        ({"OMPI_MCA_ess_base_jobid": "9"}, "mpi:9"),
    ],
)
def test_the_launch_is_named_by_what_its_processes_have_in_common(environment, name):
    assert launch_name(environment) == name


def test_torchruns_default_run_id_names_nothing_as_it_is_everybodys():
    assert launch_name({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}) is None


def test_two_job_steps_are_two_launches():
    assert launch_name(STEP) != launch_name({**STEP, "SLURM_STEP_ID": "1"})


def test_two_torchruns_with_one_run_id_are_two_launches():
    """Were they one, the second would return the first one's report and look at nothing."""
    first, second = ({**TORCHRUN, "MASTER_ADDR": "node1", "MASTER_PORT": port} for port in ("39515", "33061"))
    assert launch_name(first) != launch_name(second)


def test_ranks_of_one_torchrun_are_one_launch():
    assert launch_name(TORCHRUN) == launch_name({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}) is not None
