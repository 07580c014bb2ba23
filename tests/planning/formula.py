"""Predictions by formula instead of traces, which take seconds; the measured golden plan has the real ones."""

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from autotune.cost.calibration import Calibration
from autotune.cost.parallel import Parallel
from autotune.knobs.base import Setting
from autotune.planning import case, outlook, sealing
from autotune.prediction import PhaseMemory, Prediction
from autotune.schema import CachingSettings, Candidate, Reason, TrialResult

GIB = 2**30


class FormulaPredictor:
    """Twelve GiB of weights, activations by pixels and blocks that keep them, a quarter more time where recomputed."""

    kept_bytes = 0
    caching = (CachingSettings(), Reason(knob="caching", chosen="release", why="test"))

    def __init__(
        self, hardware: Any, workload: Any, family: Any, config: Any, parts: Any = None, pins: Any = None,
        parallel: Parallel | None = None,
    ) -> None:  # fmt: skip
        self.hardware, self.workload, self.family, self.config, self.parts = hardware, workload, family, config, parts
        self.parallel = parallel or Parallel()
        self._setting = Setting(hardware, family, workload)
        self.calibrate(())

    def weight_bytes(self, candidate: Candidate) -> int:
        return int(12 * GIB * (1.0 if candidate.quantization == "none" else 0.55))

    def calibrate(self, trials: Sequence[TrialResult]) -> None:
        pairs = [(trial, self._raw(trial.candidate)) for trial in trials]
        self._calibration = Calibration.of(pairs, rates_measured=False)

    def predict(self, candidate: Candidate) -> Prediction:
        time, memory = self._calibration.time, self._calibration.memory
        raw = self._raw(candidate, math.exp(time.log_factor(candidate)), math.exp(memory.log_factor(candidate)))
        uncertainty = {
            "time_uncertainty": time.uncertainty(candidate), "memory_uncertainty": memory.uncertainty(candidate)
        }  # fmt: skip
        return raw.model_copy(update=uncertainty)

    def _raw(self, candidate: Candidate, time: float = 1.0, memory: float = 1.0) -> Prediction:
        blocks, work, size = self.workload.model.num_blocks, self.workload, candidate.micro_batch_size
        share = candidate.checkpointed_blocks / blocks
        pixels = work.largest_bucket.width_px * work.largest_bucket.height_px / 2**16
        activations = 0.4 * pixels * size * (1.1 - share)
        allocated = int(memory * (self.weight_bytes(candidate) + GIB * (activations + work.rank / 16)))
        accumulation = -(-work.effective_batch_size // size)
        seconds = time * accumulation * (0.1 + 0.2 * pixels * size) * (1 + share / 4)
        phase = PhaseMemory.model_construct(name="train", peak_memory_bytes=allocated + GIB)
        return Prediction.model_construct(
            candidate=candidate,
            allocated_memory_bytes=allocated,
            required_memory_bytes=allocated + GIB,
            phases=(phase,),
            step_seconds=seconds,
        )


@contextmanager
def by_formula() -> Iterator[None]:
    """Planning that predicts by formula, and looks each model up once."""
    with pytest.MonkeyPatch.context() as patch:
        resolve = functools.cache(case.resolve_model)
        for module in (case, outlook, sealing):
            patch.setattr(module, "Predictor", FormulaPredictor)
        for module in (case, sealing):
            patch.setattr(module, "resolve_model", resolve)
        yield
