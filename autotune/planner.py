"""The whole algorithm on one screen: from a question and a machine to a frozen plan.

    model ──> workload ──> search space ──> trials, each chosen by what the last ones taught ──> winner ──> plan

Where the machine is not at hand (a GPU of the catalogue), predictions take the place of trials and the plan says so.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from autotune import __version__
from autotune.cost.parallel import Parallel
from autotune.cost.predict import Predictor
from autotune.errors import NothingFits
from autotune.families.resolve import ResolvedModel, parts_of, resolve_model
from autotune.hardware.probe import with_budget
from autotune.knobs.base import Setting
from autotune.knobs.caching import PIN
from autotune.plan_file import seal
from autotune.prediction import Prediction
from autotune.schema import (
    Candidate,
    Choice,
    Expected,
    FrozenPart,
    HardwareProfile,
    Job,
    PlannedHardware,
    TimestepSampling,
    TrainingPlan,
    TrialResult,
    Workload,
)
from autotune.search.sampler import ResidualSampler
from autotune.search.space import SearchSpace, search_space, without
from autotune.search.study import Limits, run_search
from autotune.search.winner import (
    Score,
    fallbacks_of,
    measured_scores,
    predicted_scores,
    reasons_for,
    require_winner,
)
from autotune.sharing.query import Known, Survey, broken_promise, first_candidates, survey
from autotune.training.data.dataset import Dataset, read_dataset
from autotune.training.describe import Wishes, check_job, describe_workload, require_even_shares
from autotune.training.processes import device_misfits
from autotune.trials.runner import ProcessTrialRunner
from autotune.weights.sources import open_source, weights_in

MOST_RECORDS = 3
"""Records of similar machines that a search stands on."""


@dataclass(frozen=True)
class Question:
    """What the user asks for; None takes the family's default."""

    model: str
    data: Path | None = None
    control: Path | None = None
    caption: str | None = None
    trigger: str | None = None
    wishes: Wishes = field(default_factory=Wishes)
    output: str = "output"
    num_steps: int | None = None
    learning_rate: float | None = None
    timestep_sampling: TimestepSampling = "logit_normal"
    timestep_shift: float | Literal["by_resolution"] | None = None
    guidance_scale: float | None = None
    seed: int = 0
    pins: tuple[tuple[str, str], ...] = ()
    """(knob, value) pairs: only this value may be chosen."""
    exclusions: tuple[tuple[str, str], ...] = ()
    """(knob, value) pairs: this value may not be chosen."""
    here: bool = True
    """Whether the hardware asked about is this machine's: only then can trials run."""
    num_processes: int = 1
    """GPUs that train together, one process each."""
    use_profiles: bool = True
    """Whether what this and other machines measured before may shorten the search."""
    max_trials: int = 8
    search_seconds: float = 600.0


@dataclass(frozen=True)
class Events:
    """Where progress is told."""

    on_space: Callable[[SearchSpace, Workload], None] = lambda space, workload: None
    on_survey: Callable[[Survey], None] = lambda survey: None
    on_start: Callable[[Candidate], None] = lambda candidate: None
    on_trial: Callable[[TrialResult], None] = lambda result: None
    on_predictions: Callable[[list[Prediction]], None] = lambda predictions: None


def make_plan(question: Question, hardware: HardwareProfile, events: Events | None = None) -> TrainingPlan:
    """Find the best settings for the question on this machine and freeze them.

    Raises:
        InvalidInput: the model or the data cannot be used.
        NothingFits: no settings run here.
    """
    events = events or Events()
    model = resolve_model(question.model)
    _require_weights_and_room(model, hardware)
    dataset = _read(question, model)
    job = _job(question, model, dataset)
    check_job(job, model.family)
    whole = describe_workload(model, dataset, question.wishes)
    require_even_shares(whole, question.num_processes)
    workload, machine = whole.share(question.num_processes), hardware  # from here on: of one process and its device
    hardware, cost, space = _strategy(question, model, workload, _of_one_process(question, machine))
    caching, why_caching = cost.caching
    events.on_space(space, whole)
    started = time.monotonic()
    trials: tuple[TrialResult, ...] = ()
    stood_on: tuple[Known, ...] = ()
    if not question.here or cost.parallel.strategy == "fsdp2":  # a trial has one device
        predictions = [cost.predict(candidate) for candidate in space.candidates]
        events.on_predictions(predictions)
        scores = predicted_scores(predictions, hardware.device.budget_bytes)
    else:
        stood_on = _known(question, hardware, workload, space, events)
        trials = _search(question, hardware, workload, space, cost, stood_on, events)
        scores = measured_scores(trials)
    best = require_winner(scores, workload.objective, _relaxation(workload))  # only what ran here may win
    scores += measured_scores(_confirmed_trials(stood_on, trials))
    frozen = FrozenPart(
        schema_version=1,
        autotune_version=__version__,
        hardware=_planned_hardware(machine, cost.parallel),
        workload=whole,
        settings=best.candidate,
        caching=caching,
        expected=_expected(best, trials, cost, whole, hardware),
        reasons=(*reasons_for(space, scores, best, workload.objective), why_caching),
        fallbacks=fallbacks_of(scores, best),
        records=tuple(item.name for item in stood_on),
        search_seconds=time.monotonic() - started,
        trials=trials,
    )
    return seal(job, frozen)


