"""Seconds of one operation: from rates that the probe measured, else from the datasheet's.

Rates from a datasheet start from what large bf16 products alone reach: as measured where the
catalog knows it, else .8 of the dense peak (H200 .8, RTX PRO 6000 .82). Of that, products between
other kernels reach .81, times how fully the output's 128 x 128 tiles fill the SMs in whole waves.
Memory-bound kernels reach .7 of the memory's bandwidth (copies .9; reductions, casts and strided
reads less). All are round figures from published measurements.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autotune.cost.kernels import CLASSES, Work
from autotune.knobs.attention import assumed_efficiency
from autotune.plan.hardware import Datasheet, HardwareProfile, Host
from autotune.plan.prediction import SwapPractice

REACHED_OF_PEAK = 0.8
MATMUL_EFFICIENCY = 0.81
CPU_ATTENTION_EFFICIENCY = 0.6
BANDWIDTH_EFFICIENCY = 0.7
# Published steps of LoRA training over their kernels at the efficiencies above: 1.15 in the median
# of 49 readings of seven programs on nine cards (benchmarks/published.py lists them). They do not
# say which attention kernel ran; cuDNN is charged on the H100. Used where nothing was measured.
STEP_OVER_KERNELS = 1.15
# Host time of a bare operation, forward or backward, where no probe measured it: 9 us on an EPYC
# core, 5 to 7 on newer ones; a published B200 step that waits for its host implies 5.
LAUNCH_SECONDS = {"cuda": 6e-6, "mps": 6e-6, "cpu": 9e-6}
# The same beside cards of data centers, which are rented with a part of a virtual machine, whose
# launches take longer: 16, 24 and 26 us beside three H200. Steps of Z-Image on an H100 that wait
# for the host imply 15, that of the B200 5: a figure between them.
RENTED_LAUNCH_SECONDS = 10e-6
# Of that, what Python and torch take at most; what is beyond it is the driver's. In virtual
# machines with an H200 a bare operation took 16 and 24 us, while 42 measured steps are predicted
# 12.4, 11.1, 9.9, 9.6 and 10.6% off with 5 to 9 us of Python (benchmarks/gpu/compare.py).
PYTHON_SECONDS = 7e-6
# Bare operations that an operation of a model takes as long as, by the device's kind: views and
# Python lie between. Steps of SDXL, FLUX.1, Krea 2 and Z-Image in torch's CUDA build, on a stand-in
# for the driver that ran no kernel, took 2.0 to 2.4 (benchmarks/host_time.py); on a CPU .7 to 1.2.
BARE_OPERATIONS = {"cuda": 2.2, "mps": 2.2, "cpu": 1.0}
# Of each operation of a checkpoint that runs again: saved tensors are packed and unpacked in Python
# (the same steps: 1.6 to 2.6; on a CPU 1.6 to 3.0).
RECOMPUTED_LAUNCHES = 2.3
MODULE_CALL: Work = ("module", (), 0, 0)  # which is no work of the device
MODULE_OPERATIONS = 1.5  # that a module's call takes Python as long as
# Of a 4-bit weight's conversion: launches, and operations that it takes as long as; bitsandbytes
# wraps it in Python (16 bare ones forward, next to none backward).
UNPACKING_LAUNCHES, UNPACKING_OPERATIONS = 3, 4
# Bare operations that a call of compiled code takes Python as long as, which rounds to 8 bits or
# scales sums: 69 us on a CPU where one takes 2.9; two models beside an H200 agree.
COMPILED_CALL_OPERATIONS = 22
# For a CPU that nobody measured: one AVX2 core and one memory channel, in fp32.
UNKNOWN_FLOPS_PER_CORE = 5e10
UNKNOWN_BANDWIDTH = 1e10
EIGHT_BITS = ("int8", "fp8")  # dtypes of 8-bit products
UNKNOWN_BUS_BANDWIDTH = 1.6e10  # PCIe 3.0 with 16 lanes
# From memory that is not locked, as a share of the rate from what is, and at most: a thread of the
# host fills a second buffer (7.0 and 9.0 GB/s beside an H200 whose bus takes 55).
PAGEABLE_SHARE, MAX_PAGEABLE_BANDWIDTH = 0.5, 8e9
# From the start of a kernel to the next, where no probe measured it (forums.developer.nvidia.com,
# thread 233645).
KERNEL_SECONDS = 3e-6
# Of the L2 cache, what a kernel's tensors may take to be there still. Published curves
# (te42kyfo/gpu-benches, gpu-l2-cache) keep its rate up to 93% of an L40's; of cards with two halves
# that copy each other's lines, up to 69% of an A100's and 72% of an H100's and of an H200's.
CACHE_SHARE = 0.9
CACHE_SHARE_IN_HALVES = 0.7
# Of the memory's rate, where no probe measured it. The cache is 2.5 (H200) to 6 (L40) times as
# fast, but an operand from long ago comes from memory.
CACHE_GAIN = 2.0
# A product with a dimension of this or less takes as long as its bytes do: one of rank 16 has 16
# FLOPs a byte, where a GPU computes a hundred and more in the time that it moves one.
THIN = 64
TILE = 128


@dataclass(frozen=True)
class MeasuredProduct:
    """One measured matmul of a profile."""

    shape: tuple[int, int, int]
    rate: float  # FLOP/s; of a thin one, bytes per second


class Rates:
    """Work of one machine per second, for one compute dtype and one attention kernel."""

    def __init__(
        self, hardware: HardwareProfile, precision: str, attention: str, kernel: str
    ) -> None:
        self.hardware = hardware
        self.precision = precision
        self.kernel = kernel
        sheet = hardware.datasheet
        self.reached = _reached(sheet, precision) or host_flops_per_second(hardware.host)
        copy = hardware.rate("memory.bandwidth")
        listed = sheet.memory_bytes_per_second if sheet is not None else None
        self.bandwidth = BANDWIDTH_EFFICIENCY * (copy or listed or UNKNOWN_BANDWIDTH)
        bus = sheet.pcie_bytes_per_second if sheet is not None else None
        pinned = hardware.rate("host_to_device.pinned")
        self.host_to_device = pinned or BANDWIDTH_EFFICIENCY * (bus or UNKNOWN_BUS_BANDWIDTH)
        pageable = min(PAGEABLE_SHARE * self.host_to_device, MAX_PAGEABLE_BANDWIDTH)
        self.from_pageable = hardware.rate("host_to_device.pageable") or pageable
        kind, on_gpu = hardware.device.kind, hardware.device.kind == "cuda"
        owned = "RTX" in hardware.device.name or hardware.device.memory_kind == "integrated"
        usual = RENTED_LAUNCH_SECONDS if on_gpu and not owned else LAUNCH_SECONDS[kind]
        launching = hardware.rate("operation.launch") or usual
        python = min(launching, PYTHON_SECONDS) if on_gpu else launching
        bare = BARE_OPERATIONS[kind]
        self.host_seconds = launching + (bare - 1) * python
        """Of an operation of a model, forward or backward."""
        self.python_share = bare * python / self.host_seconds
        """Of an operation's host time: what grows where Python does more around it."""
        self.host_seconds_of = {
            MODULE_CALL[0]: MODULE_OPERATIONS * bare * python,
            "dequantization.uint8": UNPACKING_LAUNCHES * launching
            + (UNPACKING_OPERATIONS * bare - UNPACKING_LAUNCHES) * python,
            "elementwise.quantize": launching + on_gpu * COMPILED_CALL_OPERATIONS * python,
        }
        least = hardware.rate("kernel.least") or KERNEL_SECONDS
        self.min_kernel_seconds = least if on_gpu else 0.0
        is_halved = hardware.device.compute_capability in ((8, 0), (9, 0), (10, 0))
        share = CACHE_SHARE_IN_HALVES if is_halved else CACHE_SHARE
        # What a kernel may read and write for its tensors to be in the cache.
        self.cached_bytes = share * (hardware.device.l2_bytes or 0) if on_gpu else 0.0
        cached = hardware.rate("memory.cache")
        self.cache_gain = max(1.0, cached / copy) if cached and copy else CACHE_GAIN
        known = _measured_products(hardware, precision)
        # On a CPU a slice of what takes too long is measured, for its FLOP/s.
        self.products = [each for each in known if not (on_gpu and is_thin(each.shape))]
        element_bytes = 4 if precision == "fp32" else 2
        self._thin = tuple(
            MeasuredProduct(each.shape, each.rate * _bytes_per_flop(each.shape, element_bytes))
            for each in known
            if on_gpu and is_thin(each.shape)
        )
        self._eight_bits = {dtype: _measured_products(hardware, dtype) for dtype in EIGHT_BITS}
        self.attentions = _measured_attention(hardware, precision, attention, kernel)
        self.measured = bool(self.products) and copy is not None

    def seconds(self, work: Work) -> float:
        """Return the device time of one operation.

        A GPU fetches while it computes: the longer counts. Both count on a CPU, whose rates are
        those of operands in its caches.
        """
        kind, shape, flops, moved = work
        if kind == "matmul" and self._thin and is_thin(shape):
            return max(self.min_kernel_seconds, moved / _interpolated(self._thin, shape))
        seconds = moved / (self.hardware.rate(f"{kind}.{self.precision}") or self.bandwidth)
        if moved and not kind.startswith("dequantization"):
            # What the kernel before wrote is there still, as far as it fits.
            found = min(1.0, self.cached_bytes / moved)
            seconds *= 1 - found * (1 - 1 / self.cache_gain)
        if flops:
            attends, variant = kind.startswith("attention"), kind.partition(".")[2]
            rate = self.attention_rate(shape[2]) if attends else self.matmul_rate(shape, variant)
            on_cpu, computes = self.hardware.device.kind == "cpu", flops / rate
            seconds = seconds + computes if on_cpu else max(seconds, computes)
        seconds = seconds if self.measured else seconds * STEP_OVER_KERNELS
        return max(self.min_kernel_seconds, seconds)

    def matmul_rate(self, shape: tuple[int, ...], eight_bits: str = "") -> float:
        """Return FLOP/s of a product (m, k, n), in 8 bits if measured or as in the datasheet."""
        if eight_bits:
            if measured := self._eight_bits[eight_bits]:
                return _interpolated(tuple(measured), shape)
            gain = _gain(self.hardware.datasheet, self.precision, eight_bits)
            return gain * self.matmul_rate(shape)
        if not self.products:
            return self.reached * MATMUL_EFFICIENCY * self._filled(shape)
        return _interpolated(tuple(self.products), shape or (1024, 1024, 1024))

    def attention_rate(self, tokens: int) -> float:
        """Return FLOP/s of attention over `tokens`, forward or backward."""
        if self.attentions:
            return _between(self.attentions, tokens)
        if self.products:
            return 0.5 * self.matmul_rate((tokens, 128, tokens))
        if self.kernel == "cpu":
            return self.reached * CPU_ATTENTION_EFFICIENCY
        capability = self.hardware.device.compute_capability
        return self.reached * assumed_efficiency(self.kernel, capability)

    def _filled(self, shape: tuple[int, ...]) -> float:
        units = self.hardware.device.sm_count
        if units is None or len(shape) != 3:
            return 1.0
        tiles = math.ceil(shape[0] / TILE) * math.ceil(shape[2] / TILE)
        return tiles / (math.ceil(tiles / units) * units)


