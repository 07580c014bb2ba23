"""What several processes change in a prediction: memory of one device, and time for what they send each other."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autotune.cost.memory import Resident
from autotune.schema import HardwareProfile, Strategy

if TYPE_CHECKING:
    from autotune.cost.model import ModelBytes

GATHERED_BLOCKS = 2
"""The block that runs and the next one, which FSDP2 gathers meanwhile."""
PASSES = 2
"""Weights are gathered for the forward and again for the backward pass."""

LINK_BANDWIDTH = {"nvlink": 150e9}
PCIE_BANDWIDTH = 12e9
"""Bytes per second and direction in a collective: about half of what third-generation NVLink and PCIe 4.0 x16 carry.
Round figures, not measured here."""


@dataclass(frozen=True)
class Parallel:
    """How many processes train together, and by which strategy."""

    strategy: Strategy = "single"
    num_processes: int = 1

    def weight_bytes(self, storage: "ModelBytes") -> int:
        """Frozen weights that one device keeps."""
        shards = self.num_processes if self.strategy == "fsdp2" else 1
        return -(-storage.weight_bytes // shards)

    def resident(self, whole: Resident, storage: "ModelBytes") -> Resident:
        """What one device keeps of a model that alone would take `whole`.

        DDP's buckets hold each gradient once more, beside the one that accumulates without synchronization.
        """
        if self.strategy == "single":
            return whole
        gathered = 0
        if self.strategy == "fsdp2":  # what no block holds is gathered as one, for the whole pass
            gathered = GATHERED_BLOCKS * storage.largest_block_bytes + storage.outside_bytes
        return replace(
            whole,
            weight_bytes=self.weight_bytes(storage) if self.strategy == "fsdp2" else whole.weight_bytes,
            bucket_bytes=whole.adapter_bytes,
            gathered_bytes=gathered,
        )

    def exchange_seconds(self, hardware: HardwareProfile, storage: "ModelBytes", accumulation: int) -> float:
        """What one step sends, over the link; it overlaps with computing."""
        if self.strategy == "single":
            return 0.0
        others = (self.num_processes - 1) / self.num_processes
        sent = 2 * storage.adapter_bytes * others  # reduce, then gather: a ring's all-reduce
        if self.strategy == "fsdp2":
            sent += PASSES * accumulation * storage.weight_bytes * others
        paths = {link.path for link in hardware.device.links}
        return sent / min((LINK_BANDWIDTH.get(path, PCIE_BANDWIDTH) for path in paths), default=PCIE_BANDWIDTH)
