"""The machine, plans and predictions: what a command or a notebook does before it trains.

Mistakes are told before a library such as torch is loaded: functions import the work itself, here
and in `training` and `exchange`.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from autotune.errors import AutotuneError, InvalidInput, NothingFits
from autotune.events import Notice, OnEvent, Progressed, StatusChanged
from autotune.interop import exporting
from autotune.interop.trainer import get_trainer
from autotune.knobs import knob, registry
from autotune.knobs.settings import allow_optimizer, plain_choices
from autotune.machine import catalog, probe as machine
from autotune.models.registry import find_published
from autotune.models.resolve import read_parts, resolve_model
from autotune.models.single_file import open_single_file, recognize
from autotune.plan.base import log_event, memory_bytes
from autotune.plan.candidate import Candidate
from autotune.plan.file import MARK, load_plan, save_plan
from autotune.plan.hardware import HardwareProfile
from autotune.plan.job import Job, ModelRef
from autotune.plan.plan import CheckResult, TrainingPlan
from autotune.plan.prediction import Estimate
from autotune.plan.request import CompareRequest, EstimateRequest, PlanRequest, takes
from autotune.search import comparison, space
from autotune.search.request import ResolvedRequest, complete, space_for
from autotune.share.store import build_record, unshareable_reason, user_store
from autotune.system import files, process
from autotune.train import fit
from autotune.train.workload import check_overrides, describe_workload

if TYPE_CHECKING:
    from autotune.search.planner import PlanningResult

NUMBERS = ("micro_batch_size", "checkpointed_blocks")
CHOSEN_BY_MACHINE = ("precision", "optimizer", "allocator")
"""Settings whose default is the first choice for the machine and the work, not the field's."""


class PlanNotWritten(AutotuneError):
    """A plan that was made, but whose file could not be written: the error's `plan`."""

    def __init__(self, message: str, *, hint: str, plan: TrainingPlan) -> None:
        super().__init__(message, hint=hint)
        self.plan = plan


def probe(
    *, quick: bool = False, device: int | None = None, on_event: OnEvent = log_event
) -> HardwareProfile:
    """Find out what this machine can do, and keep the measured rates for later plans; with `quick`,
    only read facts. `device` is the index of a GPU, by default of the one with the most memory.

    Raises:
        InvalidInput: there is no such device.
        AutotuneError: the amount of memory cannot be found out.

    Examples:
        >>> machine = autotune.probe()
        >>> machine.device.name, machine.device.budget_bytes
    """
    on_event(StatusChanged(text="reading the machine"))
    on_progress = machine.status_to(on_event)
    if quick:
        return machine.probe(index=device, on_progress=on_progress)
    return machine.cached_profile(fresh=True, index=device, on_progress=on_progress)


def list_gpus() -> tuple[catalog.CatalogGpu, ...]:
    """List the GPUs that can be planned for without owning one, by compute capability.

    Examples:
        >>> [gpu.id for gpu in autotune.list_gpus()]
    """
    return catalog.load_catalog()


def list_models(
    hardware: str | None = None,
    *,
    file: str | Path | None = None,
    host_memory: int | str | None = None,
    on_event: OnEvent = log_event,
) -> tuple[comparison.ModelSummary, ...]:
    """List the published models that autotune knows by name.

    With a GPU of the catalog, predict what it does with each: looked up or, with `host_memory`,
    planned one by one for a host of that size. With a single file of ComfyUI, Kohya or Civitai,
    list those of its architecture, the likeliest first.

    Raises:
        InvalidInput: the catalog has no such GPU, or the file holds no known model.

    Examples:
        >>> {model.name: model.num_parameters for model in autotune.list_models()}
        >>> [model.name for model in autotune.list_models(file="flux1-dev-fp8.safetensors")]
    """
    gpu = None if hardware is None else catalog.gpu_named(hardware)
    if gpu is None and host_memory is not None:
        raise InvalidInput("this machine's system RAM is known", hint="add --hardware")
    if gpu is None or host_memory is None:
        summaries = comparison.summarize_models(gpu.id if gpu else None)
    else:
        profile = machine.hardware_for(gpu.id, host_memory=host_memory, on_event=on_event)

        def predict(model: str) -> comparison.CatalogPrediction:
            on_event(StatusChanged(text=f"planning {model}"))
            try:
                made = plan(model, hardware=profile)
            except NothingFits:
                return comparison.CatalogPrediction(gpu=gpu.id, memory_gb=gpu.memory_nominal_gb)
            return comparison.compared_gpu(gpu, made, download_seconds=0.0, price_per_hour=None)

        summaries = comparison.summarize_models(gpu.id, predict)
    if file is None:
        return summaries
    by_id = {summary.hub_id: summary for summary in summaries}
    return tuple(by_id[model.hub_id] for _, model in recognize(open_single_file(Path(file))))


def require_gpu(model: str) -> None:
    """Raise NoGpu for a published model if this machine certainly has no GPU. Loads no library."""
    found = find_published(model)
    if found is not None and not Path(model).is_dir() and not machine.may_have_gpu():
        raise comparison.NoGpu.build(*found)


