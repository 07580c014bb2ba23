"""Predictions by formula instead of traces, without torch."""

import math
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autotune.cost.calibration import Calibration, residual_of
from autotune.cost.memory import ONE_PROCESS, Parallel
from autotune.knobs.knob import TuningContext
from autotune.models.registry import get_family
from autotune.models.resolve import ResolvedModel
from autotune.plan.candidate import BLOCK_COUNTS, CachingSettings
from autotune.plan.plan import Reason
from autotune.plan.prediction import PhaseMemory, Prediction, StepTime
from autotune.plan.workload import ModelSpec
from autotune.search import arrival, expected, problem

GIB = 2**30
KEPT_BYTES = 5 * GIB
"""What stays on the device where text encoders and VAE are kept."""


@dataclass(frozen=True, eq=False)
class FormulaCostModel:
    """Twelve GiB of weights, activations by pixels and blocks that keep them, a quarter more
    time where recomputed."""

    hardware: Any
    workload: Any
    family: Any
    model: Any = None
    encoder_gpu: None = None
    caching: CachingSettings = field(default_factory=CachingSettings)
    caching_reason: Reason = field(
        default_factory=lambda: Reason(knob="caching", chosen="release", why="test")
    )
    parallel: Parallel = ONE_PROCESS
    calibration: Calibration | None = None
    overheads: None = None

    @classmethod
    def build(
        cls,
        hardware,
        workload,
        family,
        config,
        parts=None,
        *,
        caching=None,
        caching_pins=None,
        caching_exclusions=(),
        parallel=ONE_PROCESS,
        overheads=None,
    ):
        model = SimpleNamespace(config=config, parts=parts)
        made = cls(hardware, workload, family, model, parallel=parallel)
        return replace(made, caching=caching[0], caching_reason=caching[1]) if caching else made

    @property
    def resident_encoder_bytes(self):
        return KEPT_BYTES if self.caching.residency == "keep" else 0

    @property
    def budget_bytes(self):
        whole = self.parallel.budget_bytes(self.hardware.device)
        return max(0, whole - self.resident_encoder_bytes)

    @property
    def context(self):
        return TuningContext(self.hardware, self.family, self.workload, self.budget_bytes)

    def weight_bytes(self, candidate):
        whole = int(12 * GIB * (1.0 if candidate.quantization == "none" else 0.55))
        return whole // self.parallel.num_shards

    def activation_bytes(self, candidate):
        return float(self._formula(candidate)[0] - self.weight_bytes(candidate))

    def host_memory_bytes(self, candidate):
        return GIB * (1 + candidate.swapped_blocks)

    def with_calibration(self, trials, priors=()):
        residuals = ((trial.candidate, self.residual(trial)) for trial in trials)
        pairs = [(candidate, residual) for candidate, residual in residuals if residual]
        return replace(self, calibration=Calibration.of(pairs, rates_measured=False, priors=priors))

    def with_parallel(self, parallel):
        return replace(self, parallel=parallel)

    def single_process(self):
        return self

    def residual(self, trial):
        return residual_of(trial, self._raw(trial.candidate))

    def predict_uncalibrated(self, candidate):
        return self._raw(candidate)

    def predict(self, candidate):
        calibration = self.calibration or Calibration.of((), rates_measured=False)
        time, memory = calibration.time, calibration.memory
        return self._raw(
            candidate,
            math.exp(time.log_factor(candidate)),
            math.exp(memory.log_factor(candidate)),
            time_uncertainty=time.uncertainty(candidate),
            memory_uncertainty=memory.uncertainty(candidate),
        )

    def _formula(self, candidate):
        blocks, work = self.workload.model.num_blocks, self.workload
        size = candidate.micro_batch_size
        freed = (candidate.checkpointed_blocks + 0.9 * candidate.selective_blocks) / blocks
        repeated = (candidate.checkpointed_blocks + 0.8 * candidate.selective_blocks) / blocks
        pixels = work.largest_bucket.width_px * work.largest_bucket.height_px / 2**16
        activations = 0.4 * pixels * size * (1.1 - freed)
        allocated = self.weight_bytes(candidate) + GIB * (activations + work.rank / 16)
        accumulation = -(-work.effective_batch_size // size)
        pace = 3e12 / (self.hardware.rate("memory.bandwidth") or 3e12)
        return allocated, pace * accumulation * (0.1 + 0.2 * pixels * size) * (1 + repeated / 4)

    def prepare(self, candidates):
        """There is nothing to find ahead."""

    def predict_block_counts(self, candidate, numbers):
        counts = dict(zip(BLOCK_COUNTS, numbers.T, strict=True))
        found = self._formula(SimpleNamespace(**{**dict(candidate), **counts}))
        return tuple(np.broadcast_to(np.asarray(each, dtype=float), len(numbers)) for each in found)

    def _raw(self, candidate, time=1.0, memory=1.0, **uncertainty):
        allocated, seconds = self._formula(candidate)
        allocated, seconds = int(memory * allocated), time * seconds
        phase = PhaseMemory.model_construct(name="train", run_memory_bytes=allocated + GIB)
        return Prediction.model_construct(
            candidate=candidate,
            allocated_memory_bytes=allocated,
            run_memory_bytes=allocated + GIB,
            host_memory_bytes=self.host_memory_bytes(candidate),
            phases=(phase,),
            step_seconds=seconds,
            **uncertainty,
            step_time=StepTime.model_validate(
                {**dict.fromkeys(StepTime.model_fields, 0.0), "matmul_seconds": seconds}
            ),
        )


@contextmanager
def by_formula(num_blocks=50):
    """Planning that predicts by formula and builds no model: torch is never imported."""

    def resolve(named):
        model, family = named.name, get_family(named.name)
        spec = ModelSpec(
            family=model,
            architecture="sha256:0",
            num_parameters=6_000_000_000,
            num_blocks=num_blocks,
            name=model,
        )
        found = ResolvedModel(family, family.transformer_config, model, None)
        vars(found)["spec"] = spec  # as if it had been built
        return found

    around = SimpleNamespace(total_seconds=100.0)
    with pytest.MonkeyPatch.context() as patch:
        for module in (problem, arrival):
            patch.setattr(module, "CostModel", FormulaCostModel)
        for module in ("autotune.models.resolve", "autotune.search.arrival"):
            patch.setattr(f"{module}.resolve_model", resolve)
        patch.setattr(problem, "read_parts", lambda model: None)
        patch.setattr(expected, "job_time", lambda *_, **__: around)
        yield
