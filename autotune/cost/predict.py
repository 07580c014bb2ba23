"""Predict memory and step time of any candidate: traces once, then answers by arithmetic."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from autotune.cost import timing, trace
from autotune.cost.calibration import NOISE, Calibration, PriorResiduals, residual_of
from autotune.cost.kernels import CLASSES, DeviceRules
from autotune.cost.memory import ONE_PROCESS, PHASES, Parallel, Resident, phases_of, with_kept
from autotune.cost.tables import PassTables
from autotune.cost.traced_model import PassChoice, TracedModel, traced_model
from autotune.knobs.caching import choose_caching, encoder_gpu_of
from autotune.knobs.knob import TuningContext
from autotune.models.facts import Parts
from autotune.models.family import Family
from autotune.plan.candidate import BLOCK_COUNTS, CachingSettings, Candidate, Residual, TrialResult
from autotune.plan.hardware import HardwareProfile
from autotune.plan.plan import EncoderGpu, Reason
from autotune.plan.prediction import Overheads, Prediction, StepTime, SwapPractice
from autotune.plan.workload import Workload

# What compiled blocks leave of the time of elementwise kernels (.14 to .33 of their bytes) and of
# the host (.57 to .89): blocks of three models for sm_80 to sm_120 (benchmarks/kernels.py).
ELEMENTWISE_SHARE, HOST_SHARE = 0.3, 0.65
# Per adapter parameter and step: gradient cast, clipping, AdamW's states, copy back.
OPTIMIZER_BYTES_MOVED = 52
# Operations of fused AdamW, and of others, which step each tensor by itself (8-bit AdamW: 0.4 s
# for 1,440).
FUSED_LAUNCHES_PER_TENSOR, LAUNCHES_PER_TENSOR = 4, 21
# Launches that the driver queues: so far the host is ahead when it comes to the optimizer.
LAUNCHES_AHEAD = 1000


def choice_of(candidate: Candidate) -> PassChoice:
    """Return the values of a candidate that decide which passes are traced."""
    return PassChoice(*(getattr(candidate, name) for name in PassChoice._fields))


@dataclass(frozen=True, eq=False)
class CostModel:
    """The cost model of one workload on one machine: an immutable value.

    Methods that replace a field return a new cost model, which shares everything that was traced.
    """

    tables: PassTables  # the traced model at the machine's rates
    caching: CachingSettings  # how captions are encoded
    caching_reason: Reason  # on which no prediction depends
    parallel: Parallel = ONE_PROCESS
    calibration: Calibration | None = None  # what trials taught
    process_bytes: int | None = None  # besides its tensors, of a process that trains on a CPU

    @classmethod
    def build(
        cls,
        hardware: HardwareProfile,
        workload: Workload,
        family: Family,
        config: Mapping[str, Any],
        parts: Parts | None = None,
        *,
        caching: tuple[CachingSettings, Reason] | None = None,
        caching_pins: Mapping[str, str] | None = None,
        caching_exclusions: Sequence[tuple[str, str]] = (),
        parallel: Parallel = ONE_PROCESS,
        overheads: Overheads | None = None,
    ) -> Self:
        """Build the model on the meta device, and choose how captions are encoded unless `caching`
        says so.

        `hardware` and `workload` are those of one process; `parts` are by default the published
        ones. Pins and exclusions are values of `CachingSettings`, as text. Raises InvalidInput for
        an impossible pin.
        """
        if parts is None:
            published = (each.parts for each in family.models if dict(each.config) == dict(config))
            parts = next(published, Parts())
        rules: DeviceRules = "cuda" if hardware.device.kind == "cuda" else "cpu"
        model = traced_model(family, config, workload, rules, parts, overheads)
        tables = PassTables(model, hardware, overheads)
        budget_bytes = parallel.budget_bytes(hardware.device)
        context = TuningContext(hardware, family, workload, budget_bytes)
        asked = context, tables.encoder_size, caching_pins, parallel.num_processes
        settings, reason = caching or choose_caching(*asked, exclusions=caching_exclusions)
        return cls(tables, settings, reason, parallel)

    @property
    def hardware(self) -> HardwareProfile:
        return self.tables.hardware

    @property
    def model(self) -> TracedModel:
        return self.tables.model

    @property
    def workload(self) -> Workload:
        return self.model.workload

    @property
    def family(self) -> Family:
        return self.model.family

    @property
    def resident_encoder_bytes(self) -> int:
        """Encoders and VAE that stay on the device during training."""
        if self.caching.residency == "release":
            return 0
        size, vae_stays = self.tables.encoder_size, self.caching.vae_device == "training"
        return size.device_bytes(self.caching) + (size.vae_bytes if vae_stays else 0)

    @property
    def encoder_gpu(self) -> EncoderGpu | None:
        return encoder_gpu_of(self.context, self.caching, self.tables.encoder_size)

    @property
    def budget_bytes(self) -> int:
        """Memory for training, next to encoders that stay on the device."""
        whole = self.parallel.budget_bytes(self.hardware.device)
        return max(0, whole - self.resident_encoder_bytes)

    @property
    def context(self) -> TuningContext:
        return TuningContext(self.hardware, self.family, self.workload, self.budget_bytes)

    def with_calibration(
        self, trials: Sequence[TrialResult], priors: Sequence[PriorResiduals] = ()
    ) -> Self:
        """Return the same cost model, corrected by all of `trials` and by `priors` alone."""
        residuals = ((trial.candidate, self.residual(trial)) for trial in trials)
        pairs = [(candidate, residual) for candidate, residual in residuals if residual]
        tried = [candidate for candidate, _ in pairs]
        choices = list(map(choice_of, tried)) or [self.tables.usual_choice]
        measured = all(self.tables.rates_of(each).measured for each in choices)
        calibration = Calibration.of(pairs, rates_measured=measured, priors=priors)
        besides = [
            t.host_memory_bytes - t.peak_memory_bytes
            for t in trials
            if t.host_memory_bytes and t.peak_memory_bytes and self.hardware.device.kind == "cpu"
        ]
        process_bytes = max(0, round(statistics.median(besides))) if besides else None
        return replace(self, calibration=calibration, process_bytes=process_bytes)

    def with_parallel(self, parallel: Parallel) -> Self:
        return replace(self, parallel=parallel)

    @property
    def overheads(self) -> Overheads | None:
        """Overheads of the program that trains; None for autotune's executor."""
        return self.tables.overheads

    def with_overheads(self, overheads: Overheads, caching: tuple[CachingSettings, Reason]) -> Self:
        """Return the same work by another program, before any trial."""
        tables = PassTables(self.model.with_overheads(overheads), self.hardware, overheads)
        settings, reason = caching
        return replace(
            self, tables=tables, caching=settings, caching_reason=reason, calibration=None
        )

    def single_process(self) -> Self:
        """Return the same work as trials do it: by autotune's executor in one process."""
        return replace(self, parallel=ONE_PROCESS, tables=self.tables.of_autotune)

    def residual(self, trial: TrialResult) -> Residual | None:
        """Tell how far the trial was from the uncalibrated prediction; None if it did not run."""
        if not trial.peak_memory_bytes:
            return None
        return residual_of(trial, self.single_process().predict_uncalibrated(trial.candidate))

    def weight_bytes(self, candidate: Candidate) -> int:
        """Return the frozen weights as the candidate stores them; needs no trace."""
        model_bytes = self.tables.model_bytes(choice_of(candidate))
        swapped, visiting = model_bytes.swapped_bytes(candidate.swapped_blocks)
        return self.parallel.weight_bytes(model_bytes) - swapped + visiting

    def activation_bytes(self, candidate: Candidate) -> float:
        """Return what one micro-batch keeps for its backward pass."""
        mixture = candidate.checkpointed_blocks, candidate.selective_blocks, 0
        return self.tables.pass_of(choice_of(candidate), mixture, False).saved_bytes

    def host_memory_bytes(self, candidate: Candidate) -> int:
        return self.resident_of(candidate).host_memory_bytes

    def resident_of(self, candidate: Candidate) -> Resident:
        """Return what stays on one device, whatever the micro-batch and checkpointing."""
        known = candidate.swapped_blocks, self.caching, self.parallel
        return self.tables.resident_of(choice_of(candidate), *known)

    def predict(self, candidate: Candidate) -> Prediction:
        """Predict memory of every phase and the time of one optimizer step."""
        measured = self.tables.rates_of(choice_of(candidate)).measured
        calibration = self.calibration or Calibration.of((), rates_measured=measured)
        return self._predict(candidate, calibration)

    def predict_uncalibrated(self, candidate: Candidate) -> Prediction:
        """Predict the same before anything was learned, without uncertainties."""
        return self._predict(candidate, None)

    def _predict(self, candidate: Candidate, calibration: Calibration | None) -> Prediction:
        self.prepare((candidate,))
        composed, waste, time = self.tables.steps[candidate, self.parallel]
        resident = self.resident_of(candidate)
        if self.process_bytes is not None:
            resident = replace(resident, overhead_bytes=self.process_bytes)
        factor = math.exp(calibration.memory.log_factor(candidate)) if calibration else 1.0
        kept = self.tables.kept_part_bytes(candidate.precision, resident)
        phases = with_kept(phases_of(resident, composed, waste, factor), kept)
        factor = math.exp(calibration.time.log_factor(candidate)) if calibration else 1.0
        time = {name: factor * value for name, value in time.items()}
        seconds = sum(time.values()) - time["recompute_seconds"]
        return Prediction.model_construct(
            candidate=candidate,
            allocated_memory_bytes=phases[PHASES.index("train")].allocated_memory_bytes,
            run_memory_bytes=max(phase.run_memory_bytes for phase in phases),
            host_memory_bytes=resident.host_memory_bytes,
            phases=phases,
            step_seconds=seconds,
            step_time=StepTime.model_construct(None, **time),
            images_per_second=self.workload.effective_batch_size / seconds,
            memory_uncertainty=calibration.memory.uncertainty(candidate) if calibration else 0.0,
            time_uncertainty=calibration.time.uncertainty(candidate) if calibration else 0.0,
        )

    def prepare(self, candidates: Iterable[Candidate]) -> None:
        """Compute together what predictions of `candidates` rest on: sooner, and the same bits."""
        alike: dict[tuple[object, ...], list[Candidate]] = {}
        for each in candidates:
            if (each, self.parallel) not in self.tables.steps:
                alike.setdefault(self._all_but_depth(each), []).append(each)
        for group in alike.values():
            self._prepare(group)

    def _all_but_depth(self, candidate: Candidate) -> tuple[object, ...]:
        others = (value for name, value in candidate if name not in BLOCK_COUNTS)
        recomputed = candidate.checkpointed_blocks + candidate.selective_blocks
        kinds = candidate.checkpointed_blocks > 0, candidate.selective_blocks > 0
        return (*others, *kinds, recomputed >= self.workload.model.num_blocks)

    def _prepare(self, candidates: Sequence[Candidate]) -> None:
        one, choice = candidates[0], choice_of(candidates[0])
        numbers = np.array([[getattr(each, name) for name in BLOCK_COUNTS] for each in candidates])
        accumulates = self._accumulation(one) > 1
        composed = self.tables.passes(choice, numbers, accumulates)
        known = choice, one.allocator, numbers[:, 0] + numbers[:, 1]
        waste = self.tables.waste_bytes(*known, composed.saved_bytes)
        by_class = self._step_time(one, composed, numbers[:, 2])
        seconds = {name: np.broadcast_to(each, len(numbers)) for name, each in by_class.items()}
        for at, each in enumerate(candidates):
            time = {name: float(values[at]) for name, values in seconds.items()}
            self.tables.steps[each, self.parallel] = composed[at], float(waste[at]), time

    def predict_block_counts(
        self, candidate: Candidate, numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Predict a step's bytes and seconds for many numbers of blocks at once, uncalibrated.

        `numbers` is (mixtures, 3), in the order of `BLOCK_COUNTS`.
        """
        accumulation, choice = self._accumulation(candidate), choice_of(candidate)
        composed = self.tables.passes(choice, numbers, accumulation > 1)
        known = choice, candidate.allocator, numbers[:, 0] + numbers[:, 1]
        waste = self.tables.waste_bytes(*known, composed.saved_bytes)
        model_bytes = self.tables.model_bytes(choice)
        away = np.cumsum([0, *model_bytes.block_weight_bytes])[numbers[:, 2]]
        weights = self.parallel.weight_bytes(model_bytes) - away
        time = self._step_time(candidate, composed, numbers[:, 2])
        seconds: NDArray[np.float64] = sum(time.values()) - time["recompute_seconds"]
        return composed.peak_bytes + waste + weights, seconds

    def _accumulation(self, candidate: Candidate) -> int:
        return -(-self.workload.effective_batch_size // candidate.micro_batch_size)

    def _step_time(
        self, candidate: Candidate, composed: trace.ComposedPasses, swapped: NDArray[np.int64]
    ) -> dict[str, NDArray[np.float64]]:
        """By class, of each pass (passes,) or of all, with so many `swapped` (passes,)."""
        choice, accumulation = choice_of(candidate), self._accumulation(candidate)
        rates, model_bytes = self.tables.rates_of(choice), self.tables.model_bytes(choice)
        shares = self.tables.typical_shares(choice)
        # Forward passes through the base alone, in micro-batches. Processes that hold the weights
        # together all make one with each.
        share = self.workload.base_passes
        if share and self.parallel.num_shards > 1:
            share = max(1.0, share)
        prior = accumulation * share
        base = prior * shares * composed.forward[:, :-1] * (np.array(CLASSES) != "adapter")
        forward = accumulation * shares * composed.forward[:, :-1]
        whole = accumulation * shares * composed.work[:, :-1] + base
        recomputing = (shares * composed.recompute[:, :-1]).sum(axis=1)
        again = (timing.RECOMPUTED_LAUNCHES - 1) * rates.python_share * composed.recompute[:, -1]
        begun = accumulation * composed.forward[:, -1]
        host = accumulation * (composed.work[:, -1] + again) + prior * composed.forward[:, -1]
        if candidate.compile == "block":
            host = (host - accumulation * again) * HOST_SHARE  # their checkpoints are compiled, too
            begun = begun * HOST_SHARE
            for device in (forward, whole):
                device[:, CLASSES.index("elementwise")] *= ELEMENTWISE_SHARE
        optimizer = model_bytes.adapter_parameters * OPTIMIZER_BYTES_MOVED / rates.bandwidth
        practice = self.overheads and self.overheads.adapter_on(choice.quantization)
        each = (practice and practice.step_operations) or FUSED_LAUNCHES_PER_TENSOR
        if self.workload.optimizer.name != "adamw":
            each = LAUNCHES_PER_TENSOR
        stepping = sum(model_bytes.adapter_shapes.values()) * each * rates.host_seconds
        computing = whole.sum(axis=1)
        overhead = host + stepping
        if self.model.rules != "cpu":  # there one after the other
            at_first = forward.sum(axis=1)
            issuing, running = host - begun, computing - at_first
            queued = LAUNCHES_AHEAD * rates.host_seconds * running / issuing
            left = np.minimum(queued, np.maximum(0.0, running - issuing))
            later = _idle_seconds(issuing, running) + _idle_seconds(stepping, left + optimizer)
            overhead = _idle_seconds(begun, at_first) + later
        half = accumulation + prior / 2  # a pass through the base is one of two
        exchange = self.parallel.exchange_seconds(self.hardware.device, model_bytes, half)
        transfer = np.maximum(0.0, exchange - computing)
        if swapped.any():
            swap = self.overheads.swap if self.overheads else SwapPractice()
            bandwidth = rates.host_to_device if swap.from_pinned else rates.from_pageable
            again = accumulation * recomputing
            once = forward.sum(axis=1) + again
            backward = computing - base.sum(axis=1) - once
            computed = np.stack([once - again, again, backward]) / accumulation
            sizes = np.array(model_bytes.block_weight_bytes) / bandwidth
            transfer = transfer + half * timing.swap_seconds(swap, sizes, swapped, computed)
        if model_bytes.modulation:
            overhead = overhead + self.tables.modulation_seconds(choice)
        return {
            **{f"{name}_seconds": whole[:, at] for at, name in enumerate(CLASSES)},
            "optimizer_seconds": np.array(optimizer),
            "overhead_seconds": overhead,
            "transfer_seconds": transfer,
            "recompute_seconds": accumulation * recomputing,
        }


def _idle_seconds(
    host: NDArray[np.float64] | float, device: NDArray[np.float64]
) -> NDArray[np.float64]:
    return np.maximum(0.0, host - device)


def prediction_errors(
    cost: CostModel, trials: Sequence[TrialResult], priors: Sequence[PriorResiduals] = ()
) -> list[tuple[float, float]]:
    """List the squared errors of time and of memory, each with its variance, with which each trial
    is predicted from those before it."""
    errors = []
    for number, trial in enumerate(trials):
        known = cost.with_calibration(trials[:number], priors).single_process()
        prediction = known.predict(trial.candidate)
        if error := residual_of(trial, prediction):
            time, memory = prediction.time_uncertainty, prediction.memory_uncertainty
            errors.append((error.time**2, time**2 + NOISE["time"] ** 2))
            errors.append((error.memory**2, memory**2 + NOISE["memory"] ** 2))
    return errors
