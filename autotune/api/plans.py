"""`plan`, for one machine or several, and `list_choices`, what it could choose."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Unpack

from autotune.api.amounts import image_size, memory_bytes
from autotune.api.machines import hardware_for, memory_budget_for, require_named
from autotune.api.options import PlanOptions, choose_optimizer, require_known
from autotune.errors import AutotuneError, InvalidInput
from autotune.events import Notice, OnEvent, StatusChanged, ignore_event
from autotune.interop.exporting import expressible_targets, inexpressible, overheads_for
from autotune.interop.trainer import get_trainer
from autotune.knobs.caching import caching_choices
from autotune.machine.catalog import with_assumed_packages
from autotune.models.resolve import is_single_file, resolve_model
from autotune.plan.hardware import HardwareProfile
from autotune.plan.job import DataPlace, JobOverrides, ModelRef, as_job_data
from autotune.plan.plan import TrainingPlan
from autotune.plan.plan_file import read_plan, write_plan
from autotune.search.fork_server import warm_up
from autotune.search.planner import PlanInterrupted, PlanningResult, make_plan
from autotune.search.problem import require_devices
from autotune.search.request import PlanRequest, ResolvedRequest, request_from
from autotune.search.space import SearchSpace
from autotune.search.study import check_storage
from autotune.share.record import unshareable_reason
from autotune.share.store import save_record
from autotune.system.files import require_writable
from autotune.train.workload import WorkloadOverrides

LIMITS = ("max_memory", "reserve_memory", "cap_memory")
"""Options that limit the memory of the hardware."""


class PlanNotWritten(AutotuneError):
    """A plan was made, but its file could not be written. `plan` holds it.

    Example:
        >>> try:
        ...     autotune.plan("/models/Qwen-Image", "photos", path="/full-disk/plan.yaml")
        ... except autotune.PlanNotWritten as error:
        ...     autotune.save_plan(error.plan, "plan.yaml")
    """

    def __init__(self, message: str, *, hint: str, plan: TrainingPlan) -> None:
        super().__init__(message, hint=hint)
        self.plan = plan


def plan(
    model: str | None = None,
    data: DataPlace | None = None,
    *,
    on_event: OnEvent = ignore_event,
    **options: Unpack[PlanOptions],
) -> TrainingPlan:
    """Search the fastest settings with short real trials, and freeze them into a plan.

    On this machine trials run in child processes, and what they measured is kept for later
    searches. For `hardware` that is named instead, the cost model answers alone, and the plan says
    that it is predicted.

    Args:
        model: folder in the diffusers layout, name of a known model, or hub id. Needed unless
            `earlier` is given.
        data: folder of images with same-stem `.txt` captions.
        on_event: listener to progress.
        options: as documented in `PlanOptions`; fields of `Job` are among them.

    Raises:
        InvalidInput: an argument, the model or the data cannot be used.
        NothingFits: no settings run on this hardware.
        PlanNotWritten: the plan was made, but not written to `path`.
        PlanInterrupted: Ctrl-C; its `plan`, which is written to `path`, is the best so far. The
            same call goes on.
        AutotuneError: something else failed; the message says what.

    Example:
        >>> plan = autotune.plan("/models/Qwen-Image", "photos", path="plan.yaml", num_steps=2000)
        >>> plan.frozen.settings.micro_batch_size, plan.frozen.expected.images_per_second
    """
    request = request_for(model, data, options)
    if (path := options.get("path")) is not None:
        require_writable(Path(path))
    resolved, profile = _resolve_on_hardware(request, options, on_event)
    try:
        result = make_plan(resolved, profile, on_event)
    except PlanInterrupted as stopped:
        _offer(stopped.plan, path, on_event)
        raise
    _remember(result, profile, on_event)
    if path is not None:
        _write(result.plan, Path(path))
    return result.plan


def list_choices(
    model: str | None = None,
    data: DataPlace | None = None,
    *,
    on_event: OnEvent = ignore_event,
    **options: Unpack[PlanOptions],
) -> SearchSpace:
    """What `plan` with the same arguments could choose, and what it could not and why. Tries
    nothing.

    Example:
        >>> space = autotune.list_choices("qwen-image", hardware="4090")
        >>> space.choices["quantization"], space.rejected["quantization"]
    """
    resolved, profile = _resolve_on_hardware(
        request_for(model, data, options), options, on_event, tries=False
    )
    return resolved.space(profile)


def _loaded(plan: TrainingPlan | str | Path) -> TrainingPlan:
    return plan if isinstance(plan, TrainingPlan) else read_plan(Path(plan))


def _resolve_on_hardware(
    request: PlanRequest, options: PlanOptions, on_event: OnEvent, *, tries: bool = True
) -> tuple[ResolvedRequest, HardwareProfile]:
    """The request on the machine that the options name: what can be wrong is looked at before a
    rate is measured, and as far as it can be before torch is imported. `tries`: whether trials
    are to follow."""
    amounts: Mapping[str, Any] = {name: options.get(name) for name in LIMITS}
    limits = {name: memory_bytes(amount) for name, amount in amounts.items() if amount is not None}
    named, on_sound = options.get("hardware"), lambda: None
    host_memory, assume, profile = options.get("host_memory"), options.get("assume"), None
    if named is not None:
        profile = hardware_for(
            named, host_memory=host_memory, assume=assume or (), on_event=on_event
        )
        if assume is None and profile.origin == "catalog":
            profile = _as_assumed_earlier(profile, options.get("earlier"), on_event)
    if profile is None and tries:
        on_sound = warm_up  # it imports for seconds, beside what is imported and predicted here
    on_event(StatusChanged(text="reading model and data"))
    resolved = ResolvedRequest.build(request, needs_weights=tries, on_sound=on_sound)
    if request.storage is not None:
        check_storage(request.storage)

    def require(facts: HardwareProfile) -> None:
        if tries:
            require_devices(resolved, facts)
            resolved.space(facts)  # what is pinned is refused before rates are measured

    profile = profile or hardware_for(None, on_event=on_event, on_facts=require)
    budget = memory_budget_for(
        profile, num_devices=request.num_processes if request.is_local else 1, **limits
    )
    limited = replace(request, memory_budget=None if budget == profile.device.budget else budget)
    resolved = replace(resolved, request=limited)
    return replace(resolved, request=_suited_to_trainer(resolved, profile, options)), profile


def _as_assumed_earlier(
    profile: HardwareProfile, earlier: TrainingPlan | str | Path | None, on_event: OnEvent
) -> HardwareProfile:
    """The card with those packages that an earlier plan's card was taken to have, and that it
    can run."""
    kept = []
    for name in _loaded(earlier).frozen.hardware.assumed if earlier is not None else ():
        try:
            with_assumed_packages(profile, (name,))
            kept.append(name)
        except InvalidInput as error:
            on_event(Notice(text=f"the earlier plan assumed {name}: {error.message}"))
    return with_assumed_packages(profile, kept) if kept else profile


def _suited_to_trainer(
    resolved: ResolvedRequest, profile: HardwareProfile, options: PlanOptions
) -> PlanRequest:
    """The request without what the trainer that the options name cannot express, and with what
    its program takes."""
    request = resolved.request
    if (name := options.get("for_trainer")) is None:
        return request
    trainer, spec, space = get_trainer(name), resolved.model.spec, resolved.space(profile)
    possible = {
        name: (*choices, *space.pinnable.get(name, ())) for name, choices in space.choices.items()
    }
    lacking = inexpressible(
        trainer,
        spec.family,
        spec.num_blocks,
        {**possible, **caching_choices(resolved.context(profile))},
    )
    overheads = overheads_for(trainer, resolved.job, resolved.workload, possible)
    return replace(request, exclusions=(*request.exclusions, *lacking), overheads=overheads)


def request_for(model: str | None, data: DataPlace | None, options: PlanOptions) -> PlanRequest:
    """What the arguments ask for, on top of what an earlier plan was made for."""
    require_known(options, PlanOptions.__annotations__, "argument of plan")
    earlier = options.get("earlier")
    if earlier is None and model is None:
        raise InvalidInput(
            "no model is named", hint="name a model, or an earlier plan: earlier=, --from"
        )
    require_named(options.get("hardware"), options.get("host_memory"), options.get("assume") or ())
    base = (
        PlanRequest(model=ModelRef.of(model or ""))
        if earlier is None
        else request_from(_loaded(earlier))
    )
    asked: Mapping[str, Any] = {name: value for name, value in options.items() if value is not None}
    job = {
        name: value
        for name, value in asked.items()
        if name in JobOverrides.__annotations__ and name != "num_frames"
    }
    storage = options.get("storage")
    earlier_ref = base.model
    ref = earlier_ref if model is None else ModelRef.of(model)
    added: dict[str, Any] = {name: str(asked[name]) for name in ("base", "vae") if name in asked}
    if asked.get("text_encoders"):
        added["text_encoders"] = tuple(map(str, asked["text_encoders"]))
    if added and not is_single_file(ref):
        message = f"{ref.name} is not a single file, so it takes no base, VAE or text encoders"
        raise InvalidInput(message, hint="leave them out: a folder has them all")
    if "base" in added:
        added["revision"] = None
    if "expert" in asked:
        added["expert"] = str(asked["expert"])
    ref = ref.changed(**added)
    if (
        not ref.expert
        and earlier_ref.expert
        and earlier_ref.expert in resolve_model(ref).family.experts
    ):
        ref = ref.changed(expert=earlier_ref.expert)
    request = replace(
        base,
        model=ref,
        workload_overrides=_overrides(base.workload_overrides, asked),
        job_overrides=job if data is None else {**job, "data": as_job_data(data)},
        pins=_pairs(asked["pins"]) if "pins" in asked else base.pins,
        exclusions=_pairs(asked["exclusions"]) if "exclusions" in asked else base.exclusions,
        is_local="hardware" not in asked,
        num_processes=asked.get("num_gpus", base.num_processes),
        use_profiles=asked.get("use_records", True),
        price_per_hour=asked.get("price_per_hour", base.price_per_hour),
        max_trials=asked.get("max_trials", base.max_trials),
        search_seconds=asked.get("search_seconds", base.search_seconds),
        study=options.get("study") or ("search" if storage else None),
        storage=storage,
        interrupted="forgotten" if asked.get("fresh") else "resumed",
    )
    return _with_expressible_targets(request, asked)


def _with_expressible_targets(request: PlanRequest, asked: Mapping[str, Any]) -> PlanRequest:
    """The request with a set of adapted layers that the trainer named can adapt, if the user
    named none."""
    if (name := asked.get("for_trainer")) is None:
        return request
    trainer, family, overrides = (
        get_trainer(name),
        resolve_model(request.model).family,
        request.workload_overrides,
    )
    possible = expressible_targets(trainer, family.name)
    if overrides.targets in possible or not possible:
        return request
    if "targets" in asked:
        what = f"{trainer.title} cannot adapt the layers {overrides.targets!r} of {family.name}"
        raise InvalidInput(what, hint=f"use --targets {' or '.join(possible)}")
    return replace(request, workload_overrides=replace(overrides, targets=possible[0]))


def _overrides(base: WorkloadOverrides, asked: Mapping[str, Any]) -> WorkloadOverrides:
    """What the arguments say of the workload; another rank brings its own alpha, if none is
    given."""
    named = {
        field.name: asked[field.name] for field in fields(WorkloadOverrides) if field.name in asked
    }
    if "resolution" in asked:
        named["size_px"] = image_size(asked["resolution"])
    if "rank" in asked:
        named.setdefault("lora_alpha", None)
    named["optimizer"] = choose_optimizer(
        base.optimizer, asked.get("optimizer"), asked.get("optimizer_options")
    )
    return replace(base, **named)


def _pairs(values: Any) -> tuple[tuple[str, str], ...]:
    pairs = values.items() if isinstance(values, Mapping) else values
    return tuple((name, str(value)) for name, value in pairs)


def _remember(result: "PlanningResult", profile: HardwareProfile, on_event: OnEvent) -> None:
    """Keep what was measured for later searches; a store that fails costs no plan."""
    if unshareable_reason(result.plan, profile) is not None:
        return
    try:
        save_record(result.plan, profile, result.residuals)
    except AutotuneError as error:
        text = f"not kept for the next search: {error.message}"
        on_event(Notice(text=text, topic="records", level="warning"))


def _offer(plan: TrainingPlan, path: str | Path | None, on_event: OnEvent) -> None:
    """Write the best plan of a search that was stopped, if there is a file for it, and say so."""
    if path is not None:
        _write(plan, Path(path))
        number = len(plan.frozen.trials)
        tried = f"the best of {number} trials" if number > 1 else "what the only trial ran"
        on_event(
            Notice(
                text=f"stopped: {tried} is written to {path}, and can be trained", level="warning"
            )
        )


def _write(plan: TrainingPlan, path: Path) -> None:
    try:
        write_plan(path, plan)
    except OSError as error:
        message = f"cannot write {path}: {error.strerror}"
        raise PlanNotWritten(
            message, hint="write it elsewhere: it is the error's `plan`", plan=plan
        ) from error
