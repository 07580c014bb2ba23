"""Where a process stands in a run, by its environment and by the options that name nodes."""

import os
import socket

import pytest

from autotune.api.places import find_place
from autotune.errors import InvalidInput
from autotune.runtime.launchers import NodeGroup
from autotune.runtime.launching import is_first_process, started_by_launcher
from tests.runtime.test_launchers import PODS, in_pod, in_slurm, launched


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", dict(os.environ))


def test_a_process_alone_starts_those_of_this_machine() -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # left by a shell
    place = find_place(4, None, None, None)
    assert (place.is_first, place.num_devices, place.starts_processes) == (True, 4, True)
    assert "LOCAL_RANK" not in os.environ  # accelerate would wait for others
    assert not find_place(1, None, None, None).starts_processes


def test_a_task_of_slurm_trains_itself_and_torch_learns_its_rank() -> None:
    os.environ |= in_slurm()
    place = find_place(4, None, None, None)
    assert (place.is_first, place.num_devices, place.starts_processes) == (False, 1, False)
    assert (os.environ["RANK"], os.environ["MASTER_ADDR"]) == ("3", "gpu07")
    assert "PMI_SIZE" not in os.environ
    assert not is_first_process()


def test_a_pod_starts_its_share() -> None:
    os.environ |= in_pod(**PODS)
    place = find_place(8, None, None, None)
    assert (place.nodes.num_nodes, place.num_devices, place.is_first) == (2, 4, False)
    assert not started_by_launcher()
    os.environ |= in_pod(**PODS)
    with pytest.raises(InvalidInput, match="start 4 processes each"):
        find_place(4, None, None, None)


def test_options_say_what_the_nodes_are_even_where_slurm_started_one_task_on_each() -> None:
    os.environ |= in_slurm()
    place = find_place(4, 2, 1, "head:29400")
    assert (place.nodes, place.num_devices) == (NodeGroup(2, 1, "head", 29400), 2)
    assert not started_by_launcher()


@pytest.mark.parametrize(
    ("host", "rank"), [("localhost", 0), (socket.gethostname(), 0), ("192.0.2.7", 1)]
)
def test_of_two_nodes_the_first_is_where_they_meet(host: str, rank: int) -> None:
    assert find_place(2, 2, None, f"{host}:29400").nodes.node_rank == rank


def test_an_address_of_ipv6_is_understood() -> None:
    assert find_place(2, 2, 0, "[::1]:29400").nodes == NodeGroup(2, 0, "[::1]", 29400)


@pytest.mark.parametrize(
    ("nodes", "node_rank", "endpoint", "message"),
    [
        (2, None, None, "2 nodes need a place to meet"),
        (2, None, "head", "2 nodes need a place to meet"),
        (2, None, "head:http", "2 nodes need a place to meet"),
        (2, None, "head:0", "cannot meet at host 'head', port 0"),
        (2, 0, "a;b:29400", "cannot meet at host"),
        (2, 2, "head:29400", "node 2 of 2"),
        (3, None, "192.0.2.7:29400", "which of 3 nodes this is"),
        (3, 0, "head:29400", "cannot be shared evenly by 3 nodes"),
        (None, None, "head:29400", "need --nodes"),
        (None, 1, None, "need --nodes"),
        (1, 5, None, "with one node there is no node 5"),
    ],
)
def test_options_that_say_too_little_or_too_much_are_refused(
    nodes: int | None, node_rank: int | None, endpoint: str | None, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message) as refused:
        find_place(4, nodes, node_rank, endpoint)
    assert "RANK" not in refused.value.hint  # no variable has said so


@pytest.mark.parametrize("rank", [0, 1])
def test_a_plan_of_one_process_is_not_run_by_each_of_several(rank: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    with pytest.raises(InvalidInput, match="LOCAL_WORLD_SIZE is not set") as refused:
        find_place(1, None, None, None)
    assert "unset RANK, WORLD_SIZE, LOCAL_RANK" in refused.value.hint
    os.environ |= in_pod(RANK=rank, LOCAL_WORLD_SIZE=2)
    with pytest.raises(InvalidInput, match=r"started 2 process\(es\), but the plan is for 1"):
        find_place(1, None, None, None)


def test_nodes_under_torchrun_are_refused() -> None:
    os.environ |= launched()
    with pytest.raises(InvalidInput, match="torchrun started this process"):
        find_place(4, 2, 0, "head:29400")
