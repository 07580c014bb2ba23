"""A rehearsal of a whole run, in the child: every phase once with the real settings, and enough steps to be steady."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from autotune.families.resolve import ResolvedModel, resolve_model
from autotune.schema import TrialResult
from autotune.training.data.cache import Cache
from autotune.training.data.pixels import open_pixels
from autotune.training.encoders import Encoders
from autotune.training.monitor import PhaseWatch
from autotune.training.preview import Shot, Studio
from autotune.training.save import ADAPTER_FILE, save_trained
from autotune.trials.requests import RehearsalRequest
from autotune.trials.steps import Steps, load

PREVIEW_STEPS = 2
"""Denoising steps: memory is the same in each."""
WORDS_PER_TOKEN = 0.5
"""Of the rehearsed caption: tokenizers split unusual words."""


def rehearse(request: RehearsalRequest, tell: Callable[[Any], None]) -> TrialResult:
    """The result; what is known after each phase is told."""
    device, model = torch.device(request.device), resolve_model(request.model)
    watch = PhaseWatch(device)
    result: TrialResult | None = None

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        try:
            with watch.phase(name):
                yield
        except BaseException as error:
            error.add_note(f"in the {name} phase")
            raise
        if result:
            tell(so_far(result))

    def so_far(result: TrialResult) -> TrialResult:
        known = {"confirms": True, "phases": tuple(watch.peaks.values())}
        host_bytes = watch.peaks["training"].host_bytes
        return TrialResult.model_validate({**dict(result), **known, "host_memory_bytes": host_bytes})

    with tempfile.TemporaryDirectory(prefix="autotune-rehearsal-") as name:
        folder, studio = Path(name), None
        shot = _shot(request, model, folder)
        if model.folder is not None:
            with phase("caching"):
                studio = _cache(request, model, device, shot, folder / "cache")
        with phase("loading"):
            loaded = load(request)
            if studio:
                studio.attach(loaded.model.transformer)
        with phase("training"):
            steps = Steps(loaded, request.workload, request.candidate)
            result = steps.result(request.goes_on)
        if studio:
            with phase("previews"):
                studio.sample(shot)
        with phase("saving"):
            save_trained(folder / ADAPTER_FILE, steps.model, steps.optimizer, request.workload, "rehearsal", 1)
    return so_far(result)


def _shot(request: RehearsalRequest, model: ResolvedModel, folder: Path) -> Shot:
    """The largest shape of the workload, with a caption of about its length."""
    work, bucket = request.workload, request.workload.largest_bucket
    size = (bucket.width_px, bucket.height_px)
    paths = [folder / f"control-{number}.png" for number in range(work.num_control_images)]
    for path in paths:
        Image.new("RGB", size, "gray").save(path)
    tokens = work.max_text_tokens
    if paths and model.texts is not None:  # most of which stand for the control images
        tokens -= model.family.count_text_tokens(model.texts, [""], [[size] * len(paths)])[0]
    caption = " ".join(["photo"] * max(1, int(tokens * WORDS_PER_TOKEN)))
    return Shot(caption, bucket, PREVIEW_STEPS, 0, tuple(paths))


def _cache(request: RehearsalRequest, model: ResolvedModel, device: torch.device, shot: Shot, cache: Path) -> Studio:
    """Encode the caption and an item of the largest shape, as caching would, and what the preview needs."""
    bucket, encoders = shot.bucket, Encoders(model, request.caching, request.candidate, device)
    studio = Studio(encoders)
    studio.learn([shot], Cache(cache))
    pipeline = encoders.pipeline()
    controls = [open_pixels((path,), bucket.width_px, bucket.height_px) for path in shot.control_paths]
    pixels = torch.zeros(3, bucket.num_frames, bucket.height_px, bucket.width_px, device=pipeline.vae.device)
    with torch.no_grad():
        model.family.encode_captions(pipeline, [shot.prompt], [controls] if controls else ())
        model.family.encode_pixels(pipeline, pixels)
    encoders.release()
    return studio
