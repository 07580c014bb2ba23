"""The one table of a device's kernels: which attention runs, and what it takes."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, strategies as st
from tiny_models import cpu, gpu

from autotune.cost.allocator import MIB, CachingAllocator, replayed
from autotune.cost.kernels import kernel_for, substitutes
from autotune.cost.recorder import Recorder
from autotune.cost.timing import (
    CACHE_GAIN,
    CACHE_SHARE,
    CACHE_SHARE_IN_HALVES,
    MATMUL_EFFICIENCY,
    STEP_OVER_KERNELS,
    Rates,
)
from autotune.plan.hardware import Rate

NATIVE = yaml.safe_load((Path(__file__).parent / "kernels.yaml").read_text())


@pytest.mark.parametrize(("card", "cudnn", "precision", "masked", "kernel"), NATIVE)
def test_native_is_the_kernel_torch_prefers(card, cudnn, precision, masked, kernel):
    known = {"capability": gpu(card).device.compute_capability, "cudnn": cudnn}
    assert kernel_for("native", "cuda", masked, precision, **known) == kernel


def measured(card, rates):
    how = {"unit": "FLOP/s", "spread": 0.0, "num_samples": 1}
    known = tuple(Rate(name=name, value=value, **how) for name, value in rates.items())
    return gpu(card).model_copy(update={"rates": known})


BYTES_16 = 2 * (4096 * 3072 + 3072 * 16 + 4096 * 16)
RANK_16 = ("matmul", (4096, 3072, 16), 2 * 4096 * 3072 * 16, BYTES_16)


def test_products_of_rank_wait_for_bytes():
    rank_8 = ("matmul", (4096, 3072, 8), RANK_16[2] // 2, RANK_16[3] // 2)
    rates = {"matmul.bf16.4096x3072x3072": 5e14, "memory.bandwidth": 3e12}
    thin = {**rates, "matmul.bf16.4096x3072x16": RANK_16[2] / 2e-5}
    cards = (measured("nvidia-h100-sxm", each) for each in (thin, rates))
    known, unknown = (Rates(card, "bf16", "native", "cudnn") for card in cards)
    assert known.seconds(RANK_16) == pytest.approx(2e-5)
    assert known.seconds(rank_8) == pytest.approx(1e-5)
    assert known.matmul_rate((2048, 3072, 768)) == unknown.matmul_rate((2048, 3072, 768))
    # It fits the cache.
    assert unknown.seconds(RANK_16) == pytest.approx(RANK_16[3] / unknown.bandwidth / CACHE_GAIN)


def recorded(call):
    """(operations, bytes moved) of `call(x)`, forward and backward, for an fp32 `x` of 4 MB."""
    x = torch.empty(1024, 1024, device="meta", requires_grad=True)
    recorder = Recorder("cuda")
    recorder.seed([x])
    recorder.mark("all")
    gradient = torch.empty_like(x)
    with substitutes("flash", "cuda"), recorder:
        torch.autograd.grad(call(x), x, gradient)
    work = recorder.segments[0].work
    return sum(work.values()), sum(moved * count for (_, _, _, moved), count in work.items())


def test_mixed_rms_norm_is_plain_operations():
    """Kandinsky's queries and keys are normalized in fp32 by a bf16 weight."""

    def norm(dtype):
        weight = torch.empty(1024, device="meta", dtype=dtype)
        return lambda x: torch.nn.functional.rms_norm(x, (1024,), weight, 1e-6)

    operations, moved = recorded(norm(torch.float32))
    assert operations == 2
    assert moved == pytest.approx(5 * 2**22, rel=0.01)  # forward 2 tensors, backward 3
    operations, moved = recorded(norm(torch.bfloat16))
    assert operations > 12
    assert moved > 20 * 2**22


REQUESTS = st.lists(st.tuples(st.integers(1, 30 * MIB), st.booleans()), max_size=60)


