"""Measures the rates of one device, each within a limit of time: the probe's child process."""

import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from safetensors.torch import save
from torch import nn

from autotune.errors import first_line
from autotune.knobs.attention import ATTENTION_BACKENDS
from autotune.knobs.formats import WEIGHT_FORMATS, WeightFormat
from autotune.machine.capabilities import BF16
from autotune.machine.clock import NOISY_ABOVE, BackgroundLoad, is_noisy, spread_of, time_calls
from autotune.machine.facts import WATTS, Facts, Reader, integer
from autotune.machine.sources import System, Unavailable
from autotune.plan.hardware import Conditions, DeviceKind, HardwareProfile, Rate
from autotune.system import files, process
from autotune.weights.files import open_weights
from autotune.weights.tensors import LOADERS

MAX_DISK_SAMPLES = 5
NUM_TENSORS = 8
PAGE_BYTES = 4096
HEADS, HEAD_SIZE = 24, 128  # of attention in Qwen-Image and FLUX
# Times tokens^2 x heads x head size: 4 forward, 2.5 times that backward (flash-attention).
ATTENTION_FLOPS = 14
# Kernels under the cost model's names (`cost/kernels.py`, Work).
ELEMENTWISE = ("elementwise.gelu", "elementwise.gelu_backward", "elementwise.narrow")
# By their names in rates; all other kernels compute in torch.float32.
HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PACKED = "uint8"  # the dtype in which bitsandbytes packs 4-bit weights, so that it converts them


@dataclass(frozen=True)
class BenchmarkSizes:
    """Amounts to measure on a kind of device. Widths are the families': 3072, 12288 and 18432; on a
    GPU the last four products are those of adapters of rank 16, and of 256 tokens of text. A CPU
    trains small models only, so two of its products have their widths."""

    matmul_shapes: tuple[tuple[int, int, int], ...]
    tokens: tuple[int, int]
    heads: int
    kernel_elements: int  # so many that a kernel far outlasts its launch, measured by itself
    copy_bytes: int
    file_bytes: int
    limit_seconds: float  # of one measurement
    total_seconds: float  # of all together; what does not fit is left out, with a note


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


def _usable_formats(profile: HardwareProfile) -> list[WeightFormat]:
    formats = WEIGHT_FORMATS.values()
    return [each for each in formats if profile.capability(each.capability).available]


def _stored_dtypes(profile: HardwareProfile) -> dict[str, None]:
    """torch's names of the dtypes in which weights can be stored and which products convert."""
    usable = _usable_formats(profile)
    return dict.fromkeys(each.stored_dtype for each in usable if each.stored_dtype)


def _product_dtypes(profile: HardwareProfile, *, tried: bool) -> dict[str, None]:
    usable, on_cpu = _usable_formats(profile), profile.device.kind == "cpu"
    found = [each for each in usable if bool(on_cpu and each.slow_on_cpu) is not tried]
    return dict.fromkeys(each.product_dtype for each in found if each.product_dtype)


def kernel_names(profile: HardwareProfile) -> tuple[str, ...]:
    """List the kernels that are measured by themselves, under the cost model's names."""
    return (*ELEMENTWISE, *(f"dequantization.{stored}" for stored in _stored_dtypes(profile)))


Measurement = tuple[str, Callable[[], Rate]]  # what is measured, in words, and how


