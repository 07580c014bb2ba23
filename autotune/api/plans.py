"""`plan`, and what can be asked of plans: `check`, `list_choices`."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Unpack

from autotune.api.amounts import image_size
from autotune.api.machines import hardware_for, memory_budget_for
from autotune.api.options import PlanOptions, require_known
from autotune.api.plan_files import load_plan
from autotune.errors import AutotuneError, InvalidInput
from autotune.hardware import probe as read_machine
from autotune.planning import (
    PlanningResult,
    PlanRequest,
    make_plan,
    read_recording,
    recording_of,
    replayed,
    request_from,
    write_recording,
)
from autotune.planning import list_choices as choices_for
from autotune.runtime import require_writable
from autotune.schema import (
    CheckResult,
    HardwareProfile,
    JobOverrides,
    Notice,
    OnEvent,
    TrainingPlan,
    ignore_event,
    write_plan,
)
from autotune.search import SearchSpace, StudyLocation
from autotune.sharing import save_record, unshareable_reason
from autotune.training import WorkloadOverrides, card_misfits, hardware_misfits

LIMITS = ("max_memory", "reserve_memory", "cap_memory")
"""Options that limit the memory of the hardware."""


class PlanNotWritten(AutotuneError):
    """A plan was made, but its file could not be written. `plan` holds it."""

    def __init__(self, message: str, *, hint: str, plan: TrainingPlan) -> None:
        super().__init__(message, hint=hint)
        self.plan = plan


def plan(
    model: str | None = None,
    data: str | Path | None = None,
    *,
    on_event: OnEvent = ignore_event,
    **options: Unpack[PlanOptions],
) -> TrainingPlan:
    """Search the fastest settings with short real trials, and freeze them into a plan.

    On this machine trials run in child processes, and what they measured is kept for later searches. For `hardware`
    that is named instead, the cost model answers alone, and the plan says that it is predicted.

    Args:
        model: folder in the diffusers layout, name of a known model, or hub id. Needed unless `earlier` is given.
        data: folder of images with same-stem `.txt` captions.
        on_event: listener to progress.
        options: as documented in `PlanOptions`; fields of `Job` are among them.

    Raises:
        InvalidInput: an argument, the model or the data cannot be used.
        NothingFits: no settings run on this hardware.
        PlanNotWritten: the plan was made, but not written to `path`.
        AutotuneError: something else failed; the message says what.

    Example:
        >>> plan = autotune.plan("/models/Qwen-Image", "photos", path="plan.yaml", num_steps=2000)
        >>> plan.frozen.settings.micro_batch_size, plan.frozen.expected.images_per_second
    """
    request = _request(model, data, options)
    for target in (options.get("path"), options.get("record")):
        if target is not None:
            require_writable(Path(target))
    replay = options.get("replay")
    if replay is None:
        request, profile = _on_hardware(request, options, on_event)
        result = make_plan(request, profile, on_event)
        _remember(result, profile, on_event)
    else:
        recording = read_recording(Path(replay))
        request = replace(request, memory_budget=recording.memory_budget)
        result = make_plan(request, recording.hardware, on_event, replayed(recording))
    if (path := options.get("path")) is not None:
        _write(result.plan, Path(path))
    if (record := options.get("record")) is not None:
        shared = request.study is not None
        matched, budget = result.matches.records, request.memory_budget
        recorded = recording_of(result.plan, result.hardware, matched, shared=shared, memory_budget=budget)
        write_recording(Path(record), recorded)
    return result.plan


def list_choices(
    model: str | None = None,
    data: str | Path | None = None,
    *,
    on_event: OnEvent = ignore_event,
    **options: Unpack[PlanOptions],
) -> SearchSpace:
    """What `plan` with the same arguments could choose, and what it could not and why. Tries nothing.

    Example:
        >>> space = autotune.list_choices("qwen-image", hardware="4090")
        >>> space.choices["quantization"], space.rejected["quantization"]
    """
    return choices_for(*_on_hardware(_request(model, data, options), options, on_event))


def check(plan: TrainingPlan | str | Path) -> CheckResult:
    """Tell whether a plan fits this machine, without training.

    Raises:
        InvalidPlan: the file is not a valid plan.

    Example:
        >>> autotune.check("plan.yaml").misfits
    """
    chosen, machine = _as_plan(plan), read_machine()
    misfits = hardware_misfits(chosen, machine) + card_misfits(chosen, machine)
    return CheckResult(fits=not misfits, misfits=misfits)


def _as_plan(plan: TrainingPlan | str | Path) -> TrainingPlan:
    return plan if isinstance(plan, TrainingPlan) else load_plan(plan)


def _on_hardware(request: PlanRequest, options: PlanOptions, on_event: OnEvent) -> tuple[PlanRequest, HardwareProfile]:
    """The request with the memory budget that the options leave, and the machine that they name."""
    profile = hardware_for(options.get("hardware"), on_event=on_event)
    limits: dict[str, Any] = {name: options.get(name) for name in LIMITS}
    budget = memory_budget_for(profile, num_devices=request.num_processes if request.is_local else 1, **limits)
    return replace(request, memory_budget=budget if budget != profile.device.budget else None), profile


def _request(model: str | None, data: str | Path | None, options: PlanOptions) -> PlanRequest:
    """What the arguments ask for, on top of what an earlier plan was made for."""
    require_known(options, PlanOptions.__annotations__, "argument of plan")
    earlier = options.get("earlier")
    if earlier is None and model is None:
        raise InvalidInput("no model is named", hint="name a model, or an earlier plan: earlier=, --from")
    live = ("hardware", "join", "study", *LIMITS)
    if "replay" in options and any(options.get(name) for name in live):
        raise InvalidInput("a recording brings its machine and its trials", hint=f"leave out {', '.join(live)}")
    base = PlanRequest(model=str(model)) if earlier is None else request_from(_as_plan(earlier))
    asked: Mapping[str, Any] = {name: value for name, value in options.items() if value is not None}
    job = {
        name: value for name, value in asked.items() if name in JobOverrides.__annotations__ and name != "num_frames"
    }
    study, join = options.get("study"), options.get("join")
    return replace(
        base,
        model=base.model if model is None else model,
        workload_overrides=_overrides(base.workload_overrides, asked),
        job_overrides=job if data is None else {**job, "data": str(data)},
        pins=_pairs(asked["pins"]) if "pins" in asked else base.pins,
        exclusions=_pairs(asked["exclusions"]) if "exclusions" in asked else base.exclusions,
        is_local="hardware" not in asked,
        num_processes=asked.get("num_gpus", base.num_processes),
        use_profiles=asked.get("use_records", True),
        price_per_hour=asked.get("price_per_hour", base.price_per_hour),
        max_trials=asked.get("max_trials", base.max_trials),
        search_seconds=asked.get("search_seconds", base.search_seconds),
        study=StudyLocation(study or "search", join) if study or join else None,
        interrupted="ignored" if "replay" in asked else ("forgotten" if asked.get("fresh") else "resumed"),
    )


def _overrides(base: WorkloadOverrides, asked: Mapping[str, Any]) -> WorkloadOverrides:
    """What the arguments say of the workload; another rank brings its own alpha, if none is given."""
    named = {field.name: asked[field.name] for field in fields(WorkloadOverrides) if field.name in asked}
    if "resolution" in asked:
        named["size_px"] = image_size(asked["resolution"])
    if "rank" in asked:
        named.setdefault("lora_alpha", None)
    return replace(base, **named)


def _pairs(values: Any) -> tuple[tuple[str, str], ...]:
    pairs = values.items() if isinstance(values, Mapping) else values
    return tuple((name, str(value)) for name, value in pairs)


def _remember(result: PlanningResult, profile: HardwareProfile, on_event: OnEvent) -> None:
    """Keep what was measured for later searches; a store that fails costs no plan."""
    if unshareable_reason(result.plan, profile) is not None:
        return
    try:
        save_record(result.plan, profile, result.residuals)
    except AutotuneError as error:
        text = f"not kept for the next search: {error.message}"
        on_event(Notice(text=text, topic="profiles", level="warning"))


def _write(plan: TrainingPlan, path: Path) -> None:
    try:
        write_plan(path, plan)
    except OSError as error:
        message = f"cannot write {path}: {error.strerror}"
        raise PlanNotWritten(message, hint="write it elsewhere: it is the error's `plan`", plan=plan) from error
