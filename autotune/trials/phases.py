"""A rehearsal of a whole run, in the child: every phase once with the real settings, and enough steps to be steady."""

import contextlib
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from autotune.data import Cache, Encoders, open_pixels
from autotune.families import ResolvedModel, resolve_model
from autotune.runtime import give_back_memory
from autotune.schema import TrialResult
from autotune.training import ADAPTER_FILE, PhaseWatch, Preview, PreviewSampler, save_trained
from autotune.trials.outcomes import one_line
from autotune.trials.requests import RehearsalRequest
from autotune.trials.steps import Steps, load

PREVIEW_STEPS = 2
"""Denoising steps: memory is the same in each."""
WORDS_PER_TOKEN = 0.5
"""Of the rehearsed caption: tokenizers split unusual words."""


def rehearse(request: RehearsalRequest, tell: Callable[[Any], None]) -> TrialResult:
    """The result; what is known after each phase is told. Caching that fails says nothing about the candidate: the rest
    goes on, and the message names it."""
    device, model = torch.device(request.device), resolve_model(request.model)
    watch = PhaseWatch(device)
    result: TrialResult | None = None
    left_out = ""

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
        phases, host_bytes = tuple(watch.peaks.values()), watch.peaks["training"].host_bytes
        message = result.message or left_out
        return result.changed(confirms=True, phases=phases, host_memory_bytes=host_bytes, message=message)

    with tempfile.TemporaryDirectory(prefix="autotune-rehearsal-", dir=request.scratch) as name:
        folder, sampler = Path(name), None
        preview = _preview(request, model, folder)
        if model.folder is not None:
            try:
                with phase("caching"):
                    sampler = _cache(request, model, device, preview, folder / "cache")
            except Exception as error:
                traceback.print_exc()
                left_out = f"{type(error).__name__}: {one_line(error)}"
            if left_out:  # no longer in the handler: the error held what had been loaded
                del watch.peaks["caching"]
                give_back_memory()
        with phase("loading"):
            loaded = load(request)
            if sampler:
                sampler.attach(loaded.model.transformer)
        with phase("training"):
            steps = Steps(loaded, request.workload, request.candidate)
            result = steps.result(request.goes_on)
        if sampler:
            with phase("previews"):
                sampler.sample(preview)
        with phase("saving"):
            save_trained(folder / ADAPTER_FILE, steps.model, steps.optimizer, request.workload, "rehearsal", 1)
    return so_far(result)


def _preview(request: RehearsalRequest, model: ResolvedModel, folder: Path) -> Preview:
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
    return Preview(caption, bucket, PREVIEW_STEPS, 0, tuple(paths))


def _cache(
    request: RehearsalRequest, model: ResolvedModel, device: torch.device, preview: Preview, cache: Path
) -> PreviewSampler:
    """Encode the caption and an item of the largest shape, as caching would, and what the preview needs."""
    encoders = Encoders(model, request.caching, request.candidate, device)
    sampler = PreviewSampler(encoders)
    sampler.encode_prompts([preview], Cache(cache))
    _encode_item(model, encoders, preview)
    encoders.release()
    return sampler


@torch.no_grad()
def _encode_item(model: ResolvedModel, encoders: Encoders, preview: Preview) -> None:
    """Captions, then pixels, in training's order. A function of its own: what holds the pipeline keeps it in memory."""
    pipeline, bucket = encoders.load_pipeline(), preview.bucket
    controls = [open_pixels((path,), bucket.width_px, bucket.height_px) for path in preview.control_paths]
    model.family.encode_caption(pipeline, preview.prompt, controls)
    encoders.release_text()
    pixels = torch.zeros(3, bucket.num_frames, bucket.height_px, bucket.width_px, device=pipeline.vae.device)
    model.family.encode_pixels(pipeline, pixels)
