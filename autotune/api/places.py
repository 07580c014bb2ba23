"""Where this process stands in a run: alone, one of the processes that a launcher started, or
the head of a node.
"""

import contextlib
import os
import socket
from dataclasses import dataclass

from autotune.errors import InvalidInput
from autotune.hardware import probe
from autotune.runtime import (
    THIS_NODE,
    Launch,
    NodeGroup,
    adopt_launch,
    current_launch,
    read_nodes,
    require_planned_number,
)
from autotune.schema import HardwareProfile


@dataclass(frozen=True)
class Place:
    """A process that runs a plan, or starts some of its processes on this machine."""

    launch: Launch | None
    """The launch that it belongs to; None if it starts the processes itself."""
    nodes: NodeGroup
    """The machines on each of which processes are to be started."""
    num_processes: int
    """Number that the plan is for."""

    @property
    def is_first(self) -> bool:
        """Whether it is the one that reports progress: of all processes, and of all nodes."""
        return self.launch.rank == 0 if self.launch else self.nodes.is_first

    @property
    def num_devices(self) -> int:
        """Number of this machine's devices that it answers for."""
        return 1 if self.launch else self.num_processes // self.nodes.num_nodes

    @property
    def starts_processes(self) -> bool:
        """Whether it is to start processes, rather than to train itself."""
        return self.launch is None and self.num_processes > 1

    def read_machine(self) -> HardwareProfile:
        """Facts about this machine and the device that the process has: the first of several, or
        the largest.
        """
        if not self.launch and self.num_devices == 1:
            return probe()
        first = probe(index=0)
        index = (
            self.launch.local_rank % first.device.count
            if self.launch and first.device.kind == "cuda"
            else 0
        )
        return probe(index=index) if index else first


def find_place(
    num_processes: int, nodes: int | None, node_rank: int | None, rdzv_endpoint: str | None
) -> Place:
    """The place of this process in a run of so many, by what the user says of nodes, else by the
    environment.

    Torch and accelerate then find the same in the environment.

    Raises:
        InvalidInput: the environment or the options contradict themselves or each other, or the
            number is another.
    """
    launch, group, per_node = None, THIS_NODE, None
    if nodes is not None or rdzv_endpoint is not None or node_rank is not None:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise InvalidInput(
                "torchrun started this process, so --nodes, --node-rank and --rdzv-endpoint have "
                "nothing to start",
                hint="leave them out, or start `autotune train` without torchrun on each machine",
            )
        group = _group_from(nodes, node_rank, rdzv_endpoint)
    elif (launch := current_launch()) is None and (pods := read_nodes(os.environ)):
        group, per_node = pods
    require_planned_number(launch, group, num_processes, per_node)
    adopt_launch(launch)
    return Place(launch, group, num_processes)


def _group_from(nodes: int | None, node_rank: int | None, rdzv_endpoint: str | None) -> NodeGroup:
    if nodes == 1 and node_rank:
        raise InvalidInput(
            f"with one node there is no node {node_rank}: they are counted from 0",
            hint="leave --node-rank out, or give the number of all machines with --nodes",
        )
    if nodes is None or nodes == 1:
        if nodes is None and (node_rank or rdzv_endpoint):
            raise InvalidInput(
                "--node-rank and --rdzv-endpoint need --nodes", hint="add --nodes NUMBER"
            )
        return THIS_NODE
    host, _, port = (rdzv_endpoint or "").rpartition(":")
    if not host or not port.isascii() or not port.isdecimal():
        raise InvalidInput(
            f"{nodes} nodes need a place to meet, {rdzv_endpoint or 'none'} was given",
            hint=(
                "add --rdzv-endpoint HOST:PORT with the first node's name and a free port there, "
                "such as 29400"
            ),
        )
    if node_rank is None:
        node_rank = 0 if _is_here(host.strip("[]")) else 1
        if node_rank and nodes > 2:
            raise InvalidInput(
                f"it is unclear which of {nodes} nodes this is",
                hint=f"add --node-rank, from 1 to {nodes - 1}",
            )
    return NodeGroup(nodes, node_rank, host, int(port[:6]))


def _is_here(host: str) -> bool:
    """Whether a name or address is this machine's own: no other can be listened on."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as listener:
                listener.bind(address)
                return True
    return False
