"""The frozen objects of the cost model: what is predicted of a candidate, and of a whole job."""

from typing import Literal

from pydantic import Field

from autotune.plan.base import Frozen, NaturalInt, PositiveInt
from autotune.plan.candidate import Candidate
from autotune.plan.workload import Workload

Limit = Literal["compute", "bandwidth", "transfer", "data", "host"]
"""What a step waits for: the device's arithmetic or memory, bytes on their way between devices,
the next batch, or the launching of operations."""
MEMORY_BAND_SIGMAS = 1.8
"""Four fifths of what programs publish whose ways nobody has read, on GPUs and before any trial,
lie within 1.79 sigma (19 readings of six, benchmarks/published.py); of all 49, within 1.37. Of
times nine tenths lie within one."""


class MemoryBreakdown(Frozen):
    """Device memory at the moment of a phase's peak, by what it is for. The parts add up to the
    peak."""

    weight_bytes: int = NaturalInt
    """All frozen models that are resident, with their buffers."""
    adapter_bytes: int = NaturalInt
    gradient_bytes: int = NaturalInt
    """Gradients of the adapter, as far as they exist at that moment."""
    optimizer_bytes: int = NaturalInt
    """fp32 master weights and the optimizer's state, such as AdamW's two moments."""
    saved_activation_bytes: int = NaturalInt
    """Activations saved for the backward pass, with inputs and what blocks pass on."""
    transient_bytes: int = NaturalInt
    attention_workspace_bytes: int = NaturalInt
    process_overhead_bytes: int = NaturalInt
    """Context and libraries, outside of the allocator."""
    allocator_rounding_bytes: int = NaturalInt
    """Reserved by the allocator and not allocated."""


class PhaseMemory(Frozen):
    """Device memory of one phase of a job."""

    name: Literal["load", "cache", "train", "preview", "save"]
    run_memory_bytes: int = NaturalInt
    """All memory that the device must have in this phase."""
    allocated_memory_bytes: int = NaturalInt
    """The part that the allocator counts, which a trial measures."""
    breakdown: MemoryBreakdown


class StepTime(Frozen):
    """Seconds of one optimizer step by kind of work. All but `recompute_seconds` add up to the
    step."""

    matmul_seconds: float = Field(ge=0)
    """Matrix products of frozen layers."""
    adapter_seconds: float = Field(ge=0)
    attention_seconds: float = Field(ge=0)
    elementwise_seconds: float = Field(ge=0)
    dequantization_seconds: float = Field(ge=0)
    convolution_seconds: float = Field(ge=0)
    optimizer_seconds: float = Field(ge=0)
    overhead_seconds: float = Field(ge=0)
    """Launching of operations, as far as the device waits for it."""
    transfer_seconds: float = Field(default=0.0, ge=0)
    """Bytes on their way between host, device and other devices, as far as the device waits for
    them."""
    recompute_seconds: float = Field(ge=0)
    """The part of all the above that recomputes checkpointed blocks."""

    def waits(self, data_seconds: float = 0.0) -> dict[Limit, float]:
        """Seconds of a step by what they wait for, `data_seconds` of which no plan knows."""
        return {
            "compute": self.matmul_seconds
            + self.adapter_seconds
            + self.attention_seconds
            + self.convolution_seconds,
            "bandwidth": self.elementwise_seconds
            + self.dequantization_seconds
            + self.optimizer_seconds,
            "transfer": self.transfer_seconds,
            "data": data_seconds,
            "host": self.overhead_seconds,
        }

    def limited_by(self, data_seconds: float) -> Limit:
        """What most of a step waits for."""
        waits = self.waits(data_seconds)
        return max(waits, key=lambda kind: waits[kind])


class Prediction(Frozen):
    """Memory and speed of a candidate before anything has run, and how uncertain they are.

    Example:
        >>> prediction = autotune.estimate("flux1-dev", hardware="4090").prediction
        >>> prediction.step_seconds, {phase.name: phase.run_memory_bytes for phase in prediction.phases}
    """

    candidate: Candidate
    allocated_memory_bytes: int = PositiveInt
    """Step memory: the part of a training step that the allocator counts, `peak_memory_bytes`
    where it was measured."""
    run_memory_bytes: int = PositiveInt
    """Run memory: of the phase that needs most, which the budget must hold."""
    host_memory_bytes: int = PositiveInt
    """What one process needs of the host's memory, with its share of what the first of a node
    does for all."""
    phases: tuple[PhaseMemory, ...]
    step_seconds: float = Field(gt=0)
    """Wall time of one optimizer step, the whole effective batch."""
    step_time: StepTime
    images_per_second: float = Field(gt=0)
    memory_uncertainty: float = Field(ge=0)
    """One sigma of the logarithm of memory, about a relative error."""
    time_uncertainty: float = Field(ge=0)
    """One sigma of the logarithm of time."""

    @property
    def training(self) -> PhaseMemory:
        """The phase of training steps."""
        return next(phase for phase in self.phases if phase.name == "train")

    @property
    def memory_band(self) -> float:
        """The relative error that memory is stated with."""
        return MEMORY_BAND_SIGMAS * self.memory_uncertainty


class JobTime(Frozen):
    """Wall time of a whole job, in seconds."""

    total_seconds: float = Field(ge=0)
    load_seconds: float = Field(ge=0)
    cache_seconds: float = Field(ge=0)
    compile_seconds: float = Field(default=0.0, ge=0)
    """Compiling code, and cuDNN's plans of attention."""
    step_seconds: float = Field(ge=0)
    """Time of all steps together."""
    preview_seconds: float = Field(ge=0)
    validation_seconds: float = Field(default=0.0, ge=0)
    save_seconds: float = Field(ge=0)


class Estimate(Frozen):
    """A prediction for one machine, with the job that it is for.

    Example:
        >>> answer = autotune.estimate("flux1-dev", hardware="4090", quantization="torchao-int8")
        >>> answer.fits, answer.prediction.step_seconds
    """

    hardware: str
    budget_bytes: int = NaturalInt
    fits: bool
    """Whether run memory stays within the budget."""
    workload: Workload
    prediction: Prediction
    run_memory_bytes: int = PositiveInt
    """Run memory of the prediction, repeated here for those who read JSON."""
    step_seconds: float = Field(gt=0)
    num_steps: int = PositiveInt
    job: JobTime
    price_per_hour: float | None = Field(default=None, ge=0)
    cost: float | None = Field(default=None, ge=0)
    """Cost of the whole job, in the currency of the price."""
