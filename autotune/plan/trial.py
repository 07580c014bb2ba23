"""What happened when a candidate ran for a few steps."""

import statistics
from typing import Literal

from pydantic import Field

from autotune.plan.base import Frozen, NaturalInt
from autotune.plan.candidate import Candidate

Outcome = Literal[
    "ok", "oom", "host_oom", "spill", "timeout", "unsupported", "numerics", "crash", "unpaid"
]
"""How a trial ended. `host_oom`: host memory ran out although the device has its own; if both
are one it is `oom`. `unpaid`: it ran, but the planned steps do not pay its start-up back."""
MAX_RESIDUAL = 5.0
"""Limit of a logarithmic residual, a factor of 148; what is further from its prediction counts
as this far."""


class QuantizationError(Frozen):
    """How far quantized layers are from the real weights: relative error of their outputs on
    random inputs."""

    overall: float = Field(ge=0)
    """Relative error of all quantized layers together."""
    worst: float = Field(ge=0)
    """Relative error of the block that is furthest off."""
    worst_block: int = NaturalInt


class PhasePeak(Frozen):
    """How long a phase of a run took and the most memory it had."""

    name: str
    seconds: float = Field(ge=0)
    device_bytes: int | None
    """Peak memory as the device's allocator counts it; None on CPU, where host memory is device
    memory."""
    host_bytes: int | None
    """Largest resident memory of the process; None if the system does not tell."""


class TrialResult(Frozen):
    """What happened when a candidate ran for a few real steps. Failures are evidence, too.

    Example:
        >>> [(trial.outcome, trial.median_step_seconds) for trial in autotune.load_plan("plan.yaml").frozen.trials]
    """

    candidate: Candidate
    outcome: Outcome
    step_seconds: tuple[float, ...] = ()
    """Wall time of every steady optimizer step of the whole effective batch, in order, without
    warm-up steps."""
    warmup_seconds: tuple[float, ...] = ()
    """Wall time of the first steps, and of the step whose memory was measured."""
    load_seconds: float | None = None
    peak_memory_bytes: int | None = None
    """Step memory: peak of a training step, as the device's allocator counts it."""
    load_peak_memory_bytes: int | None = None
    """Peak device memory while the weights were loaded; None on CPU."""
    confirms: bool = False
    """Whether this is the longer trial of a candidate that had won, whose figures a plan
    promises."""
    phases: tuple[PhasePeak, ...] = ()
    """Every phase of a run that a confirming trial could rehearse."""
    allocator_retries: int = Field(default=0, ge=0)
    """Number of times that the device's allocator ran out, freed its cache, and went on."""
    memory_cap_bytes: int | None = None
    """Memory limit that the user set. Such a trial is no evidence for a device that really has
    only so much."""
    host_memory_bytes: int | None = None
    """Largest resident memory of the child process."""
    wall_seconds: float | None = Field(default=None, ge=0)
    """Wall time of the whole trial, from the request to the result."""
    final_loss: float | None = None
    quantization_error: QuantizationError | None = None
    """Measured on real weights; None without quantization and for random weights."""
    message: str = ""
    """Why the outcome is not `ok`, in one line; empty if it is."""

    @property
    def median_step_seconds(self) -> float | None:
        """Median wall time of the steady steps; None if there are none."""
        return statistics.median(self.step_seconds) if self.step_seconds else None


class Residual(Frozen):
    """How far a trial was from its prediction before any calibration: logarithms of measured
    over predicted."""

    time: float = Field(ge=-MAX_RESIDUAL, le=MAX_RESIDUAL)
    memory: float = Field(ge=-MAX_RESIDUAL, le=MAX_RESIDUAL)
