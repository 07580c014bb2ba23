"""Chooses which predictions a plan keeps, so that a report can show what else there was: pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autotune.knobs.registry import KNOBS
from autotune.plan.candidate import Candidate, Choice
from autotune.plan.forecast import Alternative, Forecast, PhaseForecast, differences_of
from autotune.plan.prediction import Prediction, StepTime

MAX_ROWS = 64
"""Rows of a forecast, but for what was tried and the best with each value of a knob: a plan is
read by people."""
MAX_FRONT = 16
MAX_BEYOND = 8
"""Candidates of the Pareto front, and of those that do not fit."""
EXACT_DIGITS, DIGITS = 9, 5
"""Digits that are the same on every CPU, and those that are kept: rounding to the first before
the second makes the last bits of a logarithm decide nothing."""


@dataclass(frozen=True)
class _Row:
    candidate: Candidate
    seconds: float
    step_bytes: int
    run_bytes: int
    fits: bool

    @classmethod
    def of(cls, prediction: Prediction, budget_bytes: int) -> "_Row":
        return cls(
            prediction.candidate,
            _rounded(prediction.step_seconds),
            round(_rounded(prediction.allocated_memory_bytes)),
            round(_rounded(prediction.run_memory_bytes)),
            prediction.run_memory_bytes <= budget_bytes,
        )


def build_forecast(
    predictions: Sequence[Prediction],
    settings: Candidate,
    budget_bytes: int,
    step_time: StepTime,
    first_predictions: Mapping[Candidate, Prediction],
) -> Forecast:
    """What a plan with these settings keeps of all predictions.

    Args:
        predictions: of every candidate, corrected by all trials; the settings are among them.
        settings: what the plan chose.
        budget_bytes: what a run may take of the device.
        step_time: of the settings, before any trial.
        first_predictions: of the candidates that were tried, before any trial.
    """
    rows = [_Row.of(each, budget_bytes) for each in predictions]
    fitting, beyond = [row for row in rows if row.fits], [row for row in rows if not row.fits]
    at = next(number for number, row in enumerate(rows) if row.candidate == settings)
    kept = [
        rows[at],
        *(row for row in rows if row.candidate in first_predictions),
        *_best_by_value(rows, fitting, settings),
        *_spread(_pareto_front(fitting), MAX_FRONT),
        *_nearest_beyond(beyond, rows[at]),
    ]
    chosen = {row.candidate: row for row in kept}
    rest = sorted((row for row in rows if row.candidate not in chosen), key=_seconds)
    chosen |= {row.candidate: row for row in _spread(rest, MAX_ROWS - len(chosen))}
    first = {
        candidate: _Row.of(each, budget_bytes) for candidate, each in first_predictions.items()
    }
    return Forecast(
        num_candidates=len(rows),
        num_fitting=len(fitting),
        step_time=step_time.changed(**{name: _rounded(value) for name, value in step_time}),
        phases=tuple(
            PhaseForecast(name=phase.name, run_memory_bytes=round(_rounded(phase.run_memory_bytes)))
            for phase in predictions[at].phases
        ),
        alternatives=tuple(
            _alternative(first.get(row.candidate, row), settings) for row in chosen.values()
        ),
    )


def _alternative(row: _Row, settings: Candidate) -> Alternative:
    return Alternative(
        changes=differences_of(row.candidate, settings),
        step_seconds=row.seconds,
        step_memory_bytes=row.step_bytes,
        run_memory_bytes=row.run_bytes,
    )


def _best_by_value(
    rows: Sequence[_Row], fitting: Sequence[_Row], settings: Candidate
) -> list[_Row]:
    """For each other value of each knob, the fastest that fits, or the smallest if none fits."""
    fastest, smallest = _best_of(fitting, _seconds), _best_of(rows, _run_bytes)
    found = []
    for knob in KNOBS:
        values = [value for name, value in smallest if name == knob.name]
        for value in (
            _compared(values, getattr(settings, knob.name)) if knob.is_composed else values
        ):
            found.append(fastest.get((knob.name, value)) or smallest[knob.name, value])
    return found


def _compared(values: Sequence[Choice], chosen: Choice) -> list[Choice]:
    """The values to compare; of many numbers of blocks, the nearest and the last in either
    direction."""
    numbers = sorted(int(value) for value in values)
    below, above = [n for n in numbers if n < int(chosen)], [n for n in numbers if n > int(chosen)]
    return list(dict.fromkeys((*below[-1:], *above[:1], *below[:1], *above[-1:])))


def _best_of(rows: Sequence[_Row], key: Callable[[_Row], float]) -> dict[tuple[str, Choice], _Row]:
    """The row with the least `key` for each value of each knob."""
    best: dict[tuple[str, Choice], _Row] = {}
    for row in sorted(rows, key=key):
        for name, value in row.candidate:
            best.setdefault((name, value), row)
    return best


def _pareto_front(rows: Sequence[_Row]) -> list[_Row]:
    """Those that nothing beats in both memory and time, the fastest first."""
    front: list[_Row] = []
    for row in sorted(rows, key=lambda row: (row.seconds, row.run_bytes)):
        if not front or row.run_bytes < front[-1].run_bytes:
            front.append(row)
    return front


def _nearest_beyond(beyond: Sequence[_Row], chosen: _Row) -> list[_Row]:
    """Of what does not fit the nearest to the budget, first among what would be faster than the
    settings; then some of all others."""
    ordered = sorted(beyond, key=_run_bytes)
    nearest = [*[row for row in ordered if row.seconds < chosen.seconds][:2], *ordered[:2]]
    return nearest + _spread(ordered, MAX_BEYOND - len(nearest))


def _spread(rows: Sequence[_Row], number: int) -> list[_Row]:
    """So many of them, evenly, the first and the last included."""
    if number >= len(rows):
        return list(rows)
    if number < 2:
        return list(rows[: max(0, number)])
    return [rows[round(at * (len(rows) - 1) / (number - 1))] for at in range(number)]


def _rounded(value: float) -> float:
    return float(f"{float(f'{value:.{EXACT_DIGITS}g}'):.{DIGITS}g}")


def _seconds(row: _Row) -> float:
    return row.seconds


def _run_bytes(row: _Row) -> int:
    return row.run_bytes
