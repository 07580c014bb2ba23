"""`autotune sample`, and the files that samples are written to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from autotune.data.cache import Cache
from autotune.data.pixels import has_video_decoder
from autotune.errors import InvalidInput, reraise_oom
from autotune.events import Notice, OnEvent, StatusChanged, ignore_event
from autotune.knobs.settings import configure_allocator
from autotune.models.resolve import ResolvedModel, fetch_model
from autotune.plan.file import RUN_PLAN_FILE, read_plan
from autotune.plan.hardware import HardwareProfile
from autotune.plan.plan import TrainingPlan
from autotune.system.files import atomic_write, require_writable
from autotune.system.lazy import torch
from autotune.train.folder import ADAPTER_FILE
from autotune.train.preview import Preview, PreviewSampler
from autotune.weights.files import read_header

# Height of a line of labels, as a share of a picture's.
LINE_SHARE = 1 / 24
MIN_LINE_PX = 12
# x264's constant rate factor: what is lost cannot be seen.
CLIP_QUALITY = "18"
INSTALL_VIDEO = "pip install 'lora-autotune[video]'"
LABELS = ("without the adapter", "with the adapter")


def make_sheet(
    previews: Sequence[Preview], pairs: Sequence[tuple[Image.Image, Image.Image]]
) -> Image.Image:
    """Draw a row per preview: without and with the adapter, prompt and seed below."""
    sizes = [image.size for pair in pairs for image in pair]
    width, height = (max(side) for side in zip(*sizes, strict=True))
    line = max(MIN_LINE_PX, round(height * LINE_SHARE))
    row_height = height + 2 * line
    sheet = Image.new("RGB", (2 * width, row_height * len(pairs)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(0.75 * line)
    for number, (preview, pair) in enumerate(zip(previews, pairs, strict=True)):
        top = number * row_height
        for column, (label, image) in enumerate(zip(LABELS, pair, strict=True)):
            draw.text((column * width + 2, top), label, "black", font)
            sheet.paste(image, (column * width, top + line))
        # the seed first: long prompts are cut off
        text = f"seed {preview.seed}: {' '.join(preview.prompt.split())}"
        draw.text((2, top + line + height), text, "black", font)
    return sheet


def save_image(image: Image.Image, path: Path, facts: Mapping[str, object]) -> None:
    """Write a PNG atomically, with `facts` as text in its metadata."""
    metadata = PngInfo()
    for name, value in facts.items():
        metadata.add_itxt(name, str(value))
    with atomic_write(path) as part:
        image.save(part, format="PNG", pnginfo=metadata)


def save_frames(
    frames: Sequence[Image.Image], path: Path, facts: Mapping[str, object], fps: float
) -> None:
    """Write the first frame as a PNG and, of several and with PyAV, all as an mp4 beside it."""
    save_image(frames[0], path, facts)
    if len(frames) > 1 and has_video_decoder():
        save_clip(frames, path.with_suffix(".mp4"), facts, fps)


def save_clip(
    frames: Sequence[Image.Image], path: Path, facts: Mapping[str, object], fps: float
) -> None:
    """Write an mp4 (H.264) atomically, with `facts` as its comment. Sides must be even."""
    import av

    rate = Fraction(fps).limit_denominator(1001)
    with atomic_write(path) as part, av.open(str(part), "w", format="mp4") as container:
        texts = {name: str(value) for name, value in facts.items()}
        container.metadata["comment"] = json.dumps(texts)
        stream = container.add_stream("libx264", rate=rate, options={"crf": CLIP_QUALITY})
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(np.asarray(frame.convert("RGB")), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())


@dataclass(frozen=True)
class SampleRequest:
    """Images to sample from one prompt, each from a seed one higher than the last."""

    prompt: str
    count: int = 1
    seed: int = 0
    # None for the job's.
    num_steps: int | None = None
    control_paths: tuple[Path, ...] = ()
    # None for a file in the run's folder or beside the plan; several get numbers. A clip is an
    # .mp4; any other name gets its first frame as a PNG.
    output: Path | None = None


@dataclass(frozen=True)
class SampleInputs:
    """A checked request with its run; without an adapter it shows the model as it is."""

    request: SampleRequest
    plan: TrainingPlan
    model: ResolvedModel
    adapter: Path | None
    file: Path


def read_sample_inputs(
    run: Path,
    request: SampleRequest,
    on_event: OnEvent = ignore_event,
    require: Callable[[TrainingPlan], None] = lambda plan: None,
) -> SampleInputs:
    """Read what sampling takes; `require` may refuse a plan before its model is fetched."""
    if not run.exists():
        raise InvalidInput(f"there is no run and no plan at {run}", hint="check the path")
    folder = run.parent if run.is_file() else run
    adapter = None if run.is_file() else run / ADAPTER_FILE
    if adapter and not (adapter.is_file() and (run / RUN_PLAN_FILE).is_file()):
        hint = "name the output folder of `autotune train`"
        raise InvalidInput(f"{run} holds no trained adapter", hint=hint)
    missing = [path for path in request.control_paths if not path.is_file()]
    if missing:
        raise InvalidInput(f"there is no control image {missing[0]}", hint="check the path")
    if adapter:
        read_header(adapter)
    plan = read_plan(run / RUN_PLAN_FILE if adapter else run)
    bucket = plan.frozen.workload.largest_bucket
    is_clip = bucket.num_frames > 1
    if request.output is None and is_clip and not has_video_decoder():
        text = f"only a clip's first frame is written without PyAV: {INSTALL_VIDEO}"
        on_event(Notice(text=text, level="warning"))
    suffix = ".mp4" if is_clip and has_video_decoder() else ".png"
    file = request.output or folder / f"sample-{request.seed}{suffix}"
    require_writable(file)
    if file.suffix == ".mp4" and not has_video_decoder():
        message = "an mp4 is written with PyAV, which is not installed"
        raise InvalidInput(message, hint=INSTALL_VIDEO)
    if not adapter:
        require(plan)
    model = fetch_model(plan.job.model_ref)
    model.family.check_num_controls(len(request.control_paths), "the prompt")
    return SampleInputs(request, plan, model, adapter, file)


@reraise_oom()
def sample_run(
    inputs: SampleInputs,
    hardware: HardwareProfile,
    cache_folder: Path,
    on_event: OnEvent = ignore_event,
) -> list[Path]:
    """Sample from the adapter of a run, or from a plan's model; return the files written."""
    from autotune.data.encode import Encoders
    from autotune.knobs.block_swap import swap_blocks
    from autotune.train.model import load_transformer

    request, plan, model, file = inputs.request, inputs.plan, inputs.model, inputs.file
    frozen, device = plan.frozen, torch.device(hardware.device.torch_name)
    settings = frozen.settings
    if frozen.hardware.num_shards > 1:  # one device cannot hold all weights, so blocks are swapped
        settings = settings.changed(swapped_blocks=frozen.workload.model.num_blocks - 1)
    configure_allocator(settings.allocator)  # before anything is allocated
    encoders = Encoders(model, frozen.caching, settings, device)
    sampler = PreviewSampler(encoders, lambda text: on_event(Notice(text=text, level="warning")))
    steps, bucket = request.num_steps or plan.job.preview_steps, frozen.workload.largest_bucket
    first = Preview(request.prompt, bucket, steps, request.seed, request.control_paths)
    previews = [replace(first, seed=first.seed + number) for number in range(request.count)]
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
        frames = sampler.sample(preview)
        facts = preview.facts(plan, adapter="with" if inputs.adapter else "without")
        if path.suffix == ".mp4":
            save_clip(frames, path, facts, model.family.defaults.frames_per_second)
        else:
            save_image(frames[0], path, facts)
        written.append(path)
    return written
