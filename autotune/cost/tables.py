"""Passes, memory and rates of one traced model on one device, by candidate, before any trial."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, cached_property, partial

import numpy as np
from numpy.typing import NDArray

from autotune.cost import kernels, memory, timing, trace
from autotune.cost.allocator import waste_of
from autotune.cost.traced_model import ModelBytes, PassChoice, TracedModel
from autotune.knobs.attention import token_multiple
from autotune.knobs.caching import QUANTIZED_SHARE, EncoderSize, size_of
from autotune.knobs.knob import TuningContext
from autotune.knobs.modulation import window_steps
from autotune.knobs.settings import encoder_element_bytes, plain_choices
from autotune.plan import workload
from autotune.plan.candidate import CachingSettings, Candidate
from autotune.plan.hardware import HardwareProfile
from autotune.plan.prediction import Overheads

TRACED_SIZES = (2, 4)  # for all larger ones; 1 is traced itself: operations skip copies there
# In fixed segments a whole model wastes more than a short pass: at most, of 55 at full size, which
# a promise of ours must hold (benchmarks/allocator_truth.py).
FIXED_WASTE = 1.4
SHARED_BY = 16  # blocks whose small tensors share segments: more would change nothing

ELEMENT_BYTES = {"bf16": 2, "fp32": 4, "int8": 2 - QUANTIZED_SHARE}  # embeddings stay in bf16
KEEP_ON = ("train", "preview", "save")  # what training keeps is there to the end
VAE_IS_THERE = ("cache", "preview")

Pair = tuple[float, float]
Step = tuple[trace.ComposedPass, float, dict[str, float]]
"""A pass, bytes that the allocator reserves beyond its peak, and a step's seconds by class."""


