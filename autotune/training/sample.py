"""`autotune sample`: pictures from a trained adapter, loaded as the plan says, so it fits where training fitted."""

from collections.abc import Callable
from pathlib import Path

import torch

from autotune.atomic import require_writable
from autotune.errors import InvalidInput
from autotune.families.resolve import fetch_model
from autotune.knobs.allocator import configure_allocator
from autotune.knobs.swapping import Swapping
from autotune.plan_file import read_plan
from autotune.schema import HardwareProfile
from autotune.training.data.cache import Cache
from autotune.training.encoders import Encoders
from autotune.training.folder import PLAN_FILE
from autotune.training.model import load_transformer
from autotune.training.preview import Preview, PreviewSampler, save_image
from autotune.training.save import ADAPTER_FILE
from autotune.training.shortage import telling_of_short_memory


@telling_of_short_memory()
def sample_run(
    folder: Path,
    hardware: HardwareProfile,
    prompt: str,
    cache_folder: Path,
    *,
    count: int = 1,
    seed: int = 0,
    num_steps: int | None = None,
    control_paths: tuple[Path, ...] = (),
    output: Path | None = None,
    on_progress: Callable[[str], None] = lambda message: None,
    on_warning: Callable[[str], None] = lambda message: None,
) -> list[Path]:
    """Sample `count` pictures from the adapter in a run's folder and return the files written.

    Raises:
        OSError: the picture could not be written.
        InvalidInput: the folder holds no trained adapter, or a control image is missing or too many.
        AutotuneError: memory ran out.
    """
    if not (folder / ADAPTER_FILE).is_file() or not (folder / PLAN_FILE).is_file():
        raise InvalidInput(f"{folder} holds no trained adapter", hint="name the output folder of `autotune train`")
    missing = [path for path in control_paths if not path.is_file()]
    if missing:
        raise InvalidInput(f"there is no control image {missing[0]}", hint="check the path")
    plan = read_plan(folder / PLAN_FILE)
    model = fetch_model(plan.job.pinned_model)
    model.family.require_controls(len(control_paths), "the prompt")
    file = output or folder / f"sample-{seed}.png"
    require_writable(file)
    frozen, device = plan.frozen, torch.device(hardware.device.torch_name)
    settings = frozen.settings
    if frozen.hardware.strategy == "fsdp2":  # a device holds but a part of the weights, so they visit it
        settings = settings.changed(swapped_blocks=frozen.workload.model.num_blocks - 1)
    configure_allocator(settings.allocator)  # before anything is allocated
    encoders = Encoders(model, frozen.caching, settings, device)
    sampler = PreviewSampler(encoders, on_warning)
    steps = num_steps or plan.job.preview_steps
    previews = [
        Preview(prompt, frozen.workload.largest_bucket, steps, seed + number, control_paths) for number in range(count)
    ]
    sampler.encode_prompts(previews[:1], Cache(cache_folder))
    encoders.release()
    transformer, _ = load_transformer(model, settings, device)
    sampler.attach(transformer)
    sampler.load_adapter(folder / ADAPTER_FILE)
    Swapping().apply(transformer, model.family, settings.swapped_blocks)
    written = []
    for number, preview in enumerate(previews, start=1):
        on_progress(f"sampling {number} of {count}")
        path = file if count == 1 else file.with_stem(f"{file.stem}-{number}")
        save_image(sampler.sample(preview)[0], path)
        written.append(path)
    return written
