"""What a job must ask a cluster for, so that a plan's run fits: machines, GPUs, cores, host
memory and time.
"""

import math
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Self

from autotune.errors import InvalidInput
from autotune.schema import TrainingPlan

GIB = 2**30
TIME_MARGIN = 1.5
"""Factor of the predicted time: another machine of the same kind, and data that comes over a
network.
"""
START_SECONDS = 900
"""For starting containers, loading a model over a network and encoding on each node."""
MEMORY_MARGIN = 1.25
"""Factor of the predicted host memory."""
MIN_NOTICE_SECONDS = 120
CORES_BESIDE_WORKERS = 3
"""Cores of each process on a GPU: for the step, for autograd's thread, and for the one that
writes checkpoints.
"""
MAX_HOURS = 1e5
"""Eleven years, longer than clusters run."""
PREEMPTED = 75
"""Exit status of a run that wrote its checkpoint and wants to be started again."""


@dataclass(frozen=True)
class JobNeeds:
    """What to ask a cluster for."""

    name: str
    """Name of the job, with only the characters that a host name may have."""
    num_nodes: int
    processes_per_node: int
    gpus_per_node: int
    """0 for a plan that trains on CPUs."""
    cores_per_process: int | None
    """None for a plan that trains on CPUs: it does not say with how many cores its time was
    predicted.
    """
    host_memory_gib: int | None
    """For each node; None if the plan does not know, or if no limit holds what the device takes."""
    seconds: int
    """Time limit of one start, in whole minutes."""
    notice_seconds: int
    """How long before the limit, or a kill, the run is told, so that it can finish its step and
    write a checkpoint.
    """

    @classmethod
    def of_plan(
        cls, plan: TrainingPlan, *, num_nodes: int | None = None, hours: float | None = None
    ) -> Self:
        """What the plan predicts, with margins.

        Args:
            plan: measured or predicted.
            num_nodes: machines that share its processes; by default those that it was made for.
            hours: time limit of one start, if it is shorter or longer than the prediction's.

        Raises:
            InvalidInput: the processes cannot be shared evenly by the nodes, or the limit is too
                short for any step, or beyond `MAX_HOURS`.
        """
        hardware, expected = plan.frozen.hardware, plan.frozen.expected
        number, num_nodes = (
            hardware.num_processes,
            hardware.num_nodes if num_nodes is None else num_nodes,
        )
        if num_nodes < 1 or number % num_nodes:
            raise InvalidInput(
                f"the plan's {number} process(es) cannot be shared evenly by {num_nodes} nodes",
                hint=f"use a number of nodes that divides {number}, or plan again with --gpus",
            )
        local = number // num_nodes
        encoder = plan.frozen.caching.other_gpu
        also = max(2, int(encoder.removeprefix("cuda:")) + 1) if encoder else 0
        is_cpu = hardware.device_kind == "cpu"
        needed = (
            expected.run_memory_bytes * local
            if is_cpu
            else (expected.host_memory_bytes or 0) * local
        )
        is_limited = needed and hardware.match_keys.get("memory_kind") != "integrated"
        notice = max(MIN_NOTICE_SECONDS, math.ceil(3 * expected.step_seconds) + 60)
        seconds = plan.job_seconds * TIME_MARGIN + START_SECONDS if hours is None else hours * 3600
        if hours is not None and not hours <= MAX_HOURS:
            raise InvalidInput(
                f"a time limit of {hours:g} hours is longer than any cluster gives",
                hint=f"give one of at most {MAX_HOURS:.0f} with --hours",
            )
        if not math.isfinite(seconds) or seconds <= 2 * notice:
            raise InvalidInput(
                f"a time limit of {seconds / 3600:.3g} hours leaves no time for steps: a run needs "
                f"{notice} s to stop",
                hint=f"give it at least {math.ceil(3 * notice / 36) / 100} with --hours",
            )
        return cls(
            name=_host_name(PurePosixPath(plan.job.output).name),
            num_nodes=num_nodes,
            processes_per_node=local,
            gpus_per_node=0 if is_cpu else max(local, also),
            cores_per_process=None
            if is_cpu
            else plan.frozen.settings.data_workers + CORES_BESIDE_WORKERS,
            host_memory_gib=math.ceil(needed * MEMORY_MARGIN / GIB) if is_limited else None,
            seconds=math.ceil(seconds / 60) * 60,
            notice_seconds=notice,
        )

    @property
    def summary(self) -> str:
        """One line without anything that a user wrote, for a comment."""
        memory = (
            "as the cluster gives"
            if self.host_memory_gib is None
            else f"{self.host_memory_gib} GiB"
        )
        return (
            f"{self.num_nodes} node(s), each with {self.processes_per_node} process(es), "
            f"{self.gpus_per_node} GPU(s), "
            f"host memory {memory}"
        )


def _host_name(text: str) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
    return f"autotune-{slug}" if slug else "autotune"
