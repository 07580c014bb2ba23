"""Predictions by formula instead of traces, without torch; the measured golden plan has the real ones."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.cost.calibration import Calibration, PriorResiduals, residual_of
from autotune.cost.parallel import Parallel
from autotune.families.registry import get_family
from autotune.families.resolve import ResolvedModel
from autotune.knobs.base import TuningContext
from autotune.planning import alternatives, sealing
from autotune.planning import expectation as publish_plan
from autotune.planning import problem as case
from autotune.schema.candidate import CachingSettings, Candidate
from autotune.schema.plan import Reason
from autotune.schema.prediction import PhaseMemory, Prediction
from autotune.schema.trial import Residual, TrialResult
from autotune.schema.workload import ModelSpec

GIB = 2**30
KEPT_BYTES = 5 * GIB
"""What stays on the device where text encoders and VAE are kept."""


class FormulaPredictor:
    """Twelve GiB of weights, activations by pixels and blocks that keep them, a quarter more time where recomputed."""

    caching = (CachingSettings(), Reason(knob="caching", chosen="release", why="test"))

    def __init__(
        self, hardware: Any, workload: Any, family: Any, config: Any, parts: Any = None, pins: Any = None,
        parallel: Parallel | None = None,
    ) -> None:  # fmt: skip
        self.hardware, self.workload, self.family, self.config, self.parts = hardware, workload, family, config, parts
        self.parallel = parallel or Parallel()
        self._context = TuningContext(hardware, family, workload)
        self.calibrate(())

    @property
    def resident_encoder_bytes(self) -> int:
        return KEPT_BYTES if self.caching[0].residency == "keep" else 0

    def weight_bytes(self, candidate: Candidate) -> int:
        shards = self.parallel.num_processes if self.parallel.strategy == "fsdp2" else 1
        return int(12 * GIB * (1.0 if candidate.quantization == "none" else 0.55)) // shards

    def calibrate(self, trials: Sequence[TrialResult], priors: Sequence[PriorResiduals] = ()) -> None:
        pairs = [(trial.candidate, residual) for trial in trials if (residual := self.residual(trial))]
        self._calibration = Calibration.of(pairs, rates_measured=False, priors=priors)

    def residual(self, trial: TrialResult) -> Residual | None:
        return residual_of(trial, self._raw(trial.candidate))

    @property
    def single_process(self) -> "FormulaPredictor":
        return self

    def uncalibrated(self, candidate: Candidate) -> Prediction:
        return self._raw(candidate)

    def beside(self, hardware: Any) -> "FormulaPredictor":
        return FormulaPredictor(hardware, self.workload, self.family, self.config, self.parts, None, self.parallel)

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
        pace = 3e12 / (self.hardware.rate("memory.bandwidth") or 3e12)
        seconds = pace * time * accumulation * (0.1 + 0.2 * pixels * size) * (1 + share / 4)
        phase = PhaseMemory.model_construct(name="train", peak_memory_bytes=allocated + GIB)
        return Prediction.model_construct(
            candidate=candidate,
            peak_memory_bytes=allocated + GIB,
            allocated_memory_bytes=allocated,
            required_memory_bytes=allocated + GIB,
            host_memory_bytes=GIB * (1 + candidate.swapped_blocks),
            phases=(phase,),
            step_seconds=seconds,
        )


@contextmanager
def by_formula(num_blocks: int = 50) -> Iterator[None]:
    """Planning that predicts by formula and builds no model: torch is never imported."""

    def resolve(model: str) -> ResolvedModel:
        family = get_family(model)
        spec = ModelSpec(
            family=model, architecture="sha256:0", num_parameters=6 * 10**9, num_blocks=num_blocks, name=model
        )
        return ResolvedModel(family, family.transformer_config, spec, None)

    with pytest.MonkeyPatch.context() as patch:
        for module in (alternatives, case, sealing):
            patch.setattr(module, "Predictor", FormulaPredictor)
        for module in (case, sealing):
            patch.setattr(module, "resolve_model", resolve)
        patch.setattr(publish_plan, "job_time", lambda *_, **__: SimpleNamespace(total_seconds=100.0))
        yield
