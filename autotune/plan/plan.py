"""A training plan, the user's job and settings frozen for it; and the report of a run."""

from typing import Literal, Self

from pydantic import Field, model_validator

from autotune.plan import candidate, prediction
from autotune.plan.base import Frozen, NaturalInt, PositiveInt
from autotune.plan.hardware import DeviceKind, Versions
from autotune.plan.job import Job
from autotune.plan.workload import Workload

Strategy = Literal["single", "ddp", "fsdp2"]


class Rejected(Frozen):
    """A choice that was not taken, and why."""

    choice: candidate.Choice
    reason: str


class Reason(Frozen):
    """Why one knob has the value it has."""

    knob: str
    chosen: candidate.Choice
    why: str
    rejected: tuple[Rejected, ...] = ()


class Expected(Frozen):
    """The promise of a plan, measured or predicted."""

    evidence: Literal["measured", "predicted"]
    step_seconds: float = Field(gt=0)
    images_per_second: float = Field(gt=0)
    peak_memory_bytes: int = PositiveInt
    """Step memory: peak of a training step, as the device's allocator counts it."""
    process_memory_bytes: int = NaturalInt
    """Memory of the process besides step memory: on CPU its libraries; on a GPU its context and
    the allocator's rounding. Without a rehearsal of all phases, also what another phase is
    predicted to need beyond a step."""
    phases: tuple[candidate.PhasePeak, ...] = ()
    """Measured phases of the winner's rehearsal; empty without a rehearsal."""

    @property
    def run_memory_bytes(self) -> int:
        """Return run memory: of the neediest phase, the training step or a rehearsed one."""
        step_bytes = self.peak_memory_bytes + self.process_memory_bytes
        return max(step_bytes, self.largest_bytes(self.phases) or 0)

    def largest_bytes(self, phases: tuple[candidate.PhasePeak, ...]) -> int | None:
        """Return the memory of the neediest of measured phases; None if none is known."""
        sizes = (
            phase.host_bytes
            if phase.device_bytes is None
            else phase.device_bytes + self.process_memory_bytes
            for phase in phases
        )
        return max(filter(None, sizes), default=None)

    host_memory_bytes: int | None = Field(default=None, ge=0, lt=2**63)
    """Host memory that one process needs besides the GPU's, with its share of what a node's first
    process does for all; None if the device shares it, or in older plans."""
    time_uncertainty: float | None = Field(default=None, ge=0)
    """Standard error of a predicted `step_seconds` as a share of it; None if it was measured."""
    memory_uncertainty: float | None = Field(default=None, ge=0)
    """The same of predicted memory."""
    other_seconds: float = Field(default=0.0, ge=0)
    """Predicted time of loading, caching, compiling, previews and checkpoints."""
    price_per_hour: float | None = Field(default=None, ge=0)
    """Price of one device, in any currency; None if the user named none."""


class EncoderGpu(Frozen):
    """Another GPU than the training one, on which captions, images or both are encoded."""

    name: str
    total_memory_bytes: int = PositiveInt
    budget_bytes: int = NaturalInt
    """Memory that a run might use when the plan was made."""
    needed_bytes: int = NaturalInt
    """Memory that encoding takes."""


class PlannedHardware(Frozen):
    """The machine that a plan was made for, as far as the plan depends on it."""

    device_name: str
    device_kind: DeviceKind
    fingerprint: str
    """Identifies the machine, as `HardwareProfile.fingerprint`; says nothing about reuse."""
    match_keys: dict[str, str | None]
    """Facts that must be equal on another machine; a refusal names the difference."""
    total_memory_bytes: int | None
    budget_bytes: int = NaturalInt
    versions: Versions
    num_processes: int = Field(default=1, ge=1)
    """Processes that train together, one for each device; they divide the effective batch."""
    strategy: Strategy = "single"
    """`ddp`: each process has all weights; `fsdp2`: each has a shard of the frozen ones."""
    assumed: tuple[str, ...] = ()
    """Packages that a card of the catalog was told to have; empty once trials have run."""
    encoder_gpu: EncoderGpu | None = None
    """None if the device that trains, or the CPU, encodes everything, and in older plans."""

    @property
    def num_shards(self) -> int:
        """Processes that hold the frozen weights together: 1 if each has them all."""
        return self.num_processes if self.strategy == "fsdp2" else 1

    @model_validator(mode="after")
    def _strategy_suits(self) -> Self:
        if (self.num_processes == 1) != (self.strategy == "single"):
            number = self.num_processes
            raise ValueError(f"{number} process(es) cannot train by the strategy {self.strategy!r}")
        return self


class FrozenPart(Frozen):
    """Everything in a plan that the digest covers."""

    schema_version: Literal[2]
    autotune_version: str
    hardware: PlannedHardware
    workload: Workload
    settings: candidate.Candidate
    caching: candidate.CachingSettings = candidate.CachingSettings()
    expected: Expected
    reasons: tuple[Reason, ...]
    fallbacks: tuple[candidate.Candidate, ...] = ()
    """Settings to turn to, in this order, if memory is shorter than planned."""
    records: tuple[str, ...] = ()
    """Names of the shared records that the search started from."""
    search_seconds: float = Field(ge=0)
    """Wall time of gradient checks and trials, loading included; 0 for a predicted plan."""
    trials: tuple[candidate.TrialResult, ...]
    pins: tuple[tuple[str, str], ...] = ()
    """(knob, value) pairs that the user fixed."""
    exclusions: tuple[tuple[str, str], ...] = ()
    """(knob, value) pairs that the user ruled out."""
    max_memory_bytes: int | None = Field(default=None, ge=0)
    """The most memory that a run may take; None if the user set no limit."""
    reserve_memory_bytes: int | None = Field(default=None, ge=0)
    """Memory that the user leaves to others; None for the usual reserve."""
    overheads: prediction.Overheads | None = None
    """Overheads assumed for the program that will train; None for autotune's own executor."""
    forecast: prediction.Forecast | None = None
    """Predictions of the settings and of other candidates."""
    advice: tuple[str, ...] = ()
    """Gains of other choices of the user, one sentence each."""
    predicted_digest: str | None = None
    """Identity of the predicted plan that this one was measured from, if it was."""

    @property
    def process_workload(self) -> Workload:
        """The work of one of the plan's processes, which is what a trial runs."""
        return self.workload.share(self.hardware.num_processes)

    @model_validator(mode="after")
    def _alternatives_are_candidates(self) -> Self:
        for each in self.forecast.alternatives if self.forecast else ():
            self.settings.changed(**each.changes)
        return self


