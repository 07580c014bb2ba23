"""A candidate, how captions are encoded for it before training, and what its trials measured."""

import statistics
from collections.abc import Collection, Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from autotune.plan.base import HIDDEN, Frozen, NaturalInt, PositiveInt

Choice = str | int
BLOCK_COUNTS = ("checkpointed_blocks", "selective_blocks", "swapped_blocks")
"""Fields of `Candidate` that are numbers of blocks."""


class Candidate(Frozen):
    """One value for every knob. Names, not objects: another machine's plan must parse."""

    micro_batch_size: int = PositiveInt
    """Images per forward pass; gradients are accumulated until the batch size is reached."""
    checkpointed_blocks: int = NaturalInt
    """Number of first blocks that recompute their activations in the backward pass."""
    quantization: str = "none"
    """Weight format of the base model, e.g. none, or another that `plan --list` shows."""
    attention: str = "native"
    """Attention backend under diffusers' name, e.g. native, or another of `plan --list`."""
    precision: Annotated[str, HIDDEN] = "bf16"
    """Compute dtype of the transformer and the adapter."""
    loader: Annotated[str, HIDDEN] = "safetensors"
    """Reader of weights from disk: a name in `autotune.weights.tensors`."""
    swapped_blocks: int = Field(default=0, ge=0)
    """Blocks, from the first on, whose frozen weights stay in system RAM until they are needed."""
    selective_blocks: Annotated[int, HIDDEN] = Field(default=0, ge=0)
    """Number of blocks, after those that recompute everything, that recompute all but attention:
    they keep its output."""
    modulation: Annotated[str, HIDDEN] = "resident"
    """resident, or ahead: the modulations of coming draws are computed in windows, and their layers
    not loaded."""
    compile: str = "off"
    """off, or block: each repeated block is compiled by torch.compile."""
    norm_rope: Annotated[str, HIDDEN] = "stock"
    """Norm and rotation of queries and keys: `stock`, `fused`, or `compiled`."""
    optimizer: str = "adamw"
    allocator: Annotated[str, HIDDEN] = "default"
    """Growth of the device's caching allocator: by `default` or by `expandable` segments."""
    data_workers: Annotated[int, HIDDEN] = Field(default=1, ge=0)
    """Number of threads that collate batches ahead of the step."""
    batch_memory: Annotated[str, HIDDEN] = "pageable"
    """Kind of host memory that batches are copied to the device from: `pageable` or `pinned`."""

    @property
    def recomputed_blocks(self) -> int:
        """Number of blocks that recompute activations, all or some."""
        return self.checkpointed_blocks + self.selective_blocks

    def differences(self, other: Self) -> dict[str, Choice]:
        """Return the values that are not the other's, by knob."""
        return {name: value for name, value in self if value != getattr(other, name)}


PLACE = r"^(training|cpu|cuda:[0-9]{1,3})$"
"""The device that trains (`training`), `cpu`, or another GPU (`cuda:1`), for what only encodes."""


class CachingSettings(Frozen):
    """Encoding of captions and images before training; pinned by `--pin caching.FIELD=VALUE`."""

    text_encoder_device: str = Field(default="training", pattern=PLACE)
    """`training` for the device that trains, `cpu`, or another GPU such as `cuda:1`."""
    text_encoder_quantization: str = "none"
    """Weight format of their Linear layers, under the names of `Candidate.quantization`."""
    text_encoder_streamed: bool = False
    """True if their weights stay in host memory and are copied to the device module by module."""
    vae_device: str = Field(default="training", pattern=PLACE)
    """The same for images and clips; previews are decoded on the device that trains."""
    residency: Literal["release", "keep"] = "release"
    """`release` frees text encoders and VAE when everything is encoded; `keep` does not."""

    @property
    def other_gpu(self) -> str | None:
        """Another GPU than the training one, on which something is encoded."""
        places = (self.text_encoder_device, self.vae_device)
        return next((place for place in places if place.startswith("cuda:")), None)

    @property
    def parts_on_other_gpu(self) -> str:
        """The models that run there, in words."""
        places = {"captions": self.text_encoder_device, "images": self.vae_device}
        return " and ".join(name for name, place in places.items() if place == self.other_gpu)

    @model_validator(mode="after")
    def _one_other_gpu(self) -> Self:
        if {self.text_encoder_device, self.vae_device} - {"training", "cpu", self.other_gpu}:
            raise ValueError("captions and images can be encoded on one other GPU, not on two")
        return self


