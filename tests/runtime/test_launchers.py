"""What the environments of launchers say of a process, and what they cannot say."""

import os
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import InvalidInput
from autotune.runtime import launch
from autotune.runtime.launchers import (
    SLURM_PORTS,
    THIS_NODE,
    Launch,
    NodeGroup,
    first_host,
    read_launch,
    read_nodes,
    require_planned_number,
    tasks_on,
)


def launched(run_id: str = "none", **changes: object) -> dict[str, str]:
    """The environment that torchrun gives to process 3 of 4, two on each of two nodes."""
    numbers = {
        "RANK": 3,
        "LOCAL_RANK": 1,
        "WORLD_SIZE": 4,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_PORT": 29400,
    }
    values = {"TORCHELASTIC_RUN_ID": run_id, "MASTER_ADDR": "node-1", **numbers, **changes}
    return {name: str(value) for name, value in values.items()}


def in_slurm(**changes: object) -> dict[str, str]:
    """The environment that srun gives to task 3 of 4, two on each of two nodes."""
    values = {
        "SLURM_JOB_ID": 4711, "SLURM_STEP_ID": 0, "SLURM_PROCID": 3, "SLURM_LOCALID": 1,
        "SLURM_NODEID": 1,
        "SLURM_STEP_NUM_TASKS": 4, "SLURM_NTASKS": 4, "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": "gpu[07-08]", "PMI_SIZE": 4, **changes,
    }  # fmt: skip
    return {name: str(value) for name, value in values.items()}


def in_pod(**changes: object) -> dict[str, str]:
    """The environment of the second of two pods of a PyTorchJob, with one process each."""
    values = {
        "RANK": 1,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "lora-master-0",
        "MASTER_PORT": 23456,
        **changes,
    }
    return {name: str(value) for name, value in values.items()}


PODS = {"PET_NPROC_PER_NODE": 4, "PET_NNODES": 2, "PET_NODE_RANK": 1, "WORLD_SIZE": 8}