class Meter:
    """Measures one device."""

    def __init__(
        self, profile: HardwareProfile, conditions: Callable[[], Conditions | None]
    ) -> None:
        self.profile, self.kind = profile, profile.device.kind
        self.sizes = BENCHMARK_SIZES[self.kind]
        self.device = torch.device(profile.device.torch_name)
        self.conditions = conditions

    def synchronize(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.kind == "mps":
            torch.mps.synchronize()

    def time(self, call: Callable[[], object]) -> list[float]:
        """Time calls within the limit of one measurement."""
        if self.kind != "cpu":
            call()  # a first call loads libraries, and cuDNN compiles, which may take seconds
        limit = self.sizes.limit_seconds
        return time_calls(call, limit_seconds=limit, synchronize=self.synchronize)

    def rate(self, name: str, work: float, seconds: Sequence[float], unit: Any) -> Rate:
        """Return the rate of `work` per call; in seconds, the time of one of so many operations."""
        median = statistics.median(seconds)
        return Rate(
            name=name,
            value=median / work if unit == "s" else work / median,
            unit=unit,
            spread=spread_of(seconds),
            num_samples=len(seconds),
            conditions=self.conditions(),
        )

    def random(self, *shape: int, dtype: str) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(HALF_DTYPES.get(dtype, torch.float32))

    def matmul(self, dtype: str, m: int, k: int, n: int) -> Rate:
        """Measure a product (m, k) x (k, n), or a thin slice of it if a CPU is too slow."""
        thin, before = 8, torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
        try:
            if self.kind == "cpu":
                pilot = self._product(dtype, thin, k, n)
                pilot()  # the first call also prepares the kernel
                seconds = time_calls(pilot, limit_seconds=0.0)[0] * (m / thin)
                m = thin if seconds > 4 * self.sizes.limit_seconds else m
            timings = self.time(self._product(dtype, m, k, n))
        finally:
            torch.set_float32_matmul_precision(before)
        return self.rate(f"matmul.{dtype}.{m}x{k}x{n}", 2 * m * k * n, timings, "FLOP/s")

    def _product(self, dtype: str, m: int, k: int, n: int) -> Callable[[], object]:
        if dtype == "int8":
            left = torch.randint(-127, 127, (m, k), device=self.device, dtype=torch.int8)
            right = torch.randint(-127, 127, (n, k), device=self.device, dtype=torch.int8).t()
            return lambda: torch._int_mm(left, right)
        left, right = self.random(m, k, dtype=dtype), self.random(n, k, dtype=dtype).t()
        if dtype != "fp8":
            return lambda: left @ right
        rows, columns = (torch.ones(shape, device=self.device) for shape in ((m, 1), (1, n)))
        left, right = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn)
        return lambda: torch._scaled_mm(
            left, right, scale_a=rows, scale_b=columns, out_dtype=torch.bfloat16
        )

    def attention(self, backend: str, dtype: str, tokens: int) -> Rate:
        """Measure both passes of self-attention without a mask, as the models call it."""
        scores_bytes = 24 * self.sizes.heads * tokens**2
        entry, budget_bytes = ATTENTION_BACKENDS[backend], self.profile.device.budget_bytes
        if entry.kernel == "math" and scores_bytes > budget_bytes // 4:
            raise Unavailable(f"it stores all attention scores, {scores_bytes / 2**30:.0f} GiB")
        shape = (1, tokens, self.sizes.heads, HEAD_SIZE)
        inputs = [self.random(*shape, dtype=dtype).requires_grad_() for _ in range(3)]
        gradient = torch.ones_like(inputs[0])
        attend = partial(dispatch_attention_fn, *inputs, backend=entry.diffusers_name())
        work = ATTENTION_FLOPS * tokens**2 * self.sizes.heads * HEAD_SIZE
        timings = self.time(lambda: torch.autograd.grad(attend(), inputs, gradient))
        return self.rate(f"attention.{backend}.{dtype}.{tokens}", work, timings, "FLOP/s")

    def bandwidth(self) -> Rate:
        """Measure a copy within the device's memory; it reads and writes, so bytes count twice."""
        source = torch.ones(self.sizes.copy_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        timings = self.time(lambda: target.copy_(source))
        return self.rate("memory.bandwidth", 2 * self.sizes.copy_bytes, timings, "B/s")

    def kernel(self, name: str, dtype: str) -> Rate:
        """Measure a kernel that compute may bind, or a conversion of quantized weights."""
        what, variant = name.split(".")
        x = self.random(self.sizes.kernel_elements, dtype=dtype)
        call: Callable[[], object]
        moved = 2 * x.nbytes
        if variant == PACKED:
            from bitsandbytes import functional

            stored, state = functional.quantize_4bit(x, quant_type="nf4", compress_statistics=True)
            call = partial(functional.dequantize_4bit, stored, state)
            moved = stored.nbytes + x.nbytes
        elif what == "dequantization":
            stored = x.to(getattr(torch, variant))
            call, moved = partial(stored.to, x.dtype), stored.nbytes + x.nbytes
        elif variant == "narrow":  # as RoPE: 2 x 2 matrices rotate pairs of channels
            turns, pairs = self.random(64, 2, 2, dtype=dtype), x.view(-1, 64, 1, 2)
            call, moved = (lambda: (turns * pairs).sum(-1)), 6 * x.nbytes
        elif variant == "gelu_backward":
            call = partial(torch.ops.aten.gelu_backward, x, x, approximate="tanh")
            moved = 3 * x.nbytes
        else:
            call = partial(torch.nn.functional.gelu, x, approximate="tanh")
        return self.rate(f"{name}.{dtype}", moved, self.time(call), "B/s")

    def launch(self) -> Rate:
        """Measure one operation on next to no data: Python, dispatch, autograd and launch."""
        links = 50
        layers = [nn.Linear(16, 16, bias=False), nn.GELU()] * links
        chain = nn.Sequential(*layers).requires_grad_(False).to(self.device)
        start, gradient = (torch.ones(1, 16, device=self.device) for _ in range(2))
        start.requires_grad_()
        timings = self.time(lambda: torch.autograd.grad(chain(start), start, gradient))
        operations = 4 * links  # a product and a GELU, each forward and backward
        return self.rate("operation.launch", operations, timings, "s")

    def small(self, name: str) -> Rate:
        """Measure a copy that stays in the L2 cache (`memory.cache`), or the least kernel. Many
        run in one CUDA graph, since each ends before the host could launch the next."""
        repeats = 200
        num_bytes = (self.profile.device.l2_bytes or 2**22) // 8 if name == "memory.cache" else 4
        source = torch.ones(num_bytes, dtype=torch.uint8, device=self.device)
        target, graph = torch.empty_like(source), torch.cuda.CUDAGraph()
        torch.add(source, 1, out=target)  # its first use loads a kernel, which no graph captures
        with torch.cuda.device(self.device), torch.cuda.graph(graph):
            for _ in range(repeats):
                torch.add(source, 1, out=target)
        timings = self.time(graph.replay)
        if name == "memory.cache":
            return self.rate(name, 2 * num_bytes * repeats, timings, "B/s")
        return self.rate(name, repeats, timings, "s")

    def host_to_device(self, pinned: bool) -> Rate:
        """Measure a copy from the host's memory, page-locked if `pinned`."""
        num_bytes = self.sizes.copy_bytes // 4
        source = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        target = torch.empty_like(source, device=self.device)
        timings = self.time(lambda: target.copy_(source, non_blocking=pinned))
        kind = "pinned" if pinned else "pageable"
        return self.rate(f"host_to_device.{kind}", num_bytes, timings, "B/s")

    def disk(self, loader: str, *, cold: bool) -> Rate:
        """Measure reading a fresh file of weights onto the device. Raises Unavailable."""
        reason = LOADERS[loader].why_not(self.device)
        if reason or not hasattr(os, "posix_fadvise"):
            raise Unavailable(reason or "the page cache cannot be bypassed on this system")
        folder, shape = files.cache_path(), (NUM_TENSORS, self.sizes.file_bytes // NUM_TENSORS)
        folder.mkdir(parents=True, exist_ok=True)
        noise = torch.randint(0, 256, shape, dtype=torch.uint8)  # which no disk compresses
        # A file without a name disappears with this process, however that ends.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(save({f"block.{i}": each.clone() for i, each in enumerate(noise)}))
            file.flush()
            os.fsync(file.fileno())
            source = open_weights(Path(f"/proc/self/fd/{file.fileno()}"))

            def read() -> None:
                # A memory-mapped tensor is read when it is touched, a page at a time.
                for _, tensor in LOADERS[loader].stream(source, self.device):
                    tensor[::PAGE_BYTES].sum().item()

            def drop() -> None:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

            timings = time_calls(
                read,
                limit_seconds=2 * self.sizes.limit_seconds,
                setup=drop if cold else None,
                max_samples=MAX_DISK_SAMPLES,
            )
        name = f"disk.{loader}" if cold else f"page_cache.{loader}"
        return self.rate(name, self.sizes.file_bytes, timings, "B/s")

    def measurements(self) -> Iterator[Measurement]:
        """Yield the most important first: there may be no time for the last."""
        is_cpu, dtypes = self.kind == "cpu", ["bf16", "fp32"]
        if self.kind == "cuda":
            known = ("bf16", "fp16", "tf32", "fp32", "fp8")
            dtypes = [name for name in known if self._can(f"precision.{name}")]
        trained = ["bf16"]
        if not self._can("precision.bf16"):
            trained = [name for name in dtypes if name in ("fp16", "fp32")]
        usual = dtypes if is_cpu else trained
        first, *more = self.sizes.matmul_shapes
        eight_bits = _product_dtypes(self.profile, tried=True)
        for name in dict.fromkeys((*dtypes, *eight_bits)):
            yield f"matmul {name}", partial(self.matmul, name, *first)
        yield "memory", self.bandwidth
        yield "launches", self.launch
        for name, of in product(kernel_names(self.profile), usual):
            yield f"{name} {of}", partial(self.kernel, name, of)
        if self.kind == "cuda":
            yield "L2 cache", partial(self.small, "memory.cache")
            yield "least kernel", partial(self.small, "kernel.least")
            yield "pinned copies", partial(self.host_to_device, True)
            yield "pageable copies", partial(self.host_to_device, False)
        yield from self._attentions(trained, self.sizes.tokens[0])
        for cold, loader in product((True, False), LOADERS):
            place = "disk" if cold else "page cache"
            yield f"{place} {loader}", partial(self.disk, loader, cold=cold)
        for shape, of in product(more, (*usual, *eight_bits)):
            if of not in eight_bits or min(shape[1:]) > 16:  # adapters, as thin, stay as they are
                yield f"matmul {of} {shape}", partial(self.matmul, of, *shape)
        yield from self._attentions(trained, self.sizes.tokens[1])
        untried = _product_dtypes(self.profile, tried=False)
        for name in ("fp16" if is_cpu else "int8", *untried):
            if name not in eight_bits:
                yield f"matmul {name}", partial(self.matmul, name, *first)

    def _attentions(self, dtypes: Iterable[str], tokens: int) -> Iterator[Measurement]:
        usable = [each for each in ATTENTION_BACKENDS.values() if self._can(each.capability)]
        usable.sort(key=lambda each: each.kernel == "math")
        for of, name in product(dtypes, (each.name for each in usable)):
            yield f"attention {name} {tokens}", partial(self.attention, name, of, tokens)

    def _can(self, capability: str) -> bool:
        return self.profile.capability(capability).available


CONDITIONS: Facts = {
    "clock_mhz": (integer(1, 10_000), "nvml:clock_mhz"),
    "temperature_celsius": (integer(1, 150), "nvml:temperature_celsius"),
    "power_watts": (WATTS, "nvml:power_watts"),
}


def main() -> None:
    """Measure the device of the profile on stdin."""
    for ending in (signal.SIGINT, signal.SIGPIPE):  # the probe ends too, and reports it
        signal.signal(ending, signal.SIG_DFL)
    process.silence_libraries()
    profile = HardwareProfile.model_validate_json(sys.stdin.buffer.read())
    measure(profile, System(), lambda kind, value: print(json.dumps({kind: value}), flush=True))  # noqa: T201


def measure(profile: HardwareProfile, system: System, report: Callable[[str, str], None]) -> None:
    """Report every rate, and a note on each that fails or for which no time is left."""

    def conditions() -> Conditions | None:
        if profile.device.kind != "cuda":
            return None
        return Conditions(**Reader(system, profile.device.index).facts("conditions", CONDITIONS))

    report("measuring", "the start of a process")
    if (overhead := process_overhead(profile)) is not None:
        report("rate", overhead.model_dump_json())
    if PACKED in _stored_dtypes(profile):
        with contextlib.suppress(Exception):  # its measurement will report it
            import bitsandbytes  # noqa: F401

    meter = Meter(profile, conditions)
    rates: list[Rate] = []
    first: Callable[[], Rate] | None = None
    begin, background, num_late = time.perf_counter(), BackgroundLoad(), 0
    for name, call in meter.measurements():
        if time.perf_counter() - begin > meter.sizes.total_seconds:
            num_late += 1
            continue
        report("measuring", name)
        try:
            rates.append(call())
        except Exception as error:  # a kernel that fails costs its own rate only
            why = first_line(error) or type(error).__name__
            report("note", f"not measured: {name}: {why}"[:200])
        else:
            first = first or call
            report("rate", rates[-1].model_dump_json())
    if num_late:
        report("note", f"{num_late} of the speeds were not measured for lack of time")
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


def process_overhead(profile: HardwareProfile) -> Rate | None:
    """Measure what a process takes before its first tensor: CUDA's context, or torch itself."""
    num_bytes = psutil.Process().memory_info().rss
    if profile.device.kind == "cuda":
        index, free_before = profile.device.index, profile.device.free_memory_bytes
        if free_before is None or profile.device.memory_kind == "integrated":
            return None
        _load_kernels(torch.device("cuda", index))
        torch.cuda.empty_cache()
        free, reserved = torch.cuda.mem_get_info(index)[0], torch.cuda.memory_reserved(index)
        num_bytes = free_before - free - reserved
    if num_bytes <= 0:
        return None
    return Rate(name="process.overhead", value=num_bytes, unit="B", spread=0.0, num_samples=1)


def _load_kernels(device: torch.device) -> None:
    """Use one kernel of each library that steps use: CUDA loads a library's code with its first."""
    capable = torch.cuda.get_device_capability(device) >= BF16
    for dtype in (torch.float32, torch.bfloat16 if capable else torch.float16):
        make = partial(torch.ones, device=device, dtype=dtype, requires_grad=True)
        images, matrix, heads = make(1, 64, 32, 32), make(256, 256), make(1, 2, 128, 128)
        filters = images.detach()[0, :, None, :3, :3].expand(64, 64, 3, 3)
        convolved = torch.nn.functional.conv2d(images, filters)
        attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        (convolved.sum() + (matrix @ matrix).sum() + attended.sum()).backward()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
