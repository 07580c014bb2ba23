"""`train` and `sample`: run a plan, and look at what came of it."""

import contextlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from autotune.api import plans
from autotune.api.doors import takes
from autotune.api.metrics_server import serve_metrics
from autotune.api.plan_files import load_plan
from autotune.api.reports import RunPage
from autotune.errors import InvalidInput
from autotune.events import Notice, OnEvent, RunStarted, StatusChanged, ignore_event
from autotune.knobs.settings import allow_optimizer
from autotune.machine.probe import lock_for_run
from autotune.machine.probe import probe as read_machine
from autotune.plan.file import RUN_PLAN_FILE, with_job
from autotune.plan.hardware import HardwareProfile
from autotune.plan.plan import TrainingPlan
from autotune.plan.request import TrainRequest
from autotune.plan.run import RunReport
from autotune.system.files import cache_path
from autotune.system.process import Launch, adopt_launch, silence_progress_bars, started_by_launcher

ENCODED = "encoded"
"""Folder of the user's cache that holds encoded captions and images."""


@takes(TrainRequest, "plan")
def train(request: TrainRequest) -> RunReport:
    """Train exactly what a plan says, in as many processes as it says.

    Without a plan, `model` and `data` are planned first, or with `resume` the output folder's plan
    is taken. A predicted plan is tried once on this machine first; the measured plan is written
    beside its file. If torchrun started this process, it is one of the plan's; else it starts them.

    Raises:
        InvalidPlan: the file is not a valid plan, or a value of the job is out of range.
        DoesNotFit: the plan was made for another machine, model or class of data.
        InvalidInput: model, data or output folder cannot be used, or a launcher started another
            number of processes.
        Preempted: a signal came; a checkpoint is written.
        AutotuneError: another process of the run failed, memory or disk ran out, or the loss is no
            longer finite.

    Example:
        >>> autotune.train("plan.yaml", output="first-run").final_loss
        >>> autotune.train(model="qwen-image", data="photos")
    """
    plan, on_event, resume = request.plan, request.on_event, request.resume
    if plan is None:
        plan = _plan_first(request)
    given, file = (plan, None) if isinstance(plan, TrainingPlan) else (load_plan(plan), Path(plan))
    _require_optimizer(given, request.optimizer)
    chosen = with_job(given, **request.given_job)
    launch = adopt_launch(chosen.frozen.hardware.num_processes)
    is_first = launch is None or launch.rank == 0
    on_event = on_event if is_first else ignore_event
    with contextlib.ExitStack() as stack:
        if request.metrics_port is not None and is_first:
            on_event = stack.enter_context(serve_metrics(request.metrics_port, on_event))
        return _train_here(chosen, file, launch, on_event, resume=resume, trace=request.trace)


def _require_optimizer(plan: TrainingPlan, named: str | None) -> None:
    """Let the plan's optimizer be loaded if the user names it. Raises InvalidInput if that is
    another."""
    planned = plan.frozen.workload.optimizer
    if named not in (None, planned.name):
        hint = f"plan for it: autotune plan --from PLAN --optimizer {named}"
        raise InvalidInput(
            f"the plan was made for the optimizer {planned.name}, not for {named}", hint=hint
        )
    if named is not None and ":" in named:
        allow_optimizer(named)


def _train_here(
    chosen: TrainingPlan,
    file: Path | None,
    launch: Launch | None,
    on_event: OnEvent,
    *,
    resume: bool,
    trace: bool,
) -> RunReport:
    """Everything after the arguments are understood; `file` as `measure_predicted` takes it."""
    from autotune.train.prepare import fetch_weights, prepare, read_inputs

    on_event(StatusChanged(text="reading model and data"))
    inputs = read_inputs(chosen, resume=resume)
    from autotune.train.processes import train_in_processes  # mistakes are told by now
    from autotune.train.run import train as run_training

    on_event(StatusChanged(text="reading the machine"))
    silence_progress_bars()
    number = chosen.frozen.hardware.num_processes
    hardware = read_machine() if launch is None and number == 1 else read_machine(index=0)
    if launch and hardware.device.kind == "cuda" and launch.local_rank:
        hardware = read_machine(index=launch.local_rank % hardware.device.count)
    chosen = measure_predicted(fetch_weights(chosen, hardware), hardware, file, on_event)
    on_event(RunStarted(plan=chosen))
    page = RunPage(Path(chosen.job.output), on_event)
    with lock_for_run(
        hardware.device, 1 if launch else number, lambda text: on_event(Notice(text=text))
    ):
        cache = cache_path(ENCODED)
        if launch or number == 1:
            report = run_training(
                chosen, hardware, cache, page, resume=resume, trace=trace, inputs=inputs
            )
        else:  # checked here, so that what is wrong is reported once, before any process starts
            prepare(chosen, hardware, resume=resume, inputs=inputs).lock.release()
            report = train_in_processes(chosen, cache, page, resume=resume, trace=trace)
    if page.has_trained:  # of several processes only the first tells of steps
        page.write()
    return report