@takes(PlanRequest, "model", "data")
def plan(request: PlanRequest) -> TrainingPlan:
    """Search the fastest settings with short real trials, and freeze them into a plan.

    Trials run in child processes, and what they measured is kept for later searches. If `hardware`
    is named, the cost model answers alone, and the plan says that it is predicted.

    Raises:
        InvalidInput: an argument, the model or the data cannot be used.
        NothingFits: no settings run on this hardware.
        PlanNotWritten: the plan was made, but not written to `path`.
        PlanInterrupted: Ctrl-C; its `plan`, which is written to `path`, is the best so far. The
            same call goes on.

    Examples:
        >>> plan = autotune.plan("/models/Qwen-Image", "photos", path="plan.yaml", num_steps=2000)
        >>> plan.frozen.settings.micro_batch_size, plan.frozen.expected.images_per_second
    """
    on_event, path = request.on_event, request.path
    request = complete(request)
    if path is not None:
        files.require_writable(Path(path), MARK)
    resolved, profile = _resolve_on_hardware(request)
    from autotune.search.planner import PlanInterrupted, make_plan

    try:
        result = make_plan(resolved, profile, on_event)
    except PlanInterrupted as stopped:
        if path is not None:
            _write(stopped.plan, Path(path))
            number = len(stopped.plan.frozen.trials)
            tried = f"the best of {number} trials" if number > 1 else "what the only trial ran"
            text = f"stopped: {tried} is written to {path}, and can be trained"
            on_event(Notice(text=text, level="warning"))
        raise
    _remember(result, profile, on_event)
    if path is not None:
        _write(result.plan, Path(path))
    return result.plan


@takes(PlanRequest, "model", "data")
def list_choices(request: PlanRequest) -> space.SearchSpace:
    """List what `plan` could choose, and what it could not and why. Tries nothing."""
    resolved, profile = _resolve_on_hardware(complete(request), tries=False)
    return _space(resolved, profile)


def _resolve_on_hardware(
    request: PlanRequest, *, tries: bool = True
) -> tuple[ResolvedRequest, HardwareProfile]:
    """Resolve the request on the machine that it names. Mistakes are found before a rate is
    measured, and if possible before torch is imported. `tries`: whether trials follow."""
    on_event, on_sound, profile = request.on_event, None, None
    if request.hardware is not None:
        profile = machine.hardware_for(
            request.hardware,
            host_memory=request.host_memory,
            assume=request.assume,
            on_event=on_event,
        )
        if not request.assume and request.earlier is not None:
            assumed = load_plan(request.earlier).frozen.hardware.assumed
            profile = machine.with_earlier_packages(profile, assumed, on_event)
    elif tries:
        on_sound = process.fork_server_context  # it imports for seconds, beside this process
    on_event(StatusChanged(text="reading model and data"))
    resolved = ResolvedRequest.build(request, needs_weights=tries, on_sound=on_sound)
    if request.storage is not None:
        from autotune.search.study import check_storage

        check_storage(request.storage)

    def require(facts: HardwareProfile) -> None:
        if tries:
            from autotune.search.problem import require_devices

            require_devices(resolved, facts)
            _space(resolved, facts)  # what is pinned is refused before rates are measured

    profile = profile or machine.hardware_for(None, on_event=on_event, on_facts=require)
    profile = machine.limit_memory(profile, request)
    if request.for_trainer is not None:
        resolved = resolved.suited_to_trainer(profile)
    return resolved, profile


def _space(resolved: ResolvedRequest, profile: HardwareProfile) -> space.SearchSpace:
    context = knob.TuningContext(profile, resolved.model.family, resolved.workload)
    return space_for(resolved.request, context)


def _remember(result: "PlanningResult", profile: HardwareProfile, on_event: OnEvent) -> None:
    if unshareable_reason(result.plan, profile) is not None:
        return
    try:
        user_store().add(build_record(result.plan, profile, result.residuals))
    except AutotuneError as error:
        text = f"not kept for the next search: {error.message}"
        on_event(Notice(text=text, topic="records", level="warning"))


def _write(plan: TrainingPlan, path: Path) -> None:
    try:
        save_plan(plan, path)
    except OSError as error:
        message = f"cannot write {path}: {error.strerror}"
        hint = "write it elsewhere: it is the error's `plan`"
        raise PlanNotWritten(message, hint=hint, plan=plan) from error


def check(
    plan: TrainingPlan | str | Path, *, hardware: str | HardwareProfile | None = None
) -> CheckResult:
    """Tell whether a plan fits this machine, or the one that is named, without training.

    Raises:
        InvalidPlan: the file is not a valid plan.
        InvalidInput: there is no such hardware.

    Examples:
        >>> autotune.check("plan.yaml").misfits
        >>> autotune.check("plan.yaml", hardware="4090").misfits
    """
    chosen = load_plan(plan)
    if hardware is not None:
        profile, assumed = machine.hardware_for(hardware), chosen.frozen.hardware.assumed
        profile = machine.with_earlier_packages(profile, assumed, log_event)
        misfits = fit.hardware_misfits(chosen, profile)
    else:
        profile = machine.probe()
        misfits = fit.hardware_misfits(chosen, profile) + fit.card_misfits(chosen, profile)
    return CheckResult(fits=not misfits, misfits=misfits)