class TrainingPlan(Frozen):
    """A job and the settings that were measured for it. Data only: nothing in it is executed."""

    job: Job
    frozen: FrozenPart
    digest: str
    """Digest of `frozen`, by which runs and the plan sealed from it refer to the plan."""

    @property
    def job_seconds(self) -> float:
        """Expected wall time of the whole job, in seconds."""
        return self.seconds_of(self.job.num_steps)

    def seconds_of(self, num_steps: int) -> float:
        """Return the expected wall time of a start that takes so many steps."""
        expected = self.frozen.expected
        return num_steps * expected.step_seconds + expected.other_seconds

    @property
    def job_cost(self) -> float | None:
        """Expected cost of the whole job; None if the plan has no price."""
        price = self.frozen.expected.price_per_hour
        return None if price is None else self.cost_at(price)

    def cost_at(self, price_per_hour: float) -> float:
        """Compute the whole job's expected cost at that price for an hour of each device."""
        return price_per_hour * self.frozen.hardware.num_processes * self.job_seconds / 3600


class CheckResult(Frozen):
    """Fit of a plan to a machine."""

    fits: bool
    misfits: tuple[str, ...]
    """Why it does not fit, one sentence each."""


class AdapterVerdict(Frozen):
    """Norms of the trained adapter, and its effect on the loss."""

    num_layers: int = NaturalInt
    num_unmoved: int = NaturalInt
    """Layers before the last block whose update is still zero: no gradient reached them."""
    num_not_finite: int = NaturalInt
    layer_norms: dict[str, float]
    """Frobenius norm of each layer's update, up @ down * alpha / rank; 0 if it is not finite.
    Layers of the last block may stay 0: if the model discards the text that leaves it, no
    gradient reaches them."""
    base_loss: float | None
    """Mean loss without the adapter, on images and noise of steps that were not trained on."""
    adapter_loss: float | None
    """Mean loss with the adapter, on the same images and noise."""


class ValidationResult(Frozen):
    """The loss on held-out images, always at the same noise levels and noise."""

    num_images: int = PositiveInt
    base_loss: float
    """Loss without the adapter."""
    final_loss: float | None
    """Loss after the last step; None if it was not finite."""
    lowest_loss: float
    lowest_step: int = PositiveInt
    """Number of steps after which it was lowest."""
    kept_step: int = PositiveInt
    """Number of steps after which the adapter was kept."""


class RunReport(Frozen):
    """A training run, against the promise of its plan."""

    plan_digest: str
    num_steps: int
    resumed_at: int = Field(default=0, ge=0)
    """Number of steps that an earlier start of this run had taken."""
    total_seconds: float
    """Wall time of this start."""
    expected_step_seconds: float
    measured_step_seconds: float
    data_seconds: float = Field(default=0.0, ge=0)
    """Mean time that a step waited for data."""
    caching_saved_seconds: float = Field(default=0.0, ge=0)
    """Time to encode every step's images and captions anew; 0 if the cache had them before."""
    limited_by: prediction.Limit | None = None
    """The bottleneck of its steps; None if the plan does not hold its prediction."""
    expected_peak_memory_bytes: int
    measured_peak_memory_bytes: int | None
    """Step memory; None if the run was too short to measure it."""
    expected_run_memory_bytes: int | None = None
    """Run memory: the promise for the neediest phase."""
    run_memory_bytes: int | None = None
    """Measured memory of the neediest phase; None if the system does not tell."""
    expected_phases: tuple[candidate.PhasePeak, ...] = ()
    """Measured phases of the rehearsal; empty if the plan was predicted."""
    phases: tuple[candidate.PhasePeak, ...] = ()
    images_per_second: float
    gpu_utilization: float | None = None
    """Mean share of time that the GPU computed, in [0, 1]; None without NVML."""
    first_loss: float
    """Smoothed loss after the first tenth of the steps."""
    final_loss: float
    """Smoothed loss after the last step."""
    warnings: tuple[str, ...] = ()
    settings: candidate.Candidate
    """Settings that the run ended with: the plan's, or a fallback, which a warning then names."""
    gradient_spikes: int = 0
    """Gradients whose norm was far above those of the steps before."""
    nonfinite_gradients: int = 0
    """Gradients that were not finite; their steps were taken again."""
    overflowed_gradients: int = 0
    """Gradients that overflowed fp16; their steps were skipped."""
    quantization_error: candidate.QuantizationError | None = None
    validation: ValidationResult | None = None
    """None if no images were held out."""
    verdict: AdapterVerdict | None = None
    adapter: str = Field(pattern=r"^[\w.-]+$")
    """File name of the adapter inside the output folder."""
