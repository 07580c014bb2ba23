"""`autotune sample`: images and clips from a trained adapter, or from a plan's model as it is,
loaded as the plan says: it fits if training did."""

from pathlib import Path

import torch

from autotune.data import Cache, Encoders
from autotune.knobs import Swapping, configure_allocator
from autotune.runtime import reraise_oom
from autotune.schema import HardwareProfile, Notice, OnEvent, StatusChanged, ignore_event
from autotune.training.model import load_transformer
from autotune.training.pictures import save_clip, save_image
from autotune.training.preview import Preview, PreviewSampler
from autotune.training.sample_inputs import SampleInputs


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
    Swapping().apply(transformer, model.family, settings.swapped_blocks)
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
