"""A rehearsal of a whole run, in the child: every phase once with the real settings, and enough steps to be steady."""

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.schema import CachingSettings, TrialResult
from autotune.trials.steps import Steps, TrialRequest, load

if TYPE_CHECKING:
    from autotune.families.resolve import ResolvedModel
    from autotune.training.preview import Shot, Studio

LEAST_STEPS, MOST_STEPS = 10, 40
STEADY = 0.03
"""Difference between the medians of both halves of the steps, up to which they are steady."""
PREVIEW_STEPS = 2
"""Denoising steps: memory is the same in each."""
WORDS_PER_TOKEN = 0.5
"""Of the rehearsed caption: tokenizers split unusual words."""


@dataclass(frozen=True, kw_only=True)
class RehearsalRequest(TrialRequest):
    """One candidate to run through every phase: caching, loading, training, previews and saving.

    Without the model's files only loading (random weights), training and saving can be.
    """

    caching: CachingSettings
    most_seconds: float
    """No further steps after so much of training."""

    def perform(self, kept: dict[str, Any], tell: Callable[[Any], None]) -> TrialResult:
        """The result; what is known after each phase is told."""
        with tempfile.TemporaryDirectory(prefix="autotune-rehearsal-") as folder:
            return _Rehearsal(self, Path(folder), tell).run()

    def goes_on(self, times: list[float]) -> bool:
        """Until steps are steady, within the time there is."""
        if len(times) < self.num_steps or (len(times) < LEAST_STEPS and sum(times) < self.most_seconds):
            return True
        return not _steady(times) and len(times) < MOST_STEPS and sum(times) < self.most_seconds


class _Rehearsal:
    def __init__(self, request: RehearsalRequest, folder: Path, tell: Callable[[Any], None]) -> None:
        import torch

        from autotune.families.resolve import resolve_model
        from autotune.training.monitor import PhaseWatch

        self.request, self.folder, self.tell = request, folder, tell
        self.device = torch.device(request.device)
        self.model: ResolvedModel = resolve_model(request.model)
        self.watch = PhaseWatch(self.device)
        self.result: TrialResult | None = None

    def run(self) -> TrialResult:
        shot = self._shot()
        studio = None
        if self.model.folder is not None:
            with self._phase("caching"):
                studio = self._cache(shot)
        with self._phase("loading"):
            loaded = load(self.request)
            if studio:
                studio.attach(loaded.model.transformer)
        with self._phase("training"):
            steps = Steps(loaded, self.request.workload, self.request.candidate)
            self.result = steps.result(self.request.goes_on)
        if studio:
            with self._phase("previews"):
                studio.sample(shot)
        with self._phase("saving"):
            self._save(steps)
        return self._so_far()

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        try:
            with self.watch.phase(name):
                yield
        except BaseException as error:
            error.add_note(f"in the {name} phase")
            raise
        if self.result:
            self.tell(self._so_far())

    def _so_far(self) -> TrialResult:
        assert self.result is not None
        peaks = self.watch.peaks
        known = {"confirms": True, "phases": tuple(peaks.values()), "host_memory_bytes": peaks["training"].host_bytes}
        return TrialResult.model_validate({**dict(self.result), **known})

    def _shot(self) -> "Shot":
        """The largest shape of the workload, with a caption of about its length."""
        from PIL import Image

        from autotune.training.preview import Shot

        work = self.request.workload
        caption = " ".join(["photo"] * max(1, int(work.max_text_tokens * WORDS_PER_TOKEN)))
        paths = [self.folder / f"control-{number}.png" for number in range(work.num_control_images)]
        for path in paths:
            Image.new("RGB", (work.largest_bucket.width_px, work.largest_bucket.height_px), "gray").save(path)
        return Shot(caption, work.largest_bucket, PREVIEW_STEPS, 0, tuple(paths))

    def _cache(self, shot: "Shot") -> "Studio":
        """Encode the caption and an item of the largest shape, as caching would, and what the preview needs."""
        import torch

        from autotune.knobs.precision import torch_dtype
        from autotune.training.data.cache import Cache
        from autotune.training.data.pixels import open_pixels
        from autotune.training.encoders import Encoders
        from autotune.training.preview import Studio

        candidate, bucket, family = self.request.candidate, shot.bucket, self.model.family
        dtype = torch_dtype(candidate.precision)
        encoders = Encoders(self.model, self.request.caching, dtype, self.device, candidate.loader)
        studio = Studio(encoders)
        studio.learn([shot], Cache(self.folder / "cache"))
        pipeline = encoders.pipeline()
        controls = [open_pixels((path,), bucket.width_px, bucket.height_px) for path in shot.control_paths]
        pixels = torch.zeros(3, bucket.num_frames, bucket.height_px, bucket.width_px, device=pipeline.vae.device)
        with torch.no_grad():
            family.encode_captions(pipeline, [shot.prompt], [controls] if controls else ())
            family.encode_pixels(pipeline, pixels)
        encoders.release()
        return studio

    def _save(self, steps: Steps) -> None:
        from autotune.training.save import ADAPTER_FILE, save_masters
        from autotune.weights.adapters import AdapterInfo

        work = self.request.workload
        info = AdapterInfo(
            model=work.model.name,
            plan_digest="rehearsal",
            rank=work.rank,
            alpha=work.lora_alpha,
            training_steps=steps.step_number,
        )
        save_masters(self.folder / ADAPTER_FILE, steps.model, steps.optimizer, info)


def _steady(times: list[float]) -> bool:
    """Whether the second half of the steps was as fast as the first: nothing warms up, throttles or grows."""
    first, second = (statistics.median(half) for half in (times[: len(times) // 2], times[len(times) // 2 :]))
    return abs(second - first) <= STEADY * first
