"""Repeated timings within a limit of wall-clock time, with their median and spread."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

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
