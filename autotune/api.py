"""Everything that a command or a notebook does. The command line and the page call these functions
and nothing else.

What is wrong with a question is told before a library such as torch is loaded, so the work itself
is imported in the functions.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from autotune.data.dataset import DataReport, check_dataset
from autotune.data.items import make_options
from autotune.errors import AutotuneError, InvalidInput, NothingFits, first_line
from autotune.events import Notice, OnEvent, Progressed, RunStarted, StatusChanged, ignore_event
from autotune.interop import exporting
from autotune.interop.trainer import get_trainer
from autotune.knobs.caching import caching_choices
from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import require_choice
from autotune.knobs.settings import allow_optimizer, plain_choices
from autotune.machine import catalog
from autotune.machine.probe import (
    cached_profile,
    hardware_for,
    limit_memory,
    lock_for_run,
    may_have_gpu,
    status_to,
    with_earlier_packages,
)
from autotune.machine.probe import probe as read_machine
from autotune.models.family import TORCH_LOCK
from autotune.models.registry import find_published, get_family
from autotune.models.resolve import is_single_file, read_parts, resolve_model
from autotune.models.single_file import open_single_file, recognize
from autotune.plan.base import first_problem, log_event, memory_bytes
from autotune.plan.candidate import Candidate
from autotune.plan.file import RUN_PLAN_FILE, load_plan, save_plan, with_job
from autotune.plan.hardware import HardwareProfile
from autotune.plan.job import ModelRef
from autotune.plan.plan import CheckResult, RunReport, TrainingPlan
from autotune.plan.prediction import Estimate
from autotune.plan.request import (
    CheckDataRequest,
    CompareRequest,
    EstimateRequest,
    PlanRequest,
    TrainRequest,
    takes,
)
from autotune.plan.workload import ADAMW
from autotune.report.files import RunPage
from autotune.search import comparison
from autotune.search.request import ResolvedRequest
from autotune.search.space import SearchSpace
from autotune.share.store import build_record, unshareable_reason, user_store
from autotune.system import process
from autotune.system.files import cache_path, require_writable
from autotune.train import prepare
from autotune.train.folder import check_folder
from autotune.train.metrics import serve_metrics
from autotune.weights.hub import snapshot_in_cache

if TYPE_CHECKING:
    from autotune.search.planner import PlanningResult

process.silence_libraries()  # before the first of them is imported

ENCODED = "encoded"  # folder of the user's cache that holds encoded captions and images
NUMBERS = ("micro_batch_size", "checkpointed_blocks")
CHOSEN_BY_MACHINE = ("precision", "optimizer", "allocator")
"""Settings whose default is the first choice for the machine and the work rather than the
field's default."""


class PlanNotWritten(AutotuneError):
    """A plan that was made, but whose file could not be written: the error's `plan`."""

    def __init__(self, message: str, *, hint: str, plan: TrainingPlan) -> None:
        super().__init__(message, hint=hint)
        self.plan = plan


# --- This machine, and what there is to train ----------------------------------------------------


def probe(
    *, quick: bool = False, device: int | None = None, on_event: OnEvent = log_event
) -> HardwareProfile:
    """Find out what this machine can do, and keep the measured rates for later plans; with `quick`,
    only read facts. `device` is the index of a GPU, by default of the one with the most memory.

    Raises:
        InvalidInput: there is no such device.
        AutotuneError: the amount of memory cannot be found out.

    Example:
        >>> machine = autotune.probe()
        >>> machine.device.name, machine.device.budget_bytes
    """
    on_event(StatusChanged(text="reading the machine"))
    on_progress = status_to(on_event)
    if quick:
        return read_machine(index=device, on_progress=on_progress)
    return cached_profile(fresh=True, index=device, on_progress=on_progress)


