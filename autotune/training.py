"""Data, training and samples: what happens once there is a plan."""

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from autotune.api import plan
from autotune.data.captions import Captioned, edit_captions, read_captions, reworded, tell_unread
from autotune.data.dataset import DataReport, check_dataset
from autotune.data.items import make_options
from autotune.errors import InvalidInput, first_line
from autotune.events import Notice, OnEvent, Progressed, RunStarted, StatusChanged, ignore_event
from autotune.knobs.settings import allow_optimizer
from autotune.machine.lock import lock_for_run
from autotune.machine.probe import probe as read_machine
from autotune.models.family import TORCH_LOCK
from autotune.models.registry import get_family
from autotune.models.resolve import refuse_parts
from autotune.plan.base import log_event
from autotune.plan.file import RUN_PLAN_FILE, load_plan, with_job
from autotune.plan.job import Job
from autotune.plan.plan import RunReport, TrainingPlan
from autotune.plan.request import CheckDataRequest, TrainRequest, takes
from autotune.plan.workload import WorkloadRequest
from autotune.report.files import RunPage
from autotune.report.run import missed_promises
from autotune.system import files, process
from autotune.train import fit, metrics, prepare
from autotune.train.folder import as_begun, check_folder
from autotune.train.workload import check_overrides
from autotune.weights.hub import snapshot_in_cache

ENCODED = "encoded"  # folder of the user's cache that holds encoded captions and images


@takes(CheckDataRequest, "data")
def check_data(request: CheckDataRequest) -> DataReport:
    """Look at every file of a data folder as training would, and name what is broken, tiny,
    duplicate or captionless.

    Raises:
        InvalidInput: there is no such folder or family, or the size does not suit it.

    Examples:
        >>> report = autotune.check_data("photos")
        >>> report.can_train, report.problems
    """
    family, asked = get_family(request.model), request.given_of(WorkloadRequest)
    size = asked.get("resolution")
    if size and min(size) > 0 and "model" not in request.given:  # it may be any model's size
        asked |= {"resolution": None, "side_px": math.isqrt(math.prod(size))}
    bucket = check_overrides(family, WorkloadRequest(**asked))
    return check_dataset(
        request.data,
        family,
        make_options(request.given, family, bucket.num_frames),
        resolution_px=math.isqrt(bucket.width_px * bucket.height_px),
        any_controls="model" not in request.given,
        tokenizers=snapshot_in_cache(family.models[0].hub_id),
        on_progress=lambda n, of: request.on_event(Progressed(name="reading", done=n, total=of)),
    )


def caption_data(
    place: str | Path,
    *,
    model: str | None = None,
    prompt: str | None = None,
    caption: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    on_event: OnEvent = log_event,
    **rewording: Any,
) -> dict[str, str]:
    """Write or edit captions of a folder's images, or of one, and return the changed ones by their
    images' names. `rewording` has the arguments of `reworded`; alone, it edits without a model.

    A `model` of this machine describes images without a caption, or `caption` becomes theirs;
    with `overwrite` all get it, and every caption is reworded. A `dry_run` changes nothing; it
    tells what a model takes, and returns empty captions for what it would write.
    Raises InvalidInput for no images or no such model, NothingFits if it needs more memory than is
    free.
    """
    place = Path(place)
    folder = place if place.is_dir() else place.parent
    found = read_captions(folder) if folder.is_dir() else []
    items = [one for one in found if place.is_dir() or one.media.name == place.name]
    if not items:
        raise InvalidInput(f"there are no images at {place}", hint="name a folder of images")
    if left := tell_unread(items):
        on_event(Notice(text=left, level="warning"))
    if not (model or caption or any(rewording.values())):
        hint = "give --model, --caption, --trigger, --prefix or --replace"
        raise InvalidInput("nothing is to be changed", hint=hint)
    bare = [one for one in items if not one.locked and (overwrite or not one.caption)]
    made = {one.media.name: "" for one in bare} if model or caption else {}
    if (model or caption) and not made:
        on_event(Notice(text="every image has a caption; --overwrite writes them anew"))
    describe: Callable[[Captioned], str] = lambda one: caption or ""  # noqa: E731
    if model and made:
        from autotune.data.describe import find_describer

        load = find_describer(model, len(made), on_event)
        describe = describe if dry_run else load(prompt)
    items = items if any(rewording.values()) else bare
    untold = made if model and dry_run else {}
    return untold | edit_captions(
        folder,
        [one for one in items if one.media.name not in untold],
        lambda one: reworded(describe(one) if one.media.name in made else one.caption, **rewording),
        f"captions by {model}" if model else "captions",
        at_once=bool(model) and not dry_run,
        dry_run=dry_run,
    )