def without(environment: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (launched(), Launch("torchrun", 3, 1, 4, 2, "node-1", 29400)),
        (launched("autotune-17"), Launch("autotune", 3, 1, 4, 2, "node-1", 29400)),
        (
            launched(ACCELERATE_MIXED_PRECISION="no"),
            Launch("accelerate", 3, 1, 4, 2, "node-1", 29400),
        ),
        (launched() | in_slurm(SLURM_NTASKS=2), Launch("torchrun", 3, 1, 4, 2, "node-1", 29400)),
        (in_slurm(), Launch("slurm", 3, 1, 4, 2, "gpu07", 19711)),
        (in_slurm(SLURM_STEP_ID=2), Launch("slurm", 3, 1, 4, 2, "gpu07", 19713)),
        (
            in_slurm(MASTER_ADDR="10.0.0.7", MASTER_PORT=5),
            Launch("slurm", 3, 1, 4, 2, "10.0.0.7", 5),
        ),
        (in_slurm(RANK=0, WORLD_SIZE=1), Launch("slurm", 3, 1, 4, 2, "gpu07", 19711)),
        (in_pod(), Launch("environment", 1, 0, 2, 1, "lora-master-0", 23456)),
        (
            in_pod(PET_NPROC_PER_NODE=1, PET_NNODES=2),
            Launch("environment", 1, 0, 2, 1, "lora-master-0", 23456),
        ),
        (
            in_pod(LOCAL_RANK=1, LOCAL_WORLD_SIZE=2),
            Launch("environment", 1, 1, 2, 2, "lora-master-0", 23456),
        ),
        (
            in_slurm() | in_pod(RANK=3, WORLD_SIZE=4),
            Launch("environment", 3, 1, 4, 2, "lora-master-0", 23456),
        ),
    ],
)
def test_each_launcher_is_understood(environment: Mapping[str, str], expected: Launch) -> None:
    assert read_launch(environment) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1", "PMI_SIZE": "1", "HOME": "/root"},
        without(in_slurm(SLURM_PROCID=0, PMI_SIZE=1), "SLURM_STEP_ID"),  # a batch script
        in_slurm(SLURM_STEP_ID=0xFFFFFFFB, SLURM_PROCID=0, PMI_SIZE=1),
        in_slurm(SLURM_STEP_ID=0xFFFFFFFA, SLURM_PROCID=0, PMI_SIZE=1),  # an interactive shell
        in_slurm(SLURM_STEP_NUM_TASKS=1, SLURM_PROCID=0, PMI_SIZE=1),
        in_pod(**PODS),  # which starts four processes itself
    ],
)
def test_a_process_that_was_started_alone_has_no_launch(environment: Mapping[str, str]) -> None:
    assert read_launch(environment) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (launched(RANK=4), "process 4 of 4"),
        (launched(LOCAL_RANK=2), "number 2 of 2 on its node"),
        (launched(LOCAL_WORLD_SIZE=5), "of 5 on its node"),
        (launched(MASTER_PORT=70000), "port 70000"),
        (launched(MASTER_PORT=0), "port 0"),
        (launched(MASTER_ADDR="a b; rm -rf /"), "cannot meet at host"),
        (without(launched(), "LOCAL_WORLD_SIZE"), "LOCAL_WORLD_SIZE is not set"),
        ({"TORCHELASTIC_RUN_ID": "1"}, "RANK is not set"),
        ({"RANK": "2"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "4"}, "RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "MASTER_ADDR is not set"),
        (in_pod(MASTER_ADDR=""), "MASTER_ADDR is empty"),
        (in_pod(RANK="-1"), "'-1', which is not the number"),
        (in_pod(RANK="٣"), "which is not the number"),
        (in_pod(WORLD_SIZE="9" * 400), "which is not the number"),
        (in_pod(WORLD_SIZE=2**30, RANK=1), "process 1 of 1073741824"),
        (in_pod(LOCAL_RANK=1), "LOCAL_WORLD_SIZE is not set"),
        (in_slurm(SLURM_STEP_TASKS_PER_NODE="2"), "has none for node 1"),
        (in_slurm(SLURM_STEP_TASKS_PER_NODE="2(x999999999999)"), "has none for node 1"),
        (
            in_slurm(
                SLURM_STEP_NUM_TASKS=3,
                SLURM_PROCID=1,
                SLURM_LOCALID=0,
                SLURM_STEP_TASKS_PER_NODE="1(x2)",
            ),
            "has 3 tasks, but its list, '1(x2)', has 2",
        ),
        (in_slurm(SLURM_STEP_NODELIST="[01-02]["), "names no host"),
        (in_slurm(SLURM_STEP_NODELIST="$(reboot)"), "names no host"),
        (without(in_slurm(), "SLURM_STEP_NODELIST"), "SLURM_NODELIST is not set"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpirun started 4 processes"),
    ],
)
def test_a_contradiction_is_refused(environment: Mapping[str, str], message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        read_launch(environment)
    assert message in str(refused.value)
    assert len(refused.value.hint) > 10
    if "unset " in refused.value.hint:
        named = refused.value.hint.partition("unset ")[2].split(", ")
        assert set(named) <= set(environment)


SLURM_TASK = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURM_NODELIST": "a"}


@pytest.mark.parametrize(
    ("environment", "message", "names"),
    [
        (
            {
                **SLURM_TASK,
                "SLURM_PROCID": "0",
                "SLURM_LOCALID": "4",
                "SLURM_NTASKS": "2",
                "SLURM_TASKS_PER_NODE": "2",
            },
            "by srun's variables this would be process 0 of 2, and number 4 of 2 on its node",
            {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE"},
        ),
        ({"SLURM_PROCID": "3"}, "SLURM_NTASKS is not set", {"SLURM_PROCID"}),
        (
            in_pod(RANK=5),
            "by RANK and WORLD_SIZE this would be process 5 of 2, counted from 0",
            {"RANK", "WORLD_SIZE"},
        ),
        (
            in_pod(**{**PODS, "PET_NNODES": "1:4"}),
            "PET_NNODES is '1:4'",
            {"PET_NPROC_PER_NODE", "PET_NNODES"},
        ),
        (
            launched(RANK=4),
            "by torchrun's variables this would be process 4 of 4",
            {"TORCHELASTIC_RUN_ID", "RANK"},
        ),
    ],
)
def test_a_refusal_names_the_variables_that_were_read(
    environment: Mapping[str, str], message: str, names: set[str]
) -> None:
    with pytest.raises(InvalidInput) as refused:
        read_launch(environment) or read_nodes(environment)
    assert message in str(refused.value)
    named = set(refused.value.hint.partition("unset ")[2].split(", "))
    assert names <= named <= set(environment)
    alone = without(environment, *named, "PMI_SIZE")
    assert read_launch(alone) is None  # the hint helps
    assert read_nodes(alone) is None


NAMES = sorted(
    {*launched(), *in_slurm(), *in_pod(**PODS), "SLURM_NODELIST", "OMPI_COMM_WORLD_SIZE"}
)
VALUES = st.one_of(
    st.integers(-2, 9).map(str),
    st.text("0129-a[](x),.: \n٣", max_size=9),
    st.sampled_from(["2(x2)", "n[1-2]", "1:2"]),
)


@given(
    st.sampled_from([{}, launched(), in_slurm(), in_pod(), in_pod(**PODS)]),
    st.dictionaries(st.sampled_from(NAMES), st.none() | VALUES, max_size=4),
)
def test_whatever_the_environment_a_launch_is_consistent_or_refused(
    base: dict[str, str], changes: dict[str, str | None]
) -> None:
    environment = {name: value for name, value in (base | changes).items() if value is not None}
    try:
        launch, nodes = read_launch(environment), read_nodes(environment)
    except InvalidInput:
        return
    assert launch is None or nodes is None
    if launch:
        assert 0 <= launch.local_rank < launch.local_world_size <= launch.world_size
        assert 0 <= launch.rank < launch.world_size
        told = {
            **launch.variables,
            "TORCHELASTIC_RUN_ID": "none",
        }  # what torch is told is the same launch
        again = read_launch(told)
        assert again is not None
        assert (again.rank, again.world_size, again.address) == (
            launch.rank,
            launch.world_size,
            launch.address,
        )


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_every_task_of_a_slurm_step_has_a_place_of_its_own(tasks: list[int]) -> None:
    world_size, launches = sum(tasks), []
    for node, number in enumerate(tasks):
        for local_rank in range(number):
            environment = in_slurm(
                SLURM_PROCID=len(launches), SLURM_LOCALID=local_rank, SLURM_NODEID=node,
                SLURM_STEP_NUM_TASKS=world_size, SLURM_STEP_TASKS_PER_NODE=",".join(map(str,
                tasks)),
            )  # fmt: skip
            launches.append(
                read_launch(without(environment, *(["PMI_SIZE"] if world_size == 1 else [])))
            )
    if world_size == 1:
        assert launches == [None]
        return
    assert [launch.rank for launch in launches if launch] == list(range(world_size))
    assert [launch.local_world_size for launch in launches if launch] == [
        n for n in tasks for _ in range(n)
    ]
    assert (
        len({(launch.address, launch.port, launch.world_size) for launch in launches if launch})
        == 1
    )


@given(st.integers(0, 2**32 - 1))
def test_the_port_of_a_slurm_job_is_one_that_linux_does_not_hand_out(job: int) -> None:
    launch = read_launch(in_slurm(SLURM_JOB_ID=job))
    assert launch is not None
    assert launch.port in SLURM_PORTS


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("node1", "node1"),
        ("node[01-03,07],login", "node01"),
        ("node[3,1]", "node3"),
        ("gpu-[1-2]-rack[07-08],x", "gpu-1-rack07"),
        ("a,b[1-9999999999]", "a"),
        ("cn[0-999999999]", "cn0"),
        ("n.example.org", "n.example.org"),
    ],
)
def test_the_first_host_of_a_list(text: str, host: str) -> None:
    assert first_host(text) == host


