"""What happened when a candidate ran for a few steps."""

import statistics
from typing import Literal

from pydantic import Field

from autotune.schema.base import Frozen, NaturalInt
from autotune.schema.candidate import Candidate

Outcome = Literal["ok", "oom", "host_oom", "spill", "timeout", "unsupported", "numerics", "crash"]
"""`host_oom`: beside a device with memory of its own it was the host's that ran out; where both are one it is `oom`."""
MAX_RESIDUAL = 5.0
"""A factor of 148: what is further from its prediction is counted as this far."""


class QuantizationError(Frozen):
    """How far quantized layers are from the real weights: relative error of their outputs on random inputs."""

    overall: float = Field(ge=0)
    """Of all quantized layers together."""
    worst: float = Field(ge=0)
    """Of the block that is furthest off."""
    worst_block: int = NaturalInt


class PhasePeak(Frozen):
    """How long a phase of a run took and the most memory it had."""

    name: str
    seconds: float = Field(ge=0)
    device_bytes: int | None
    """By the device's allocator; None on CPU, where the host's memory is the device's."""
    host_bytes: int | None
    """Largest resident memory of the process; None where the system does not tell."""


class TrialResult(Frozen):
    """What happened when a candidate ran for a few real steps. Failures teach as well."""

    candidate: Candidate
    outcome: Outcome
    step_seconds: tuple[float, ...] = ()
    """Every steady optimizer step (the whole effective batch), in order; warm-up steps are apart."""
    warmup_seconds: tuple[float, ...] = ()
    """The first steps, and the one whose memory was measured."""
    load_seconds: float | None = None
    peak_memory_bytes: int | None = None
    """Device memory of the step, as the allocator counts it."""
    load_peak_memory_bytes: int | None = None
    """Device memory while the weights arrived; None on CPU."""
    confirms: bool = False
    """Whether this is the longer trial of a candidate that had won: its numbers are what a plan promises."""
    phases: tuple[PhasePeak, ...] = ()
    """Of a confirming trial: every phase of a run that could be rehearsed."""
    allocator_retries: int = Field(default=0, ge=0)
    """Times that the device's allocator ran out, freed what it kept, and went on."""
    memory_cap_bytes: int | None = None
    """Set where the user, not the device, decided how much memory there was: no evidence for a device of that size."""
    host_memory_bytes: int | None = None
    """Largest resident memory of the child process."""
    wall_seconds: float | None = Field(default=None, ge=0)
    """What the trial cost, from the request to the answer."""
    final_loss: float | None = None
    quantization_error: QuantizationError | None = None
    """None without quantization, and where the weights were random."""
    message: str = ""
    """Why the outcome is not `ok`, in one line."""

    @property
    def median_step_seconds(self) -> float | None:
        """Median of the steady steps, None when there are none."""
        return statistics.median(self.step_seconds) if self.step_seconds else None


class Residual(Frozen):
    """How far a trial was from its prediction before any calibration: logarithms of measured over predicted."""

    time: float = Field(ge=-MAX_RESIDUAL, le=MAX_RESIDUAL)
    memory: float = Field(ge=-MAX_RESIDUAL, le=MAX_RESIDUAL)
