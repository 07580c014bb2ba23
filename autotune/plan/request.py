"""Requests of a user to each command and function: declared once, with types, bounds and defaults.

From these fields come the keyword arguments of `autotune.plan` and the like, the options of the
command line, their `--help`, and docs/reference.md.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, Protocol, Self, TypeVar, overload

from pydantic import BeforeValidator, Field, ValidationError

from autotune.errors import InvalidInput, InvalidPlan, suggest_nearest
from autotune.plan import candidate, prediction
from autotune.plan.base import (
    HIDDEN,
    Hours,
    ImageSize,
    MemoryAmount,
    Option,
    Request,
    first_problem,
    memory_bytes,
)
from autotune.plan.hardware import HardwareProfile
from autotune.plan.job import MAX_STEPS, DataFields, JobFields, PathText, as_job_data
from autotune.plan.plan import TrainingPlan
from autotune.plan.workload import ADAMW, NamedOptimizer, WorkloadRequest

Pairs = tuple[tuple[str, str], ...]


def _as_pairs(values: Any) -> Pairs:
    try:
        items = values.items() if isinstance(values, Mapping) else values
        return tuple((name, str(value)) for name, value in items)
    except TypeError as error:  # pydantic lets it pass
        raise ValueError(f"{values!r} are no names with values") from error


KnobValues = Annotated[Pairs | Mapping[str, str | int], BeforeValidator(_as_pairs)]
"""A value for each of some knobs, e.g. `{"quantization": "none"}`; kept as pairs."""


class HardwareRequest(Request):
    """A machine to plan for instead of this one."""

    hardware: str | HardwareProfile | None = None
    """Another machine: a GPU of the catalog, e.g. 4090 (see `probe --list`), or a saved probe."""
    host_memory: MemoryAmount | None = None
    """System RAM of that GPU's computer; 64GiB by default."""
    assume: Annotated[tuple[str, ...], BeforeValidator(tuple), Option(metavar="PACKAGE")] = ()
    """A package to count as installed there, as fast as published: flash-attn, flash-attn-3,
    flash-attn-4 or xformers."""
    price_per_hour: Annotated[float | None, Option("--price")] = Field(default=None, ge=0, le=1e6)
    """Price of an hour of one GPU, for the cost of the job, in any currency."""

    def require_named(self) -> None:
        """Raise InvalidInput if this machine is described, which needs no description."""
        for name, part in (("host_memory", "system RAM"), ("assume", "software")):
            if self.hardware is None and getattr(self, name):
                what = f"this machine's {part} is known"
                raise InvalidInput(what, hint="to describe another machine, add --hardware")