def list_gpus() -> tuple[catalog.CatalogGpu, ...]:
    """List the GPUs that can be planned for without owning one, by compute capability.

    Example:
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

    With a GPU of the catalog, tell what it is predicted to do with each: looked up, or with
    `host_memory` planned one by one for a host with so much. With a single file of ComfyUI, Kohya
    or Civitai, list those of its architecture: the one that it is taken for first.

    Raises:
        InvalidInput: the catalog has no such GPU, or the file holds no known model.

    Example:
        >>> {model.name: model.num_parameters for model in autotune.list_models()}
        >>> [model.name for model in autotune.list_models(file="flux1-dev-fp8.safetensors")]
    """
    gpu = None if hardware is None else catalog.gpu_named(hardware)
    if gpu is None and host_memory is not None:
        raise InvalidInput("this machine's host memory is known", hint="add --hardware")
    if gpu is None or host_memory is None:
        summaries = comparison.summarize_models(gpu.id if gpu else None)
    else:
        machine = hardware_for(gpu.id, host_memory=host_memory, on_event=on_event)

        def predict(model: str) -> comparison.CatalogPrediction:
            on_event(StatusChanged(text=f"planning {model}"))
            try:
                made = plan(model, hardware=machine)
            except NothingFits:
                return comparison.CatalogPrediction(gpu=gpu.id, memory_gb=gpu.memory_nominal_gb)
            return comparison.compared_gpu(gpu, made, download_seconds=0.0, price_per_hour=None)

        summaries = comparison.summarize_models(gpu.id, predict)
    if file is None:
        return summaries
    by_id = {summary.hub_id: summary for summary in summaries}
    return tuple(by_id[model.hub_id] for _, model in recognize(open_single_file(Path(file))))


def require_gpu(model: str) -> None:
    """Raise NoGpu, with what the model takes on GPUs of the catalog, if `model` is a published one
    and this machine certainly has no GPU. Loads no library."""
    found = find_published(model)
    if found is not None and not Path(model).is_dir() and not may_have_gpu():
        raise comparison.NoGpu.build(*found)


# --- Plans ---------------------------------------------------------------------------------------


@takes(PlanRequest, "model", "data")
def plan(request: PlanRequest) -> TrainingPlan:
    """Search the fastest settings with short real trials, and freeze them into a plan.

    Trials run in child processes, and what they measured is kept for later searches. For
    `hardware` that is named, the cost model answers alone, and the plan says that it is predicted.

    Raises:
        InvalidInput: an argument, the model or the data cannot be used.
        NothingFits: no settings run on this hardware.
        PlanNotWritten: the plan was made, but not written to `path`.
        PlanInterrupted: Ctrl-C; its `plan`, which is written to `path`, is the best so far. The
            same call goes on.

    Example:
        >>> plan = autotune.plan("/models/Qwen-Image", "photos", path="plan.yaml", num_steps=2000)
        >>> plan.frozen.settings.micro_batch_size, plan.frozen.expected.images_per_second
    """
    on_event, path = request.on_event, request.path
    request = complete(request)
    if path is not None:
        require_writable(Path(path))
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
def list_choices(request: PlanRequest) -> SearchSpace:
    """List what `plan` with the same arguments could choose, and what it could not and why. Tries
    nothing.
    """
    resolved, profile = _resolve_on_hardware(complete(request), tries=False)
    return _space(resolved, profile)


def complete(request: PlanRequest) -> PlanRequest:
    """Return the request on top of what an earlier plan was made for, with what follows from it.

    Raises:
        InvalidInput: it contradicts itself.
    """
    request.require_named()
    if ":" in request.optimizer_choice.name and request.optimizer_choice.name != ADAMW.name:
        allow_optimizer(request.optimizer_choice.name)
    said = request
    if request.earlier is not None:
        before = load_plan(request.earlier)
        request = request.over(before)
        expert = before.job.expert
        is_kept = said.model is not None and expert is not None and "expert" not in said.given
        if is_kept and expert in resolve_model(said.model_ref).family.experts:
            request = request.changed(expert=expert)
    added = {"base", "vae", "text_encoders"} & said.given.keys()
    if added and not is_single_file(request.model_ref):
        raise InvalidInput(
            f"{request.model_ref.name} is not a single file, so it takes no base, VAE or text "
            "encoders",
            hint="leave them out: a folder has them all",
        )
    request = request.changed(
        study=request.study or ("search" if request.storage else None),
        interrupted="forgotten" if request.fresh else "resumed",
    )
    if request.for_trainer is None:
        return request
    trainer, family = get_trainer(request.for_trainer), resolve_model(request.model_ref).family
    possible = exporting.expressible_targets(trainer, family.name)
    if request.targets in possible or not possible:
        return request
    if "targets" in said.given:
        what = f"{trainer.title} cannot adapt the layers {request.targets!r} of {family.name}"
        raise InvalidInput(what, hint=f"use --targets {' or '.join(possible)}")
    return request.changed(targets=possible[0])


