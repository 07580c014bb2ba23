"""What several processes change in a prediction: memory of one device, and time for what they
send each other.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autotune.cost.memory import Resident
from autotune.schema import HardwareProfile, MemoryBudget, Strategy

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


@dataclass(frozen=True)
class Parallel:
    """How many processes train together, and by which strategy."""

    strategy: Strategy = "single"
    num_processes: int = 1

    @property
    def num_shards(self) -> int:
        """Processes that hold the frozen weights together: 1 if each has them all."""
        return self.num_processes if self.strategy == "fsdp2" else 1

    def budget_of_one(self, budget: MemoryBudget, hardware: HardwareProfile) -> MemoryBudget:
        """What one process may take: each has a device of its own, but on a CPU they share the
        memory.
        """
        is_shared = hardware.device.kind == "cpu"
        return (
            budget.changed(num_bytes=budget.num_bytes // self.num_processes)
            if is_shared
            else budget
        )

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
        link decides.
        """
        if self.strategy == "single":
            return 0.0
        paths = {link.path for link in hardware.device.links}
        within = min(
            (LINK_BANDWIDTH.get(path, PCIE_BANDWIDTH) for path in paths), default=PCIE_BANDWIDTH
        )
        others = (self.num_processes - 1) / self.num_processes
        seconds = (
            2 * model_bytes.adapter_bytes * others / within
        )  # reduce, then gather: an all-reduce
        if self.num_shards > 1:
            gathered = (
                PASSES
                * accumulation
                * model_bytes.weight_bytes
                * (self.num_shards - 1)
                / self.num_shards
            )
            seconds += gathered / within
        return seconds


ONE_PROCESS = Parallel()