def _gain(sheet: Datasheet | None, precision: str, eight_bits: str) -> float:
    if sheet is None:
        return 1.0
    tf32_or_plain = sheet.tf32_flops_per_second or sheet.fp32_flops_per_second
    half = sheet.bf16_flops_per_second or sheet.fp16_flops_per_second
    peak = tf32_or_plain if precision == "fp32" else half
    fast = {"int8": sheet.int8_flops_per_second, "fp8": sheet.fp8_flops_per_second}[eight_bits]
    return fast / peak if fast and peak else 1.0


def host_flops_per_second(host: Host) -> float:
    """Return FLOP/s of all cores of a CPU that nobody measured."""
    return UNKNOWN_FLOPS_PER_CORE * (host.physical_cores or host.logical_cores)


def _reached(sheet: Datasheet | None, precision: str) -> float | None:
    """FLOP/s of large products alone; TF32 falls short of its peak as bf16 does."""
    if sheet is None:
        return None
    # Before compute capability 8.0 tensor cores work in fp16 alone.
    if sheet.bf16_flops_per_second is None:
        is_half = precision == "fp16"
        peak = sheet.fp16_flops_per_second if is_half else sheet.fp32_flops_per_second
        measured = sheet.reached_fp16_flops_per_second if is_half else None
        return measured or (None if peak is None else REACHED_OF_PEAK * peak)
    bf16 = sheet.reached_bf16_flops_per_second or REACHED_OF_PEAK * sheet.bf16_flops_per_second
    if precision != "fp32":
        return bf16
    tf32 = sheet.tf32_flops_per_second
    return None if tf32 is None else tf32 * bf16 / sheet.bf16_flops_per_second