def _resolve_on_hardware(
    request: PlanRequest, *, tries: bool = True
) -> tuple[ResolvedRequest, HardwareProfile]:
    """The request on the machine that it names. What can be wrong is looked at before a rate is
    measured, and as far as possible before torch is imported. `tries`: whether trials follow."""
    on_event, on_sound, profile = request.on_event, lambda: None, None
    if request.hardware is not None:
        profile = hardware_for(
            request.hardware,
            host_memory=request.host_memory,
            assume=request.assume,
            on_event=on_event,
        )
        if not request.assume and profile.origin == "catalog" and request.earlier is not None:
            assumed = load_plan(request.earlier).frozen.hardware.assumed
            profile = with_earlier_packages(profile, assumed, on_event)
    elif tries:
        on_sound = process.warm_up  # it imports for seconds, beside this process
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

    profile = profile or hardware_for(None, on_event=on_event, on_facts=require)
    profile = limit_memory(profile, request)
    if request.for_trainer is not None:
        resolved = replace(resolved, request=_suited_to_trainer(resolved, profile))
    return resolved, profile


def _context(resolved: ResolvedRequest, profile: HardwareProfile) -> TuningContext:
    return TuningContext(profile, resolved.model.family, resolved.workload)


def _space(resolved: ResolvedRequest, profile: HardwareProfile) -> SearchSpace:
    from autotune.search.request import build_space

    return build_space(resolved.request, _context(resolved, profile))


def _suited_to_trainer(resolved: ResolvedRequest, profile: HardwareProfile) -> PlanRequest:
    """The request without what the trainer that it names cannot express, and with what its
    program takes."""
    request = resolved.request
    trainer = get_trainer(str(request.for_trainer))
    spec, space = resolved.model.spec, _space(resolved, profile)
    possible = {
        name: (*choices, *space.pinnable.get(name, ())) for name, choices in space.choices.items()
    }
    every = {**possible, **caching_choices(_context(resolved, profile))}
    lacking = exporting.inexpressible(trainer, spec.family, spec.num_blocks, every)
    overheads = exporting.overheads_for(trainer, resolved.job, resolved.workload, possible)
    return request.changed(exclusions=(*request.exclusion_pairs, *lacking), overheads=overheads)


def _remember(result: "PlanningResult", profile: HardwareProfile, on_event: OnEvent) -> None:
    """Keep what was measured for later searches; a store that fails costs no plan."""
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

    Example:
        >>> autotune.check("plan.yaml").misfits
        >>> autotune.check("plan.yaml", hardware="4090").misfits
    """
    chosen = load_plan(plan)
    if hardware is not None:
        misfits = prepare.hardware_misfits(chosen, hardware_for(hardware))
    else:
        machine = read_machine()
        misfits = prepare.hardware_misfits(chosen, machine) + prepare.card_misfits(chosen, machine)
    return CheckResult(fits=not misfits, misfits=misfits)


# --- Predictions ---------------------------------------------------------------------------------


@takes(EstimateRequest, "model")
@process.collect_rarely()
def estimate(request: EstimateRequest) -> Estimate:
    """Predict memory, time and cost of one candidate. Runs nothing and downloads nothing.

    Raises:
        InvalidInput: the model, the hardware or a setting does not exist, or settings do not go
            together.

    Example:
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
    settings = {
        name: value
        for name, value in request.given.items()
        if name in Candidate.model_fields and name not in ("optimizer", *NUMBERS)
    }
    for name, value in settings.items():
        require_choice(name, value)
    prepare.check_overrides(family, work)
    profile = hardware_for(
        request.hardware,
        host_memory=request.host_memory,
        assume=request.assume,
        on_event=request.on_event,
    )
    from autotune.cost.estimate import estimate as estimate_candidate
    from autotune.cost.estimate import require_divisor
    from autotune.cost.predict import CostModel

    require_divisor(request.micro_batch_size, batch)
    context = TuningContext(profile, family, prepare.describe_workload(resolved, None, work))
    total = context.workload.model.num_blocks
    blocks = {"all": total, "none": 0}.get(str(request.checkpointed_blocks))
    try:
        candidate = Candidate.model_validate(
            {
                **{name: plain_choices(context)[name][0] for name in CHOSEN_BY_MACHINE},
                **settings,
                "checkpointed_blocks": request.checkpointed_blocks if blocks is None else blocks,
                "micro_batch_size": request.micro_batch_size,
            }
        )
    except ValidationError as error:
        where, why = first_problem(error)
        raise InvalidInput(f"{where}: {why}", hint="give another value") from error
    cost = CostModel.build(profile, context.workload, family, resolved.config, read_parts(resolved))
    return estimate_candidate(
        cost, candidate, num_steps=request.num_steps, price_per_hour=request.price_per_hour
    )


