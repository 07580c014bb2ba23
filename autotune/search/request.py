"""What a user asks of a planner, and the job that comes with the answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autotune.data.dataset import Dataset, SplitDataset, read_split
from autotune.data.items import make_options
from autotune.knobs.caching import PIN
from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import require_choice
from autotune.knobs.settings import usual_learning_rate
from autotune.models.family import Defaults
from autotune.models.registry import find_published
from autotune.models.resolve import (
    ResolvedModel,
    check_weights,
    fetch_model,
    is_on_hub,
    resolve_model,
)
from autotune.plan.hardware import HardwareProfile, MemoryBudget
from autotune.plan.job import Job, ModelRef
from autotune.plan.overheads import Overheads
from autotune.plan.plan import TrainingPlan
from autotune.plan.plan_file import job_from
from autotune.plan.workload import ADAMW, OptimizerChoice, Workload
from autotune.search.space import SearchSpace, build_search_space
from autotune.train.folder import require_separate_output
from autotune.train.workload import (
    WorkloadOverrides,
    check_job,
    check_overrides,
    describe_workload,
    overrides_from,
    require_even_shares,
)
from autotune.weights.files import BadWeights


@dataclass(frozen=True)
class PlanRequest:
    """What the user asks for; None takes the family's default."""

    model: ModelRef
    workload_overrides: WorkloadOverrides = field(default_factory=WorkloadOverrides)
    job_overrides: Mapping[str, object] = field(default_factory=dict)
    """Values of the job, by the names of its fields."""
    pins: tuple[tuple[str, str], ...] = ()
    """(knob, value) pairs: only this value may be chosen."""
    exclusions: tuple[tuple[str, str], ...] = ()
    """(knob, value) pairs: this value may not be chosen."""
    is_local: bool = True
    """Whether the hardware asked about is this machine's: only then can trials run."""
    overheads: Overheads | None = None
    """Overheads of the program that will train; None for autotune's own executor."""
    memory_budget: MemoryBudget | None = None
    """What a run may use of the device; None for what the device leaves."""
    num_processes: int = 1
    """GPUs that train together, one process each."""
    use_profiles: bool = True
    """Whether what this and other machines measured before may shorten the search."""
    max_trials: int = 8
    price_per_hour: float | None = None
    """Price of an hour of one GPU, for what the job costs."""
    search_seconds: float | None = None
    """None for a share of the planned run's time."""
    study: str | None = None
    """Name under which trials and the plan are kept and shared."""
    storage: str | None = field(default=None, repr=False)
    """URL of the database that keeps them; None for a file of the user's own."""
    interrupted: Literal["ignored", "resumed", "forgotten"] = "ignored"
    """Without a named study: what becomes of an interrupted search of the same. `ignored` keeps
    trials in memory."""
    job: Job | None = None
    """What an earlier plan did, if it is made again; what is asked for now takes precedence."""
    job_optimizer: OptimizerChoice = ADAMW
    """The optimizer of that plan, which its learning rate was for."""

    @property
    def data(self) -> str | tuple[str, ...] | None:
        """Where the job's data lies, if it has any."""
        named: Any = self.job_overrides.get("data", self.job.data if self.job else None)
        return named or None

    def text(self, name: str) -> str | None:
        """The job's field called `name`, if it has one."""
        value = self.job_overrides.get(name, getattr(self.job, name, None))
        return None if value is None else str(value)

    @property
    def caching_pins(self) -> dict[str, str]:
        """Fields of `CachingSettings` that are pinned."""
        return {name.removeprefix(PIN): value for name, value in self.pins if name.startswith(PIN)}

    @property
    def caching_exclusions(self) -> tuple[tuple[str, str], ...]:
        """Values of such fields that are excluded."""
        return tuple(
            (name.removeprefix(PIN), value)
            for name, value in self.exclusions
            if name.startswith(PIN)
        )

    @property
    def knob_pins(self) -> tuple[tuple[str, str], ...]:
        """The other pins."""
        return tuple(pin for pin in self.pins if not pin[0].startswith(PIN))

    @property
    def knob_exclusions(self) -> tuple[tuple[str, str], ...]:
        """The other exclusions."""
        return tuple(one for one in self.exclusions if not one[0].startswith(PIN))

    def space(self, context: TuningContext) -> SearchSpace:
        """What may be tried for `context`.

        Raises:
            InvalidInput, NothingFits: as `build_search_space`.
        """
        return build_search_space(context, self.knob_pins, self.knob_exclusions)

    @property
    def drops_captions(self) -> bool:
        """Whether the job leaves captions out at random."""
        return bool(
            self.job_overrides.get("caption_dropout", getattr(self.job, "caption_dropout", 0))
        )


def request_from(plan: TrainingPlan) -> PlanRequest:
    """The request that `plan` answered."""
    frozen, job = plan.frozen, plan.job
    return PlanRequest(
        model=job.model_ref,
        workload_overrides=overrides_from(frozen.workload, has_data=job.data is not None),
        num_processes=frozen.hardware.num_processes,
        price_per_hour=frozen.expected.price_per_hour,
        pins=frozen.pins,
        exclusions=frozen.exclusions,
        overheads=frozen.overheads,
        job=job,
        job_optimizer=frozen.workload.optimizer,
    )


