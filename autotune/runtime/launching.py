"""Starts the processes of a run by torch.distributed.run's engine. Importing this loads no torch."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

OTHER_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE",
               "MV2_COMM_WORLD_SIZE")  # fmt: skip
"""Variables by which torch and accelerate (`state.py`) find their ranks, whoever set them."""

SHUTDOWN_SECONDS = 900
"""How long processes may take to finish their step and write a checkpoint after a signal; older torch gives 30."""


def started_by_launcher() -> bool:
    """Whether this is one of the processes that `launch` starts."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_first_process() -> bool:
    """Whether this is the only process of a command, or the first of several: the one that prints and writes."""
    return not started_by_launcher() or os.environ.get("RANK", "0") == "0"


def ignore_other_launchers() -> None:
    """Remove a cluster job's ranks from the environment: accelerate would wait for those that this run has not."""
    for name in () if started_by_launcher() else OTHER_RANKS:
        os.environ.pop(name, None)


def launch(num_processes: int, arguments: Sequence[str], checkpoints: Callable[[], set[Path]]) -> int:
    """Run `python ARGUMENTS` in several processes; returns the exit status that one process would have.

    On a signal all get SIGTERM, finish their step and write a checkpoint; those that take too long are killed.

    Args:
        num_processes: how many to start on this machine.
        arguments: those that each process is called with.
        checkpoints: lists the run's checkpoints; a new one after a signal means that the run was preempted (75).
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(SHUTDOWN_SECONDS)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns even though every layer got a gradient
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
    before = checkpoints()
    try:
        elastic_launch(config, sys.executable)("-u", *arguments)
    except ChildFailedError as failure:
        code = int(failure.get_first_failure()[1].exitcode)
        return code if code >= 0 else 128 - code  # as a shell reports a signal
    except SignalException as stop:
        return 75 if checkpoints() - before else 128 + stop.sigval
    return 0