@pytest.mark.parametrize(
    "text", ["", ",", "[", "n[", "n[]", "n[a]", "n[1-]", "n[1", "-n", "n m", "n\n", "ü[1]"]
)
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="names no host"):
        first_host(text)


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(1, 50)), min_size=1, max_size=6), st.data()
)
def test_tasks_of_a_node_are_those_of_the_expanded_list(
    runs: list[tuple[int, int]], data: st.DataObject
) -> None:
    text = ",".join(f"{number}(x{times})" if times > 1 else str(number) for number, times in runs)
    expanded = [number for number, times in runs for _ in range(times)]
    node = data.draw(st.integers(0, len(expanded) - 1))
    assert tasks_on(node, text) == expanded[node]
    with pytest.raises(InvalidInput):
        tasks_on(len(expanded), text)


def test_pods_that_are_to_start_several_processes_are_nodes() -> None:
    assert read_nodes(in_pod(**PODS)) == (NodeGroup(2, 1, "lora-master-0", 23456), 4)
    assert read_nodes(in_pod()) is None
    assert (
        read_nodes(launched() | in_pod(**PODS)) is None
    )  # one of the processes that a pod started
    with pytest.raises(InvalidInput, match="PET_NNODES is '1:4'"):
        read_nodes(in_pod(**{**PODS, "PET_NNODES": "1:4"}))


def test_another_number_of_processes_than_planned_is_refused() -> None:
    require_planned_number(read_launch(in_slurm()), THIS_NODE, 4)
    require_planned_number(None, NodeGroup(2, 0, "a", 1), 8, 4)
    with pytest.raises(
        InvalidInput, match=r"srun started 4 process\(es\), but the plan is for 8"
    ) as refused:
        require_planned_number(read_launch(in_slurm()), THIS_NODE, 8)
    assert "srun -n 8" in refused.value.hint
    with pytest.raises(InvalidInput, match="cannot be shared evenly by 3 nodes"):
        require_planned_number(None, NodeGroup(3, 0, "a", 1), 8)
    with pytest.raises(InvalidInput, match="start 2 processes each"):
        require_planned_number(None, NodeGroup(2, 0, "a", 1), 8, 2)


def test_processes_share_the_cores_that_a_job_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.setenv(name, "")  # what is set below is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda *_: lambda *_: None)
    assert launch(2, (), set) == 0
    assert os.environ["OMP_NUM_THREADS"] == "2"
