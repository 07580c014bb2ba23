"""`autotune sample`: images and clips from a trained adapter, loaded as the plan says: it fits if training did."""

from dataclasses import dataclass
from pathlib import Path

import torch

from autotune.data import Cache, Encoders, has_video_decoder
from autotune.errors import InvalidInput
from autotune.families import fetch_model
from autotune.knobs import Swapping, configure_allocator
from autotune.runtime import require_writable, reraise_oom
from autotune.schema import (
    RUN_PLAN_FILE,
    Bucket,
    HardwareProfile,
    Notice,
    OnEvent,
    StatusChanged,
    ignore_event,
    read_plan,
)
from autotune.training.adapter_file import ADAPTER_FILE
from autotune.training.model import load_transformer
from autotune.training.pictures import save_clip, save_image
from autotune.training.preview import Preview, PreviewSampler

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
    """File to write, with a number added if there are several; None for one in the run's folder. A clip is an .mp4; any
    other name gets its first frame as a PNG."""


@reraise_oom()
def sample_run(
    folder: Path,
    hardware: HardwareProfile,
    request: SampleRequest,
    cache_folder: Path,
    on_event: OnEvent = ignore_event,
) -> list[Path]:
    """Sample images from the adapter in a run's folder and return the files written.

    Raises:
        OSError: an image could not be written.
        InvalidInput: the folder holds no trained adapter, or a control image is missing or too many.
        AutotuneError: memory ran out.
    """
    if not (folder / ADAPTER_FILE).is_file() or not (folder / RUN_PLAN_FILE).is_file():
        raise InvalidInput(f"{folder} holds no trained adapter", hint="name the output folder of `autotune train`")
    missing = [path for path in request.control_paths if not path.is_file()]
    if missing:
        raise InvalidInput(f"there is no control image {missing[0]}", hint="check the path")
    plan = read_plan(folder / RUN_PLAN_FILE)
    model = fetch_model(plan.job.pinned_model)
    model.family.check_num_controls(len(request.control_paths), "the prompt")
    frozen, device = plan.frozen, torch.device(hardware.device.torch_name)
    file = request.output or folder / f"sample-{request.seed}{_usual_suffix(frozen.workload.largest_bucket, on_event)}"
    require_writable(file)
    if file.suffix == ".mp4" and not has_video_decoder():
        raise InvalidInput("an mp4 is written with PyAV, which is not installed", hint=INSTALL_VIDEO)
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
    sampler.load_adapter(folder / ADAPTER_FILE)
    Swapping().apply(transformer, model.family, settings.swapped_blocks)
    written = []
    for number, preview in enumerate(previews, start=1):
        on_event(StatusChanged(text=f"sampling {number} of {request.count}"))
        path = file if request.count == 1 else file.with_stem(f"{file.stem}-{number}")
        frames, facts = sampler.sample(preview), preview.facts(plan, adapter="with")
        if path.suffix == ".mp4":
            save_clip(frames, path, facts, model.family.defaults.frames_per_second)
        else:
            save_image(frames[0], path, facts)
        written.append(path)
    return written


def _usual_suffix(bucket: Bucket, on_event: OnEvent) -> str:
    if bucket.num_frames == 1:
        return ".png"
    if has_video_decoder():
        return ".mp4"
    on_event(Notice(text=f"only a clip's first frame is written without PyAV: {INSTALL_VIDEO}", level="warning"))
    return ".png"
