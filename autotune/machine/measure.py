"""The probe's child process: reads a profile, measures its device, and reports each result as soon
as it has it.

Each report is a line of JSON, an object of one entry: `measuring`, `rate`, `note` or `noisy`. The
last one is `measuring: done`.
"""

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil

from autotune.machine.reader import Facts, Reader, integer, positive_number
from autotune.machine.sources import RealSystem
from autotune.machine.system import System
from autotune.plan.hardware import Conditions, HardwareProfile, Rate
from autotune.system.process import silence_libraries

if TYPE_CHECKING:
    import torch

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
    measure(profile, RealSystem(), lambda kind, value: print(json.dumps({kind: value}), flush=True))  # noqa: T201


def measure(profile: HardwareProfile, system: System, report: Report) -> None:
    """Report every rate of the profile's device, and a note on each that fails or for which no
    time is left."""
    report("measuring", "the start of a process")
    if (overhead := process_overhead(profile)) is not None:
        report("rate", overhead.model_dump_json())
    # After the overhead, to which they would add; importing takes a second or two, which are no
    # measurement's.
    from autotune.machine.rates import NOISY_ABOVE, PACKED, Meter, is_noisy, stored_dtypes

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
    import torch

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


def _load_kernels(device: "torch.device") -> None:
    """Use one kernel of each library that a step uses: CUDA loads a library's code with its
    first kernel, for good."""
    import torch
    from torch.nn import functional

    capable = torch.cuda.is_bf16_supported(including_emulation=False)
    for dtype in (torch.float32, torch.bfloat16 if capable else torch.float16):
        images = torch.ones(1, 64, 32, 32, device=device, dtype=dtype, requires_grad=True)
        matrix = torch.ones(256, 256, device=device, dtype=dtype, requires_grad=True)
        heads = torch.ones(1, 2, 128, 128, device=device, dtype=dtype, requires_grad=True)
        convolved = functional.conv2d(
            images, images.detach()[0, :, None, :3, :3].expand(64, 64, 3, 3)
        )
        attended = functional.scaled_dot_product_attention(heads, heads, heads)
        (convolved.sum() + (matrix @ matrix).sum() + attended.sum()).backward()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)


def conditions_of(profile: HardwareProfile, system: System) -> Conditions | None:
    """Clock, temperature and power of a GPU now; None on other devices."""
    if profile.device.kind != "cuda":
        return None
    return Conditions(**Reader(system, profile.device.index).facts("conditions", CONDITIONS))


if __name__ == "__main__":
    main()
