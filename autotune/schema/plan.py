"""A training plan: the user's job, and the settings that were frozen for it."""

from typing import Literal, Self

from pydantic import Field, model_validator

from autotune.schema.base import Frozen, NaturalInt, PositiveInt
from autotune.schema.candidate import CachingSettings, Candidate, Choice
from autotune.schema.hardware import DeviceKind, Versions
from autotune.schema.job import Job
from autotune.schema.trial import PhasePeak, TrialResult
from autotune.schema.workload import Workload

PLAN_SCHEMA_VERSION = 1
"""Version of the plan file; a plan from a newer version is refused, not guessed at."""
Strategy = Literal["single", "ddp", "fsdp2"]


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
    match_keys: dict[str, str | None]
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


class CheckResult(Frozen):
    """Whether a plan fits a machine."""

    fits: bool
    misfits: tuple[str, ...]
    """Why it does not fit, one sentence each."""
