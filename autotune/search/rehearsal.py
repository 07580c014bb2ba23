"""Rehearses the winner of a search: a longer trial, through every phase of a run."""

import contextlib
import statistics
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from autotune.data.cache import Cache
from autotune.data.encode import Encoders
from autotune.data.pixels import open_pixels
from autotune.models.resolve import ResolvedModel
from autotune.plan.candidate import CachingSettings, TrialResult
from autotune.search import worker
from autotune.system import memory
from autotune.train.folder import ADAPTER_FILE
from autotune.train.model import eager_eval, save_trained
from autotune.train.monitor import Monitor
from autotune.train.sample import Preview, PreviewSampler

MIN_REHEARSAL_STEPS, MAX_REHEARSAL_STEPS = 10, 40
MAX_DRIFT = 0.03  # between the medians of both halves of a rehearsal's steps, relative
NUM_PREVIEW_STEPS = 2  # memory is the same in each
RUN_BYTES = 22 << 20
"""Host memory that only a run has, e.g. the list of the data; 13 to 32 MiB were measured
(`benchmarks/run_memory.py`)."""

WORDS_PER_TOKEN = 0.5  # of the rehearsed caption: tokenizers split unusual words


@dataclass(frozen=True, kw_only=True)
class RehearsalRequest(worker.TrialRequest):
    """Every phase of a run; without the model's files only loading, training and saving."""

    caching: CachingSettings
    max_seconds: float  # training takes no further step after this long
    scratch_folder: str | None = None
    """Folder to write in, which the parent removes, however the child ends."""

    def needs_another_step(self, seconds: list[float]) -> bool:
        if len(seconds) < self.num_steps:
            return True
        if sum(seconds) >= self.max_seconds or len(seconds) >= MAX_REHEARSAL_STEPS:
            return False
        if len(seconds) < MIN_REHEARSAL_STEPS:
            return True
        half = len(seconds) // 2
        first, second = statistics.median(seconds[:half]), statistics.median(seconds[half:])
        return abs(second - first) > MAX_DRIFT * first

    def perform(self, child: worker.ChildState) -> TrialResult:
        """Go through every phase of a run; from training on, each phase's end is reported."""
        with contextlib.suppress(ImportError):
            import bitsandbytes  # noqa: F401 - diffusers imports it in a run; trials start without (see preload.py)
        device, model = torch.device(self.device), self.model
        monitor = Monitor(device)
        trained: TrialResult | None = None
        caching_error = ""

        @contextlib.contextmanager
        def phase(name: str) -> Iterator[None]:
            try:
                with monitor.phase(name):
                    yield
            except BaseException as error:
                error.add_note(f"in the {name} phase")
                raise
            if trained:
                child.report(with_phases(trained))

        def with_phases(result: TrialResult) -> TrialResult:
            phases = tuple(
                peak.changed(host_bytes=(peak.host_bytes or 0) + RUN_BYTES)
                for peak in monitor.peaks.values()
            )
            host_bytes = next(phase.host_bytes for phase in phases if phase.name == "training")
            message = result.message or caching_error
            return result.changed(
                confirms=True, phases=phases, host_memory_bytes=host_bytes, message=message
            )

        with tempfile.TemporaryDirectory(
            prefix="autotune-rehearsal-", dir=self.scratch_folder
        ) as name:
            folder, sampler = Path(name), None
            preview = largest_preview(self, model, folder)
            if model.folder is not None:
                try:
                    with phase("caching"):
                        sampler = rehearse_caching(self, model, preview, folder / "cache")
                except Exception as error:
                    traceback.print_exc()
                    caching_error = f"{type(error).__name__}: {worker.first_line_with_notes(error)}"
                if caching_error:  # outside of the handler: the error held what had been loaded
                    del monitor.peaks["caching"]
                    memory.release_memory()
            with phase("loading"):
                loaded = worker.load_for_trial(self)
                if sampler:
                    sampler.attach(loaded.model.transformer)
            with phase("training"):
                steps = worker.StepRunner(loaded, self.workload, self.candidate)
                trained = steps.measure(self.needs_another_step)
            if sampler:
                with phase("previews"), eager_eval(loaded.model.transformer):
                    sampler.sample(preview)
            adapter, work = folder / ADAPTER_FILE, self.workload
            with phase("saving"):
                trained_by = steps.model, steps.optimizer, work, "rehearsal", 1
                save_trained(adapter, *trained_by, torch.bfloat16)  # as jobs do by default
            # Loading the adapter into the pipeline takes more than the preview.
            if sampler:
                with phase("previews"), eager_eval(loaded.model.transformer):
                    sampler.compare_adapter(adapter, [preview], lambda *written: None)
        return with_phases(trained)


def largest_preview(request: RehearsalRequest, model: ResolvedModel, folder: Path) -> Preview:
    """Make a preview in the largest shape, with a caption of about its length."""
    work, bucket = request.workload, request.workload.largest_bucket
    size = (bucket.width_px, bucket.height_px)
    num_pictures = work.num_control_images + model.family.starts_from_picture
    paths = [folder / f"control-{number}.png" for number in range(num_pictures)]
    for path in paths:
        Image.new("RGB", size, "gray").save(path)
    tokens = work.max_text_tokens
    if paths and model.config_folder is not None:  # most of the tokens stand for the control images
        sizes = [[size] * len(paths)]
        tokens -= model.family.count_text_tokens(model.config_folder, [""], sizes)[0]
    caption = " ".join(["photo"] * max(1, int(tokens * WORDS_PER_TOKEN)))
    return Preview(caption, bucket, NUM_PREVIEW_STEPS, 0, tuple(paths))


def rehearse_caching(
    request: RehearsalRequest, model: ResolvedModel, preview: Preview, cache: Path
) -> PreviewSampler:
    """Encode a caption and an item of the largest shape, and what the preview needs."""
    device, settings = torch.device(request.device), request.candidate
    encoders = Encoders(model, request.caching, device, settings.precision, settings.loader)
    sampler = PreviewSampler(encoders)
    sampler.encode_prompts([preview], Cache(cache))
    _encode_item(model, encoders, preview)
    encoders.release()
    return sampler


@torch.no_grad()
def _encode_item(model: ResolvedModel, encoders: Encoders, preview: Preview) -> None:
    """In training's order; a function of its own, since what holds the pipeline keeps it."""
    pipeline, bucket = encoders.load_pipeline(), preview.bucket
    width, height = bucket.width_px, bucket.height_px
    controls = [open_pixels((path,), width, height) for path in preview.control_paths]
    model.family.encode_caption(pipeline, preview.prompt, controls)
    encoders.release_text()
    pipeline = encoders.load_pipeline(with_text=False)
    pixels = torch.zeros(3, bucket.num_frames, height, width, device=pipeline.vae.device)
    with memory.map_large_buffers():
        model.family.encode_item(pipeline, pixels)
