"""The frozen objects that flow through autotune, and nothing else.

    HardwareProfile ─┐
    Workload ────────┼─> Candidate ─> TrialResult ─> TrainingPlan ─> RunReport
    ModelSpec ───────┘

Every object is immutable, refuses unknown fields and non-finite numbers, and carries its units in its names.
Equal questions give equal objects, so objects can be compared, hashed, stored and replayed.
Files are validated in JSON mode (`model_validate_json`): strict mode would refuse YAML's lists for tuples.
"""

import hashlib
import json
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

PLAN_SCHEMA_VERSION = 1
"""Version of the plan file; a plan from a newer version is refused, not guessed at."""

TRIAL_PROTOCOL_VERSION = 1
"""Version of how a trial measures; results of different versions are never compared."""

DeviceKind = Literal["cuda", "mps", "cpu"]
MemoryKind = Literal["discrete", "integrated", "coherent", "host"]
Quality = Literal["exact", "high", "compact"]
Objective = Literal["throughput", "memory"]
Outcome = Literal["ok", "oom", "spill", "timeout", "unsupported", "numerics", "crash"]
Knob = str
Choice = str | int

PositiveInt = Field(ge=1)
NaturalInt = Field(ge=0)


class Frozen(BaseModel):
    """Base of every object here: immutable, strict, closed to unknown fields, finite numbers only."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def digest_of(value: Frozen | dict[str, object]) -> str:
    """SHA-256 of the canonical JSON of `value` (sorted keys, no spaces), as `sha256:<64 hex digits>`."""
    data = value.model_dump(mode="json") if isinstance(value, Frozen) else value
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


# --- the machine -------------------------------------------------------------------------------------------------


class Device(Frozen):
    """One device that can train, as its runtime reports it. What is unknown is None, never 0."""

    kind: DeviceKind
    index: int = NaturalInt
    name: str
    """As the runtime reports it, e.g. `NVIDIA GeForce RTX 4090`."""
    compute_capability: tuple[int, int] | None = None
    """(major, minor) on CUDA devices."""
    sm_count: int | None = None
    l2_bytes: int | None = None
    memory_kind: MemoryKind
    memory_kind_reason: str
    total_memory_bytes: int | None = None
    budget_bytes: int = NaturalInt
    """What a run may really take, overhead of its own process included."""
    budget_reason: str


class Host(Frozen):
    """The computer around the device."""

    cpu: str
    physical_cores: int | None = None
    logical_cores: int = PositiveInt
    memory_bytes: int = PositiveInt
    available_memory_bytes: int = NaturalInt
    swap_bytes: int = NaturalInt
    system: str
    """Operating system and release, e.g. `Linux 6.1`."""
    memory_model: str
    """What an over-allocation meets: `linux`, `wsl`, `windows`, `macos`."""


class Versions(Frozen):
    """Versions of what decides how a step runs; None where it is absent."""

    python: str
    torch: str | None = None
    cuda_runtime: str | None = None
    driver: str | None = None
    cudnn: str | None = None
    triton: str | None = None
    diffusers: str | None = None
    transformers: str | None = None
    peft: str | None = None
    accelerate: str | None = None
    torchao: str | None = None
    bitsandbytes: str | None = None
    fastsafetensors: str | None = None


class Gate(Frozen):
    """Whether this machine can use a feature, and why or why not."""

    name: str
    available: bool
    reason: str


class Rate(Frozen):
    """One measured rate: the median of several timings."""

    name: str
    """Dotted: what, variant, shape; e.g. `matmul.bf16.4096x3072x3072`."""
    value: float = Field(gt=0)
    unit: Literal["FLOP/s", "B/s", "B", "s"]
    spread: float = Field(ge=0)
    """Interquartile range over the median."""
    num_samples: int = PositiveInt


class HardwareProfile(Frozen):
    """A machine with one device, in a form that two teams can compare."""

    device: Device
    host: Host
    versions: Versions
    gates: tuple[Gate, ...] = ()
    rates: tuple[Rate, ...] = ()
    noisy: bool = False
    """True when repeated timings disagreed, so that rates deserve less trust."""

    @property
    def hard_keys(self) -> dict[str, str | None]:
        """The facts that decide whether a tuning carries over to another machine."""
        capability = self.device.compute_capability
        return {
            "device_kind": self.device.kind,
            "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
            "memory_kind": self.device.memory_kind,
            "memory_model": self.host.memory_model,
            "torch": _minor(self.versions.torch),
            "cuda": _major(self.versions.cuda_runtime),
            "torchao": self.versions.torchao,
            "bitsandbytes": self.versions.bitsandbytes,
            "trial_protocol": str(TRIAL_PROTOCOL_VERSION),
        }

    @property
    def fingerprint(self) -> str:
        """Digest of the hard keys: equal where a tuning may be reused."""
        return digest_of(dict(self.hard_keys))

    def gate(self, name: str) -> Gate:
        """The gate called `name`; an unknown name is a closed gate that says so."""
        found = next((gate for gate in self.gates if gate.name == name), None)
        return found or Gate(name=name, available=False, reason=f"this profile says nothing about {name}")

    def rate(self, name: str) -> float | None:
        """The measured rate called `name` in its unit, or None."""
        return next((rate.value for rate in self.rates if rate.name == name), None)


def _minor(version: str | None) -> str | None:
    return None if version is None else ".".join(version.split("+")[0].split(".")[:2])


def _major(version: str | None) -> str | None:
    return None if version is None else version.split(".")[0]


# --- the question ------------------------------------------------------------------------------------------------


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


class Workload(Frozen):
    """What is to be trained, as far as it decides memory and speed: the class a plan is made for."""

    model: ModelSpec
    resolution_px: int = PositiveInt
    """Side of the square whose area every bucket stays within."""
    buckets: tuple[Bucket, ...] = Field(min_length=1)
    max_text_tokens: int = PositiveInt
    """Longest encoded caption."""
    text_padding: Literal["exact", "masked"]
    """`exact`: all captions have one length, no mask is ever needed; `masked`: lengths differ."""
    rank: int = PositiveInt
    lora_alpha: float = Field(gt=0)
    targets: str
    """Named set of adapted layers, e.g. `attention`."""
    effective_batch_size: int = PositiveInt
    """Images per optimizer step. It is the user's: tuning never changes what is learned."""
    quality: Quality = "high"
    objective: Objective = "throughput"

    @property
    def largest_bucket(self) -> Bucket:
        """The bucket with the most pixels: the one that decides the peak."""
        return max(self.buckets, key=lambda b: (b.num_frames * b.width_px * b.height_px, b.width_px))


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

    def label(self) -> str:
        """One short line for people."""
        checkpointing = f"ckpt {self.checkpointed_blocks}"
        return f"batch {self.micro_batch_size}, {checkpointing}, {self.quantization}, {self.attention}"