Outcome = Literal[
    "ok",
    "oom",
    "host_oom",
    "spill",
    "timeout",
    "unsupported",
    "numerics",
    "crash",
    "unpaid",
    "disturbed",
]
"""End of a trial. `host_oom`: host memory ran out although the device has its own; if both are one
it is `oom`. `unpaid`: it ran, but the planned steps do not pay its start-up back. `disturbed`: it
ran, but other programs slowed it down, as the same settings were faster in another trial."""
MAX_RESIDUAL = 5.0
"""Limit of a logarithmic residual, a factor of 148; what is further off counts as this far."""


class QuantizationError(Frozen):
    """Relative error of the outputs of quantized layers on random inputs."""

    overall: float = Field(ge=0)
    """Relative error of all quantized layers together."""
    worst: float = Field(ge=0)
    """Relative error of the block that is furthest off."""
    worst_block: int = NaturalInt


class PhasePeak(Frozen):
    """Time and peak memory of a phase of a run."""

    name: str
    seconds: float = Field(ge=0)
    device_bytes: int | None
    """Peak as the device's allocator counts it; None on CPU, where host memory is device memory."""
    host_bytes: int | None
    """Largest resident memory of the process; None if the system does not tell."""


class TrialResult(Frozen):
    """The outcome of a few real steps of a candidate. Failures are evidence, too."""

    candidate: Candidate
    outcome: Outcome
    step_seconds: tuple[float, ...] = ()
    """Wall time of every steady optimizer step of the whole effective batch, in order."""
    warmup_seconds: tuple[float, ...] = ()
    """Wall time of the first steps, and of the step whose memory was measured."""
    load_seconds: float | None = None
    peak_memory_bytes: int | None = None
    """Step memory: peak of a training step, as the device's allocator counts it."""
    load_peak_memory_bytes: int | None = None
    """Peak device memory while the weights were loaded; None on CPU."""
    confirms: bool = False
    """True for the longer trial of a candidate that had won: a plan promises its figures."""
    phases: tuple[PhasePeak, ...] = ()
    """Every phase of a run that a confirming trial could rehearse."""
    allocator_retries: int = Field(default=0, ge=0)
    """Number of times that the device's allocator ran out, freed its cache, and went on."""
    memory_cap_bytes: int | None = None
    """Limit that the user set: no evidence for a device that really has only so much."""
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


def counting_trials(trials: Iterable[TrialResult]) -> list[TrialResult]:
    """Return the trial of each candidate that counts: the last, unless it only took too long."""
    last: dict[Candidate, TrialResult] = {}
    for trial in trials:
        earlier = last.get(trial.candidate)
        is_late = trial.outcome in ("timeout", "disturbed")
        if earlier is None or earlier.outcome != "ok" or not is_late:
            last[trial.candidate] = trial
    return list(last.values())


class Residual(Frozen):
    """Logarithms of measured over predicted values of a trial, before any calibration."""

    time: float = Field(ge=-MAX_RESIDUAL, le=MAX_RESIDUAL)
    memory: float = Field(ge=-MAX_RESIDUAL, le=MAX_RESIDUAL)


def count_blocks(value: str | int, num_blocks: int) -> int:
    """Count the blocks meant by a number, `all`, `25%`, or `2/4`, the first two of every four."""
    written = str(value)
    if written == "all":
        return num_blocks
    if written.endswith("%"):
        return round(float(written[:-1]) * num_blocks / 100)
    first, of, every = written.partition("/")
    if not of:
        return int(first)
    whole_groups, rest = divmod(num_blocks, int(every))
    return whole_groups * int(first) + min(rest, int(first))


def nearest_numbers(numbers: Collection[Choice], own: Choice) -> list[int]:
    """Choose the nearest of numbers of blocks below and above `own`, then the farthest."""
    below = sorted(int(number) for number in numbers if int(number) < int(own))
    above = sorted(int(number) for number in numbers if int(number) > int(own))
    return list(dict.fromkeys((*below[-1:], *above[:1], *below[:1], *above[-1:])))