class PlanRequest(HardwareRequest, WorkloadRequest, JobFields):
    """A request for a plan."""

    path: Annotated[str | Path | None, Option("--output", short="-o", metavar="FILE")] = None
    """File to write the plan to; by default the command writes plan.yaml, Python none."""
    earlier: Annotated[TrainingPlan | str | Path | None, Option("--from", metavar="PLAN")] = None
    """Plan again for the same job and settings; other options replace those of this plan."""
    pins: Annotated[KnobValues, Option("--pin", metavar="KNOB=VALUE")] = ()
    """Fix a setting; `plan --list` shows its name and values."""
    exclusions: Annotated[KnobValues, Option("--exclude", metavar="KNOB=VALUE")] = ()
    """Never choose this value of a setting."""
    for_trainer: Annotated[str | None, Option("--for", metavar="TRAINER")] = None
    """Choose only what this trainer can do and fit: a name that `export-config --to` takes."""
    num_gpus: Annotated[int, Option("--gpus")] = Field(default=1, ge=1, le=65536)
    """GPUs that train together, one process each; tested on CPUs only."""
    max_memory: MemoryAmount | None = None
    """The most VRAM (on a CPU, system RAM) that a run may take; 12GiB rehearses such a card."""
    reserve_memory: Annotated[MemoryAmount | None, Option("--reserve")] = None
    """Memory to leave to the display and other programs, in place of the usual reserve."""
    use_records: Annotated[bool, Option("--profiles/--no-profiles")] = True
    """Use what machines measured before."""
    max_trials: int = Field(default=8, ge=1)
    """The most trials to run."""
    search_seconds: Annotated[float | None, Option("--search-time")] = Field(default=None, ge=1)
    """Seconds for trials; by default 5% of the run, at least 60, longer while another pays."""
    fresh: bool = False
    """Forget what an interrupted search has measured."""
    study: str | None = None
    """Keep the trials and their plan under this name."""
    storage: Annotated[str | None, Option(envvar="AUTOTUNE_STORAGE")] = Field(
        default=None, repr=False
    )
    """Share the study: postgresql+psycopg://user:password@host/database."""
    overheads: Annotated[prediction.Overheads | None, HIDDEN] = None
    """Overheads of the program that will train; None for autotune's own executor."""
    lacking: Annotated[Pairs, HIDDEN] = ()
    """(knob, value) pairs that this program cannot do."""
    interrupted: Annotated[Literal["ignored", "resumed", "forgotten"], HIDDEN] = "ignored"
    """Use of an interrupted search without a name. `ignored` keeps trials in memory."""

    @property
    def is_local(self) -> bool:
        """Tell if the hardware asked about is this machine's: only then can trials run."""
        return self.hardware is None

    @property
    def memory_limits(self) -> tuple[int | None, int | None]:
        """Bytes of `max_memory` and `reserve_memory`."""
        asked = (self.max_memory, self.reserve_memory)
        most, reserve = (None if amount is None else memory_bytes(amount) for amount in asked)
        return most, reserve

    @property
    def pin_pairs(self) -> Pairs:
        """(knob, value) pairs: only this value may be chosen."""
        return _as_pairs(self.pins)

    @property
    def exclusion_pairs(self) -> Pairs:
        """(knob, value) pairs: this value may not be chosen."""
        return (*_as_pairs(self.exclusions), *self.lacking)

    @classmethod
    def of_plan(cls, plan: TrainingPlan) -> Self:
        """Return the request that `plan` answered."""
        frozen, job = plan.frozen, plan.job
        work = WorkloadRequest.again(frozen.workload, has_data=job.data is not None)
        return cls.model_validate(
            {
                **dict(job),
                **work.given,
                "num_gpus": frozen.hardware.num_processes,
                "price_per_hour": frozen.expected.price_per_hour,
                "pins": frozen.pins,
                "exclusions": frozen.exclusions,
                "max_memory": frozen.max_memory_bytes,
                "reserve_memory": frozen.reserve_memory_bytes,
                "for_trainer": frozen.overheads and frozen.overheads.program,
            }
        )

    def over(self, plan: TrainingPlan, dropped: Collection[str] = ()) -> Self:
        """Return the request that `plan` answered, without what is `dropped`, with what is given
        here in its place."""
        before, now = type(self).of_plan(plan).given, self.given
        for name in dropped:
            before.pop(name, None)
        if "rank" in now:
            before.pop("lora_alpha", None)  # another rank brings its own
        if self.model is not None:
            for name in ("base", "vae", "text_encoders", "revision", "expert"):
                before.pop(name)
        if "base" in now:
            before.pop("revision", None)  # a commit of another repository
        if "num_steps" in now:
            before.pop("num_train_epochs")
        if "checkpointing_steps" in now:
            before.pop("checkpointing_epochs")
        if "optimizer" in now or "optimizer_options" in now:
            old = plan.frozen.workload.optimizer
            name = self.optimizer_choice.name if "optimizer" in now else old.name
            options = dict(old.options) if name == old.name else {}
            before["optimizer"] = name
            now["optimizer_options"] = {**options, **dict(self.optimizer_choice.options)}
            now["optimizer"] = name
            if name != old.name:
                before.pop("learning_rate", None)  # it was for the other
        return type(self).model_validate({"on_event": self.on_event, **before, **now})


CheckpointedBlocks = Annotated[
    Annotated[int, Field(ge=0, lt=2**63)] | Literal["all", "none"],
    Option("--checkpointing", metavar="all|none|NUMBER"),
]


class EstimateRequest(candidate.Candidate, HardwareRequest, WorkloadRequest):
    """A request for an estimate: a workload, hardware, and one candidate."""

    model: Annotated[str, Option(is_required=True)] = ""
    """A known name, a folder in the diffusers layout, or a hub id."""
    num_steps: Annotated[int | None, Option("--steps")] = Field(default=None, ge=1, le=MAX_STEPS)
    """Optimizer steps of the job."""
    micro_batch_size: int = Field(default=1, ge=1, le=65536)
    """Images that pass at once."""
    checkpointed_blocks: CheckpointedBlocks = "all"  # type: ignore[assignment]
    """Blocks that recompute their activations in the backward pass."""
    optimizer: NamedOptimizer = ADAMW  # type: ignore[assignment]
    """As for plan; adamw by default."""
    for_trainer: Annotated[str | None, Option("--for", metavar="TRAINER")] = None
    """Estimate what this trainer takes, with its own ways of adapting, storing and swapping: a name
    that `export-config --to` takes."""


