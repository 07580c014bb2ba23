"""`autotune sample`: images and clips from a trained adapter, or from a plan's model as it is,
loaded as the plan says: it fits if training did."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from autotune.data.cache import Cache
from autotune.data.captions import has_video_decoder
from autotune.data.encode import Encoders
from autotune.errors import InvalidInput
from autotune.events import Notice, OnEvent, StatusChanged, ignore_event
from autotune.knobs.block_swap import swap_blocks
from autotune.knobs.settings import configure_allocator
from autotune.models.resolve import ResolvedModel, fetch_model
from autotune.plan.hardware import HardwareProfile
from autotune.plan.plan import TrainingPlan
from autotune.plan.plan_file import RUN_PLAN_FILE, read_plan
from autotune.plan.workload import Bucket
from autotune.system.failures import reraise_oom
from autotune.system.files import require_writable
from autotune.train.files import ADAPTER_FILE
from autotune.train.model import load_transformer
from autotune.train.preview import Preview, PreviewSampler, save_clip, save_image
from autotune.weights.files import read_header

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


@reraise_oom()
def sample_run(
    inputs: SampleInputs,
    hardware: HardwareProfile,
    cache_folder: Path,
    on_event: OnEvent = ignore_event,
) -> list[Path]:
    """Sample images from the adapter of a run, or from a plan's model without one, and return the
    files written.

    Raises:
        OSError: an image could not be written.
        AutotuneError: memory ran out.
    """
    request, plan, model, file = inputs.request, inputs.plan, inputs.model, inputs.file
    frozen, device = plan.frozen, torch.device(hardware.device.torch_name)
    settings = frozen.settings
    if frozen.hardware.num_shards > 1:  # one device cannot hold all weights, so blocks are swapped
        settings = settings.changed(swapped_blocks=frozen.workload.model.num_blocks - 1)
    configure_allocator(settings.allocator)  # before anything is allocated
    encoders = Encoders(model, frozen.caching, settings, device)
    sampler = PreviewSampler(encoders, lambda text: on_event(Notice(text=text, level="warning")))
    steps, bucket = request.num_steps or plan.job.preview_steps, frozen.workload.largest_bucket
    previews = [
        Preview(request.prompt, bucket, steps, request.seed + number, request.control_paths)
        for number in range(request.count)
    ]
    sampler.encode_prompts(previews[:1], Cache(cache_folder))
    encoders.release()
    transformer, _ = load_transformer(model, settings, device)
    sampler.attach(transformer)
    if inputs.adapter:
        sampler.load_adapter(inputs.adapter)
    swap_blocks(transformer, model.family, settings.swapped_blocks)
    written = []
    for number, preview in enumerate(previews, start=1):
        on_event(StatusChanged(text=f"sampling {number} of {request.count}"))
        path = file if request.count == 1 else file.with_stem(f"{file.stem}-{number}")
        frames, facts = (
            sampler.sample(preview),
            preview.facts(plan, adapter="with" if inputs.adapter else "without"),
        )
        if path.suffix == ".mp4":
            save_clip(frames, path, facts, model.family.defaults.frames_per_second)
        else:
            save_image(frames[0], path, facts)
        written.append(path)
    return written
