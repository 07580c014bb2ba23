"""Predict memory and step time of any candidate: traces once, then answers by arithmetic."""

import copy
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.cost.allocator import Waste, waste_of
from autotune.cost.calibration import Calibration, PriorResiduals, residual_of
from autotune.cost.composition import SECONDS, ComposedPass, PassTable, compose, table_of
from autotune.cost.kernels import CLASSES, DeviceRules, kernel_for
from autotune.cost.memory import PHASES, Resident, away_bytes, phases_of, resident_of
from autotune.cost.model import TracedModel
from autotune.cost.parallel import Parallel
from autotune.cost.timing import RECOMPUTED_LAUNCHES, Rates
from autotune.families import Family, Parts
from autotune.knobs import (
    ELEMENTWISE_SHARE,
    LAUNCH_SHARE,
    EncoderSize,
    Precision,
    TuningContext,
    choose_caching,
    size_of,
)
from autotune.schema import (
    CachingSettings,
    Candidate,
    HardwareProfile,
    Prediction,
    Reason,
    Residual,
    StepTime,
    TrialResult,
    Workload,
    has_typical_shape,
    mean_text_tokens,
    padded_text_tokens,
    typical_bucket,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

AFFINE_FROM = (2, 4)
"""Micro-batch sizes that are traced for all larger ones. 1 is traced itself: operations skip copies there."""

OPTIMIZER_BYTES_MOVED = 52
"""Per adapter parameter and step: gradient cast, clipping, AdamW's three states read and written, copy back."""
OPTIMIZER_LAUNCHES_PER_TENSOR = 4


class Predictor:
    """The cost model of one workload on one machine.

    The first prediction for a precision, quantization, attention kernel and micro-batch size traces the model, which
    takes a fraction of a second; all others take well under a millisecond.
    """

    def __init__(
        self,
        hardware: HardwareProfile,
        workload: Workload,
        family: Family,
        config: Mapping[str, Any],
        parts: Parts | None = None,
        caching_pins: Mapping[str, str] | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        """`workload` is what one process works on.

        `parts`: the models around the transformer; by default the published ones of the published transformer.

        `caching_pins`: fields of `CachingSettings` that are fixed, as text.
        """
        self.hardware = hardware
        self.workload = workload
        self.family = family
        self.config = config
        self.parts = parts
        self.caching_pins = caching_pins
        self.parallel = parallel or Parallel()
        self.calibration: Calibration | None = None
        self.rules: DeviceRules = "cuda" if hardware.device.kind == "cuda" else "cpu"
        self._tables: dict[tuple[Any, ...], PassTable] = {}
        self._rates: dict[tuple[str, str, str], Rates] = {}
        self._residents: dict[tuple[str, str, str, int], Resident] = {}
        self._waste: dict[tuple[Any, ...], Waste] = {}
        self._end_waste: dict[tuple[Any, ...], float] = {}
        self._shares: dict[int, NDArray[np.float64]] = {}

    @cached_property
    def model(self) -> TracedModel:
        """The traced side; built when first needed."""
        published = dict(self.config) == dict(self.family.transformer_config)
        parts = self.parts or (self.family.parts if published else Parts())
        return TracedModel(self.family, self.config, self.workload, self.rules, parts)

    @cached_property
    def encoder_size(self) -> EncoderSize:
        """What decides how captions can be encoded."""
        precision = self._usual[0]
        return size_of(self.model.parts, precision, self.model.vae_cost(precision).weight_bytes)

    @cached_property
    def _usual(self) -> tuple[str, str, str]:
        """Precision, attention and its kernel that any machine of this kind has."""
        precision = str(Precision().choices(self._context).admitted[0])
        return precision, "native", kernel_for("native", self.rules, False, self.hardware, precision)

    @cached_property
    def caching(self) -> tuple[CachingSettings, Reason]:
        """How captions are to be encoded here, and why. Raises InvalidInput for pins that cannot be."""
        return choose_caching(self._context, self.encoder_size, self.caching_pins, self.parallel.num_processes)

    @property
    def resident_encoder_bytes(self) -> int:
        """What stays on the device beside training, where the caching settings keep encoders and VAE."""
        caching = self.caching[0]
        if caching.residency == "release":
            return 0
        return self.encoder_size.device_bytes(caching) + self.encoder_size.vae_bytes

    @property
    def _context(self) -> TuningContext:
        return TuningContext(self.hardware, self.family, self.workload)

    def predict(self, candidate: Candidate) -> Prediction:
        """Memory of every phase and the time of one optimizer step."""
        calibration = self.calibration or Calibration.of((), rates_measured=self.rates_of(candidate).measured)
        return self._predicted(candidate, calibration)

    def weight_bytes(self, candidate: Candidate) -> int:
        """Of the frozen weights as the candidate stores them; needs no trace."""
        storage = self.model.storage(candidate.precision, candidate.quantization)
        return self.parallel.weight_bytes(storage) - away_bytes(storage, candidate.swapped_blocks)

    def calibrate(self, trials: Sequence[TrialResult], priors: Sequence[PriorResiduals] = ()) -> None:
        """Learn from all `trials` at once and from others' `priors`; what is not among them is forgotten."""
        pairs = [(t.candidate, residual) for t in trials if (residual := self.residual(t))]
        rates = [self.rates_of(candidate) for candidate, _ in pairs] or [Rates(self.hardware, *self._usual)]
        measured = all(each.measured for each in rates)
        self.calibration = Calibration.of(pairs, rates_measured=measured, priors=priors)

    def residual(self, trial: TrialResult) -> Residual | None:
        """How far the trial was from what is predicted before any calibration; None where it did not run."""
        return (
            residual_of(trial, self.single_process.uncalibrated(trial.candidate)) if trial.peak_memory_bytes else None
        )

    @property
    def single_process(self) -> "Predictor":
        """The same work as trials do it: one process, which sends nothing and keeps no buckets for that."""
        if self.parallel.strategy == "single":
            return self
        _ = self.model, self.caching  # to share them
        alone = copy.copy(self)
        alone.parallel, alone._residents = Parallel(), {}
        return alone

    def uncalibrated(self, candidate: Candidate) -> Prediction:
        """What is predicted as if nothing had been learned."""
        return self._predicted(candidate, None)

    def beside(self, hardware: HardwareProfile) -> "Predictor":
        """The cost model of the same work on a machine with the same rules; they share the traces."""
        known = (self.workload, self.family, self.config, self.parts, self.caching_pins, self.parallel)
        other = Predictor(hardware, *known)
        other.model = self.model
        return other

    def _predicted(self, candidate: Candidate, calibration: Calibration | None) -> Prediction:
        accumulation = -(-self.workload.effective_batch_size // candidate.micro_batch_size)
        composed = self.composed(candidate, accumulates=accumulation > 1)
        resident = self._resident(candidate)
        factor = math.exp(calibration.memory.log_factor(candidate)) if calibration else 1.0
        phases = phases_of(resident, composed, self._waste_of(candidate, composed), factor)
        train = phases[PHASES.index("train")]
        time = self._step_time(candidate, composed, accumulation)
        if calibration:
            factor = math.exp(calibration.time.log_factor(candidate))
            time = {name: factor * value for name, value in time.items()}
        seconds = sum(time.values()) - time["recompute_seconds"]
        return Prediction.model_construct(
            candidate=candidate,
            peak_memory_bytes=train.peak_memory_bytes,
            allocated_memory_bytes=train.allocated_memory_bytes,
            required_memory_bytes=max(phase.peak_memory_bytes for phase in phases),
            host_memory_bytes=resident.host_memory_bytes,
            phases=phases,
            step_seconds=seconds,
            step_time=StepTime.model_construct(None, **time),
            images_per_second=self.workload.effective_batch_size / seconds,
            memory_uncertainty=calibration.memory.uncertainty(candidate) if calibration else 0.0,
            time_uncertainty=calibration.time.uncertainty(candidate) if calibration else 0.0,
        )

    def composed(self, candidate: Candidate, *, accumulates: bool) -> ComposedPass:
        """One micro-batch of the full model under `candidate`, before calibration."""
        blocks = sum(self.model.counts)
        k = min(candidate.checkpointed_blocks, blocks)
        plain = self._table(candidate, "none")
        mixed = plain if k == 0 else self._table(candidate, "all" if k == blocks else "some")
        return compose(plain, mixed, k, self._gradients(candidate), accumulates)

    def _gradients(self, candidate: Candidate) -> "NDArray[np.float64]":
        storage = self.model.storage(candidate.precision, candidate.quantization)
        return np.array(storage.block_adapter_bytes, dtype=np.float64)

    def _table(self, candidate: Candidate, mode: str) -> PassTable:
        size = candidate.micro_batch_size
        key = (candidate.precision, candidate.quantization, candidate.attention, size, mode)
        if key not in self._tables:
            low, high = AFFINE_FROM
            if size in (1, low, high):
                table = self._traced_table(candidate, size, mode)
            else:
                ends = (self._traced_table(candidate, at, mode) for at in AFFINE_FROM)
                first, second = ends
                table = first.towards(second, (size - low) / (high - low))
            self._tables[key] = table.stretched(self.model.counts, self.model.traced_counts)
        return self._tables[key]

    def _traced_table(self, candidate: Candidate, size: int, mode: str) -> PassTable:
        traced = sum(self.model.traced_counts)
        checkpointed = {"none": 0, "some": traced - 1, "all": traced}[mode]
        kernel = self.kernel_of(candidate, size)
        trace = self.model.traced(candidate.precision, candidate.quantization, kernel, size, checkpointed)
        return table_of(trace, self.rates_of(candidate), self.workload.rank)

    def kernel_of(self, candidate: Candidate, size: int) -> str:
        """The kernel of the candidate's attention at micro-batch `size`."""
        masked = self.model.masked(size)
        return kernel_for(candidate.attention, self.rules, masked, self.hardware, candidate.precision)

    def rates_of(self, candidate: Candidate) -> Rates:
        """What the machine does per second with the candidate's precision and attention."""
        kernel = self.kernel_of(candidate, candidate.micro_batch_size)
        key = (candidate.precision, candidate.attention, kernel)
        if key not in self._rates:
            self._rates[key] = Rates(self.hardware, *key)
        return self._rates[key]

    def forward_seconds(self, candidate: Candidate) -> float:
        """One item's forward pass, as a preview's denoising step makes it."""
        table = self._table(candidate.model_copy(update={"micro_batch_size": 1}), "none")
        return float(table.before[SECONDS:-1].sum() + table.forward[:, SECONDS:-1].sum())

    def _waste_of(self, candidate: Candidate, composed: ComposedPass) -> float:
        """Bytes that the caching allocator reserves beyond the pass's own peak.

        Known for no checkpointing and for all blocks but one; between them it goes by the share of blocks.
        """
        if self.rules == "cpu":
            return 0.0
        most = sum(self.model.counts) - 1
        share = min(1.0, candidate.checkpointed_blocks / max(1, most))
        if share in (0.0, 1.0):
            return self._waste_at(candidate, composed)
        ends = []
        for k in (0, most):
            end = candidate.model_copy(update={"checkpointed_blocks": k})
            key = (end.precision, end.quantization, end.attention, end.allocator, end.micro_batch_size, k)
            if key not in self._end_waste:
                self._end_waste[key] = self._waste_at(end, self.composed(end, accumulates=True))
            ends.append(self._end_waste[key])
        return (1 - share) * ends[0] + share * ends[1]

    def _waste_at(self, candidate: Candidate, composed: ComposedPass) -> float:
        size = 1 if candidate.micro_batch_size == 1 else AFFINE_FROM[0]
        kernel = self.kernel_of(candidate, size)
        k = 0 if candidate.checkpointed_blocks == 0 else sum(self.model.traced_counts) - 1
        traced = (candidate.precision, candidate.quantization, kernel, size, k)
        key = (candidate.allocator, *traced)
        if key not in self._waste:
            trace = self.model.traced(*traced)
            segments = (trace.before, *trace.forward, trace.between, *reversed(trace.backward))
            block = trace.forward[len(trace.forward) // 2].events
            freed = {number for number, bytes_ in block if bytes_ < 0}
            kept = [event for event in block if event[0] not in freed]
            events = [event for segment in segments for event in segment.events]
            self._waste[key] = waste_of(events, kept, expandable_segments=candidate.allocator == "expandable")
        waste = self._waste[key]
        return waste.fixed_bytes * candidate.micro_batch_size / size + waste.saved_share * composed.saved_bytes

    def _resident(self, candidate: Candidate) -> Resident:
        key = (candidate.precision, candidate.quantization, candidate.allocator, candidate.swapped_blocks)
        if key not in self._residents:
            caching = self.caching[0]
            stay, encoder_bytes = caching.residency == "keep", self.encoder_size.device_bytes(caching)
            known = (self.hardware, self.model, candidate)
            whole = resident_of(*known, encoder_bytes=encoder_bytes, encoders_stay=stay)
            self._residents[key] = self.parallel.resident(whole, self.model.storage(*key[:2]))
        return self._residents[key]

    def _step_time(self, candidate: Candidate, composed: ComposedPass, accumulation: int) -> dict[str, float]:
        rates = self.rates_of(candidate)
        storage = self.model.storage(candidate.precision, candidate.quantization)
        share = self._typical_share(candidate.micro_batch_size)
        device = accumulation * share * composed.work[:-1]
        launches = accumulation * (composed.work[-1] + (RECOMPUTED_LAUNCHES - 1) * composed.recompute[-1])
        if candidate.compile == "block":
            launches *= LAUNCH_SHARE
            device[CLASSES.index("elementwise")] *= ELEMENTWISE_SHARE
        optimizer = storage.adapter_parameters * OPTIMIZER_BYTES_MOVED / rates.bandwidth
        launches += storage.adapter_tensors * OPTIMIZER_LAUNCHES_PER_TENSOR
        host = launches * rates.launch_seconds
        # A GPU works while the host launches the next operation; a CPU does one after the other.
        overhead = host if self.rules == "cpu" else max(0.0, host - float(device.sum()) - optimizer)
        exchange = self.parallel.exchange_seconds(self.hardware, storage, accumulation)
        overhead += max(0.0, exchange - float(device.sum()))
        swapped = storage.block_weight_bytes[: candidate.swapped_blocks]
        if swapped:  # each block visits for the forward and for the backward pass, while another computes
            visits = 2 * accumulation * sum(swapped) / rates.host_to_device
            overhead += max(0.0, visits - float(device.sum()) * len(swapped) / len(storage.block_weight_bytes))
        return {
            **{f"{name}_seconds": float(value) for name, value in zip(CLASSES, device, strict=True)},
            "optimizer_seconds": optimizer,
            "overhead_seconds": overhead,
            "recompute_seconds": accumulation * float((share * composed.recompute[:-1]).sum()),
        }

    def _typical_share(self, micro_batch_size: int) -> "NDArray[np.float64] | float":
        """What steps of usual shapes take of the time that the largest take, by class of operation.

        Between captions of mean length and the longest, both traced without checkpoints, it goes by the length that
        micro-batches are padded to: the larger they are, the more often they hold a long one.
        """
        work = self.workload
        if not has_typical_shape(work):
            return 1.0
        mean, longest = mean_text_tokens(work), work.max_text_tokens
        if mean == longest:
            return self._share_at(longest)
        padded = (padded_text_tokens(work, micro_batch_size) - mean) / (longest - mean)
        return (1 - padded) * self._share_at(mean) + padded * self._share_at(longest)

    def _share_at(self, text_tokens: int) -> "NDArray[np.float64]":
        if text_tokens not in self._shares:
            precision, attention, kernel = self._usual
            rates = Rates(self.hardware, precision, attention, kernel)
            shapes = (self.model.in_shape(typical_bucket(self.workload), text_tokens), self.model)
            passes = (model.traced(precision, "none", kernel, 1, 0) for model in shapes)
            tables = [
                table_of(one, rates, self.workload.rank).stretched(self.model.counts, self.model.traced_counts)
                for one in passes
            ]
            usual, largest = (table.seconds for table in tables)
            self._shares[text_tokens] = np.divide(usual, largest, out=np.ones_like(usual), where=largest > 0)
        return self._shares[text_tokens]