class CompareRequest(WorkloadRequest, JobFields):
    """A request for a comparison of GPUs."""

    model: Annotated[PathText | None, Option(is_required=True)] = None
    """A folder in the diffusers layout, a known name, a hub id, or a single file."""
    hardware: str | tuple[str, ...] = "all"
    """GPU of the catalog, or several separated by commas; by default all."""
    host_memory: MemoryAmount | None = None
    """System RAM of their computers; 64GiB by default."""
    prices: Annotated[
        Mapping[str, float] | str | Path | None, Option("--price", metavar="FILE")
    ] = None
    """Price of an hour of each GPU: a YAML file such as docs/prices.yaml."""
    max_cost: Annotated[float | None, Option("--under")] = Field(default=None, ge=0)
    """Leave out what costs more."""
    max_hours: Annotated[Hours | None, Option("--within", metavar="TIME")] = None
    """Leave out what takes longer, e.g. 2h or 90min; a number counts hours."""
    pins: Annotated[KnobValues, Option("--pin", metavar="KNOB=VALUE")] = ()
    """Fix a setting; `plan --list` shows its name and values."""
    exclusions: Annotated[KnobValues, Option("--exclude", metavar="KNOB=VALUE")] = ()
    """Never choose this value of a setting."""
    for_trainer: Annotated[str | None, Option("--for", metavar="TRAINER")] = None
    """Choose only what this trainer can do and fit: a name that `export-config --to` takes."""


class TrainRequest(JobFields, Request):
    """A request for a run: a plan, and fields of its job to replace."""

    plan: Annotated[TrainingPlan | str | Path | None, Option("PLAN")] = None
    """A plan made by `autotune plan`; without one, --model is planned first."""
    model: PathText | None = None
    """Another folder of the same architecture; without PLAN, the model to train."""
    output: Annotated[PathText, Option("--output", metavar="FOLDER")] = "output"
    """Folder for adapter, checkpoints, samples and report; by default the plan's."""
    optimizer: str | None = None
    """The plan's package:Class, which is loaded only if you name it."""
    resume: bool = False
    """Continue from the newest checkpoint, if there is one."""
    trace: bool = False
    """Write a trace of a few steps (torch.profiler) to trace.json."""
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """Serve Prometheus metrics at this port of localhost."""
    push_to_hub: Annotated[str | None, Option(metavar="OWNER/NAME")] = None
    """Upload adapter, samples and a model card, privately, at the end."""


class CheckDataRequest(DataFields, Request):
    """A request for a look at training data."""

    data: Annotated[
        str | tuple[str, ...], BeforeValidator(as_job_data), Option("DIR", is_required=True)
    ] = ()
    """Folder of images with same-stem .txt captions, or a YAML file that lists such folders."""
    model: str = "qwen-image"
    """Model whose image sizes count."""
    resolution: Annotated[ImageSize | None, Option(metavar="SIDE|WIDTHxHEIGHT")] = None
    """Size of images in pixels, as for plan; by default the family's."""


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


class Door(Protocol[P, R_co]):
    """A function whose first arguments may stand without their names."""

    __name__: str

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, first: Any, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, first: Any, second: Any, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


def takes(request: Callable[P, T], *positional: str) -> Callable[[Callable[[T], R]], Door[P, R]]:
    """Make a function of a request one of its fields, whose types mypy checks; values of
    `positional` may stand first, without their names."""

    def decorate(run: Callable[[T], R]) -> Door[P, R]:
        @functools.wraps(run)
        def door(*args: Any, **kwargs: Any) -> R:
            if len(args) > len(positional):
                raise TypeError(f"{run.__name__} takes at most {len(positional)} unnamed arguments")
            return run(
                make_request(
                    request, run.__name__, {**dict(zip(positional, args, strict=False)), **kwargs}
                )
            )

        return door

    return decorate


def make_request(request: Any, function: str, values: dict[str, Any]) -> Any:
    """Return the request with these values; None is as if it were not given. Raises InvalidInput
    for an absent field or a value out of range, InvalidPlan if it is of the job."""
    unknown = sorted(values.keys() - request.model_fields.keys())
    if unknown:
        what = f"there is no argument of {function} {unknown[0]!r}"
        raise InvalidInput(what, hint=suggest_nearest(unknown[0], request.model_fields))
    try:
        return request(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        where, why = first_problem(error)
        if where.partition(".")[0] in JobFields.model_fields:
            hint = "give the job another value"
            raise InvalidPlan(f"job.{where}: {why}", hint=hint) from error
        raise InvalidInput(f"{where}: {why}", hint="give another value") from error