@lru_cache(maxsize=4096)
def _interpolated(products: tuple[MeasuredProduct, ...], shape: tuple[int, ...]) -> float:
    """Weighted by inverse squared distance in the logarithms of m, k and n."""
    total = weight = 0.0
    for product in products:
        distance = sum(
            (math.log(a) - math.log(b)) ** 2 for a, b in zip(product.shape, shape, strict=True)
        )
        share = 1 / (distance + 1e-3)
        total += share * math.log(product.rate)
        weight += share
    return math.exp(total / weight)


def _measured_products(hardware: HardwareProfile, precision: str) -> list[MeasuredProduct]:
    # In TF32 on CUDA, as training computes fp32.
    in_tf32 = precision == "fp32" and hardware.device.kind == "cuda"
    for name in ["tf32", "fp32"] if in_tf32 else [precision]:
        found = []
        for shape, rate in hardware.rates_under(f"matmul.{name}.").items():
            m, k, n = map(int, shape.split("x"))
            found.append(MeasuredProduct((m, k, n), rate))
        if found:
            return found
    return []


def _measured_attention(
    hardware: HardwareProfile, precision: str, backend: str, kernel: str
) -> tuple[tuple[int, float], ...]:
    """(tokens, FLOP/s); with a mask `native` may run the efficient kernel."""
    is_efficient = backend == "native" and kernel == "efficient"
    for name in ("_native_efficient" if is_efficient else backend, "native"):
        if points := hardware.rates_under(f"attention.{name}.{precision}."):
            return tuple(sorted((int(tokens), rate) for tokens, rate in points.items()))
    return ()


