"""What `autotune sample` is asked for, and whether the run's folder can answer: told before
torch is imported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autotune.data import has_video_decoder
from autotune.errors import InvalidInput
from autotune.families import ResolvedModel, fetch_model
from autotune.runtime import require_writable
from autotune.schema import (
    RUN_PLAN_FILE,
    Bucket,
    Notice,
    OnEvent,
    TrainingPlan,
    ignore_event,
    read_plan,
)
from autotune.training.files import ADAPTER_FILE
from autotune.weights import read_header

INSTALL_VIDEO = "pip install 'lora-autotune[video]'"


@dataclass(frozen=True)
class SampleRequest:
    """Images to sample from one prompt."""

    prompt: str
    count: int = 1
    """Number of images, each from a seed one higher than the last."""
    seed: int = 0
    """Seed of the first image."""
    num_steps: int | None = None
    """Number of denoising steps; None for the job's."""
    control_paths: tuple[Path, ...] = ()
    """Control images, for edit models."""
    output: Path | None = None
    """File to write, with a number added if there are several; None for one in the run's folder
    or beside the plan. A clip is an .mp4; any other name gets its first frame as a PNG."""


@dataclass(frozen=True)
class SampleInputs:
    """A request with the run that it is for, found sound."""

    request: SampleRequest
    plan: TrainingPlan
    model: ResolvedModel
    adapter: Path | None
    """None to show the model as it is."""
    file: Path
    """To write, as `SampleRequest.output`."""


def read_sample_inputs(
    run: Path,
    request: SampleRequest,
    on_event: OnEvent = ignore_event,
    require: Callable[[TrainingPlan], None] = lambda plan: None,
) -> SampleInputs:
    """Read what sampling from the adapter in a run's folder takes, or from the model of a plan
    file; a model of the hub is fetched, a plan's once `require` has found nothing against it.

    Raises:
        InvalidInput: the folder holds no trained adapter or a damaged one, or a control image is
            missing or too many.
        InvalidPlan: the file is no plan.
        AutotuneError: the model cannot be fetched, or the file cannot be written.
    """
    if not run.exists():
        raise InvalidInput(f"there is no run and no plan at {run}", hint="check the path")
    folder = run.parent if run.is_file() else run
    adapter = None if run.is_file() else run / ADAPTER_FILE
    if adapter and not (adapter.is_file() and (run / RUN_PLAN_FILE).is_file()):
        raise InvalidInput(
            f"{run} holds no trained adapter", hint="name the output folder of `autotune train`"
        )
    missing = [path for path in request.control_paths if not path.is_file()]
    if missing:
        raise InvalidInput(f"there is no control image {missing[0]}", hint="check the path")
    if adapter:
        read_header(adapter)
    plan = read_plan(run / RUN_PLAN_FILE if adapter else run)
    bucket = plan.frozen.workload.largest_bucket
    file = request.output or folder / f"sample-{request.seed}{_usual_suffix(bucket, on_event)}"
    require_writable(file)
    if file.suffix == ".mp4" and not has_video_decoder():
        raise InvalidInput(
            "an mp4 is written with PyAV, which is not installed", hint=INSTALL_VIDEO
        )
    if not adapter:
        require(plan)
    model = fetch_model(plan.job.model_ref)
    model.family.check_num_controls(len(request.control_paths), "the prompt")
    return SampleInputs(request, plan, model, adapter, file)


def _usual_suffix(bucket: Bucket, on_event: OnEvent) -> str:
    if bucket.num_frames == 1:
        return ".png"
    if has_video_decoder():
        return ".mp4"
    on_event(
        Notice(
            text=f"only a clip's first frame is written without PyAV: {INSTALL_VIDEO}",
            level="warning",
        )
    )
    return ".png"
