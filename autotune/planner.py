"""The whole algorithm on one screen: from a question and a machine to a frozen plan.

model ──> workload ──> search space ──> trials, each chosen by what the last ones taught ──> winner ──> plan
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autotune import __version__
from autotune.cost.predict import Predictor
from autotune.errors import NothingFits
from autotune.families.resolve import ResolvedModel, resolve_model
from autotune.knobs.base import Setting
from autotune.plan_file import seal
from autotune.schema import (
    Expected,
    FrozenPart,
    HardwareProfile,
    Job,
    Objective,
    PlannedHardware,
    Quality,
    TrainingPlan,
    TrialResult,
    Workload,
)
from autotune.search.sampler import ResidualSampler
from autotune.search.space import SearchSpace, search_space
from autotune.search.study import Limits, run_search
from autotune.search.winner import fallbacks_of, reasons_for, winner_of
from autotune.training.data.dataset import Dataset, read_dataset
from autotune.training.describe import describe_workload
from autotune.trials.runner import ProcessTrialRunner
from autotune.weights.sources import open_source, weights_in

SMALLEST_WEIGHT_BYTES = 1
"""Bytes per parameter of the smallest storage that the quality floors up to `high` admit."""


@dataclass(frozen=True)
class Question:
    """What the user asks for; None takes the family's default."""

    model: str
    data: Path | None = None
    output: str = "output"
    resolution_px: int | None = None
    rank: int | None = None
    lora_alpha: float | None = None
    targets: str = "attention"
    effective_batch_size: int | None = None
    quality: Quality = "high"
    objective: Objective = "throughput"
    num_steps: int | None = None
    learning_rate: float | None = None
    seed: int = 0
    max_trials: int = 8
    search_seconds: float = 600.0


@dataclass(frozen=True)
class Events:
    """Where progress is told."""

    on_space: Callable[[SearchSpace, Workload], None] = lambda space, workload: None
    on_trial: Callable[[TrialResult], None] = lambda result: None


def make_plan(question: Question, hardware: HardwareProfile, events: Events | None = None) -> TrainingPlan:
    """Search the fastest settings for the question on this machine and freeze them.

    Raises:
        InvalidInput: the model or the data cannot be used.
        NothingFits: no settings run here.
    """
    events = events or Events()
    model = resolve_model(question.model)
    _require_weights_and_room(model, hardware)
    dataset = read_dataset(question.data) if question.data else None
    workload = _describe(question, model, dataset)
    space = search_space(Setting(hardware, model.family, workload))
    events.on_space(space, workload)
    cost = Predictor(hardware, workload, model.family, model.config)
    sampler = ResidualSampler(space, cost, hardware.device.budget_bytes)
    limits = Limits(max_trials=question.max_trials, max_seconds=question.search_seconds)
    with ProcessTrialRunner(
        model=question.model,
        workload=workload,
        device=_torch_device(hardware),
        memory_cap_bytes=hardware.device.budget_bytes,
    ) as runner:
        started = time.monotonic()
        trials = run_search(space, sampler, runner.run, limits, events.on_trial)
    return seal(
        _job(question, model, dataset, workload),
        _freeze(hardware, workload, space, trials, search_seconds=time.monotonic() - started),
    )


def _describe(question: Question, model: ResolvedModel, dataset: Dataset | None) -> Workload:
    return describe_workload(
        model,
        dataset,
        resolution_px=question.resolution_px,
        rank=question.rank,
        lora_alpha=question.lora_alpha,
        targets=question.targets,
        effective_batch_size=question.effective_batch_size,
        quality=question.quality,
        objective=question.objective,
    )


def _require_weights_and_room(model: ResolvedModel, hardware: HardwareProfile) -> None:
    spec, device = model.spec, hardware.device
    size = f"{spec.num_parameters / 1e9:.1f}B parameters"
    least = spec.num_parameters * SMALLEST_WEIGHT_BYTES
    if least > device.budget_bytes:
        raise NothingFits(
            f"{spec.name} ({size}) needs at least {least / 2**30:.0f} GiB for its weights alone; "
            f"{device.name} offers {device.budget_bytes / 2**30:.0f} GiB",
            hint="run this on a machine with a larger GPU; `autotune doctor` tells whether one here is hidden",
        )
    if model.folder is not None:
        open_source(weights_in(model.folder / "transformer"))  # headers only: damage shows now, not in a trial
    elif device.kind == "cpu":
        raise NothingFits(
            f"{spec.name} ({size}) cannot be tried here: this machine has no GPU",
            hint="run this on a machine with a GPU, or pass the folder of a small pipeline: --model FOLDER",
        )


def _torch_device(hardware: HardwareProfile) -> str:
    kind = hardware.device.kind
    return f"cuda:{hardware.device.index}" if kind == "cuda" else kind


def _job(question: Question, model: ResolvedModel, dataset: Dataset | None, workload: Workload) -> Job:
    defaults = model.family.defaults
    captions = [item.caption for item in dataset.items] if dataset else []
    return Job(
        model=question.model,
        data=str(question.data) if question.data else None,
        output=question.output,
        num_steps=question.num_steps or defaults.num_steps(len(captions)),
        learning_rate=question.learning_rate or defaults.learning_rate,
        weight_decay=defaults.weight_decay,
        max_grad_norm=1.0,
        timestep_shift=defaults.timestep_shift,
        seed=question.seed,
        preview_prompts=tuple(captions[:1]),
        preview_steps=defaults.preview_steps,
    )


def _freeze(
    hardware: HardwareProfile,
    workload: Workload,
    space: SearchSpace,
    trials: tuple[TrialResult, ...],
    search_seconds: float,
) -> FrozenPart:
    best = winner_of(trials, workload.objective)
    if not best.median_step_seconds or not best.peak_memory_bytes:
        raise AssertionError("a trial that is ok has both times and memory")
    overhead = max(0, (best.host_memory_bytes or 0) - best.peak_memory_bytes) if hardware.device.kind == "cpu" else 0
    return FrozenPart(
        schema_version=1,
        autotune_version=__version__,
        hardware=PlannedHardware(
            device_name=hardware.device.name,
            device_kind=hardware.device.kind,
            fingerprint=hardware.fingerprint,
            hard_keys=hardware.hard_keys,
            total_memory_bytes=hardware.device.total_memory_bytes,
            budget_bytes=hardware.device.budget_bytes,
            versions=hardware.versions,
        ),
        workload=workload,
        settings=best.candidate,
        expected=Expected(
            evidence="measured",
            step_seconds=best.median_step_seconds,
            images_per_second=workload.effective_batch_size / best.median_step_seconds,
            peak_memory_bytes=best.peak_memory_bytes,
            process_memory_bytes=overhead,
        ),
        reasons=reasons_for(space, trials, best, workload.objective),
        fallbacks=fallbacks_of(trials, best),
        search_seconds=search_seconds,
        trials=trials,
    )