def _plan_first(request: TrainRequest) -> TrainingPlan:
    """The plan of the run in the output folder that is resumed, else a new one for what the
    request says."""
    from autotune.train.folder import check_folder

    if (file := Path(request.output) / RUN_PLAN_FILE).exists():
        earlier = with_job(load_plan(file), output=request.output)
        if request.resume:
            return earlier
        check_folder(earlier, resume=False)  # before a search
    if started_by_launcher():
        hint = (
            "plan once, then start all with its file: autotune plan ..., autotune train plan.yaml"
        )
        raise InvalidInput("processes that train together need a plan file", hint=hint)
    if request.data is None:
        raise InvalidInput(
            "there is no data to train on", hint="name a folder with --data, or a plan that has one"
        )
    asked = {**request.given_job, "optimizer": request.optimizer, "on_event": request.on_event}
    made: TrainingPlan = plans.plan(**asked)
    return made


def measure_predicted(
    plan: TrainingPlan, hardware: HardwareProfile, file: Path | None, on_event: OnEvent
) -> TrainingPlan:
    """The plan, whose weights are here: tried on this machine if it was predicted, else as it
    is."""
    from autotune.search.arrival import load_or_verify

    if plan.frozen.expected.evidence != "predicted":
        return plan
    return load_or_verify(plan, hardware, file, on_event)


def sample(
    run: str | Path,
    prompt: str,
    *,
    count: int = 1,
    seed: int = 0,
    num_steps: int | None = None,
    control: Sequence[str | Path] = (),
    path: str | Path | None = None,
    on_event: OnEvent = ignore_event,
) -> list[Path]:
    """Sample pictures from a trained adapter through the model's stock pipeline; returns the files.

    Args:
        run: output folder of a training run; or a plan, whose model is shown without an adapter, which makes images for prior preservation.
        prompt: what to show.
        count: number of pictures, each from another seed.
        seed: seed of the first picture.
        num_steps: denoising steps; the job's by default.
        control: control images, for edit models.
        path: file to write, with a number added if there are several; in or beside `run` by
            default. A video model writes an mp4; a name that ends otherwise gets the first frame as
            a PNG.
        on_event: listener to progress.

    Raises:
        InvalidInput: the folder holds no trained adapter, or control images do not suit the model.
        InvalidPlan: the file is no plan.
        DoesNotFit: the plan was made for another machine.
        AutotuneError: memory ran out.

    Example:
        >>> autotune.sample("first-run", "a photo of sks dog in the snow", count=2)
        >>> autotune.sample("plan.yaml", "a photo of a dog", count=100, path="class-images/dog.png")
    """
    from autotune.train.prepare import hardware_misfits, require_fit
    from autotune.train.sample import SampleRequest, read_sample_inputs, sample_run

    on_event(StatusChanged(text="sampling"))
    wanted = SampleRequest(
        prompt,
        count,
        seed,
        num_steps,
        tuple(map(Path, control)),
        None if path is None else Path(path),
    )
    machine = cache(read_machine)

    def require(plan: TrainingPlan) -> None:
        require_fit(hardware_misfits(plan, machine(), 1))

    inputs = read_sample_inputs(Path(run), wanted, on_event, require)
    silence_progress_bars()
    return sample_run(inputs, machine(), cache_path(ENCODED), on_event)
