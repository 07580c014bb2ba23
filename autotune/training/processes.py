"""Several processes that train together, one per device: started by torch.distributed.run's engine, kept in step here.

accelerate's `PartialState` sets up the backend and the device. Its model wrapper (DDP) is not used: DDP hooks each
gradient, needs `no_sync` for accumulation, keeps buckets, and fails on adapted layers that get no gradient (the last
block's text stream). An adapter's gradients are small, so they are averaged at once, after the last micro-batch, in
one flat tensor: nothing is sent that need not be, and the model stays what a single process has.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from autotune.errors import AutotuneError
from autotune.training.memory import make_current

LONGEST_WAIT = timedelta(hours=12)
"""The others wait while the first encodes a data set or samples previews; if it dies, the launcher ends them."""

SHUTDOWN_SECONDS = 900
"""How long processes may take to finish their step and write a checkpoint after a signal."""


@dataclass(frozen=True)
class Processes:
    """This process among those of the run."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this one writes files and tells events."""
        return self.rank == 0

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by their mean over all processes, in place; the result is the same on all."""
        if self.world_size == 1 or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
        torch.distributed.all_reduce(flat)
        flat /= self.world_size
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def any(self, flag: bool) -> bool:
        """Whether `flag` holds on any process."""
        if self.world_size == 1:
            return flag
        shared = torch.tensor([float(flag)], device=self.device)
        self.average([shared])
        return bool(shared.item() > 0)

    def wait(self) -> None:
        """Until all processes are here."""
        self.any(False)


def join(num_processes: int, device: torch.device) -> Processes:
    """Take this process's place among `num_processes`.

    Raises:
        AutotuneError: another number was started than the plan says.
    """
    from accelerate import PartialState

    arguments = {"timeout": LONGEST_WAIT} if num_processes > 1 else {}
    state = PartialState(cpu=device.type == "cpu", **arguments)
    if state.num_processes != num_processes:
        raise AutotuneError(
            f"the plan is for {num_processes} processes, but {state.num_processes} run",
            hint="start it with `autotune train`, which starts them itself, not with accelerate or torchrun",
        )
    shared = num_processes > 1 and device.type != "cpu"
    own = state.device if shared else device
    make_current(own)
    return Processes(state.process_index, num_processes, own)


def started_by_launcher() -> bool:
    """Whether this is one of the processes that `launch` starts."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launch(num_processes: int, arguments: Sequence[str]) -> int:
    """Run `autotune ARGUMENTS` in that many processes; returns the exit status, as one process would give it.

    On a signal all get SIGTERM, finish their step and write a checkpoint.
    """
    import logging

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(SHUTDOWN_SECONDS)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=f"autotune-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "autotune", *arguments)
    except ChildFailedError as failure:
        return int(failure.get_first_failure()[1].exitcode) % 256
    except SignalException:
        return 75
    return 0
