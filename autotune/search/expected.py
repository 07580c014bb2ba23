"""Expectations of a plan's settings, and the predictions that it keeps for a report: pure."""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress

from autotune.cost.estimate import job_time
from autotune.cost.predict import CostModel
from autotune.knobs.registry import KNOBS
from autotune.knobs.settings import encoder_element_bytes
from autotune.plan.candidate import Choice, TrialResult, nearest_numbers
from autotune.plan.hardware import shares_host_memory
from autotune.plan.job import Job
from autotune.plan.plan import Expected, PlannedHardware
from autotune.plan.prediction import Alternative, Forecast, PhaseForecast, Prediction, StepTime
from autotune.plan.workload import Workload, mean_text_tokens
from autotune.search.winner import Score

MAX_ROWS = 64  # besides what was tried and the best with each value
MAX_FRONT = 16  # candidates of the Pareto front
MAX_BEYOND = 8  # candidates that do not fit
EXACT_DIGITS, DIGITS = 9, 5
"""Digits that are the same on every CPU, and those that are kept: rounding twice hides others."""


_seconds = operator.attrgetter("step_seconds")
_run_bytes = operator.attrgetter("run_memory_bytes")


def planned_hardware(cost: CostModel) -> PlannedHardware:
    """Describe the machine as far as a plan depends on it."""
    hardware = cost.hardware
    return PlannedHardware(
        device_name=hardware.device.name,
        device_kind=hardware.device.kind,
        fingerprint=hardware.fingerprint,
        match_keys=hardware.match_keys,
        total_memory_bytes=hardware.device.total_memory_bytes,
        budget_bytes=hardware.device.budget_bytes,
        versions=hardware.versions,
        num_processes=cost.parallel.num_processes,
        strategy=cost.parallel.strategy,
        assumed=hardware.assumed,
        encoder_gpu=cost.encoder_gpu,
    )


def build_expectation(
    best: Score,
    trials: Sequence[TrialResult],
    cost: CostModel,
    workload: Workload,
    job: Job,
    price_per_hour: float | None = None,
) -> Expected:
    """Say what the plan promises of `best`: measured by `trials`, or predicted without any. `cost`
    is of the work of one process, `workload` of all, `price_per_hour` of one device."""
    cost = cost.with_calibration(trials)
    own = [trial for trial in trials if trial.candidate == best.candidate]
    rehearsals = [trial for trial in own if trial.confirms]
    phases = rehearsals[-1].phases if rehearsals else ()
    prediction = cost.predict(best.candidate)
    peak = best.peak_memory_bytes if trials else prediction.allocated_memory_bytes
    largest = max([peak, *(phase.device_bytes or 0 for phase in phases)])
    # What the process takes outside the allocator.
    overhead = prediction.training.run_memory_bytes - prediction.allocated_memory_bytes
    room = cost.budget_bytes - largest
    if trials and room > 0:  # they ran within the budget, so that they need no more than it
        overhead = min(overhead, room)
    host = max([trial.host_memory_bytes or 0 for trial in own], default=0)
    kept = cost.resident_encoder_bytes
    if cost.hardware.device.kind == "cpu" and own:  # where the process as a whole was measured
        measured = [phase.host_bytes or 0 for phase in phases] or [own[-1].host_memory_bytes or 0]
        overhead = max(measured) - peak
        kept = 0 if phases else kept  # they were there
    if not any(phase.name == "caching" for phase in phases):  # the others are only predicted
        others = [phase.run_memory_bytes for phase in prediction.phases if phase.name != "train"]
        overhead = max([overhead, *(needed - largest for needed in others)])
    if trials:  # which ran in one process of autotune's executor
        alone = cost.single_process().predict(best.candidate)
        overhead += prediction.allocated_memory_bytes - alone.allocated_memory_bytes
    data_bytes = held_data_bytes(cost, workload, job, best.candidate.precision)
    on_host = shares_host_memory(cost.hardware.device.memory_kind)
    num_images = sum(bucket.num_items for bucket in workload.buckets)
    shown = {"num_previews": job.num_previews, "num_validations": job.num_validations}
    around = job_time(cost, prediction, num_steps=0, num_images=num_images, **shown)
    return Expected(
        evidence="measured" if trials else "predicted",
        step_seconds=best.step_seconds,
        images_per_second=workload.effective_batch_size / best.step_seconds,
        peak_memory_bytes=peak,
        process_memory_bytes=max(0, overhead) + kept + (data_bytes if on_host else 0),
        phases=phases,
        host_memory_bytes=None if on_host else max(host, prediction.host_memory_bytes) + data_bytes,
        time_uncertainty=None if trials else prediction.stated_time_uncertainty,
        memory_uncertainty=None if trials else prediction.memory_uncertainty,
        other_seconds=round(around.total_seconds, 3),
        price_per_hour=price_per_hour,
    )


