"""Clocks calls, and tells from the timings whether other work disturbed them."""

import statistics
import time
from collections.abc import Callable, Sequence

import psutil

from autotune.plan.hardware import Rate

MAX_SAMPLES = 25
NOISY_ABOVE = 0.10  # spread, or drift from first to last measurement, that makes a machine noisy


def spread_of(seconds: Sequence[float]) -> float:
    """Return the interquartile range over the median; 0 for less than four, too few to tell."""
    if len(seconds) < 4:
        return 0.0
    first, median, third = statistics.quantiles(seconds, n=4)
    return (third - first) / median


def time_calls(
    call: Callable[[], object],
    *,
    limit_seconds: float,
    synchronize: Callable[[], None] = lambda: None,
    setup: Callable[[], None] | None = None,
    max_samples: int = MAX_SAMPLES,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Time `call`, in seconds, until the limit or `max_samples`, at least once.

    The first call warms up and is dropped, unless it alone took four times the limit. `setup` runs
    before each call, untimed. Without it, quick calls are grouped into samples of a millisecond:
    clocks and launches have noise of their own.
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
        return [first]
    begin = clock()
    second = sample(1)
    repeats = 1 if setup else max(1, min(1000, round(1e-3 / max(second, 1e-9))))
    seconds = [second] if repeats == 1 else [sample(repeats)]
    while len(seconds) < max_samples and clock() - begin < limit_seconds:
        seconds.append(sample(repeats))
    return seconds


def is_noisy(rates: tuple[Rate, ...], again: Rate | None) -> bool:
    """Tell if timings vary too much, within a measurement or from the first to its repetition.
    Disks do not count: their readings differ on quiet machines too."""
    disks = ("disk.", "page_cache.")
    wide = any(r.spread > NOISY_ABOVE for r in rates if not r.name.startswith(disks))
    first = next((rate for rate in rates if again is not None and rate.name == again.name), None)
    if wide or first is None or again is None:
        return wide
    return abs(first.value - again.value) > NOISY_ABOVE * (first.value + again.value) / 2


class BackgroundLoad:
    """CPU time that other processes take, from the creation of this object until now."""

    def __init__(self) -> None:
        self._begin = self._times()

    def share(self) -> float:
        """Return their share of all CPU time, in [0, 1]."""
        pairs = zip(self._times(), self._begin, strict=True)
        busy, idle, own = (now - before for now, before in pairs)
        return max(0.0, busy - own) / max(busy + idle, 1e-9)

    def _times(self) -> tuple[float, float, float]:
        whole, own = psutil.cpu_times(), psutil.Process().cpu_times()
        idle = whole.idle + getattr(whole, "iowait", 0.0)
        # On Linux `user` already holds the guests' time.
        busy = sum(whole) - idle - getattr(whole, "guest", 0.0) - getattr(whole, "guest_nice", 0.0)
        return busy, idle, own.user + own.system