def _between(points: tuple[tuple[int, float], ...], tokens: int) -> float:
    if tokens <= points[0][0]:
        return points[0][1]
    for (low, slow), (high, fast) in pairwise(points):
        if tokens <= high:
            share = (math.log(tokens) - math.log(low)) / (math.log(high) - math.log(low))
            return math.exp((1 - share) * math.log(slow) + share * math.log(fast))
    return points[-1][1]


def seconds_by_class(work: Mapping[Work, int], rates: Rates, rank: int) -> tuple[float, ...]:
    """Return device seconds of a segment for each of `CLASSES`, then those of the host."""
    seconds = dict.fromkeys(CLASSES, 0.0)
    host = 0.0
    for item, count in work.items():
        host += count * rates.host_seconds_of.get(item[0], rates.host_seconds)
        if item == MODULE_CALL:
            continue
        kind, shape = item[0].partition(".")[0], item[1]
        if kind == "matmul" and rank in shape:
            kind = "adapter"
        seconds[kind] += count * rates.seconds(item)
    return (*seconds.values(), host)


def swap_seconds(
    swap: SwapPractice,
    copy_seconds: NDArray[np.float64],
    swapped: NDArray[np.int64],
    computed: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return for how long a micro-batch waits for weights of swapped blocks.

    `copy_seconds` (blocks,) is of each block of the model, `swapped` (passes,) and `computed`
    (3, passes) of all blocks in the forward pass, recomputing, and backward.
    """
    number = len(copy_seconds)
    blocks, away = np.arange(number)[:, None], np.minimum(swapped, number)
    slots: int | NDArray[np.int64] = 1 if swap.slots == "one" else 2
    up = down = blocks < away
    if swap.slots == "resident":  # all blocks take turns in these places
        up, slots = blocks >= number - away, np.maximum(1, number - away)
    elif swap.slots == "two" and not swap.by_layer:  # a pass begins where the last one ended
        up, down = up & (blocks > 0), down & (blocks < away - 1)
    seconds = (1 + swap.copies_back) * copy_seconds[:, None]
    rising, falling, (forward, again, backward) = seconds * up, (seconds * down)[::-1], computed
    passes = [(rising, forward), (falling, again + backward)]
    if swap.by_layer:
        passes[1:] = (falling, again), (falling, backward)
    stalls = [_stalled_seconds(copies, took / number, slots) for copies, took in passes]
    total: NDArray[np.float64] = np.sum(stalls, axis=0)
    return total


def _stalled_seconds(
    copies: NDArray[np.float64], computing: NDArray[np.float64], slots: int | NDArray[np.int64]
) -> NDArray[np.float64]:
    # Two streams. Copies follow each other, each into the place of the block that ran `slots`
    # before; a block begins once its own has ended, 0 if it is there.
    shape = np.broadcast_shapes(copies.shape[1:], computing.shape)
    ends, copied, stalled = np.zeros((len(copies) + 1, *shape)), np.zeros(shape), np.zeros(shape)
    for number, copy in enumerate(copies):
        if isinstance(slots, int):
            left = ends[max(0, number + 1 - slots)]
        else:
            at = np.broadcast_to(np.maximum(0, number + 1 - slots), shape)
            left = np.take_along_axis(ends, at[None], axis=0)[0]
        copied = np.where(copy > 0, np.maximum(copied, left) + copy, copied)
        stalled += np.maximum(0.0, copied - ends[number])
        ends[number + 1] = np.maximum(ends[number], copied) + computing
    return stalled


def is_thin(shape: tuple[int, ...]) -> bool:
    """Tell if a product (m, k, n) moves bytes for longer than it computes."""
    return len(shape) == 3 and min(shape) <= THIN


def _bytes_per_flop(shape: tuple[int, int, int], element_bytes: int) -> float:
    m, k, n = shape
    return element_bytes * (m * k + k * n + m * n) / (2 * m * k * n)