@takes(EstimateRequest, "model")
@process.collect_rarely()
def estimate(request: EstimateRequest) -> Estimate:
    """Predict memory, time and cost of one candidate. Runs nothing and downloads nothing.

    Raises:
        InvalidInput: the model, the hardware or a setting does not exist, or settings do not go
            together.

    Examples:
        >>> estimate = autotune.estimate("flux1-dev", hardware="4090", quantization="torchao-int8")
        >>> estimate.run_memory_bytes
    """
    request.require_named()
    request.on_event(StatusChanged(text="tracing the model"))
    resolved = resolve_model(ModelRef.of(request.model))
    family = resolved.family
    batch = max(request.micro_batch_size, family.defaults.effective_batch_size)
    batch = request.given.get("effective_batch_size", batch)
    work = request.changed(effective_batch_size=batch)
    if ":" in request.optimizer_choice.name:
        allow_optimizer(request.optimizer_choice.name)
    settings = request.given_of(Candidate)
    for name in ("optimizer", *NUMBERS):
        settings.pop(name, None)
    for name, value in settings.items():
        registry.require_choice(name, value)
    check_overrides(family, work)
    profile = machine.hardware_for(
        request.hardware,
        host_memory=request.host_memory,
        assume=request.assume,
        on_event=request.on_event,
    )
    from autotune.cost.estimate import estimate as estimate_candidate, require_divisor
    from autotune.cost.predict import CostModel

    require_divisor(request.micro_batch_size, batch)
    context = knob.TuningContext(profile, family, describe_workload(resolved, None, work))
    total = context.workload.model.num_blocks
    blocks = {"all": total, "none": 0}.get(str(request.checkpointed_blocks))
    candidate = Candidate.model_validate(
        {
            **{name: plain_choices(context)[name][0] for name in CHOSEN_BY_MACHINE},
            **settings,
            "checkpointed_blocks": request.checkpointed_blocks if blocks is None else blocks,
            "micro_batch_size": request.micro_batch_size,
        }
    )
    overheads = None
    if request.for_trainer is not None:
        job = Job(model=str(request.model), data=None, num_steps=request.num_steps or 1)
        chosen = {name: (value,) for name, value in candidate}
        trainer = get_trainer(request.for_trainer)
        known = trainer, job, context.workload, chosen
        overheads = exporting.overheads_for(*known, is_exported=False)
    built = profile, context.workload, family, resolved.config, read_parts(resolved)
    cost = CostModel.build(*built, overheads=overheads)
    steps, price = request.num_steps, request.price_per_hour
    return estimate_candidate(cost, candidate, num_steps=steps, price_per_hour=price)


@takes(CompareRequest, "model", "data")
def compare(request: CompareRequest) -> comparison.Comparison:
    """Predict the same job on several GPUs of the catalog: settings, speed, and hours and cost from
    an empty machine to the finished adapter.

    Raises:
        InvalidInput: an argument, the model, the data or the prices cannot be used.

    Examples:
        >>> found = autotune.compare("flux1-dev", prices={"4090": 0.4, "h100-sxm": 2.5})
        >>> found.gpus[0].gpu, found.gpus[0].cost, found.gpus[0].hours_range
    """
    asked = request.given_of(PlanRequest)
    asked.pop("hardware", None)
    on_event, found = request.on_event, []
    gpus, prices = catalog.gpus_named(request.hardware), catalog.read_prices(request.prices)
    on_event(StatusChanged(text="reading model and data"))
    anywhere = complete(PlanRequest(**asked, hardware="any"))
    model = ResolvedRequest.build(anywhere, needs_weights=False).model
    download = comparison.download_seconds(model)
    for done, gpu in enumerate(gpus):
        on_event(Progressed(name="comparing", done=done, total=len(gpus)))
        price = prices.per_hour.get(gpu.id)
        try:
            own = asked.keys() - ({"host_memory"} if gpu.memory_kind == "integrated" else set())
            made = plan(**{name: asked[name] for name in own}, hardware=catalog.profile_of_gpu(gpu))
        except NothingFits as error:
            size = gpu.memory_nominal_gb
            found.append(comparison.ComparedGpu(gpu=gpu.id, memory_gb=size, misfit=error.message))
            continue
        row = comparison.compared_gpu(gpu, made, download_seconds=download, price_per_hour=price)
        found.append(row)
    on_event(Progressed(name="comparing", done=len(gpus), total=len(gpus)))
    selected = comparison.select_gpus(found, max_cost=request.max_cost, max_hours=request.max_hours)
    return comparison.Comparison(
        model=model.spec.name,
        gpus=selected,
        num_left_out=len(found) - len(selected),
        host_memory_bytes=memory_bytes(request.host_memory or catalog.ASSUMED_HOST_BYTES),
        currency=prices.currency,
        priced=prices.date,
    )