def held_data_bytes(cost: CostModel, workload: Workload, job: Job, precision: str) -> int:
    """Count what a run holds of its data on the host, captions at their mean length."""
    held = 0
    element = encoder_element_bytes(precision) if job.cache == "memory" else 0
    for bucket in workload.buckets:
        shapes = cost.family.sample_shapes(
            cost.model.config, bucket, mean_text_tokens(workload), workload.num_control_images
        )
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        texts = sum(size for name, size in sizes.items() if "prompt" in name)
        images = sum(sizes.values()) - texts
        encoded = images * (1 + job.flip) + texts * max(1, job.shuffle_tags)
        mask = math.prod(shapes["latents"][-2:]) if job.loss_mask != "none" else 0
        held += bucket.num_items * (mask + element * encoded)
    return held


def build_forecast(
    predictions: Sequence[Prediction],
    best: Score,
    budget_bytes: int,
    step_time: StepTime,
    first_predictions: Iterable[Prediction],
) -> Forecast:
    """Choose what a plan keeps of predictions; step time and first ones are uncorrected."""
    settings = best.candidate

    def row_of(prediction: Prediction) -> Alternative:
        return Alternative(
            changes=prediction.candidate.differences(settings),
            step_seconds=_rounded(prediction.step_seconds),
            step_memory_bytes=round(_rounded(prediction.allocated_memory_bytes)),
            run_memory_bytes=round(_rounded(prediction.run_memory_bytes)),
        )

    rows = list(map(row_of, predictions))
    fits = [each.run_memory_bytes <= budget_bytes for each in predictions]
    fitting = list(compress(rows, fits))
    beyond = list(compress(rows, map(operator.not_, fits)))
    at = next(number for number, row in enumerate(rows) if not row.changes)
    tried = {_key(each): each for each in map(row_of, first_predictions)}
    kept = [
        rows[at],
        *(row for row in rows if _key(row) in tried),
        *_best_by_value(rows, fitting, dict(settings)),
        *_spread(_pareto_front(fitting), MAX_FRONT),
        *_nearest_beyond(beyond, rows[at]),
    ]
    chosen = {_key(row): row for row in kept}
    rest = sorted((row for row in rows if _key(row) not in chosen), key=_seconds)
    chosen |= {_key(row): row for row in _spread(rest, MAX_ROWS - len(chosen))}
    return Forecast(
        num_candidates=len(rows),
        num_fitting=len(fitting),
        step_time=step_time.changed(**{name: _rounded(value) for name, value in step_time}),
        phases=tuple(
            PhaseForecast(name=phase.name, run_memory_bytes=round(_rounded(phase.run_memory_bytes)))
            for phase in predictions[at].phases
        ),
        alternatives=tuple((chosen | tried).values()),
    )


def _key(row: Alternative) -> tuple[tuple[str, Choice], ...]:
    return tuple(row.changes.items())


def _best_by_value(
    rows: Sequence[Alternative], fitting: Sequence[Alternative], settings: Mapping[str, Choice]
) -> list[Alternative]:
    found = []
    for knob in KNOBS:
        own = settings[knob.name]
        fastest, smallest = (
            _best_of(some, key, knob.name, own)
            for some, key in ((fitting, _seconds), (rows, _run_bytes))
        )
        values = list(smallest)
        if knob.is_composed:
            values = [*nearest_numbers(values, own)]
        found += [fastest.get(value) or smallest[value] for value in values]
    return found


def _best_of(
    rows: Sequence[Alternative], key: Callable[[Alternative], float], knob: str, own: Choice
) -> dict[Choice, Alternative]:
    best: dict[Choice, Alternative] = {}
    for row in sorted(rows, key=key):
        best.setdefault(row.changes.get(knob, own), row)
    return best


def _pareto_front(rows: Sequence[Alternative]) -> list[Alternative]:
    front: list[Alternative] = []
    for row in sorted(rows, key=lambda row: (row.step_seconds, row.run_memory_bytes)):
        if not front or row.run_memory_bytes < front[-1].run_memory_bytes:
            front.append(row)
    return front


def _nearest_beyond(beyond: Sequence[Alternative], chosen: Alternative) -> list[Alternative]:
    ordered = sorted(beyond, key=_run_bytes)
    faster = [row for row in ordered if row.step_seconds < chosen.step_seconds]
    nearest = [*faster[:2], *ordered[:2]]
    return nearest + _spread(ordered, MAX_BEYOND - len(nearest))


def _spread(rows: Sequence[Alternative], number: int) -> list[Alternative]:
    if number >= len(rows):
        return list(rows)
    if number < 2:
        return list(rows[: max(0, number)])
    return [rows[round(at * (len(rows) - 1) / (number - 1))] for at in range(number)]


def _rounded(value: float) -> float:
    return float(f"{float(f'{value:.{EXACT_DIGITS}g}'):.{DIGITS}g}")
