"""What several processes change in a prediction: memory of one device, and time for what they
send each other.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autotune.cost.memory import Resident
from autotune.schema import HardwareProfile, MemoryBudget, Strategy, count_shards

if TYPE_CHECKING:
    from autotune.cost.model import ModelBytes

GATHERED_BLOCKS = 2
"""The block that runs and the next one, which FSDP2 gathers meanwhile."""
PASSES = 2
"""Weights are gathered for the forward and again for the backward pass."""

LINK_BANDWIDTH = {"nvlink": 150e9}
PCIE_BANDWIDTH = 12e9
"""Bytes per second and direction in a collective: about half of what third-generation NVLink and
PCIe 4.0 x16 carry. Round figures, not measured here."""
COLLECTIVE_SHARE = 0.5
"""Of an interconnect's nominal bandwidth that a collective gets: the same round figure."""
USUAL_INTERCONNECT = 10e9 / 8
"""Bytes per second between nodes if the user does not say: an Ethernet of 10 Gbit/s."""


@dataclass(frozen=True)
class Parallel:
    """How many processes train together, and by which strategy."""

    strategy: Strategy = "single"
    num_processes: int = 1
    num_nodes: int = 1
    """Machines that these are on, as many on each."""
    interconnect_bytes_per_second: float | None = None
    """Between two nodes, in one direction; None for `USUAL_INTERCONNECT`."""

    @property
    def num_shards(self) -> int:
        """Processes that hold the frozen weights together: 1 if each has them all."""
        return count_shards(self.strategy, self.num_processes, self.num_nodes)

    @property
    def processes_per_node(self) -> int:
        """Processes on each machine, which share its host memory."""
        return self.num_processes // self.num_nodes

    def budget_of_one(self, budget: MemoryBudget, hardware: HardwareProfile) -> MemoryBudget:
        """What one process may take: each has a device of its own, but on a CPU they share the
        memory.
        """
        is_shared = hardware.device.kind == "cpu"
        return (
            budget.changed(num_bytes=budget.num_bytes // self.processes_per_node)
            if is_shared
            else budget
        )

    @property
    def sharded(self) -> "tuple[Parallel, ...]":
        """The ways to shard weights over these processes, the one that sends least over the
        interconnect first.
        """
        ways: tuple[Strategy, ...] = ("fsdp2",)
        if 1 < self.num_nodes < self.num_processes:
            ways = ("hybrid", "fsdp2")
        return tuple(replace(self, strategy=way) for way in ways)

    def weight_bytes(self, model_bytes: "ModelBytes") -> int:
        """Frozen weights that one device keeps."""
        return -(-model_bytes.weight_bytes // self.num_shards)

    def resident(self, whole: Resident, model_bytes: "ModelBytes") -> Resident:
        """What one device keeps of a model that alone would take `whole`.

        DDP's buckets hold each gradient once more, beside the one that accumulates without
        synchronization.
        """
        if self.strategy == "single":
            return whole
        gathered = 0
        if self.num_shards > 1:  # what no block holds is gathered as one, for the whole pass
            gathered = GATHERED_BLOCKS * model_bytes.largest_block_bytes + model_bytes.outside_bytes
        return replace(
            whole,
            weight_bytes=self.weight_bytes(model_bytes)
            if self.num_shards > 1
            else whole.weight_bytes,
            bucket_bytes=whole.adapter_bytes,
            gathered_bytes=gathered,
        )

    def exchange_seconds(
        self, hardware: HardwareProfile, model_bytes: "ModelBytes", accumulation: int
    ) -> float:
        """What one step sends; it overlaps with computing.

        Each collective is a ring, through which every byte but a process's own passes: its slowest
        link decides. A ring of `hybrid` that gathers weights stays within a node.
        """
        if self.strategy == "single":
            return 0.0
        paths = {link.path for link in hardware.device.links}
        within = min(
            (LINK_BANDWIDTH.get(path, PCIE_BANDWIDTH) for path in paths), default=PCIE_BANDWIDTH
        )
        across = within
        if self.num_nodes > 1:
            across = COLLECTIVE_SHARE * (self.interconnect_bytes_per_second or USUAL_INTERCONNECT)
            across = min(within, across) if self.num_nodes < self.num_processes else across
        others = (self.num_processes - 1) / self.num_processes
        seconds = (
            2 * model_bytes.adapter_bytes * others / across
        )  # reduce, then gather: an all-reduce
        if self.num_shards > 1:
            gathered = (
                PASSES
                * accumulation
                * model_bytes.weight_bytes
                * (self.num_shards - 1)
                / self.num_shards
            )
            seconds += gathered / (within if self.strategy == "hybrid" else across)
        return seconds


ONE_PROCESS = Parallel()