@takes(TrainRequest, "plan")
def train(request: TrainRequest) -> RunReport:
    """Train exactly what a plan says, in as many processes as it says.

    Without a plan, `model` and `data` are planned first, or with `resume` the output folder's plan
    is taken. A predicted plan is measured once first, and the result written next to its file. If
    torchrun started this process, it is one of the plan's; else it starts them.

    Raises:
        InvalidPlan: the file is not a valid plan, or a value of the job is out of range.
        DoesNotFit: the plan was made for another machine, model or class of data.
        InvalidInput: model, data or output folder cannot be used, or a launcher started another
            number of processes.
        Preempted: a signal came, or `on_event` raised KeyboardInterrupt at a step, as a thread does
            to cancel; a checkpoint is written.
        AutotuneError: another process of the run failed, memory or disk ran out, or the loss is no
            longer finite.

    Examples:
        >>> autotune.train("plan.yaml", output="first-run").final_loss
        >>> autotune.train(model="qwen-image", data="photos")
    """
    named, on_event = request.plan, request.on_event
    given = _plan_first(request) if named is None else load_plan(named)
    file = None if named is None or isinstance(named, TrainingPlan) else Path(named)
    planned = given.frozen.workload.optimizer
    if request.optimizer not in (None, planned.name):
        what = f"the plan was made for the optimizer {planned.name}, not for {request.optimizer}"
        hint = f"plan for it: autotune plan --from PLAN --optimizer {request.optimizer}"
        raise InvalidInput(what, hint=hint)
    if request.optimizer is not None and ":" in request.optimizer:
        allow_optimizer(request.optimizer)
    chosen = with_job(given, **request.given_of(Job))
    refuse_parts(chosen.job.model_ref, request.given)
    launch = process.adopt_launch(chosen.frozen.hardware.num_processes)
    is_first = launch is None or launch.rank == 0
    on_event = on_event if is_first else ignore_event
    with contextlib.ExitStack() as stack:
        if request.metrics_port is not None and is_first:
            on_event = stack.enter_context(metrics.serve_metrics(request.metrics_port, on_event))
        how = {"resume": request.resume, "trace": request.trace}
        return _train_here(chosen, file, launch, on_event, **how)


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
    chosen = as_begun(chosen)
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
        from autotune.search.arrival import load_or_measure

        chosen = load_or_measure(chosen, hardware, file, on_event)
    batch = chosen.frozen.workload.effective_batch_size
    num_steps = chosen.job.steps_on(inputs.data.training.epoch_size, batch)
    on_event(RunStarted(plan=chosen.changed(job=chosen.job.changed(num_steps=num_steps))))
    page = RunPage(Path(chosen.job.output), on_event)
    try:
        with lock_for_run(
            hardware.device, 1 if launch else number, lambda text: on_event(Notice(text=text))
        ):
            encoded = files.cache_path(ENCODED)
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
        for line in missed_promises(made):
            page.log(logging.WARNING, line)
        page.log(logging.INFO, f"trained {made.num_steps} steps in {made.total_seconds:.0f} s")
        page.write()
    return made


def _plan_first(request: TrainRequest) -> TrainingPlan:
    if (file := Path(request.output) / RUN_PLAN_FILE).exists():
        earlier = with_job(load_plan(file), output=request.output)
        if request.resume:
            return earlier
        check_folder(earlier, resume=False)  # before a search
    elif request.resume:
        hint = "name the folder that it wrote with --output, or leave --resume out"
        raise InvalidInput(f"there is no run in {request.output}", hint=hint)
    if process.current_launch() is not None:
        hint = "plan once, start all with its file: autotune plan ..., autotune train plan.yaml"
        raise InvalidInput("processes that train together need a plan file", hint=hint)
    if request.data is None and not request.slider:
        hint = "name a folder with --data, or a plan that has one"
        raise InvalidInput("there is no data to train on", hint=hint)
    asked = {**request.given_of(Job), "optimizer": request.optimizer, "on_event": request.on_event}
    made: TrainingPlan = plan(**asked)
    return made


def sample(
    run: str | Path,
    prompt: str,
    *,
    count: int = 1,
    seed: int = 0,
    num_steps: int | None = None,
    strengths: Sequence[float] = (1.0,),
    control: Sequence[str | Path] = (),
    path: str | Path | None = None,
    on_event: OnEvent = log_event,
) -> list[Path]:
    """Sample pictures from a trained adapter through the model's stock pipeline; return the files.

    `run` is a run's folder; or a plan, whose model is shown without an adapter (for prior
    preservation). Picture N has the seed `seed` + N, at each of the adapter's `strengths`. `path`
    gets a number added if there are several, and the strength; without it free names are found in
    the run's `samples`, or beside the plan. A video model writes an mp4; to a name that ends
    otherwise, its first frame as a PNG.

    Raises:
        InvalidInput: the folder holds no trained adapter, or control images do not suit the model.
        InvalidPlan: the file is no plan.
        DoesNotFit: the plan was made for another machine.
        AutotuneError: memory ran out.

    Examples:
        >>> autotune.sample("first-run", "a photo of sks dog in the snow", count=2)
        >>> autotune.sample("plan.yaml", "a photo of a dog", count=100, path="class-images/dog.png")
    """
    on_event(StatusChanged(text="sampling"))
    places = tuple(map(Path, control)), None if path is None else Path(path)
    wanted = prepare.SampleRequest(prompt, count, seed, num_steps, *places, tuple(strengths))
    machine = cache(read_machine)

    def require(plan: TrainingPlan) -> None:
        fit.require_fit(fit.hardware_misfits(plan, machine(), 1))

    inputs = prepare.read_sample_inputs(Path(run), wanted, on_event, require)
    from autotune.train.sample import sample_run

    process.silence_progress_bars()
    with TORCH_LOCK:
        return sample_run(inputs, machine(), files.cache_path(ENCODED), on_event)
