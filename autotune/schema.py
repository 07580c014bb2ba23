"""The frozen objects that flow through autotune, and nothing else.

    HardwareProfile ─┐
    Workload ────────┼─> Candidate ─> TrialResult ─> TrainingPlan ─> RunReport
    ModelSpec ───────┘

Those that describe a machine are in `autotune.machine`, the user's job is in `autotune.job`.

Every object is immutable, refuses unknown fields and non-finite numbers, and carries its units in its names.
Equal questions give equal objects, so objects can be compared, hashed, stored and replayed.
Files are validated in JSON mode (`model_validate_json`): strict mode would refuse YAML's lists for tuples.
"""

import statistics
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from autotune.frozen import Frozen, NaturalInt, PositiveInt
from autotune.job import Job
from autotune.machine import DeviceKind, Versions

PLAN_SCHEMA_VERSION = 1
"""Version of the plan file; a plan from a newer version is refused, not guessed at."""

Quality = Literal["exact", "high", "compact"]
Objective = Literal["throughput", "memory"]
Outcome = Literal["ok", "oom", "host_oom", "spill", "timeout", "unsupported", "numerics", "crash"]
"""`host_oom`: beside a device with memory of its own it was the host's that ran out; where both are one it is `oom`."""
TextPadding = Literal["exact", "masked"]
"""`exact`: all captions have one length, no mask is ever needed; `masked`: lengths differ."""
Strategy = Literal["single", "ddp", "fsdp2"]
MOST_RESIDUAL = 5.0
"""A factor of 148: what is further from its prediction is counted as this far."""
Choice = str | int
PositiveTokens = Annotated[int, PositiveInt]


class ModelSpec(Frozen):
    """Which model, by what it is made of rather than by where its files lie."""

    family: str
    """A name from the registry of families, e.g. `qwen-image`."""
    architecture: str
    """Digest of the transformer's class and configuration."""
    num_parameters: int = PositiveInt
    """Of the transformer alone."""
    num_blocks: int = PositiveInt
    """Repeated blocks that can be checkpointed."""
    name: str
    """For people: the hub id or the folder's own name."""


class Bucket(Frozen):
    """A shape that images (or clips) are resized to, and how many have it."""

    width_px: int = PositiveInt
    height_px: int = PositiveInt
    num_frames: int = PositiveInt
    num_items: int = NaturalInt

    @property
    def num_pixels(self) -> int:
        """Of all frames."""
        return self.num_frames * self.width_px * self.height_px


