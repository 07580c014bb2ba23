"""The frozen objects of the cost model: what is predicted of a candidate, and of a whole job."""

from typing import Literal

from pydantic import Field

from autotune.schema.base import Frozen, NaturalInt, PositiveInt
from autotune.schema.candidate import Candidate
from autotune.schema.workload import Workload


class MemoryBreakdown(Frozen):
    """Device memory at the moment of a phase's peak, by what it is for. The parts add up to the peak."""

    weight_bytes: int = NaturalInt
    """All frozen models that are resident, with their buffers."""
    adapter_bytes: int = NaturalInt
    gradient_bytes: int = NaturalInt
    """Of the adapter, as far as they exist at that moment."""
    optimizer_bytes: int = NaturalInt
    """fp32 masters and AdamW's two moments."""
    saved_activation_bytes: int = NaturalInt
    """Kept for the backward pass, with inputs and what blocks hand on."""
    transient_bytes: int = NaturalInt
    attention_workspace_bytes: int = NaturalInt
    process_overhead_bytes: int = NaturalInt
    """Context and libraries, outside the allocator."""
    allocator_rounding_bytes: int = NaturalInt
    """Reserved by the allocator and not allocated."""


class PhaseMemory(Frozen):
    """Device memory of one phase of a job."""

    name: Literal["load", "cache", "train", "preview", "save"]
    peak_memory_bytes: int = NaturalInt
    """All of it: what the device must have."""
    allocated_memory_bytes: int = NaturalInt
    """As the allocator counts allocations; a trial measures this."""
    breakdown: MemoryBreakdown


class StepTime(Frozen):
    """Seconds of one optimizer step by kind of work. All but the last add up to the step."""

    matmul_seconds: float = Field(ge=0)
    """Of frozen layers."""
    adapter_seconds: float = Field(ge=0)
    attention_seconds: float = Field(ge=0)
    elementwise_seconds: float = Field(ge=0)
    dequantization_seconds: float = Field(ge=0)
    convolution_seconds: float = Field(ge=0)
    optimizer_seconds: float = Field(ge=0)
    overhead_seconds: float = Field(ge=0)
    """Launching operations, as far as the device waits for it."""
    recompute_seconds: float = Field(ge=0)
    """Of the above, spent on recomputing checkpointed blocks."""


class Prediction(Frozen):
    """Memory and speed of a candidate before anything has run, and how uncertain they are."""

    candidate: Candidate
    peak_memory_bytes: int = PositiveInt
    """Device memory of the training step, all of it."""
    allocated_memory_bytes: int = PositiveInt
    """Of the training step, as the allocator counts; to compare with `TrialResult.peak_memory_bytes`."""
    required_memory_bytes: int = PositiveInt
    """Of the phase that needs most: what a budget must hold."""
    host_memory_bytes: int = PositiveInt
    phases: tuple[PhaseMemory, ...]
    step_seconds: float = Field(gt=0)
    """One optimizer step: the whole effective batch."""
    step_time: StepTime
    images_per_second: float = Field(gt=0)
    memory_uncertainty: float = Field(ge=0)
    """One sigma of the logarithm of memory, about a relative error."""
    time_uncertainty: float = Field(ge=0)
    """One sigma of the logarithm of time."""


class JobTime(Frozen):
    """Wall time of a whole job, in seconds."""

    total_seconds: float = Field(ge=0)
    load_seconds: float = Field(ge=0)
    cache_seconds: float = Field(ge=0)
    compile_seconds: float = Field(default=0.0, ge=0)
    step_seconds: float = Field(ge=0)
    """Of all steps."""
    preview_seconds: float = Field(ge=0)
    save_seconds: float = Field(ge=0)


class Estimate(Frozen):
    """A prediction for one machine, with the job that it is for."""

    hardware: str
    budget_bytes: int = NaturalInt
    fits: bool
    """Whether the neediest phase stays within the budget."""
    workload: Workload
    prediction: Prediction
    peak_memory_bytes: int = PositiveInt
    """The prediction's, at the top for those who read JSON."""
    step_seconds: float = Field(gt=0)
    num_steps: int = PositiveInt
    job: JobTime
    price_per_hour: float | None = Field(default=None, ge=0)
    cost: float | None = Field(default=None, ge=0)
    """Of the whole job, in the price's currency."""
