"""`plan`, for one machine or several, and `list_choices`, what it could choose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.api.doors import takes
from autotune.api.machines import hardware_for, limit_memory
from autotune.errors import AutotuneError, InvalidInput
from autotune.events import Notice, OnEvent, StatusChanged
from autotune.interop.exporting import expressible_targets, inexpressible, overheads_for
from autotune.interop.trainer import get_trainer
from autotune.knobs.caching import caching_choices
from autotune.knobs.settings import allow_optimizer
from autotune.machine.catalog import with_assumed_packages
from autotune.models.resolve import is_single_file, resolve_model
from autotune.plan.file import read_plan, write_plan
from autotune.plan.hardware import HardwareProfile
from autotune.plan.plan import TrainingPlan
from autotune.plan.request import PlanRequest
from autotune.plan.workload import ADAMW
from autotune.share.record import unshareable_reason
from autotune.share.store import save_record
from autotune.system.files import require_writable

if TYPE_CHECKING:
    from autotune.search.planner import PlanningResult
    from autotune.search.request import ResolvedRequest
    from autotune.search.space import SearchSpace


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


@takes(PlanRequest, "model", "data")
def plan(request: PlanRequest) -> TrainingPlan:
    """Search the fastest settings with short real trials, and freeze them into a plan.

    On this machine trials run in child processes, and what they measured is kept for later
    searches. For `hardware` that is named instead, the cost model answers alone, and the plan says
    that it is predicted.

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
    on_event, path = request.on_event, request.path
    request = complete(request)
    if path is not None:
        require_writable(Path(path))
    resolved, profile = _resolve_on_hardware(request)
    from autotune.search.planner import PlanInterrupted, make_plan  # mistakes are told by now

    try:
        result = make_plan(resolved, profile, on_event)
    except PlanInterrupted as stopped:
        _offer(stopped.plan, path, on_event)
        raise
    _remember(result, profile, on_event)
    if path is not None:
        _write(result.plan, Path(path))
    return result.plan


@takes(PlanRequest, "model", "data")
def list_choices(request: PlanRequest) -> SearchSpace:
    """What `plan` with the same arguments could choose, and what it could not and why. Tries
    nothing.

    Example:
        >>> space = autotune.list_choices("qwen-image", hardware="4090")
        >>> space.choices["quantization"], space.rejected["quantization"]
    """
    resolved, profile = _resolve_on_hardware(complete(request), tries=False)
    return resolved.space(profile)


def _loaded(plan: TrainingPlan | str | Path) -> TrainingPlan:
    return plan if isinstance(plan, TrainingPlan) else read_plan(Path(plan))


def _resolve_on_hardware(
    request: PlanRequest, *, tries: bool = True
) -> tuple[ResolvedRequest, HardwareProfile]:
    """The request on the machine that it names: what can be wrong is looked at before a rate is
    measured, and as far as it can be before torch is imported. `tries`: whether trials are to
    follow."""
    from autotune.search.fork_server import warm_up
    from autotune.search.request import ResolvedRequest

    on_event, on_sound, profile = request.on_event, lambda: None, None
    if request.hardware is not None:
        profile = hardware_for(
            request.hardware,
            host_memory=request.host_memory,
            assume=request.assume,
            on_event=on_event,
        )
        if not request.assume and profile.origin == "catalog":
            profile = _as_assumed_earlier(profile, request.earlier, on_event)
    if profile is None and tries:
        on_sound = warm_up  # it imports for seconds, beside what is imported and predicted here
    on_event(StatusChanged(text="reading model and data"))
    resolved = ResolvedRequest.build(request, needs_weights=tries, on_sound=on_sound)
    if request.storage is not None:
        from autotune.search.study import check_storage

        check_storage(request.storage)

    def require(facts: HardwareProfile) -> None:
        if tries:
            from autotune.search.problem import require_devices

            require_devices(resolved, facts)
            resolved.space(facts)  # what is pinned is refused before rates are measured

    profile = profile or hardware_for(None, on_event=on_event, on_facts=require)
    profile = limit_memory(
        profile,
        num_devices=request.num_gpus if request.is_local else 1,
        max_memory=request.max_memory,
        reserve_memory=request.reserve_memory,
        cap_memory=request.cap_memory,
    )
    return replace(resolved, request=_suited_to_trainer(resolved, profile)), profile


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


def _suited_to_trainer(resolved: ResolvedRequest, profile: HardwareProfile) -> PlanRequest:
    """The request without what the trainer that it names cannot express, and with what its
    program takes."""
    request = resolved.request
    if (name := request.for_trainer) is None:
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
    return request.changed(exclusions=(*request.exclusion_pairs, *lacking), overheads=overheads)


def complete(request: PlanRequest) -> PlanRequest:
    """Return the request on top of what an earlier plan was made for, with what follows from it.

    Raises:
        InvalidInput: it contradicts itself.
    """
    request.require_named()
    if request.optimizer_choice.name != ADAMW.name and ":" in request.optimizer_choice.name:
        allow_optimizer(request.optimizer_choice.name)
    said, earlier = request, request.earlier
    if earlier is not None:
        before = _loaded(earlier)
        request = request.over(before)
        expert = before.job.expert
        is_kept = said.model is not None and expert is not None and "expert" not in said.given
        if is_kept and expert in resolve_model(said.model_ref).family.experts:
            request = request.changed(expert=expert)
    added = {"base", "vae", "text_encoders"} & said.given.keys()
    if added and not is_single_file(request.model_ref):
        message = f"{request.model_ref.name} is not a single file, so it takes no base, VAE or text encoders"
        raise InvalidInput(message, hint="leave them out: a folder has them all")
    request = request.changed(
        study=request.study or ("search" if request.storage else None),
        interrupted="forgotten" if request.fresh else "resumed",
    )
    if request.for_trainer is None:
        return request
    trainer, family = (get_trainer(request.for_trainer), resolve_model(request.model_ref).family)
    possible = expressible_targets(trainer, family.name)
    if request.targets in possible or not possible:
        return request
    if "targets" in said.given:
        what = f"{trainer.title} cannot adapt the layers {request.targets!r} of {family.name}"
        raise InvalidInput(what, hint=f"use --targets {' or '.join(possible)}")
    return request.changed(targets=possible[0])


def _remember(result: PlanningResult, profile: HardwareProfile, on_event: OnEvent) -> None:
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