class TrialResult(Frozen):
    """What happened when a candidate ran for a few real steps. Failures teach as well."""

    candidate: Candidate
    outcome: Outcome
    step_seconds: tuple[float, ...] = ()
    """Every steady optimizer step (the whole effective batch), in order; warm-up steps are apart."""
    warmup_seconds: tuple[float, ...] = ()
    load_seconds: float | None = None
    peak_memory_bytes: int | None = None
    """Device memory of the step, as the allocator counts it."""
    load_peak_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    """Largest resident memory of the child process."""
    final_loss: float | None = None
    message: str = ""
    """Why the outcome is not `ok`, in one line."""

    @property
    def median_step_seconds(self) -> float | None:
        """Median of the steady steps, None when there are none."""
        ordered = sorted(self.step_seconds)
        if not ordered:
            return None
        middle = len(ordered) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


class Rejected(Frozen):
    """A choice that lost or never ran, and why."""

    choice: Choice
    reason: str


class Reason(Frozen):
    """Why one knob has the value it has."""

    knob: Knob
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
    """What the process takes besides: on CPU its libraries, on a GPU its context."""


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


class Job(Frozen):
    """The user's part of a plan: may be edited or overridden while shapes stay in the planned class."""

    model: str
    """Folder in the diffusers layout, or a hub id."""
    data: str | None
    """Folder of images with same-stem `.txt` captions; None until `train --data` names one."""
    output: str = "output"
    num_steps: int = PositiveInt
    learning_rate: float = Field(gt=0, le=1)
    weight_decay: float = Field(ge=0, le=1)
    max_grad_norm: float = Field(gt=0)
    timestep_shift: float = Field(gt=0)
    """Shift of the flow-matching timesteps; 1 leaves them as sampled."""
    seed: int = NaturalInt
    preview_prompts: tuple[str, ...] = ()
    preview_steps: int = PositiveInt
    """Denoising steps of a preview."""


class FrozenPart(Frozen):
    """Everything in a plan that the digest covers."""

    schema_version: Literal[1]
    autotune_version: str
    hardware: PlannedHardware
    workload: Workload
    settings: Candidate
    expected: Expected
    reasons: tuple[Reason, ...]
    fallbacks: tuple[Candidate, ...] = ()
    """The next safer settings, in order: where to turn when memory is shorter than planned."""
    trials: tuple[TrialResult, ...]


class TrainingPlan(Frozen):
    """A job and the settings that were measured for it. Data only: nothing in it is ever executed."""

    job: Job
    frozen: FrozenPart
    digest: str
    """Digest of `frozen`."""


class RunReport(Frozen):
    """What a training run did, against what its plan promised."""

    plan_digest: str
    num_steps: int
    total_seconds: float
    expected_step_seconds: float
    measured_step_seconds: float
    expected_peak_memory_bytes: int
    measured_peak_memory_bytes: int
    images_per_second: float
    first_loss: float
    final_loss: float
    settings: Candidate
    adapter: str
    """File name of the adapter inside the output folder."""