@takes(CompareRequest, "model", "data")
def compare(request: CompareRequest) -> comparison.Comparison:
    """Predict the same job on several GPUs of the catalog: settings, speed, and hours and cost from
    an empty machine to the finished adapter.

    Raises:
        InvalidInput: an argument, the model, the data or the prices cannot be used.

    Example:
        >>> found = autotune.compare("flux1-dev", prices={"4090": 0.4, "h100-sxm": 2.5})
        >>> found.gpus[0].gpu, found.gpus[0].cost, found.gpus[0].hours_range
    """
    asked = {name: v for name, v in request.given.items() if name in PlanRequest.model_fields}
    asked.pop("hardware", None)
    on_event, found = request.on_event, []
    gpus, prices = catalog.gpus_named(request.hardware), catalog.read_prices(request.prices)
    on_event(StatusChanged(text="reading model and data"))
    anywhere = complete(PlanRequest(**asked, hardware="any"))
    model = ResolvedRequest.build(anywhere, needs_weights=False).model
    download = comparison.download_seconds(model, request.download_rate)
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
    selected = comparison.select_gpus(
        found, max_cost=request.max_cost, max_hours=request.max_hours, order=request.order
    )
    return comparison.Comparison(
        model=model.spec.name,
        gpus=selected,
        num_left_out=len(found) - len(selected),
        host_memory_bytes=memory_bytes(request.host_memory or catalog.ASSUMED_HOST_BYTES),
        currency=prices.currency,
        priced=prices.date,
    )


# --- Training ------------------------------------------------------------------------------------


@takes(CheckDataRequest, "data")
def check_data(request: CheckDataRequest) -> DataReport:
    """Look at every file of a data folder as training would, and name what is broken, tiny,
    duplicate or captionless.

    Raises:
        InvalidInput: there is no such folder or family.

    Example:
        >>> report = autotune.check_data("photos")
        >>> report.can_train, report.problems
    """
    family = get_family(request.model)
    num_frames = request.given.get("num_frames", family.defaults.num_frames)
    family.check_num_frames(num_frames)
    return check_dataset(
        request.data,
        make_options(request.given, family, num_frames),
        resolution_px=request.resolution_px or family.defaults.resolution_px,
        multiple_px=family.size_multiple_px,
        max_side_px=family.max_side_px,
        max_upscaling=request.max_upscaling,
        max_crop=request.max_crop,
        family=family,
        tokenizers=snapshot_in_cache(family.models[0].hub_id),
        on_progress=_progress_to(request.on_event, "reading"),
    )


@takes(TrainRequest, "plan")
def train(request: TrainRequest) -> RunReport:
    """Train exactly what a plan says, in as many processes as it says.

    Without a plan, `model` and `data` are planned first, or with `resume` the output folder's plan
    is taken. A predicted plan is measured once first, and then written beside its file. If torchrun
    started this process, it is one of the plan's; else it starts them.

    Raises:
        InvalidPlan: the file is not a valid plan, or a value of the job is out of range.
        DoesNotFit: the plan was made for another machine, model or class of data.
        InvalidInput: model, data or output folder cannot be used, or a launcher started another
            number of processes.
        Preempted: a signal came, or `on_event` raised KeyboardInterrupt at a step, as a thread does
            to cancel; a checkpoint is written.
        AutotuneError: another process of the run failed, memory or disk ran out, or the loss is no
            longer finite.

    Example:
        >>> autotune.train("plan.yaml", output="first-run").final_loss
        >>> autotune.train(model="qwen-image", data="photos")
    """
    named, on_event = request.plan, request.on_event
    given = _plan_first(request) if named is None else load_plan(named)
    file = None if named is None or isinstance(named, TrainingPlan) else Path(named)
    planned = given.frozen.workload.optimizer
    if request.optimizer not in (None, planned.name):
        raise InvalidInput(
            f"the plan was made for the optimizer {planned.name}, not for {request.optimizer}",
            hint=f"plan for it: autotune plan --from PLAN --optimizer {request.optimizer}",
        )
    if request.optimizer is not None and ":" in request.optimizer:
        allow_optimizer(request.optimizer)
    chosen = with_job(given, **request.given_job)
    launch = process.adopt_launch(chosen.frozen.hardware.num_processes)
    is_first = launch is None or launch.rank == 0
    on_event = on_event if is_first else ignore_event
    with contextlib.ExitStack() as stack:
        if request.metrics_port is not None and is_first:
            on_event = stack.enter_context(serve_metrics(request.metrics_port, on_event))
        return _train_here(
            chosen, file, launch, on_event, resume=request.resume, trace=request.trace
        )