def read_data(request: PlanRequest, model: ResolvedModel) -> SplitDataset | None:
    """The request's data, if it names any, and what of it is held out."""
    if request.data is None:
        return None
    frames = request.workload_overrides.num_frames or model.family.defaults.num_frames
    job = {**dict(request.job or {}), **request.job_overrides}
    options = make_options(job, model.family, frames)
    return read_split(
        request.data, options, request.text("validation"), int(request.text("seed") or 0)
    )


def build_job(
    request: PlanRequest, model: ResolvedModel, dataset: Dataset | None, effective_batch_size: int
) -> Job:
    """The job that the plan starts with: the user's words, else the earlier plan's, else the
    family's defaults.

    Raises:
        InvalidInput, InvalidPlan: a value is out of range, or asks of the model what its family
            does not have.
    """
    defaults = model.family.defaults
    items = dataset.items if dataset else ()
    usual = {
        "data": None,
        "num_steps": defaults.num_steps(max(1, len(items))),
        "learning_rate": usual_learning_rate(
            request.workload_overrides.optimizer, defaults.learning_rate
        ),
        "weight_decay": defaults.weight_decay,
        "max_grad_norm": 1.0,
        "timestep_sampling": defaults.timestep_sampling,
        "timestep_shift": defaults.timestep_shift,
        "guidance_scale": defaults.training_guidance,
        "seed": 0,
        "preview_prompts": tuple(item.caption for item in items[:1]),
        "preview_steps": defaults.preview_steps,
    }
    name = request.model.name
    resolved = {
        "model": name.partition("@")[0] if model.revision and not model.file else name,
        "base": model.base,
        "expert": model.family.expert,
        "revision": model.revision,
        "num_frames": request.workload_overrides.num_frames or defaults.num_frames,
    }
    earlier = dict(request.job) if request.job else usual
    if request.job_optimizer.name != request.workload_overrides.optimizer.name:
        earlier = {**earlier, "learning_rate": usual["learning_rate"]}
    job = job_from(earlier, {**request.job_overrides, **resolved})
    if dataset:
        job = job.changed(num_steps=job.steps_on(dataset.epoch_size, effective_batch_size))
    check_job(job, model.family)
    return job


@dataclass(frozen=True)
class ResolvedRequest:
    """A request with its model, data and job, read and found sound: all that can be wrong
    whatever the machine."""

    request: PlanRequest
    model: ResolvedModel
    dataset: Dataset | None
    workload: Workload
    """The work of all processes that train together."""
    job: Job
    notes: tuple[str, ...]
    """What the user should know about how the request was understood."""

    @classmethod
    def build(
        cls,
        request: PlanRequest,
        *,
        needs_weights: bool = True,
        on_sound: Callable[[], None] = lambda: None,
    ) -> "ResolvedRequest":
        """Read what the request names; with `needs_weights`, the headers of a local model's weights
        too.

        `on_sound` is called when all that can be judged without torch is found sound, before that
        is imported.

        Raises:
            InvalidInput, InvalidPlan: the model, the data or a value of the job cannot be used.
        """
        for name, value in (*request.knob_pins, *request.knob_exclusions):
            require_choice(name, value)
        model, notes = resolve_request_model(request)
        check_overrides(model.family, request.workload_overrides)
        if needs_weights and model.folder is not None:
            check_weights(model)
        data = read_data(request, model)
        dataset = data.whole if data else None
        request, rounded = _with_even_batch(request, model.family.defaults)
        overrides, drops_captions = request.workload_overrides, request.drops_captions
        batch = overrides.effective_batch_size or model.family.defaults.effective_batch_size
        require_even_shares(batch, request.num_processes)
        job = build_job(request, model, data.training if data else None, batch)
        require_separate_output(job)
        on_sound()
        workload = describe_workload(model, dataset, overrides, drops_captions=drops_captions)
        return cls(request, model, dataset, workload, job, (*notes, *rounded))

    def context(self, hardware: HardwareProfile) -> TuningContext:
        """What knobs are chosen for on a machine."""
        return TuningContext(hardware, self.model.family, self.workload, self.request.memory_budget)

    def space(self, hardware: HardwareProfile) -> SearchSpace:
        """What may be tried on a machine, and what not and why. Raises as `build_search_space`."""
        return self.request.space(self.context(hardware))


def _with_even_batch(
    request: PlanRequest, defaults: Defaults
) -> tuple[PlanRequest, tuple[str, ...]]:
    """The request with an effective batch that its processes can share, if the user named none;
    and a note of that."""
    number, overrides = request.num_processes, request.workload_overrides
    default, batch = defaults.effective_batch_size, defaults.batch_for(number)
    if overrides.effective_batch_size is not None or batch == default:
        return request, ()
    note = (
        f"an effective batch of {batch}: {number} GPUs cannot share the usual {default} "
        "evenly; "
        "--batch sets another"
    )
    return replace(request, workload_overrides=replace(overrides, effective_batch_size=batch)), (
        note,
    )


def resolve_request_model(request: PlanRequest) -> tuple[ResolvedModel, tuple[str, ...]]:
    """The model; from the hub come its tokenizers, if there are captions to count, and unknown
    architectures."""
    known = find_published(request.model.name) is not None
    if not is_on_hub(request.model) or (known and not (request.is_local and request.data)):
        return resolve_model(request.model), ()
    try:
        return fetch_model(request.model, weights=False), ()
    except BadWeights as error:
        if not known:
            raise
        note = f"captions are assumed to have the usual length: {error.message}"
        return resolve_model(request.model), (note,)
