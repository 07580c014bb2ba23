"""Repeated timings under a limit of wall-clock time, and what they come to: median and spread."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOST_SAMPLES = 25


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
        """Interquartile range over the median; 0 for fewer than four samples, which say nothing."""
        if len(self.seconds) < 4:
            return 0.0
        first, _, third = statistics.quantiles(self.seconds, n=4)
        return (third - first) / self.median


def timed(
    call: Callable[[], object],
    *,
    limit_seconds: float,
    finish: Callable[[], None] = lambda: None,
    before: Callable[[], None] | None = None,
    most: int = MOST_SAMPLES,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Time `call` until the limit or `most` samples, at least once.

    The first call warms up and is dropped, unless it alone took four times the limit. `finish` waits for the device,
    `before` makes ready for one call, untimed. Without it quick calls are grouped so that a sample takes at least a
    millisecond: clocks and launches have their own noise.
    """

    def sample(repeats: int) -> float:
        if before:
            before()
        finish()
        begin = clock()
        for _ in range(repeats):
            call()
        finish()
        return (clock() - begin) / repeats

    first = sample(1)
    if first >= 4 * limit_seconds:
        return Timings((first,))
    begin = clock()
    second = sample(1)
    repeats = 1 if before else max(1, min(1000, round(1e-3 / max(second, 1e-9))))
    seconds = [second] if repeats == 1 else [sample(repeats)]
    while len(seconds) < most and clock() - begin < limit_seconds:
        seconds.append(sample(repeats))
    return Timings(tuple(seconds))


def disagreement(values: Sequence[float]) -> float:
    """(largest - smallest) / median."""
    return (max(values) - min(values)) / statistics.median(values)