def _train_here(
    chosen: TrainingPlan,
    file: Path | None,
    launch: process.Launch | None,
    on_event: OnEvent,
    *,
    resume: bool,
    trace: bool,
) -> RunReport:
    on_event(StatusChanged(text="reading model and data"))
    inputs = prepare.read_inputs(chosen, resume=resume)
    from autotune.train.processes import train_in_processes
    from autotune.train.run import train as run_training

    on_event(StatusChanged(text="reading the machine"))
    process.silence_progress_bars()
    number = chosen.frozen.hardware.num_processes
    hardware = read_machine() if launch is None and number == 1 else read_machine(index=0)
    if launch and hardware.device.kind == "cuda" and launch.local_rank:
        hardware = read_machine(index=launch.local_rank % hardware.device.count)
    chosen = prepare.fetch_weights(chosen, hardware)
    if chosen.frozen.expected.evidence == "predicted":
        from autotune.search.arrival import load_or_verify

        chosen = load_or_verify(chosen, hardware, file, on_event)
    batch = chosen.frozen.workload.effective_batch_size
    num_steps = chosen.job.steps_on(inputs.data.training.epoch_size, batch)
    on_event(RunStarted(plan=chosen.changed(job=chosen.job.changed(num_steps=num_steps))))
    page = RunPage(Path(chosen.job.output), on_event)
    try:
        with lock_for_run(
            hardware.device, 1 if launch else number, lambda text: on_event(Notice(text=text))
        ):
            encoded = cache_path(ENCODED)
            if launch or number == 1:
                made = run_training(
                    chosen, hardware, encoded, page, resume=resume, trace=trace, inputs=inputs
                )
            else:  # checked here, so that what is wrong is reported once, before processes start
                prepare.prepare(chosen, hardware, resume=resume, inputs=inputs).lock.release()
                made = train_in_processes(chosen, encoded, page, resume=resume, trace=trace)
    except BaseException as error:
        page.log(logging.ERROR, f"{type(error).__name__}: {first_line(error)}")
        raise
    if page.has_trained:  # of several processes only the first tells of steps
        page.write()
    return made


def _plan_first(request: TrainRequest) -> TrainingPlan:
    """The plan of the run in the output folder that is resumed, else a new one for what the
    request says."""
    if (file := Path(request.output) / RUN_PLAN_FILE).exists():
        earlier = with_job(load_plan(file), output=request.output)
        if request.resume:
            return earlier
        check_folder(earlier, resume=False)  # before a search
    if process.started_by_launcher():
        hint = (
            "plan once, then start all with its file: autotune plan ..., autotune train plan.yaml"
        )
        raise InvalidInput("processes that train together need a plan file", hint=hint)
    if request.data is None:
        raise InvalidInput(
            "there is no data to train on", hint="name a folder with --data, or a plan that has one"
        )
    asked = {**request.given_job, "optimizer": request.optimizer, "on_event": request.on_event}
    made: TrainingPlan = plan(**asked)
    return made


def sample(
    run: str | Path,
    prompt: str,
    *,
    count: int = 1,
    seed: int = 0,
    num_steps: int | None = None,
    control: Sequence[str | Path] = (),
    path: str | Path | None = None,
    on_event: OnEvent = log_event,
) -> list[Path]:
    """Sample pictures from a trained adapter through the model's stock pipeline; return the files.

    `run` is a run's folder; or a plan, whose model is shown without an adapter (for prior
    preservation). Picture N has the seed `seed` + N. `path` gets a number added if there are
    several. A video model writes an mp4; to a name that ends otherwise, its first frame as a PNG.

    Raises:
        InvalidInput: the folder holds no trained adapter, or control images do not suit the model.
        InvalidPlan: the file is no plan.
        DoesNotFit: the plan was made for another machine.
        AutotuneError: memory ran out.

    Example:
        >>> autotune.sample("first-run", "a photo of sks dog in the snow", count=2)
        >>> autotune.sample("plan.yaml", "a photo of a dog", count=100, path="class-images/dog.png")
    """
    on_event(StatusChanged(text="sampling"))
    target = None if path is None else Path(path)
    controls = tuple(map(Path, control))
    wanted = prepare.SampleRequest(prompt, count, seed, num_steps, controls, target)
    machine = cache(read_machine)

    def require(plan: TrainingPlan) -> None:
        prepare.require_fit(prepare.hardware_misfits(plan, machine(), 1))

    inputs = prepare.read_sample_inputs(Path(run), wanted, on_event, require)
    from autotune.train.sample import sample_run

    process.silence_progress_bars()
    with TORCH_LOCK:
        return sample_run(inputs, machine(), cache_path(ENCODED), on_event)


def _progress_to(on_event: OnEvent, name: str) -> Callable[[int, int], None]:
    return lambda done, total: on_event(Progressed(name=name, done=done, total=total))