class PassTables:
    """Passes of a traced model at a device's rates: pure, and results are remembered."""

    def __init__(
        self, model: TracedModel, hardware: HardwareProfile, overheads: Overheads | None = None
    ) -> None:
        self.model = model
        self.hardware = hardware
        self.workload = model.workload
        self.overheads = overheads
        self._num_blocks, self._num_traced = model.num_blocks, sum(map(len, model.picked))
        self._rates, self._blocks = cache(partial(timing.Rates, hardware)), cache(self._find_blocks)
        self._table, self._traced_table = cache(self._find_table), cache(self._find_traced_table)
        self._waste, self._waste_bytes = cache(self._find_waste), cache(self._find_waste_bytes)
        self._typical_shares = cache(self._find_typical_shares)
        self.pass_of = cache(self._find_pass)
        # What cost models on these tables have found, whatever trials taught them.
        self.steps: dict[tuple[Candidate, memory.Parallel], Step] = {}
        self.modulation_seconds = cache(self._find_modulation)
        self._residents: dict[tuple[object, ...], memory.Resident] = {}
        self._own: PassTables | None = None

    @cached_property
    def usual_choice(self) -> PassChoice:
        """Choices that any machine of this kind has."""
        context = TuningContext(self.hardware, self.model.family, self.workload)
        precision = str(plain_choices(context)["precision"][0])
        return PassChoice(precision, "none", "native", 1, "resident", "stock")

    @cached_property
    def encoder_size(self) -> EncoderSize:
        precision = self.usual_choice.precision
        vae = self.model.vae_cost(precision)
        known = self.model.parts, precision, vae.weight_bytes, vae.encode_bytes[0]
        tokens = self.workload.max_text_tokens
        picture_bytes = vae.encode_bytes[0] if self._sees_pictures else 0
        if self.model.family.starts_from_picture:  # there is no item, with its pixels twice in fp32
            picture_bytes -= 2 * 4 * 3 * self.workload.largest_bucket.num_pixels
        return size_of(*known, text_tokens=tokens, picture_bytes=picture_bytes)

    @property
    def _sees_pictures(self) -> bool:
        return bool(self.workload.num_control_images) or self.model.family.starts_from_picture

    def rates_of(self, choice: PassChoice) -> timing.Rates:
        return self._rates(choice.precision, choice.attention, self.kernel_of(choice))

    def model_bytes(self, choice: PassChoice) -> ModelBytes:
        return self.model.model_bytes(choice.precision, choice.quantization, choice.modulation)

    def kernel_of(self, choice: PassChoice, size: int | None = None) -> str:
        """Name the attention kernel that runs at micro-batch `size`, by default the choice's."""
        masked = self.model.masked(size or choice.micro_batch_size)
        device, cudnn = self.hardware.device, self.hardware.versions.cudnn
        known = choice.attention, self.model.rules, masked, choice.precision
        return kernels.kernel_for(*known, capability=device.compute_capability, cudnn=cudnn)

    def _find_pass(
        self, choice: PassChoice, mixture: tuple[int, int, int], accumulates: bool
    ) -> trace.ComposedPass:
        return self.passes(choice, np.array([mixture]), accumulates)[0]

    def passes(
        self, choice: PassChoice, mixtures: NDArray[np.int64], accumulates: bool
    ) -> trace.ComposedPasses:
        """Compose one micro-batch of the full model for many mixtures of what blocks keep.

        `mixtures` is (mixtures, 3), as `trace.compose` takes it.
        """
        whole, selective, swapped = mixtures.T
        at_most = self._num_blocks - selective
        mixtures = np.stack([np.minimum(whole, at_most), selective, swapped], axis=1)
        deepest = self._num_traced - bool((whole + selective).max() < self._num_blocks)
        kinds = bool(selective.any()), bool(whole.any())
        return trace.compose(self._blocks(choice, deepest, *kinds), mixtures, accumulates)

    def _find_blocks(
        self, choice: PassChoice, recomputed: int, selective: bool, whole: bool
    ) -> trace.BlockTables:
        tables = [self._table(choice, trace.PLAIN, 0)] * 3
        # What keeps attention is told by its difference from what keeps nothing.
        if selective or whole:
            tables[trace.WHOLE] = self._table(choice, trace.WHOLE, recomputed)
        if selective:
            tables[trace.SELECTIVE] = self._table(choice, trace.SELECTIVE, recomputed)
        model_bytes = self.model_bytes(choice)
        sizes = model_bytes.block_adapter_bytes, model_bytes.block_weight_bytes
        return trace.BlockTables(tables, *(np.array(each, dtype=np.float64) for each in sizes))

    def _find_table(self, choice: PassChoice, kind: int, recomputed: int) -> trace.PassTable:
        (low, high), size = TRACED_SIZES, choice.micro_batch_size
        if kind == trace.SELECTIVE:
            # Keeping attention saves in proportion to the micro-batch, whatever the weights.
            usual = choice._replace(quantization="none", micro_batch_size=1 if size == 1 else low)
            start, end = (
                self._traced_table(usual, each, recomputed)
                for each in (trace.WHOLE, trace.SELECTIVE)
            )
            share = size / usual.micro_batch_size
            return self._table(choice, trace.WHOLE, recomputed).plus(share, start, end)
        if size in (1, low, high):
            return self._traced_table(choice, kind, recomputed)
        ends = [self._traced_table(choice, kind, recomputed, at) for at in TRACED_SIZES]
        return ends[0].plus((size - low) / (high - low), *ends)

    def _find_traced_table(
        self, choice: PassChoice, kind: int, recomputed: int, size: int | None = None
    ) -> trace.PassTable:
        at, keeps = size or choice.micro_batch_size, kind == trace.SELECTIVE
        traced = self._trace(choice, at, recomputed, keeps_attention=keeps)
        table = trace.table_of(traced, self.rates_of(choice), self.workload.rank)
        return table.stretched(self.model.index)

    def _trace(
        self,
        choice: PassChoice,
        size: int,
        recomputed: int,
        *,
        keeps_attention: bool = False,
        model: TracedModel | None = None,
    ) -> trace.TracePass:
        kernel = self.kernel_of(choice, size)
        known = choice.precision, choice.quantization, kernel, size, recomputed
        others = choice.modulation, choice.norm_rope
        return (model or self.model).traced(*known, keeps_attention, *others)

    def forward_seconds(self, choice: PassChoice) -> float:
        """Return the time of one item's forward pass, as a preview's denoising step makes it."""
        table = self._table(choice._replace(micro_batch_size=1), trace.PLAIN, 0)
        columns = slice(trace.SECONDS, -1)
        return float(table.before[columns].sum() + table.forward[:, columns].sum())

    def waste_bytes(
        self,
        choice: PassChoice,
        allocator: str,
        recomputed: NDArray[np.int64],
        saved_bytes: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Return bytes that the caching allocator reserves beyond the peaks of passes.

        Known for no recomputing block, for all but one, and for all; between, by the share.
        """
        if self.model.rules == "cpu":
            return np.zeros(len(recomputed))
        if not recomputed.any():
            return self._scaled_waste(choice, allocator, 0, saved_bytes)
        last = max(1, self._num_blocks - 1)
        share = np.minimum(1.0, recomputed / last)
        low, high = (self._waste_bytes(choice, allocator, end) for end in (0, last))
        wasted = (1 - share) * low + share * high
        for end in {0, last, self._num_blocks} & set(recomputed.tolist()):
            own = self._scaled_waste(choice, allocator, end, saved_bytes)
            wasted = np.where(recomputed == end, own, wasted)
        return wasted

    def _find_waste_bytes(self, choice: PassChoice, allocator: str, checkpointed: int) -> float:
        saved = self.pass_of(choice, (checkpointed, 0, 0), True).saved_bytes
        return float(self._scaled_waste(choice, allocator, checkpointed, np.array(saved)))

    def _scaled_waste(
        self,
        choice: PassChoice,
        allocator: str,
        checkpointed: int,
        saved_bytes: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        plain = self._num_blocks - checkpointed
        size, recomputed = choice.micro_batch_size, self._num_traced - min(plain, 1)
        traced_size = max(one for one in (1, *TRACED_SIZES) if one <= size)
        traced = choice._replace(micro_batch_size=traced_size)
        fixed_bytes, saved_share = self._waste(traced, allocator, recomputed if checkpointed else 0)
        wasted = fixed_bytes * size / traced_size + saved_share * saved_bytes
        is_bound = self.overheads is None and allocator != "expandable"
        return FIXED_WASTE * wasted if is_bound else wasted

    def _find_waste(self, choice: PassChoice, allocator: str, recomputed: int) -> Pair:
        traced = self._trace(choice, choice.micro_batch_size, recomputed)
        segments = (traced.before, *traced.forward, traced.between, *reversed(traced.backward))
        block = traced.forward[len(traced.forward) // 2].events
        freed = {number for number, num_bytes in block if num_bytes < 0}
        own = [size for number, size in block if number not in freed]
        saved = list(enumerate(own * SHARED_BY))
        events = [event for segment in segments for event in segment.events]
        return waste_of(events, saved, expandable_segments=allocator == "expandable")

    def resident_of(
        self, choice: PassChoice, swapped: int, caching: CachingSettings, parallel: memory.Parallel
    ) -> memory.Resident:
        """Return what stays on one device, whatever the micro-batch and checkpointing."""
        stored = choice.precision, choice.quantization, choice.modulation
        key = (*stored, swapped, caching, parallel)
        if key in self._residents:
            return self._residents[key]
        keeps = self.overheads is not None and self.overheads.has("text_encoders", "cache")
        holes_bytes = self.model.vae_cost(self.usual_choice.precision).encode_bytes[1]
        alone = memory.resident_of(
            self.hardware.device,
            self.model,
            choice,
            swapped=swapped,
            overhead_bytes=self.hardware.process_overhead_bytes,
            encoder_bytes=self.encoder_size.device_bytes(caching),
            caption_bytes=(self.encoder_size.caption_bytes, self._sees_pictures * holes_bytes),
            encoders_stay=keeps or caching.residency == "keep",
        )
        if caching.vae_device != "training" and not self._sees_pictures:
            alone = replace(alone, vae=replace(alone.vae, encode_bytes=(0, 0)))
        # By one process of a node for all, before the transformer comes: each counts its share.
        encoders = -(-self.encoder_size.bytes_at("cpu", caching) // parallel.num_processes)
        encoding = memory.HOST_PROCESS_BYTES + encoders
        alone = replace(alone, host_memory_bytes=max(alone.host_memory_bytes, encoding))
        self._residents[key] = parallel.resident(alone, self.model_bytes(choice))
        return self._residents[key]

    def kept_part_bytes(self, precision: str, resident: memory.Resident) -> Mapping[str, int]:
        """Return what the program that trains keeps in each phase beyond autotune's executor."""
        found: dict[str, int] = {}
        for one in self.overheads.kept if self.overheads else ():
            for phase in KEEP_ON if one.phase == "train" else (one.phase,):
                num_bytes, size = 0.0, ELEMENT_BYTES[one.precision]
                if one.part == "vae":
                    own_bytes = self.model.vae_cost(precision).weight_bytes
                    there = resident.vae.weight_bytes if phase in VAE_IS_THERE else 0
                    num_bytes = own_bytes // encoder_element_bytes(precision) * size - there
                elif one.part == "text_encoders" and phase != "cache":
                    num_bytes = self.encoder_size.num_parameters * size
                elif one.part == "transformer" and phase == "cache":
                    num_bytes = resident.weight_bytes + resident.buffer_bytes
                elif one.part == "transformer" and phase == "load":
                    unquantized = self.model.model_bytes(precision, "none")
                    num_bytes = unquantized.weight_bytes - resident.weight_bytes
                before, size = found.get(phase, 0), max(0, round(num_bytes))
                # encoders are loaded once the transformer is quantized
                found[phase] = max(before, size) if phase == "load" else before + size
        return found

    @property
    def of_autotune(self) -> "PassTables":
        if self.overheads is None:
            return self
        self._own = self._own or PassTables(self.model.with_overheads(None), self.hardware)
        return self._own

    def _find_modulation(self, choice: PassChoice) -> float:
        """A step's share of computing a window of modulations ahead, and of copying its own.

        The layers' files are taken to be in the page cache; what is computed crosses the bus to the
        host and back.
        """
        layers = self.model_bytes(choice).modulation
        if layers is None:
            return 0.0
        images, rates = self.workload.effective_batch_size, self.rates_of(choice)
        steps = window_steps(layers.row_bytes, images)
        draws = steps * images
        rows = draws * layers.row_bytes
        products = sum(
            rates.seconds(("matmul", (draws, *shape), 2 * draws * math.prod(shape), 0))
            for shape in layers.shapes
        )
        if self.model.rules == "cpu":
            moved = (layers.weight_bytes + 3 * rows) / rates.bandwidth
        else:
            # From files that are mapped.
            moved = layers.weight_bytes / rates.from_pageable + 2 * rows / rates.host_to_device
        return (products + moved) / steps

    def typical_shares(self, choice: PassChoice) -> NDArray[np.float64] | float:
        """Return the time of steps of usual shapes over that of the largest, by class of operation.

        Between captions of mean length and the longest it goes by the length that micro-batches are
        padded to: the larger they are, the more often they hold a long one.
        """
        work, size = self.workload, choice.micro_batch_size
        if not workload.has_typical_shape(work):
            return 1.0
        mean, longest = workload.mean_text_tokens(work), work.max_text_tokens
        if mean == longest:
            return self._typical_shares(longest)
        multiple = self.padded_to(choice)
        image_tokens = self.model.image_tokens(workload.typical_bucket(work))
        end = workload.pad_text(longest, image_tokens, multiple)
        length = workload.padded_text_tokens(work, size, image_tokens, multiple)
        padded = (length - mean) / (end - mean)
        return (1 - padded) * self._typical_shares(mean) + padded * self._typical_shares(longest)

    def padded_to(self, choice: PassChoice) -> int:
        """Return the number to whose multiples a micro-batch's tokens are padded."""
        if self.overheads is not None or self.model.family.separates_prompts:
            return 1
        is_masked = self.model.masked(choice.micro_batch_size)
        return token_multiple(self.kernel_of(choice)) if is_masked else 1

    def _find_typical_shares(self, text_tokens: int) -> NDArray[np.float64]:
        choice, rates = self.usual_choice, self.rates_of(self.usual_choice)
        typical_shape = self.model.in_shape(workload.typical_bucket(self.workload), text_tokens)
        traces = [self._trace(choice, 1, 0, model=each) for each in (typical_shape, self.model)]
        typical, largest = (
            trace.table_of(each, rates, self.workload.rank).stretched(self.model.index).seconds
            for each in traces
        )
        return np.divide(typical, largest, out=np.ones_like(typical), where=largest > 0)