class Workload(Frozen):
    """What is to be trained, as far as it decides memory and speed: the class a plan is made for."""

    model: ModelSpec
    resolution_px: int = PositiveInt
    """Side of the square whose area every bucket stays within."""
    buckets: tuple[Bucket, ...] = Field(min_length=1)
    max_text_tokens: int = PositiveInt
    """Longest encoded caption: with the largest bucket it decides memory."""
    text_token_quantiles: tuple[PositiveTokens, ...] = Field(default=(), max_length=64)
    """Lengths of captions, each of as many, the shortest first: they decide speed. Empty where the longest stands for
    all."""
    text_padding: TextPadding
    num_control_images: int = Field(default=0, ge=0)
    """Most control images of an item; edit models only."""
    rank: int = PositiveInt
    lora_alpha: float = Field(gt=0)
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the adapter's inputs that a step leaves out; above 0 every adapted layer keeps its own copy."""
    targets: str
    """Named set of adapted layers, e.g. `attention`."""
    effective_batch_size: int = PositiveInt
    """Images per optimizer step. It is the user's: tuning never changes what is learned."""
    quality: Quality = "high"
    objective: Objective = "throughput"

    @property
    def largest_bucket(self) -> Bucket:
        """The bucket with the most pixels: the one that decides the peak."""
        return max(self.buckets, key=lambda b: (b.num_pixels, b.width_px))

    @model_validator(mode="after")
    def _quantiles_in_order(self) -> Self:
        lengths = (*self.text_token_quantiles, self.max_text_tokens)
        if any(after < before for before, after in pairwise(lengths)):
            raise ValueError("text_token_quantiles must rise, and none be above max_text_tokens")
        return self

    def share(self, num_processes: int) -> "Workload":
        """What each of several processes works on: its part of the effective batch, rounded down."""
        batch = max(1, self.effective_batch_size // num_processes)
        return self if num_processes == 1 else self.changed(effective_batch_size=batch)


# --- the answer --------------------------------------------------------------------------------------------------


class Candidate(Frozen):
    """One value for every knob. Names, not objects: a plan from another machine must always parse."""

    micro_batch_size: int = PositiveInt
    """Images per forward pass; accumulation fills the effective batch."""
    checkpointed_blocks: int = NaturalInt
    """The first k blocks recompute their activations in the backward pass."""
    quantization: str = "none"
    """How frozen base weights are stored."""
    attention: str = "native"
    """diffusers' name of the attention backend."""
    precision: str = "bf16"
    """Compute dtype of the transformer and the adapter."""
    loader: str = "safetensors"
    """How weights are read from disk: a name in `autotune.weights.loaders`."""
    swapped_blocks: int = Field(default=0, ge=0)
    """The frozen weights of the first k blocks wait on the host until they are needed."""
    compile: str = "off"
    """`block`: each repeated block goes through torch.compile."""
    optimizer: str = "adamw"
    allocator: str = "default"
    """How the device's allocator grows: `default` or `expandable` segments."""
    data_workers: int = Field(default=1, ge=0)
    """Threads that collate batches ahead of the step."""
    batch_memory: str = "pageable"
    """Where batches wait for the device: `pageable` or `pinned` memory of the host."""

    def label(self) -> str:
        """One short line for people."""
        main = f"batch {self.micro_batch_size}, ckpt {self.checkpointed_blocks}, {self.quantization}, {self.attention}"
        unusual = (
            f"{name.replace('_', ' ')} {value}"
            for name, value in self
            if not (field := type(self).model_fields[name]).is_required() and value != field.default
            if name not in ("quantization", "attention", "allocator", "data_workers", "batch_memory")
        )
        return ", ".join((main, *unusual))


class QuantizationError(Frozen):
    """How far quantised layers are from the real weights: relative error of their outputs on random inputs."""

    overall: float = Field(ge=0)
    """Of all quantised layers together."""
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


class CachingSettings(Frozen):
    """How captions and images are encoded before training. Fields can be pinned: `--pin caching.FIELD=VALUE`."""

    text_encoder_device: str = Field(default="training", pattern=r"^(training|cpu|cuda:[0-9]{1,3})$")
    """`training` for the device that trains, `cpu`, or another GPU such as `cuda:1`."""
    text_encoder_storage: str = "none"
    """How the weights of their Linear layers are stored; names as for `Candidate.quantization`."""
    text_encoder_streamed: bool = False
    """Their weights wait on the host, and visit the device module by module."""
    residency: Literal["release", "keep"] = "release"
    """`release`: text encoders and VAE leave memory when all is encoded."""


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
    """None without quantisation, and where the weights were random."""
    message: str = ""
    """Why the outcome is not `ok`, in one line."""

    @property
    def median_step_seconds(self) -> float | None:
        """Median of the steady steps, None when there are none."""
        return statistics.median(self.step_seconds) if self.step_seconds else None


class Residual(Frozen):
    """How far a trial was from its prediction before any calibration: logarithms of measured over predicted."""

    time: float = Field(ge=-MOST_RESIDUAL, le=MOST_RESIDUAL)
    memory: float = Field(ge=-MOST_RESIDUAL, le=MOST_RESIDUAL)


class Rejected(Frozen):
    """A choice that lost or never ran, and why."""

    choice: Choice
    reason: str


class Reason(Frozen):
    """Why one knob has the value it has."""

    knob: str
    chosen: Choice
    why: str
    rejected: tuple[Rejected, ...] = ()


class Expected(Frozen):
    """What the plan promises, and what the promise stands on."""

    evidence: Literal["measured", "predicted"]
    step_seconds: float = Field(gt=0)
    images_per_second: float = Field(gt=0)
    peak_memory_bytes: int = PositiveInt
    """Of a training step, as the device's allocator counts it."""
    process_memory_bytes: int = NaturalInt
    """What the process takes besides: on CPU its libraries, on a GPU its context and what the allocator rounds up.
    Where no rehearsal went through all phases, also what another one is predicted to need beyond a step."""
    phases: tuple[PhasePeak, ...] = ()
    """What each phase of a run took when the winner was rehearsed; empty where none was."""

    @property
    def required_memory_bytes(self) -> int:
        """Of the neediest phase that was rehearsed, and of a training step at least."""
        measured = (
            phase.host_bytes if phase.device_bytes is None else phase.device_bytes + self.process_memory_bytes
            for phase in self.phases
        )
        return max([self.peak_memory_bytes + self.process_memory_bytes, *(size or 0 for size in measured)])

    other_seconds: float = Field(default=0.0, ge=0)
    """What the job takes beside its steps, always predicted: loading, caches, compiling, previews, checkpoints."""
    price_per_hour: float | None = Field(default=None, ge=0)
    """Of the machine, in whatever currency the user thinks in."""


class PlannedHardware(Frozen):
    """The machine a plan was made for, as far as the plan depends on it."""

    device_name: str
    device_kind: DeviceKind
    fingerprint: str
    hard_keys: dict[str, str | None]
    """Shown so that a refusal can say which key differs."""
    total_memory_bytes: int | None
    budget_bytes: int = NaturalInt
    versions: Versions
    num_processes: int = Field(default=1, ge=1)
    """Processes that train together, one per device of this kind; they share out the effective batch."""
    strategy: Strategy = "single"
    """How they do it: `ddp`, each with the whole model, or `fsdp2`, each with a part of the frozen weights."""

    @model_validator(mode="after")
    def _strategy_suits(self) -> Self:
        if (self.num_processes == 1) != (self.strategy == "single"):
            raise ValueError(f"{self.num_processes} process(es) cannot train by the strategy {self.strategy!r}")
        return self


class FrozenPart(Frozen):
    """Everything in a plan that the digest covers."""

    schema_version: Literal[1]
    autotune_version: str
    hardware: PlannedHardware
    workload: Workload
    settings: Candidate
    caching: CachingSettings = CachingSettings()
    expected: Expected
    reasons: tuple[Reason, ...]
    fallbacks: tuple[Candidate, ...] = ()
    """The next safer settings, in order: where to turn when memory is shorter than planned."""
    records: tuple[str, ...] = ()
    """Shared records that the search stood on, by name."""
    search_seconds: float = Field(ge=0)
    """What its trials cost, loading included; 0 for a prediction."""
    trials: tuple[TrialResult, ...]
    pins: tuple[tuple[str, str], ...] = ()
    """Values that the user asked for."""
    exclusions: tuple[tuple[str, str], ...] = ()
    """Values that the user ruled out."""
    advice: tuple[str, ...] = ()
    """What other wishes would bring, one sentence each."""
    predicted_digest: str | None = None
    """Digest of the predicted plan that this one was made of on arrival."""


class TrainingPlan(Frozen):
    """A job and the settings that were measured for it. Data only: nothing in it is ever executed."""

    job: Job
    frozen: FrozenPart
    digest: str
    """Digest of `frozen`."""

    @property
    def job_seconds(self) -> float:
        """Expected wall time of the whole job as it stands."""
        expected = self.frozen.expected
        return self.job.num_steps * expected.step_seconds + expected.other_seconds

    @property
    def job_cost(self) -> float | None:
        """Of the whole job, where the plan knows what an hour costs."""
        price = self.frozen.expected.price_per_hour
        return None if price is None else price * self.job_seconds / 3600


class AdapterVerdict(Frozen):
    """What the trained adapter looks like, and what it does to the loss."""

    num_layers: int = NaturalInt
    num_unmoved: int = NaturalInt
    """Layers before the last block whose update is still zero: no gradient reached them."""
    num_not_finite: int = NaturalInt
    layer_norms: dict[str, float]
    """Frobenius norm of each layer's update, up @ down * alpha / rank; 0 stands for one that is not finite. Layers of
    the last block may keep 0: where the model makes nothing of the text that comes out of it, nothing trains them."""
    base_loss: float | None
    """Mean loss without the adapter on images and noise of steps that were not trained on."""
    adapter_loss: float | None
    """The same with it."""


class RunReport(Frozen):
    """What a training run did, against what its plan promised."""

    plan_digest: str
    num_steps: int
    resumed_at: int = Field(default=0, ge=0)
    """Steps that an earlier start of this run had taken."""
    total_seconds: float
    """Of this start."""
    expected_step_seconds: float
    measured_step_seconds: float
    data_seconds: float = Field(default=0.0, ge=0)
    """Mean wait for data in a step."""
    expected_peak_memory_bytes: int
    measured_peak_memory_bytes: int | None
    """None for a run too short to measure it."""
    expected_phases: tuple[PhasePeak, ...] = ()
    """Of the rehearsal; empty where the plan was predicted."""
    phases: tuple[PhasePeak, ...] = ()
    images_per_second: float
    gpu_utilisation: float | None = None
    """Mean share of time in [0, 1] that the GPU computed; None without NVML."""
    first_loss: float
    final_loss: float
    warnings: tuple[str, ...] = ()
    settings: Candidate
    """Those that it ended with: the plan's, or a fallback, which a warning then names."""
    quantization_error: QuantizationError | None = None
    verdict: AdapterVerdict | None = None
    adapter: str
    """File name of the adapter inside the output folder."""
