"""The processes of a run: those of one machine are started here by torch's elastic launcher; a
process that torchrun started finds its place in the environment. Importing this loads no torch."""

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from autotune.errors import InvalidInput

OWN_RUN_ID = "autotune-"
"""How the run ids of `launch` begin, by which processes that autotune itself started are known."""

TORCH_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables with which torchrun names a process."""

OTHER_RANKS = tuple(
    f"{prefix}_{name}"
    for prefix in ("PMI", "OMPI_COMM_WORLD", "MV2_COMM_WORLD")
    for name in ("RANK", "SIZE")
)
"""Variables that accelerate (`state.py`) would take for ranks besides those of torch."""

SHUTDOWN_SECONDS = 900
"""How long processes may take to finish their step and write a checkpoint after a signal; older
torch gives 30."""

MAX_JOIN_SECONDS = 3600
"""How long processes wait for each other at the start: others may still load a container or a
model."""


@dataclass(frozen=True)
class Launch:
    """This process among those that a launcher started, and where they meet."""

    rank: int
    local_rank: int
    """Number of this process among those of its node."""
    world_size: int
    local_world_size: int
    endpoint: str
    """`HOST:PORT` of the first process."""
    is_own: bool = False
    """Whether autotune started it."""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self | None:
        """The launch that a process with this environment belongs to; None if it was started alone.

        Raises:
            InvalidInput: torchrun's variables are incomplete or contradict each other.
        """
        size = environment.get("WORLD_SIZE", "1"), environment.get("RANK", "0")
        if "TORCHELASTIC_RUN_ID" not in environment and size == ("1", "0"):
            return None  # accelerate sets these for a process alone
        names = (*TORCH_RANKS, "MASTER_PORT")
        values = {name: environment.get(name, "") for name in (*names, "MASTER_ADDR")}
        if all(values[name].isdecimal() and len(values[name]) < 10 for name in names):
            rank, local_rank, world_size, local_size, port = (int(values[name]) for name in names)
            is_place = rank < world_size and local_rank < local_size <= world_size
            if is_place and 0 < port < 2**16 and values["MASTER_ADDR"]:
                endpoint = f"{values['MASTER_ADDR']}:{port}"
                is_own = environment.get("TORCHELASTIC_RUN_ID", "").startswith(OWN_RUN_ID)
                return cls(rank, local_rank, world_size, local_size, endpoint, is_own)
        told = ", ".join(f"{name}={value or 'nothing'}" for name, value in values.items())
        raise InvalidInput(
            f"the launcher's variables name no process among others: {told}",
            hint=f"start the processes by torchrun; to train alone, unset {', '.join(TORCH_RANKS)}",
        )


def current_launch() -> Launch | None:
    """The launch that this process belongs to. Raises InvalidInput as `Launch.read`."""
    return Launch.read(os.environ)


def started_by_launcher() -> bool:
    """Whether this is one of the processes that a launcher, autotune's or another, started."""
    return current_launch() is not None


def is_first_process() -> bool:
    """Whether this is the only process of a command, or the first of several: the one that prints
    and writes.

    Example:
        >>> if autotune.is_first_process():
        ...     print("written by one process, however many train")
    """
    launch = current_launch()
    return launch is None or launch.rank == 0


def adopt_launch(num_processes: int) -> Launch | None:
    """The launch of this process, which torch and accelerate then find alone in the environment.

    Raises:
        InvalidInput: other than `num_processes`, the plan's, were started.
    """
    launch = current_launch()
    if launch is not None and launch.world_size != num_processes:
        raise InvalidInput(
            f"a launcher started {launch.world_size} process(es), but the plan is for "
            f"{num_processes}",
            hint="plan again for what is there (autotune plan --from PLAN --gpus N), or start as "
            "many as the plan says; alone, `autotune train` starts those of one machine",
        )
    for name in (*OTHER_RANKS, *(() if launch else TORCH_RANKS)):
        os.environ.pop(name, None)
    return launch


def launch(
    num_processes: int, arguments: Sequence[str], checkpoints: Callable[[], set[Path]]
) -> int:
    """Run `python ARGUMENTS` in several processes of this machine; returns the exit status that one
    process would have.

    On a signal all get SIGTERM, finish their step and write a checkpoint; those that take too long
    are killed.

    Args:
        num_processes: how many to start.
        arguments: those that each process is called with.
        checkpoints: lists the run's checkpoints; a new one after a signal means that the run was
            preempted (75).
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(SHUTDOWN_SECONDS)
    # torch warns of hosts whose addresses have no name
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_processes)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=f"{OWN_RUN_ID}{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    before = checkpoints()
    try:
        elastic_launch(config, sys.executable)("-u", *arguments)
    except ChildFailedError as failure:
        code = int(failure.get_first_failure()[1].exitcode)
        return code if code >= 0 else 128 - code  # as a shell reports a signal
    except SignalException as stop:
        return 75 if checkpoints() - before else 128 + stop.sigval
    return 0