@given(REQUESTS, st.booleans())
def test_reserved_holds_what_is_allocated(requests, expandable):
    allocator = CachingAllocator(expandable_segments=expandable)
    held = {}
    for number, (size, frees) in enumerate(requests, start=1):
        allocator.allocate(number, size)
        held[number] = size
        if frees and held:
            oldest = next(iter(held))
            allocator.free(oldest)
            del held[oldest]
        assert sum(held.values()) <= allocator.allocated_bytes <= allocator.reserved_bytes
        blocks = sorted((id(pool), b.address, b.size) for pool, b in allocator._held.values())
        for (pool, start, length), (other, following, _) in pairwise(blocks):
            assert pool != other or start + length <= following
    for number in list(held):
        allocator.free(number)
    assert allocator.allocated_bytes == 0


def test_segments_have_the_documented_sizes():
    in_mib = {1: 2, MIB: 2, MIB + 1: 20, 10 * MIB - 512: 20, 10 * MIB: 10, 11 * MIB + 1: 12}
    for size, reserved in in_mib.items():
        assert replayed([(1, size)]).reserved_bytes == reserved * MIB


def test_expandable_segments_join_free_ends():
    events = [(1, 12 * MIB), (1, -1), (2, 30 * MIB)]
    assert replayed(events, expandable_segments=True).reserved_bytes == 40 * MIB
    assert replayed(events).reserved_bytes == 42 * MIB


def test_times_are_those_of_the_roofline():
    """What a device takes of bytes and FLOPs: the longer on a GPU, both on a CPU."""
    rates = {"matmul.bf16.4096x4096x4096": 4e14, "memory.bandwidth": 2e12, "memory.cache": 8e12}
    card = measured("nvidia-h100-sxm", {**rates, "kernel.least": 1e-9})
    own = Rates(card, "bf16", "native", "cudnn")
    halves = ("nvidia-a100-40gb", "nvidia-h100-sxm", "nvidia-b200")
    for name in (*halves, "nvidia-rtx-4090"):
        each = Rates(gpu(name), "bf16", "native", "flash")
        share = CACHE_SHARE_IN_HALVES if name in halves else CACHE_SHARE
        assert each.cached_bytes == share * each.hardware.device.l2_bytes
    flops = 2 * 4096**3
    for moved in (own.cached_bytes / 2, own.cached_bytes, 4 * own.cached_bytes, 1e12):
        found = min(1.0, own.cached_bytes / moved)
        bytes_alone = moved / own.bandwidth * (1 - found * 3 / 4)  # a cache four times as fast
        assert own.seconds(("elementwise", (), 0, moved)) == pytest.approx(bytes_alone)
        unpacking = own.seconds(("dequantization.int8", (), 0, moved))
        assert unpacking == pytest.approx(moved / own.bandwidth)
        product = own.seconds(("matmul", (4096,) * 3, flops, moved))
        assert product == pytest.approx(max(bytes_alone, flops / 4e14))
    host = Rates(cpu().changed(rates=card.rates), "bf16", "native", "cpu")
    both = 1e9 / host.bandwidth + flops / 4e14
    assert host.seconds(("matmul", (4096,) * 3, flops, 1e9)) == pytest.approx(both)
    assert (host.cached_bytes, host.min_kernel_seconds) == (0.0, 0.0)
    guessed = Rates(gpu("nvidia-h100-sxm"), "bf16", "native", "cudnn")
    plain = 1e12 / guessed.bandwidth * (1 - guessed.cached_bytes / 1e12 * (1 - 1 / CACHE_GAIN))
    assert guessed.seconds(("elementwise", (), 0, 1e12)) == pytest.approx(plain * STEP_OVER_KERNELS)


