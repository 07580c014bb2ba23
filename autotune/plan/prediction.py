"""The frozen objects of the cost model: what is predicted of a candidate, and of a whole job."""

from typing import Literal, Self

from pydantic import Field, model_validator

from autotune.plan.base import Frozen, NaturalInt, PositiveInt
from autotune.plan.candidate import Candidate, Choice
from autotune.plan.words import PHASES
from autotune.plan.workload import Workload

Limit = Literal["compute", "bandwidth", "transfer", "data", "host"]
"""The bottleneck of a step: the device's arithmetic or memory, bytes on their way between devices,
the next batch, or the launching of operations."""
WAITING: tuple[Limit, ...] = ("transfer", "data", "host")
WAITING_SHARE = 0.1
TIME_SIGMAS = (-0.3, 0.65)
"""Four fifths of published times lie between these standard errors of their prediction before any
trial (benchmarks/published.py, which says how many do if a program, family or card is left out)."""
WAITING_DOUBT = 2.0
"""A step that waits for the host or copies is so many times as uncertain: no datasheet has them."""
MEMORY_SIGMAS = (-0.9, 1.8)
"""The same for memory."""
TIME_EVIDENCE = "such ranges held 4 of 5 published times"


class MemoryBreakdown(Frozen):
    """Device memory at a phase's peak, by what it is for; the parts add up to the peak."""

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
    """Seconds of an optimizer step; all parts but `recompute_seconds` add up to it."""

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
    """Transfers between host and devices, as far as the device waits for them."""
    recompute_seconds: float = Field(ge=0)
    """The part of all the above that recomputes checkpointed blocks."""

    def waits(self, data_seconds: float = 0.0) -> dict[Limit, float]:
        """Return a step's seconds by what they wait for; no plan knows `data_seconds`."""
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
        """Return the bottleneck of a step: copies, data and the host count by what the device's own
        work does not hide, so that a tenth of the step is enough."""
        waits = self.waits(data_seconds)
        limit = WAITING_SHARE * sum(waits.values())
        kinds = [kind for kind in WAITING if waits[kind] > limit] or waits
        return max(kinds, key=lambda kind: waits[kind])


class Prediction(Frozen):
    """Memory and speed of a candidate before anything has run, and how uncertain they are."""

    candidate: Candidate
    allocated_memory_bytes: int = PositiveInt
    """Step memory: the part of a step that the allocator counts, as trials measure it."""
    run_memory_bytes: int = PositiveInt
    """Run memory: of the phase that needs most, which the budget must hold."""
    host_memory_bytes: int = PositiveInt
    """Host memory of one process, with its share of what a node's first does for all."""
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
    def stated_time_uncertainty(self) -> float:
        """One sigma as people are told it."""
        waits = self.step_time.limited_by(0.0) in WAITING
        return self.time_uncertainty * (WAITING_DOUBT if waits else 1.0)

    @property
    def training(self) -> PhaseMemory:
        """The phase of training steps."""
        return next(phase for phase in self.phases if phase.name == "train")


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
    """A prediction for one machine, with the job that it is for."""

    hardware: str
    budget_bytes: int = NaturalInt
    fits: bool
    """True if run memory stays within the budget."""
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


MAX_ALTERNATIVES = 512  # maximum number for one plan; autotune records fewer


class Alternative(Frozen):
    """A candidate and its prediction: the first if a trial ran it, else corrected by trials."""

    changes: dict[str, Choice]
    """Values of the knobs that differ from the plan's settings; empty for these settings."""
    step_seconds: float = Field(gt=0)
    """Wall time of an optimizer step, to five digits."""
    step_memory_bytes: int = PositiveInt
    """Peak of a training step, as the device's allocator counts it."""
    run_memory_bytes: int = PositiveInt
    """Device memory of the phase that needs most, which the budget must hold."""

    @model_validator(mode="after")
    def _changes_are_knobs(self) -> Self:
        if unknown := self.changes.keys() - Candidate.model_fields:
            raise ValueError(f"there is no setting {min(unknown)!r}")
        return self


class PhaseForecast(Frozen):
    """Device memory that a phase of a run is predicted to need."""

    name: str
    run_memory_bytes: int = NaturalInt


class Forecast(Frozen):
    """Predictions around a plan's settings."""

    num_candidates: int = PositiveInt
    """Number of candidates that were predicted."""
    num_fitting: int = NaturalInt
    """Number of those that are predicted to fit."""
    step_time: StepTime
    """Seconds of a step by kind of work, at measured rates: nothing that trials taught."""
    phases: tuple[PhaseForecast, ...] = ()
    alternatives: tuple[Alternative, ...] = Field(default=(), max_length=MAX_ALTERNATIVES)
    """Those that tell most, the plan's settings among them: the Pareto front of memory and time,
    the best with each other value of a knob, what was tried, and the nearest that do not fit."""

    def rebased(self, before: Candidate, after: Candidate) -> Self:
        """Return the forecast for a plan that has the settings `after` instead of `before`."""
        rows = (
            each.changed(changes=before.changed(**each.changes).differences(after))
            for each in self.alternatives
        )
        return self.changed(alternatives=tuple(rows))


