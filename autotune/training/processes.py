"""Several processes that train together, one per device: kept in step here, started in `launching`.

accelerate sets up backend and device. DDP, which averages the adapter's gradients, is torch's own, for accelerate wraps
no model with sharded weights on GPUs. It sees the adapter alone: frozen weights, quantized or sharded ones too, are
declared out of its sight, so it neither sends nor checks them. Layers that get no gradient (the last block's text
stream) are looked for in every step, since a static graph does not go with accumulation without synchronization (torch
2.13 fails in the second step).
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import nn

from autotune.errors import AutotuneError
from autotune.hardware import probe
from autotune.schema import HardwareProfile, PlannedHardware, Strategy, TrainingPlan
from autotune.training.fit import memory_misfits
from autotune.training.sharding import is_sharded

LONGEST_WAIT = timedelta(hours=12)
"""The others wait while the first encodes a data set or samples previews; if it dies, the launcher ends them."""


@dataclass(frozen=True)
class Processes:
    """This process among those of the run."""

    rank: int
    world_size: int
    device: torch.device
    strategy: Strategy = "single"

    @property
    def is_first(self) -> bool:
        """Whether this one writes files and tells events."""
        return self.rank == 0

    @property
    def samples(self) -> bool:
        """Whether this one runs previews: the first, or all where each holds but a part of the weights."""
        return self.is_first or self.strategy == "fsdp2"

    def average(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its mean over all processes, in place; the result is the same on all."""
        if self.world_size > 1:
            torch.distributed.all_reduce(tensor)
            tensor.div_(self.world_size)

    def any(self, flag: bool) -> bool:
        """Whether `flag` holds on any process."""
        if self.world_size == 1:
            return flag
        shared = torch.tensor([float(flag)], device=self.device)
        self.average(shared)
        return bool(shared.item() > 0)

    def wait(self) -> None:
        self.any(False)

    def replicate(self, transformer: nn.Module) -> nn.Module:
        """The transformer as the steps call it: with several processes, so that gradients are averaged.

        Raises:
            AutotuneError: what came of it is not the strategy of the plan.
        """
        if self.world_size == 1:
            return transformer
        from torch.nn.parallel import DistributedDataParallel

        frozen = [name for name, parameter in transformer.named_parameters() if not parameter.requires_grad]
        buffers = [name for name, _ in transformer.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(transformer, frozen + buffers)  # type: ignore[no-untyped-call]
        actual = "fsdp2" if is_sharded(transformer, self.world_size) else "ddp"
        if actual != self.strategy:
            raise AutotuneError(
                f"the plan's strategy is {self.strategy}, but the weights are those of {actual}",
                hint="this is a bug in autotune: please report it",
            )
        # Buckets as gradients: nothing is held twice. Buffers are frozen, so they are not sent.
        return DistributedDataParallel(
            transformer, broadcast_buffers=False, gradient_as_bucket_view=True, find_unused_parameters=True
        )


def make_current(device: torch.device) -> None:
    """Start CUDA on `device`: its memory counters exist only then, and libraries launch on the current device."""
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(device)


def join(planned: PlannedHardware, device: torch.device) -> Processes:
    """Take this process's place among those that the plan names.

    Raises:
        AutotuneError: another number was started than the plan says.
    """
    from accelerate import PartialState

    several = planned.num_processes > 1
    state = PartialState(cpu=device.type == "cpu", **({"timeout": LONGEST_WAIT} if several else {}))
    if state.num_processes != planned.num_processes:
        raise AutotuneError(
            f"the plan is for {planned.num_processes} processes, but {state.num_processes} run",
            hint="start it with `autotune train`, which starts them itself, not with accelerate or torchrun",
        )
    own = state.device if several and device.type != "cpu" else device
    make_current(own)
    return Processes(state.process_index, planned.num_processes, own, planned.strategy)


def device_misfits(num_processes: int, hardware: HardwareProfile) -> tuple[str, ...]:
    """Why so many processes cannot have a device each; empty when they can. On CPU they share it."""
    kind = hardware.device.kind
    if num_processes == 1 or kind == "cpu":
        return ()
    if kind != "cuda":
        return (f"processes: {num_processes} need a GPU each, {kind} has one",)
    if hardware.device.count < num_processes:
        return (f"processes: {num_processes} need a GPU each, {hardware.device.count} can be seen here",)
    cards = [torch.cuda.get_device_properties(index) for index in range(num_processes)]
    unlike = {(card.name, card.total_memory // 2**30) for card in cards}
    names = ", ".join(sorted(f"{name} ({size} GiB)" for name, size in unlike))
    return (f"processes: they need equal GPUs, the first {num_processes} are {names}",) if len(unlike) > 1 else ()


def card_misfits(plan: TrainingPlan, hardware: HardwareProfile) -> tuple[str, ...]:
    """Why each of the plan's processes cannot have a device with room; of the first one `memory_misfits` tells."""
    number = plan.frozen.hardware.num_processes
    if few := device_misfits(number, hardware):
        return few
    others = range(1, number if hardware.device.kind == "cuda" else 1)
    return tuple(misfit for index in others for misfit in memory_misfits(plan, probe(index=index)))
