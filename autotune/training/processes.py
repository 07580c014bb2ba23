"""Several processes that train together, one per device: synchronized here, started in `runtime.launching`.

accelerate sets up backend and device. DDP, which averages the adapter's gradients, is torch's own, since accelerate
wraps no model with sharded weights on GPUs. It handles the adapter alone: frozen weights, quantized or sharded ones
too, are on its ignore list, so it neither sends nor checks them. Layers that get no gradient (the last block's text
stream) are searched for in every step, since a static graph does not work together with accumulation without
synchronization (torch 2.13 fails in the second step).
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autotune.errors import AutotuneError
from autotune.hardware import probe
from autotune.schema import HardwareProfile, PlannedHardware, Strategy, TrainingPlan
from autotune.training.fit import memory_misfits
from autotune.training.sharding import is_sharded

MAX_WAIT = timedelta(hours=12)
"""The others wait while the first encodes a dataset or samples previews; if it dies, the launcher ends them."""


@dataclass(frozen=True)
class Processes:
    """This process among those of the run."""

    rank: int
    world_size: int
    device: torch.device
    strategy: Strategy = "single"

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and reports progress."""
        return self.rank == 0

    @property
    def is_sampler(self) -> bool:
        """Whether this process samples previews: the first, or all if each holds only a part of the weights."""
        return self.is_first or self.strategy == "fsdp2"

    def average(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its mean over all processes, in place; the result is equal on all."""
        if self.world_size > 1:
            torch.distributed.all_reduce(tensor)
            tensor.div_(self.world_size)

    def is_any(self, flag: bool) -> bool:
        """Whether `flag` holds on any process."""
        if self.world_size == 1:
            return flag
        shared = torch.tensor([float(flag)], device=self.device)
        self.average(shared)
        return bool(shared.item() > 0)

    def wait(self) -> None:
        """Wait for all processes to get here."""
        self.is_any(False)

    def replicate(self, transformer: nn.Module) -> nn.Module:
        """The transformer as the steps call it: with several processes, wrapped to average gradients.

        Raises:
            AutotuneError: its weights do not follow the strategy of the plan.
        """
        if self.world_size == 1:
            return transformer
        frozen = [name for name, parameter in transformer.named_parameters() if not parameter.requires_grad]
        buffers = [name for name, _ in transformer.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(transformer, frozen + buffers)  # type: ignore[no-untyped-call]
        actual = "fsdp2" if is_sharded(transformer, self.world_size) else "ddp"
        if actual != self.strategy:
            raise AutotuneError(
                f"the plan's strategy is {self.strategy}, but the weights are those of {actual}",
                hint="this is a bug in autotune: please report it",
            )
        # Gradients are views of buckets, so memory holds them once. Buffers are frozen, so they are not sent.
        return DistributedDataParallel(
            transformer, broadcast_buffers=False, gradient_as_bucket_view=True, find_unused_parameters=True
        )


def make_current(device: torch.device) -> None:
    """Initialize CUDA on `device`: memory counters need it, and libraries launch on the current device."""
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(device)


def join_processes(planned: PlannedHardware, device: torch.device) -> Processes:
    """Join the process group of the plan's processes.

    Raises:
        AutotuneError: the number of processes is not the plan's.
    """
    from accelerate import PartialState

    has_several = planned.num_processes > 1
    state = PartialState(cpu=device.type == "cpu", **({"timeout": MAX_WAIT} if has_several else {}))
    if state.num_processes != planned.num_processes:
        raise AutotuneError(
            f"the plan is for {planned.num_processes} processes, but {state.num_processes} run",
            hint="start it with `autotune train`, which starts them itself, not with accelerate or torchrun",
        )
    own = state.device if has_several and device.type != "cpu" else device
    make_current(own)
    return Processes(state.process_index, planned.num_processes, own, planned.strategy)


def device_misfits(num_processes: int, hardware: HardwareProfile) -> tuple[str, ...]:
    """Why so many processes cannot have one GPU each; empty when they can. On a CPU they share it."""
    kind = hardware.device.kind
    if num_processes == 1 or kind == "cpu":
        return ()
    if kind != "cuda":
        return (f"processes: {num_processes} need a GPU each, {kind} has one",)
    if hardware.device.count < num_processes:
        return (f"processes: {num_processes} need a GPU each, {hardware.device.count} can be seen here",)
    cards = [torch.cuda.get_device_properties(index) for index in range(num_processes)]
    kinds = {(card.name, card.total_memory // 2**30) for card in cards}
    names = ", ".join(sorted(f"{name} ({size} GiB)" for name, size in kinds))
    return (f"processes: they need equal GPUs, the first {num_processes} are {names}",) if len(kinds) > 1 else ()


def card_misfits(plan: TrainingPlan, hardware: HardwareProfile) -> tuple[str, ...]:
    """Why the plan's processes cannot have a GPU with enough memory each; `memory_misfits` checks the first one's."""
    num_processes = plan.frozen.hardware.num_processes
    if misfits := device_misfits(num_processes, hardware):
        return misfits
    others = range(1, num_processes if hardware.device.kind == "cuda" else 1)
    return tuple(misfit for index in others for misfit in memory_misfits(plan, probe(index=index)))
