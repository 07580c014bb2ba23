"""Starts the processes of a run by torch.distributed.run's engine. Importing this loads no
torch.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from autotune.errors import AutotuneError, first_line
from autotune.runtime.launchers import (
    OTHER_RANKS,
    OWN_RUN_ID,
    SLURM_RANKS,
    THIS_NODE,
    TORCH_RANKS,
    Launch,
    NodeGroup,
    read_launch,
)

SHUTDOWN_SECONDS = 900
"""How long processes may take to finish their step and write a checkpoint after a signal; older
torch gives 30.
"""

MAX_JOIN_SECONDS = 3600
"""How long processes and nodes wait for each other at the start: others may still load a
container or a model.
"""


def current_launch() -> Launch | None:
    """The launch that this process belongs to; None if it was started alone. Raises InvalidInput
    as `read_launch`.
    """
    return read_launch(os.environ)


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


def adopt_launch(launch: Launch | None) -> None:
    """Let the environment tell torch and accelerate that launch and no other, or that this
    process is alone.
    """
    for name in (*OTHER_RANKS, *TORCH_RANKS, *(() if launch else SLURM_RANKS)):
        os.environ.pop(name, None)
    if launch:
        os.environ.update(launch.variables)


def launch(
    num_processes: int,
    arguments: Sequence[str],
    checkpoints: Callable[[], set[Path]],
    nodes: NodeGroup = THIS_NODE,
) -> int:
    """Run `python ARGUMENTS` in several processes; returns the exit status that one process would
    have.

    On a signal all get SIGTERM, finish their step and write a checkpoint; those that take too long
    are killed.

    Args:
        num_processes: how many to start on this machine.
        arguments: those that each process is called with.
        checkpoints: lists the run's checkpoints; a new one after a signal means that the run was
            preempted (75).
        nodes: the machines that start as many each.

    Raises:
        AutotuneError: the other nodes did not come.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(SHUTDOWN_SECONDS)
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # torch warns of hosts whose addresses have no name
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_processes)))
    several = nodes.num_nodes > 1
    config = LaunchConfig(
        min_nodes=nodes.num_nodes,
        max_nodes=nodes.num_nodes,
        nproc_per_node=num_processes,
        run_id=f"{OWN_RUN_ID}{nodes.num_nodes}-nodes" if several else f"{OWN_RUN_ID}{os.getpid()}",
        rdzv_backend="static"
        if several
        else "c10d",  # so that the first node is the one that the user says
        rdzv_endpoint=f"{nodes.address}:{nodes.port}",
        rdzv_configs={"rank": nodes.node_rank, "timeout": MAX_JOIN_SECONDS} if several else {},
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
    except DistError as error:
        raise AutotuneError(
            f"the {nodes.num_nodes} nodes did not meet at {nodes.address}:{nodes.port}: "
            f"{first_line(error)}",
            hint=(
                "start the same command on every node, and make sure that they can reach that "
                "port "
                "on the first one"
            ),
        ) from error
    return 0