Part = Literal["transformer", "text_encoders", "vae"]
KeptPhase = Literal["load", "cache", "train", "preview"]


class AdapterPractice(Frozen):
    """A program's way to hold and step the adapter of a bf16 model; of fp32 all is fp32."""

    precision: Literal["bf16", "fp32"]
    """Dtype of its parameters and gradients."""
    autocasts: bool = False
    """True if training runs under autocast: products are in the precision that the model
    computes in and norms in fp32, whatever their inputs are in; else each adapted layer copies
    its input to the adapter's precision."""
    optimizer_bytes: int = NaturalInt
    """Bytes that AdamW keeps for each parameter, a second copy of it included."""
    step_bytes: int = NaturalInt
    """Bytes for each parameter that AdamW needs besides while it steps."""
    step_operations: int | None = None
    """For each tensor: what an AdamW that is not fused costs the host, in operations of a model.
    One of its own, which autograd does not record, costs less than half of that."""

    @property
    def text(self) -> str:
        """In words for people."""
        products = ", under autocast" if self.autocasts else ""
        inputs = ", with a copy of each input" if self.precision == "fp32" else ""
        state = f"with AdamW {self.optimizer_bytes} bytes of its state a parameter"
        return f"the adapter in {self.precision}{products or inputs}, {state}"


class ProductPractice(Frozen):
    """The way in which a program stores frozen layers of a weight format, and multiplies."""

    keeps: Literal["weights", "inputs"]
    """Kept until the backward pass of each layer: its weight in the precision of the products, as
    autograd does; or its input."""
    gradients: bool = False
    """True if the input makes a gradient of the weight, which nobody uses."""
    everywhere: bool = False
    """True if all linear layers are stored so, not those of blocks alone."""

    @property
    def text(self) -> str:
        """In words for people."""
        kept = {
            "weights": "each converted weight kept for its backward pass",
            "inputs": "each layer's input kept for its backward pass",
        }
        told = "gradients of weights, too" if self.gradients else kept[self.keeps]
        return f"{told}{', all linear layers stored so' * self.everywhere}"


class SwapPractice(Frozen):
    """The way in which a program brings swapped blocks to the device; by default autotune's."""

    from_pinned: bool = True
    """True if copies start from locked memory of the host; else they go through a second buffer."""
    copies_back: bool = False
    """True if weights are copied to the host, too, when they leave."""
    slots: Literal["one", "two", "resident"] = "two"
    """Blocks that have a place on the device: the one that runs, so that nothing overlaps; it and
    the next; or as many as are not swapped."""
    by_layer: bool = False
    """True if each layer arrives by itself for the forward pass, the recomputation and the backward
    pass; blocks stay between the last two."""


class KeptPart(Frozen):
    """A model that is on the device in a phase in which autotune's executor has it elsewhere."""

    phase: KeptPhase
    """A part that is kept in training is there in previews, too."""
    part: Part
    precision: Literal["bf16", "fp32", "int8"] = "bf16"
    """Dtype; int8 stands for any format of eight bits."""

    @property
    def text(self) -> str:
        """In words for people."""
        precision = {"fp32": " in fp32", "int8": " in 8 bits"}.get(self.precision, "")
        return f"{self.part.replace('_', ' ')}{precision} kept during {PHASES[self.phase]}"


class Overheads(Frozen):
    """One program's ways with memory, as far as they were read in its source."""

    program: str
    version: str
    """Commit that they were read at."""
    source: str
    """Place in it."""
    adapter: AdapterPractice
    adapter_by_format: dict[str, AdapterPractice] = Field(default_factory=dict)
    """Differences from `adapter`, by the weight format of the layers that are adapted."""
    products: dict[str, ProductPractice] = Field(default_factory=dict)
    """By weight format; others are stored and multiplied by as autotune does."""
    kept: tuple[KeptPart, ...] = ()
    swap: SwapPractice = SwapPractice()

    @property
    def traced(self) -> tuple[object, ...]:
        """All that decides how a model is traced."""
        return self.adapter, tuple(self.adapter_by_format.items()), tuple(self.products.items())

    def adapter_on(self, weight_format: str) -> AdapterPractice:
        """Return the practice for the adapter of layers that are stored in a format."""
        return self.adapter_by_format.get(weight_format, self.adapter)

    def has(self, part: Part, phase: str) -> bool:
        """Tell if a part is kept in a phase."""
        return any(one.part == part and one.phase == phase for one in self.kept)

    def text(self, weight_format: str) -> str:
        """Say what is assumed of a base model in this format."""
        told = [self.adapter_on(weight_format).text, *(one.text for one in self.kept)]
        if product := self.products.get(weight_format):
            told.insert(1, product.text)
        source = f"by its source ({self.version})"
        return f"memory as {self.program} takes it, {source}: {'; '.join(told)}"


class SettingWorth(Frozen):
    """Change by giving one setting of a file the other value, all else as written. Blocks that
    recompute all, and those that keep attention, are one."""

    knob: str
    written: Choice
    better: Choice
    step_seconds_saved: float
    run_memory_saved_bytes: int
    """Nothing, if another phase than training is the peak."""
    training_memory_saved_bytes: int = 0