def test_rates_lie_between_measured_ones():
    """The mean of logarithms half-way, and the nearest beyond the ends."""
    products = {"matmul.bf16.512x512x512": 1e13, "matmul.bf16.2048x2048x2048": 9e13}
    points = {"attention.native.bf16.1024": 1e13, "attention.native.bf16.4096": 4e13}
    card = measured("nvidia-h100-sxm", {**products, **points, "matmul.int8.1024x1024x1024": 7e14})
    own = Rates(card, "bf16", "native", "flash")
    assert own.matmul_rate((1024,) * 3) == pytest.approx(3e13)
    assert own.matmul_rate((512,) * 3) == pytest.approx(1e13, rel=1e-2)
    assert own.matmul_rate((640, 512, 512)) < own.matmul_rate((1024, 512, 512)) < 3e13
    tokens = [own.attention_rate(number) for number in (512, 1024, 2048, 4096, 9999)]
    assert tokens == pytest.approx([1e13, 1e13, 2e13, 4e13, 4e13])
    unmeasured = Rates(measured("nvidia-h100-sxm", products), "bf16", "native", "flash")
    assert unmeasured.attention_rate(512) == 0.5 * own.matmul_rate((512, 128, 512))
    assert own.matmul_rate((64,) * 3, "int8") == pytest.approx(7e14)
    sheet = card.datasheet
    gain = sheet.fp8_flops_per_second / sheet.bf16_flops_per_second
    assert own.matmul_rate((512,) * 3, "fp8") == gain * own.matmul_rate((512,) * 3)


def test_last_waves_leave_units_idle():
    card = gpu("nvidia-h100-sxm")
    units, own = card.device.sm_count, Rates(card, "bf16", "native", "flash")
    full = own.reached * MATMUL_EFFICIENCY
    for rows, columns, waves in ((units, 1, 1), (units + 1, 1, 2), (1, units, 1), (units, 3, 3)):
        share = rows * columns / (waves * units)
        for part in (1, 128):  # of the last tile
            shape = (128 * (rows - 1) + part, 4096, 128 * columns)
            assert own.matmul_rate(shape) == pytest.approx(share * full)


def test_unmeasured_rates_follow_the_datasheet():
    peaks = {  # by card and precision
        ("nvidia-rtx-6000-ada", "bf16"): 0.8 * 364.2e12,
        ("nvidia-rtx-6000-ada", "fp32"): 0.8 * 182.1e12,
        ("nvidia-rtx-4090", "bf16"): 165.3e12,  # as measured
        ("nvidia-rtx-4090", "fp32"): 82.6e12 * 165.3 / 165.2,
        ("nvidia-t4", "fp16"): 24e12,
        ("nvidia-t4", "fp32"): 0.8 * 8.1e12,
    }
    for (card, precision), peak in peaks.items():
        own = Rates(gpu(card), precision, "native", "cpu")
        assert own.reached == pytest.approx(peak)
        assert own.attention_rate(99) == pytest.approx(0.6 * peak)
    own = Rates(gpu("nvidia-h100-sxm"), "bf16", "native", "flash")
    found = own.bandwidth, own.host_to_device, own.from_pageable
    assert found == pytest.approx((0.7 * 3.35e12, 0.7 * 63.008e9, 8e9))
    t4 = Rates(gpu("nvidia-t4"), "fp16", "native", "flash")
    assert t4.from_pageable == pytest.approx(0.5 * 0.7 * 15.76e9)
    host = Rates(cpu(), "fp32", "native", "cpu")
    assert (host.reached, host.bandwidth) == (2 * 5e10, 0.7 * 1e10)
    assert (host.host_seconds, host.python_share) == (9e-6, 1.0)
    for each, bits in ((host, "int8"), (t4, "fp8")):  # which nothing tells
        assert each.matmul_rate((64,) * 3, bits) == each.matmul_rate((64,) * 3)
    rates = {"host_to_device.pinned": 5e10, "host_to_device.pageable": 3e9}
    own = Rates(measured("nvidia-h100-sxm", rates), "bf16", "native", "flash")
    assert (own.host_to_device, own.from_pageable, own.measured) == (5e10, 3e9, False)