def _of_one_process(question: Question, hardware: HardwareProfile) -> HardwareProfile:
    """Each process has a device of its own, but on CPU they share the memory."""
    if question.here and (misfits := device_misfits(question.num_processes, hardware)):
        raise NothingFits(misfits[0], hint="ask for fewer with --gpus, or see what is here with `autotune probe`")
    if hardware.device.kind != "cpu" or question.num_processes == 1:
        return hardware
    return with_budget(hardware, hardware.device.budget_bytes // question.num_processes)


def _strategy(
    question: Question, model: ResolvedModel, workload: Workload, hardware: HardwareProfile
) -> tuple[HardwareProfile, Predictor, SearchSpace]:
    """One device's memory, the cost model and what it admits.

    The weights are shared out over the processes only where no device is predicted to hold them all.
    """
    number = question.num_processes
    replicated = Parallel("ddp", number) if number > 1 else Parallel()
    less, cost = _beside_kept(question, model, workload, hardware, replicated)
    budget = less.device.budget_bytes
    space = _space(question, Setting(less, model.family, workload))
    try:
        lighter = _without_too_heavy(space, cost, budget)
        if number == 1 or cost.predict(lighter.candidates[0]).required_memory_bytes <= budget:
            return less, cost, lighter
    except NothingFits:
        if number == 1:
            raise
    why = "the model is shared out over the processes, for which weights must be plain"
    plain = without(space, "quantization", {name: why for name in space.choices["quantization"] if name != "none"})
    if not plain.candidates:
        raise NothingFits(f"on each of {number} devices nothing fits, and {why}", hint=_relaxation(workload))
    less, cost = _beside_kept(question, model, workload, hardware, Parallel("fsdp2", number))
    return less, cost, _without_too_heavy(plain, cost, less.device.budget_bytes)


def list_choices(question: Question, hardware: HardwareProfile) -> SearchSpace:
    """What a search for the question could choose on this machine, and what it could not and why."""
    model = resolve_model(question.model)
    workload = describe_workload(model, _read(question, model), question.wishes)
    return _space(question, Setting(hardware, model.family, workload))


def _space(question: Question, setting: Setting) -> SearchSpace:
    pins = [pin for pin in question.pins if not pin[0].startswith(PIN)]
    return search_space(setting, pins, question.exclusions)


def _beside_kept(
    question: Question, model: ResolvedModel, workload: Workload, hardware: HardwareProfile, parallel: Parallel
) -> tuple[HardwareProfile, Predictor]:
    """The cost model, and the machine without what stays on it beside training."""
    pins = {name.removeprefix(PIN): value for name, value in question.pins if name.startswith(PIN)}
    cost = Predictor(hardware, workload, model.family, model.config, parts_of(model), pins, parallel)
    if not cost.kept_bytes:
        return hardware, cost
    less = with_budget(hardware, max(0, hardware.device.budget_bytes - cost.kept_bytes))
    reduced = Predictor(less, workload, model.family, model.config, cost.parts, pins, parallel)
    reduced.caching = cost.caching  # chosen with all of the memory
    return less, reduced


def _without_too_heavy(space: SearchSpace, cost: Predictor, budget_bytes: int) -> SearchSpace:
    """Leave out storages whose weights alone exceed the budget: nothing about them needs to be traced or tried."""
    sizes = {c.quantization: cost.weight_bytes(c) for c in space.candidates}
    dropped: dict[Choice, str] = {
        name: f"its weights alone need {size / 2**30:.1f} GiB, a run may take {budget_bytes / 2**30:.1f} GiB"
        for name, size in sizes.items()
        if size > budget_bytes
    }
    if len(dropped) == len(sizes):
        least = min(dropped, key=lambda name: sizes[str(name)])
        raise NothingFits(f"{cost.workload.model.name} as {least}: {dropped[least]}", hint=_relaxation(cost.workload))
    return without(space, "quantization", dropped)


def _read(question: Question, model: ResolvedModel) -> Dataset | None:
    if question.data is None:
        return None
    return read_dataset(
        question.data,
        caption=question.caption,
        trigger=question.trigger,
        control=question.control,
        num_frames=question.wishes.num_frames or model.family.defaults.num_frames,
    )


def _search(
    question: Question,
    hardware: HardwareProfile,
    workload: Workload,
    space: SearchSpace,
    cost: Predictor,
    stood_on: tuple[Known, ...],
    events: Events,
) -> tuple[TrialResult, ...]:
    budget = hardware.device.budget_bytes
    same_work = [item for item in stood_on if item.record.workload.largest_bucket == workload.largest_bucket]
    sampler = ResidualSampler(space, cost, budget, elsewhere=same_work[0].trials if same_work else ())
    first = first_candidates(stood_on, space.candidates, budget)
    limits = Limits(max_trials=question.max_trials, max_seconds=question.search_seconds)
    device = hardware.device
    with ProcessTrialRunner(
        model=question.model,
        workload=workload,
        device=f"cuda:{device.index}" if device.kind == "cuda" else device.kind,
        memory_cap_bytes=device.budget_bytes,
    ) as runner:

        def run(candidate: Candidate) -> TrialResult:
            events.on_start(candidate)
            return runner.run(candidate)

        return run_search(
            space,
            sampler,
            run,
            limits,
            events.on_trial,
            first=first,
            enough=lambda results: bool(_confirmed(stood_on, results)),
        )


def _known(
    question: Question,
    hardware: HardwareProfile,
    workload: Workload,
    space: SearchSpace,
    events: Events,
) -> tuple[Known, ...]:
    """The records that the search will stand on: an exact one alone, else the nearest few."""
    if not question.use_profiles:
        return ()
    found = survey(hardware, workload)
    events.on_survey(found)
    usable = [item for item in found.known if item.record.settings in space.candidates]
    exact = [item for item in usable if item.confirmed]
    return tuple(exact[:1] or usable[:MOST_RECORDS])


def _confirmed(stood_on: tuple[Known, ...], results: Sequence[TrialResult]) -> Known | None:
    """The exact record whose promise the first trial here has kept."""
    for item in stood_on:
        kept = results and results[0].candidate == item.record.settings
        if item.confirmed and kept and broken_promise(item.record, results[0]) is None:
            return item
    return None


def _confirmed_trials(stood_on: tuple[Known, ...], results: tuple[TrialResult, ...]) -> tuple[TrialResult, ...]:
    """Trials of a record that has been confirmed count as evidence here."""
    item = _confirmed(stood_on, results)
    tried = {result.candidate for result in results}
    return tuple(trial for trial in item.trials if trial.candidate not in tried) if item else ()


def _require_weights_and_room(model: ResolvedModel, hardware: HardwareProfile) -> None:
    if model.folder is not None:
        open_source(weights_in(model.folder / "transformer"))  # headers only: damage shows now, not in a trial
    elif hardware.device.kind == "cpu":
        spec = model.spec
        raise NothingFits(
            f"{spec.name} ({spec.num_parameters / 1e9:.1f}B parameters) cannot be tried here: this machine has no GPU",
            hint=f"plan for a GPU by name: autotune plan --model {model.family.name} --hardware nvidia-rtx-4090 "
            "(all: autotune probe --list)",
        )


def _relaxation(workload: Workload) -> str:
    if workload.quality == "compact":
        return "try a smaller --resolution, --rank or --batch, or a device with more memory"
    looser = "high" if workload.quality == "exact" else "compact"
    return f"allow smaller weights with --quality {looser}, or try a smaller --resolution"


def _planned_hardware(hardware: HardwareProfile, parallel: Parallel) -> PlannedHardware:
    return PlannedHardware(
        device_name=hardware.device.name,
        device_kind=hardware.device.kind,
        fingerprint=hardware.fingerprint,
        hard_keys=hardware.hard_keys,
        total_memory_bytes=hardware.device.total_memory_bytes,
        budget_bytes=hardware.device.budget_bytes,
        versions=hardware.versions,
        num_processes=parallel.num_processes,
        strategy=parallel.strategy,
    )


def _expected(
    best: Score, trials: tuple[TrialResult, ...], cost: Predictor, workload: Workload, hardware: HardwareProfile
) -> Expected:
    cost.calibrate(trials)
    prediction = cost.predict(best.candidate)
    overhead = prediction.required_memory_bytes - prediction.allocated_memory_bytes
    if hardware.device.kind == "cpu":
        host = max((t.host_memory_bytes or 0 for t in trials if t.candidate == best.candidate), default=0)
        overhead = max(0, host - best.peak_memory_bytes)
    allocated = best.peak_memory_bytes if trials else prediction.allocated_memory_bytes
    return Expected(
        evidence="measured" if trials else "predicted",
        step_seconds=best.step_seconds,
        images_per_second=workload.effective_batch_size / best.step_seconds,
        peak_memory_bytes=allocated,
        process_memory_bytes=max(0, overhead) + cost.kept_bytes,
    )


def _job(question: Question, model: ResolvedModel, dataset: Dataset | None) -> Job:
    defaults = model.family.defaults
    captions = [item.caption for item in dataset.items] if dataset else []
    return Job(
        model=question.model,
        data=str(question.data) if question.data else None,
        control=str(question.control) if question.control else None,
        caption=question.caption,
        trigger=question.trigger,
        num_frames=question.wishes.num_frames or defaults.num_frames,
        output=question.output,
        num_steps=question.num_steps or defaults.num_steps(max(1, len(captions))),
        learning_rate=question.learning_rate or defaults.learning_rate,
        weight_decay=defaults.weight_decay,
        max_grad_norm=1.0,
        timestep_sampling=question.timestep_sampling,
        timestep_shift=question.timestep_shift or defaults.timestep_shift,
        guidance_scale=defaults.training_guidance if question.guidance_scale is None else question.guidance_scale,
        seed=question.seed,
        preview_prompts=tuple(captions[:1]),
        preview_steps=defaults.preview_steps,
    )
