"""Repeated timings within a limit of wall-clock time, with their median and spread."""

import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from safetensors.torch import save

from autotune.knobs.attention import ATTENTION_BACKENDS
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.machine.facts import Facts, Reader, integer, positive_number
from autotune.machine.sources import System, Unavailable
from autotune.plan.hardware import Conditions, DeviceKind, HardwareProfile, Rate
from autotune.system.files import cache_path
from autotune.system.process import silence_libraries
from autotune.weights.files import open_weights
from autotune.weights.tensors import LOADERS

MAX_SAMPLES = 25


@dataclass(frozen=True)
class Timings:
    """Seconds of several equal calls."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median, in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range over the median; 0 for fewer than four samples, which are too few
        to tell."""
        if len(self.seconds) < 4:
            return 0.0
        first, _, third = statistics.quantiles(self.seconds, n=4)
        return (third - first) / self.median


def time_calls(
    call: Callable[[], object],
    *,
    limit_seconds: float,
    synchronize: Callable[[], None] = lambda: None,
    setup: Callable[[], None] | None = None,
    max_samples: int = MAX_SAMPLES,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Time `call` until the limit or `max_samples`, at least once.

    The first call warms up and is dropped, unless it alone took four times the limit. `synchronize`
    waits for the device; `setup` runs before each call, untimed. Without a `setup`, quick calls are
    grouped so that a sample takes at least a millisecond: clocks and launches have noise of their
    own.
    """

    def sample(repeats: int) -> float:
        if setup:
            setup()
        synchronize()
        begin = clock()
        for _ in range(repeats):
            call()
        synchronize()
        return (clock() - begin) / repeats

    first = sample(1)
    if first >= 4 * limit_seconds:
        return Timings((first,))
    begin = clock()
    second = sample(1)
    repeats = 1 if setup else max(1, min(1000, round(1e-3 / max(second, 1e-9))))
    seconds = [second] if repeats == 1 else [sample(repeats)]
    while len(seconds) < max_samples and clock() - begin < limit_seconds:
        seconds.append(sample(repeats))
    return Timings(tuple(seconds))


NUM_TENSORS = 8
MAX_DISK_SAMPLES = 5
PAGE_BYTES = 4096


def time_reads(
    loader: str, file_bytes: int, device: torch.device, limit_seconds: float, *, cold: bool = True
) -> Timings:
    """Time reading a fresh file of `file_bytes`; if `cold`, it is dropped from the page cache
    before every reading.

    Raises:
        Unavailable: the loader cannot be used here, or the page cache cannot be bypassed, so that
            nothing honest can be measured.
    """
    reason = LOADERS[loader].why_not(device)
    if reason or not hasattr(os, "posix_fadvise"):
        raise Unavailable(reason or "the page cache cannot be bypassed on this system")
    folder = cache_path()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(
        dir=folder
    ) as file:  # nameless: it disappears with this process, however that ends
        file.write(_random_weights(file_bytes))
        file.flush()
        os.fsync(file.fileno())
        source = open_weights(Path(f"/proc/self/fd/{file.fileno()}"))

        def read() -> None:
            # A memory-mapped tensor is read when it is touched, a page at a time.
            for _, tensor in LOADERS[loader].stream(source, device):
                tensor[::PAGE_BYTES].sum().item()

        def drop() -> None:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        return time_calls(
            read,
            limit_seconds=limit_seconds,
            setup=drop if cold else None,
            max_samples=MAX_DISK_SAMPLES,
        )


def _random_weights(num_bytes: int) -> bytes:
    """A safetensors file of random bytes, which a compressing disk cannot shrink."""
    noise = torch.randint(0, 256, (NUM_TENSORS, num_bytes // NUM_TENSORS), dtype=torch.uint8)
    return save({f"block.{i}": noise[i].clone() for i in range(NUM_TENSORS)})


NOISY_ABOVE = 0.10
"""Spread, or drift between the first and the last measurement, above which a machine is called
noisy."""

HEADS, HEAD_SIZE = 24, 128
"""Attention heads of Qwen-Image and FLUX."""

ATTENTION_FLOPS = 14
"""Times tokens^2 x heads x head size: 4 forward, 2.5 times that backward (flash-attention's
convention)."""

ELEMENTWISE = ("elementwise.gelu", "elementwise.gelu_backward", "elementwise.narrow")
"""Kernels under the cost model's names (`cost/kernels.py`, Work)."""
KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""By what they are called in rates; all others are torch.float32, or are measured in it."""
PACKED = "uint8"
"""The dtype in which bitsandbytes packs 4-bit weights, so that it converts them."""


def stored_dtypes(profile: HardwareProfile) -> tuple[str, ...]:
    """torch's names of the dtypes in which the machine can store weights and which each product
    converts."""
    usable = (
        each for each in WEIGHT_FORMATS.values() if profile.capability(each.capability).available
    )
    return tuple(dict.fromkeys(each.stored_dtype for each in usable if each.stored_dtype))


def product_dtypes(profile: HardwareProfile, *, tried: bool) -> tuple[str, ...]:
    """Dtypes of the products in 8 bits that the machine can train with: those that a search
    tries, or the others."""
    usable = (
        each for each in WEIGHT_FORMATS.values() if profile.capability(each.capability).available
    )
    found = (
        each.product_dtype for each in usable if (each.why_not_searched(profile) is None) is tried
    )
    return tuple(dict.fromkeys(dtype for dtype in found if dtype))


def kernel_names(profile: HardwareProfile) -> tuple[str, ...]:
    """Kernels that are measured by themselves on the machine, under the cost model's names."""
    return (*ELEMENTWISE, *(f"dequantization.{stored}" for stored in stored_dtypes(profile)))


@dataclass(frozen=True)
class BenchmarkSizes:
    """How much to measure on a kind of device. Widths are the families': 3072, 12288 and 18432; on
    a GPU the last four products are those of adapters of rank 16, and of 256 tokens of text.

    A CPU trains small models only, so two of its products have their widths.
    """

    matmul_shapes: tuple[tuple[int, int, int], ...]
    tokens: tuple[int, int]
    heads: int
    kernel_elements: int
    """So many that a kernel takes far longer than its launch, which is measured by itself."""
    copy_bytes: int
    file_bytes: int
    limit_seconds: float
    """Limit of one measurement."""
    total_seconds: float
    """Limit of all together; what does not fit is left out, with a note."""


BENCHMARK_SIZES: dict[DeviceKind, BenchmarkSizes] = {
    "cuda": BenchmarkSizes(
        ((4096, 3072, 3072), (4096, 3072, 12288), (4096, 12288, 3072), (4096, 3072, 18432),
         (4096, 3072, 16), (4096, 16, 3072), (256, 3072, 3072), (256, 3072, 12288)),
        (4096, 16384), HEADS, 2**26, 2**30, 2**28, 0.5, 22.0,
    ),
    "mps": BenchmarkSizes(
        ((4096, 3072, 3072), (4096, 3072, 12288)), (1024, 4096), HEADS, 2**24, 2**28, 2**28, 0.5,
        15.0,
    ),
    "cpu": BenchmarkSizes(
        ((128, 3072, 3072), (512, 512, 2048), (256, 256, 256), (128, 3072, 12288)),
        (256, 512), 4, 2**20, 2**27, 2**26, 0.3, 14.0,
    ),
}  # fmt: skip


class Meter:
    """Measures one device."""

    def __init__(
        self, profile: HardwareProfile, conditions: Callable[[], Conditions | None]
    ) -> None:
        self.profile = profile
        self.kind = profile.device.kind
        self.sizes = BENCHMARK_SIZES[self.kind]
        self.device = torch.device(profile.device.torch_name)
        self.conditions = conditions

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.kind == "mps":
            torch.mps.synchronize()

    def time(self, call: Callable[[], object]) -> Timings:
        if (
            self.kind != "cpu"
        ):  # a first call loads libraries, and cuDNN compiles, which may take seconds
            call()
        return time_calls(
            call, limit_seconds=self.sizes.limit_seconds, synchronize=self.synchronize
        )

    def rate(self, name: str, work: float, timings: Timings, unit: Any) -> Rate:
        """The rate of so much `work` per call; if the unit is seconds, the time of one of so
        many operations."""
        return Rate(
            name=name,
            value=timings.median / work if unit == "s" else work / timings.median,
            unit=unit,
            spread=timings.spread,
            num_samples=len(timings.seconds),
            conditions=self.conditions(),
        )

    def matmul(self, dtype: str, m: int, k: int, n: int) -> Rate:
        """A product (m, k) x (k, n); if it would take too long on a CPU, a thin slice of it is
        measured instead."""
        thin = 8
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
        try:
            pilot = self._product(dtype, thin, k, n) if self.kind == "cpu" else None
            if (
                pilot is not None
                and self._time_once(pilot) * (m / thin) > 4 * self.sizes.limit_seconds
            ):
                return self.rate(
                    f"matmul.{dtype}.{thin}x{k}x{n}", 2 * thin * k * n, self.time(pilot), "FLOP/s"
                )
            timings = self.time(self._product(dtype, m, k, n))
        finally:
            torch.set_float32_matmul_precision(before)
        return self.rate(f"matmul.{dtype}.{m}x{k}x{n}", 2 * m * k * n, timings, "FLOP/s")

    def _time_once(self, call: Callable[[], object]) -> float:
        call()  # the first call also prepares the kernel
        return time_calls(call, limit_seconds=0.0, synchronize=self.synchronize).median

    def _product(self, dtype: str, m: int, k: int, n: int) -> Callable[[], object]:
        if dtype == "fp8":
            left = torch.randn(m, k, device=self.device).to(torch.float8_e4m3fn)
            right = torch.randn(n, k, device=self.device).to(torch.float8_e4m3fn).t()
            rows, columns = (
                torch.ones(shape, device=self.device) for shape in ((m, 1), (1, n))
            )  # as layers scale
            return lambda: torch._scaled_mm(
                left, right, scale_a=rows, scale_b=columns, out_dtype=torch.bfloat16
            )
        if dtype == "int8":
            left = torch.randint(-127, 127, (m, k), device=self.device, dtype=torch.int8)
            right = torch.randint(-127, 127, (n, k), device=self.device, dtype=torch.int8).t()
            return lambda: torch._int_mm(left, right)
        kind = KINDS.get(dtype, torch.float32)
        left = torch.randn(m, k, device=self.device).to(kind)
        right = torch.randn(n, k, device=self.device).to(kind).t()
        return lambda: left @ right

    def attention(self, backend: str, dtype: str, tokens: int) -> Rate:
        """Forward and backward of self-attention without a mask, as the models call it."""
        kind = KINDS.get(dtype, torch.float32)
        scores_bytes = 24 * self.sizes.heads * tokens**2
        if (
            ATTENTION_BACKENDS[backend].kernel == "math"
            and scores_bytes > self.profile.device.budget_bytes // 4
        ):
            raise Unavailable(f"it stores all attention scores, {scores_bytes / 2**30:.0f} GiB")
        shape = (1, tokens, self.sizes.heads, HEAD_SIZE)
        query, key, value = (
            torch.randn(shape, device=self.device).to(kind).requires_grad_() for _ in range(3)
        )
        gradient = torch.ones(shape, device=self.device, dtype=kind)
        attend = partial(
            dispatch_attention_fn, backend=ATTENTION_BACKENDS[backend].diffusers_name()
        )
        work = ATTENTION_FLOPS * tokens**2 * self.sizes.heads * HEAD_SIZE
        timings = self.time(
            lambda: torch.autograd.grad(attend(query, key, value), (query, key, value), gradient)
        )
        return self.rate(f"attention.{backend}.{dtype}.{tokens}", work, timings, "FLOP/s")

    def bandwidth(self) -> Rate:
        """A copy within the device's memory; it reads and writes, so its bytes count twice."""
        source = torch.ones(self.sizes.copy_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        timings = self.time(lambda: target.copy_(source))
        return self.rate("memory.bandwidth", 2 * self.sizes.copy_bytes, timings, "B/s")

    def kernel(self, name: str, dtype: str) -> Rate:
        """A kernel that may be bound by compute rather than memory, or a conversion of quantized
        weights."""
        number = self.sizes.kernel_elements
        kind = KINDS.get(dtype, torch.float32)
        what, variant = name.split(".")
        x = torch.randn(number, device=self.device).to(kind)
        call: Callable[[], object]
        moved = 2 * x.nbytes
        if variant == PACKED:
            from bitsandbytes import functional

            stored, state = functional.quantize_4bit(x, quant_type="nf4", compress_statistics=True)
            call, moved = (
                partial(functional.dequantize_4bit, stored, state),
                stored.nbytes + x.nbytes,
            )
        elif what == "dequantization":
            stored = x.to(getattr(torch, variant))
            call, moved = partial(stored.to, kind), stored.nbytes + x.nbytes
        elif variant == "narrow":  # as RoPE: 2 x 2 matrices rotate pairs of channels
            turns, pairs = torch.randn(64, 2, 2, device=self.device).to(kind), x.view(-1, 64, 1, 2)
            call, moved = (lambda: (turns * pairs).sum(-1)), 6 * x.nbytes
        elif variant == "gelu_backward":
            call, moved = (
                partial(torch.ops.aten.gelu_backward, x, x, approximate="tanh"),
                3 * x.nbytes,
            )
        else:
            call = partial(torch.nn.functional.gelu, x, approximate="tanh")
        return self.rate(f"{name}.{dtype}", moved, self.time(call), "B/s")

    def launch(self) -> Rate:
        """Time of one operation on next to no data: Python, dispatch, autograd and launch, in
        both passes."""
        links = 50
        pairs = (
            module
            for _ in range(links)
            for module in (torch.nn.Linear(16, 16, bias=False), torch.nn.GELU())
        )
        chain = torch.nn.Sequential(*pairs).requires_grad_(False).to(self.device)
        start, gradient = (torch.ones(1, 16, device=self.device) for _ in range(2))
        start.requires_grad_()
        timings = self.time(lambda: torch.autograd.grad(chain(start), start, gradient))
        operations = 4 * links  # a product and a GELU, each forward and backward
        return self.rate("operation.launch", operations, timings, "s")

    def small(self, name: str) -> Rate:
        """`memory.cache`: a copy that stays in a CUDA device's L2 cache; `kernel.least`: the
        time of a kernel that does next to nothing. Many in one CUDA graph, for each ends before
        the host could launch the next."""
        repeats = 200
        num_bytes = (self.profile.device.l2_bytes or 2**22) // 8 if name == "memory.cache" else 4
        source = torch.ones(num_bytes, dtype=torch.uint8, device=self.device)
        target, graph = torch.empty_like(source), torch.cuda.CUDAGraph()
        torch.add(
            source, 1, out=target
        )  # a kernel is loaded when it is first used, which cannot be captured
        with torch.cuda.device(self.device), torch.cuda.graph(graph):
            for _ in range(repeats):
                torch.add(source, 1, out=target)
        timings = self.time(graph.replay)
        if name == "memory.cache":
            return self.rate(name, 2 * num_bytes * repeats, timings, "B/s")
        return self.rate(name, repeats, timings, "s")

    def host_to_device(self, pinned: bool) -> Rate:
        """A copy from the host's memory, page-locked if `pinned`."""
        num_bytes = self.sizes.copy_bytes // 4
        source = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        target = torch.empty_like(source, device=self.device)
        name = "host_to_device.pinned" if pinned else "host_to_device.pageable"
        return self.rate(
            name, num_bytes, self.time(lambda: target.copy_(source, non_blocking=pinned)), "B/s"
        )

    def disk(self, loader: str, *, cold: bool) -> Rate:
        """Reading a safetensors file onto the device: from disk if `cold`, else from the page
        cache."""
        limit = 2 * self.sizes.limit_seconds
        timings = time_reads(loader, self.sizes.file_bytes, self.device, limit, cold=cold)
        name = f"disk.{loader}" if cold else f"page_cache.{loader}"
        return self.rate(name, self.sizes.file_bytes, timings, "B/s")

    def measurements(self) -> Iterator[tuple[str, Callable[[], Rate]]]:
        """(name, call), the most important first, since there may be no time for the last."""
        available = [
            capability.name for capability in self.profile.capabilities if capability.available
        ]
        measured = [each for each in ATTENTION_BACKENDS.values() if each.capability in available]
        backends = [each.name for each in sorted(measured, key=lambda each: each.kernel == "math")]
        dtypes = ["bf16", "fp32"] if self.kind != "cuda" else [
            name for name in ("bf16", "fp16", "tf32", "fp32",
            "fp8") if f"precision.{name}" in available
        ]  # fmt: skip
        trained = (
            ["bf16"]
            if "precision.bf16" in available
            else [name for name in dtypes if name in ("fp16", "fp32")]
        )
        first, *more = self.sizes.matmul_shapes
        eight_bits = product_dtypes(self.profile, tried=True)
        for name in dict.fromkeys((*dtypes, *eight_bits)):
            yield f"matmul {name}", partial(self.matmul, name, *first)
        yield "memory", self.bandwidth
        yield "launches", self.launch
        for name, of in product(
            kernel_names(self.profile), dtypes if self.kind == "cpu" else trained
        ):
            yield f"{name} {of}", partial(self.kernel, name, of)
        if self.kind == "cuda":
            yield "L2 cache", partial(self.small, "memory.cache")
            yield "least kernel", partial(self.small, "kernel.least")
            yield "pinned copies", partial(self.host_to_device, True)
            yield "pageable copies", partial(self.host_to_device, False)
        short, long = self.sizes.tokens
        for of, name in product(trained, backends):
            yield f"attention {name} {short}", partial(self.attention, name, of, short)
        for loader in LOADERS:
            yield f"disk {loader}", partial(self.disk, loader, cold=True)
        for loader in LOADERS:
            yield f"page cache {loader}", partial(self.disk, loader, cold=False)
        for shape, of in product(more, (*(dtypes if self.kind == "cpu" else trained), *eight_bits)):
            if (
                of not in eight_bits or min(shape[1:]) > 16
            ):  # only adapters are so thin, and they stay as they are
                yield f"matmul {of} {shape}", partial(self.matmul, of, *shape)
        for of, name in product(trained, backends):
            yield f"attention {name} {long}", partial(self.attention, name, of, long)
        others = (
            "fp16" if self.kind == "cpu" else "int8",
            *product_dtypes(self.profile, tried=False),
        )
        for name in others:
            if name not in eight_bits:
                yield f"matmul {name}", partial(self.matmul, name, *first)


def is_noisy(rates: tuple[Rate, ...], again: Rate | None) -> bool:
    """Whether timings vary too much: within a measurement, or between the first one and its
    repetition at the end.

    Disks do not count: their readings differ on quiet machines too.
    """
    wide = any(
        rate.spread > NOISY_ABOVE
        for rate in rates
        if not rate.name.startswith(("disk.", "page_cache."))
    )
    first = next((rate for rate in rates if again is not None and rate.name == again.name), None)
    if wide or first is None or again is None:
        return wide
    return abs(first.value - again.value) > NOISY_ABOVE * (first.value + again.value) / 2


Report = Callable[[str, str], None]
CONDITIONS: Facts = {
    "clock_mhz": (integer(1, 10_000), "nvml:clock_mhz"),
    "temperature_celsius": (integer(1, 150), "nvml:temperature_celsius"),
    "power_watts": (positive_number(1e5), "nvml:power_watts"),
}


def main() -> None:
    """Measure the device of the profile on stdin."""
    for ending in (signal.SIGINT, signal.SIGPIPE):  # the probe ends too, and reports it
        signal.signal(ending, signal.SIG_DFL)
    silence_libraries()
    profile = HardwareProfile.model_validate_json(sys.stdin.buffer.read())
    measure(profile, System(), lambda kind, value: print(json.dumps({kind: value}), flush=True))  # noqa: T201


def measure(profile: HardwareProfile, system: System, report: Report) -> None:
    """Report every rate of the profile's device, and a note on each that fails or for which no
    time is left."""
    report("measuring", "the start of a process")
    if (overhead := process_overhead(profile)) is not None:
        report("rate", overhead.model_dump_json())
    if PACKED in stored_dtypes(profile):
        with contextlib.suppress(Exception):  # its measurement will report it
            import bitsandbytes  # noqa: F401

    meter = Meter(profile, lambda: conditions_of(profile, system))
    rates: list[Rate] = []
    first: Callable[[], Rate] | None = None
    begin, background = time.perf_counter(), BackgroundLoad()
    for name, call in meter.measurements():
        if time.perf_counter() - begin > meter.sizes.total_seconds:
            report("note", f"not measured for lack of time: {name}")
            continue
        report("measuring", name)
        try:
            rates.append(call())
        except Exception as error:  # a kernel that fails costs its own rate only
            report(
                "note",
                f"not measured: {name}: {error or type(error).__name__}".split("\n")[0][:200],
            )
        else:
            first = first or call
            report("rate", rates[-1].model_dump_json())
    again: Rate | None = None
    if first is not None:
        with contextlib.suppress(Exception):  # another process may have taken the memory since
            again = first()
    if is_noisy(tuple(rates), again):
        report("noisy", "timings disagreed by more than 10%")
    share = background.share()
    if profile.device.kind == "cpu" and share > NOISY_ABOVE:
        report("noisy", f"other processes took {share:.0%} of the CPU")
    report("measuring", "done")


class BackgroundLoad:
    """How much CPU time other processes take, from the creation of this object until now."""

    def __init__(self) -> None:
        self._begin = self._times()

    def share(self) -> float:
        """Their share of all CPU time, in [0, 1]."""
        busy, idle, own = (
            now - before for now, before in zip(self._times(), self._begin, strict=True)
        )
        return max(0.0, busy - own) / max(busy + idle, 1e-9)

    def _times(self) -> tuple[float, float, float]:
        whole, own = psutil.cpu_times(), psutil.Process().cpu_times()
        idle = whole.idle + getattr(whole, "iowait", 0.0)
        # On Linux `user` already holds the guests' time.
        busy = sum(whole) - idle - getattr(whole, "guest", 0.0) - getattr(whole, "guest_nice", 0.0)
        return busy, idle, own.user + own.system


def process_overhead(profile: HardwareProfile) -> Rate | None:
    """Bytes that a process takes before its first tensor: a CUDA context, or torch in the host's
    memory."""
    if profile.device.kind == "cuda":
        index, free_before = profile.device.index, profile.device.free_memory_bytes
        if free_before is None or profile.device.memory_kind == "integrated":
            return None
        _load_kernels(torch.device("cuda", index))
        torch.cuda.empty_cache()
        num_bytes = (
            free_before - torch.cuda.mem_get_info(index)[0] - torch.cuda.memory_reserved(index)
        )
    else:
        num_bytes = psutil.Process().memory_info().rss
    if num_bytes <= 0:
        return None
    return Rate(name="process.overhead", value=num_bytes, unit="B", spread=0.0, num_samples=1)


def _load_kernels(device: torch.device) -> None:
    """Use one kernel of each library that a step uses: CUDA loads a library's code with its
    first kernel, for good."""
    capable = torch.cuda.is_bf16_supported(including_emulation=False)
    for dtype in (torch.float32, torch.bfloat16 if capable else torch.float16):
        images = torch.ones(1, 64, 32, 32, device=device, dtype=dtype, requires_grad=True)
        matrix = torch.ones(256, 256, device=device, dtype=dtype, requires_grad=True)
        heads = torch.ones(1, 2, 128, 128, device=device, dtype=dtype, requires_grad=True)
        convolved = torch.nn.functional.conv2d(
            images, images.detach()[0, :, None, :3, :3].expand(64, 64, 3, 3)
        )
        attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        (convolved.sum() + (matrix @ matrix).sum() + attended.sum()).backward()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)


def conditions_of(profile: HardwareProfile, system: System) -> Conditions | None:
    """Clock, temperature and power of a GPU now; None on other devices."""
    if profile.device.kind != "cuda":
        return None
    return Conditions(**Reader(system, profile.device.index).facts("conditions", CONDITIONS))


if __name__ == "__main__":
    main()
