"""What a shared record saves: trials and seconds until a search has something within 5% of the best
there is.

    python benchmarks/sharing.py [--seeds N] [--output FILE]

On the measured tables of `tables.py`, whose every answer is known. A table's machine is alice.
Bob's is derived from it: all rates divided and all times multiplied by 0.6 or 1.6; then each weight
format, each attention backend and each micro-batch has a factor of its own, of 10% (one sigma),
that no rate shows; memory stays. Each search on bob's machine has 2% of noise of its own. Three
searches: cold; with the record of alice's search; with that of bob's own first one.
"""

import argparse
import json
import math
import random
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from autotune.runtime.quiet import silence_libraries

silence_libraries()

import optuna
from search_tasks import Task, table_tasks

from autotune.cost.predict import CostModel
from autotune.runtime.version import __version__
from autotune.schema.candidate import Candidate
from autotune.schema.hardware import HardwareProfile
from autotune.schema.plan import Expected
from autotune.schema.trial import TrialResult
from autotune.search.residual import ResidualSearch
from autotune.search.study import SearchLimits, run_search
from autotune.sharing.keys import compare, usable_trials
from autotune.sharing.query import MatchedRecord, StoreMatches
from autotune.sharing.record import Record, shareable_machine, shareable_trial
from autotune.sharing.warm_start import NO_WARM_START, WarmStart, build_warm_start

NEAR = 0.05
CHOICE_SIGMA = 0.10
NOISE = 0.02
PACES = (0.6, 1.6)
TARGETS = {"cold": 8, "a neighbor's record": 4, "the same machine's record": 1}
Run = Callable[[Candidate], TrialResult]


@dataclass(frozen=True)
class Bench:
    """A machine of which every answer is known."""

    task: Task
    cost: CostModel
    times: dict[Candidate, float]
    """Without noise; infinite where nothing runs."""

    def run(self, seed: int) -> Run:
        def run(candidate: Candidate) -> TrialResult:
            truth, rng = (
                self.task.truth[candidate],
                random.Random(f"{self.task.name} {candidate} {seed}"),
            )
            pace = self.times[candidate] / (truth.median_step_seconds or 1.0) * rng.gauss(1, NOISE)
            steps = tuple(seconds * pace for seconds in truth.step_seconds)
            wall = (truth.load_seconds or 0.0) + pace * sum(
                (*truth.warmup_seconds, *truth.step_seconds)
            )
            return TrialResult.model_validate(
                {**dict(truth), "step_seconds": steps, "wall_seconds": wall}
            )

        return run


def alice(task: Task) -> Bench:
    assert isinstance(task.cost, CostModel)
    times = {c: truth.median_step_seconds or math.inf for c, truth in task.truth.items()}
    return Bench(task, task.cost, times)


def bob(task: Task, pace: float, seed: int) -> Bench:
    known = alice(task)
    here = known.cost.hardware
    rates = tuple(
        rate.model_copy(
            update={"value": rate.value * pace if rate.unit == "s" else rate.value / pace}
        )
        for rate in here.rates
    )
    device = here.device.model_copy(update={"name": "bob's device"})
    hardware = HardwareProfile.model_validate({**dict(here), "rates": rates, "device": device})
    rng = random.Random(f"{task.name} {pace} {seed}")
    own: dict[object, float] = {}

    def factor(candidate: Candidate) -> float:
        keys = (candidate.quantization, candidate.attention, candidate.micro_batch_size)
        return pace * math.exp(sum(own.setdefault(key, rng.gauss(0, CHOICE_SIGMA)) for key in keys))

    return Bench(
        task, known.cost.for_hardware(hardware), {c: t * factor(c) for c, t in known.times.items()}
    )


def search(bench: Bench, seed: int, known: tuple[MatchedRecord, ...]) -> tuple[TrialResult, ...]:
    task, limits = bench.task, SearchLimits(max_trials=12, max_seconds=1e9)
    advice: WarmStart = NO_WARM_START
    if known:
        found = StoreMatches(known, (), ())
        advice = build_warm_start(
            found, task.space.choices, task.budget_bytes, bench.cost.workload, bench.cost
        )[1]
        assert advice.sources, "the record is not credible"
    planned = ResidualSearch(
        task.space,
        bench.cost,
        task.budget_bytes,
        priors=advice.priors,
        first=advice.first_candidates,
    )
    return run_search(
        planned, bench.run(seed), limits, lambda result: None, is_enough=advice.is_reproduced
    )


def record_of_search(bench: Bench, trials: tuple[TrialResult, ...]) -> Record:
    best = min(
        (t for t in trials if t.outcome == "ok"), key=lambda t: t.median_step_seconds or math.inf
    )
    seconds = best.median_step_seconds or 1.0
    work = bench.cost.workload
    expected = Expected(
        evidence="measured",
        step_seconds=seconds,
        images_per_second=work.effective_batch_size / seconds,
        peak_memory_bytes=best.peak_memory_bytes or 1,
        process_memory_bytes=0,
    )
    return Record(
        schema_version=2,
        autotune_version=__version__,
        measured_on=date(2026, 11, 21),
        machine=shareable_machine(bench.cost.hardware),
        workload=work,
        settings=best.candidate,
        expected=expected,
        trials=tuple(map(shareable_trial, trials)),
        search_seconds=0.0,
        calibration=tuple(bench.cost.residual(trial) for trial in trials),
    )


def known_on(bench: Bench, record: Record) -> MatchedRecord:
    here = bench.cost.hardware
    return MatchedRecord(
        record.name, record, compare(record, here, bench.cost.workload), usable_trials(record, here)
    )


def score(bench: Bench, trials: tuple[TrialResult, ...]) -> tuple[float, float, int]:
    """Trials and seconds to within 5% of the best (infinite if never), and trials made."""
    best = min(bench.times.values())
    seconds = 0.0
    for count, trial in enumerate(trials, start=1):
        seconds += trial.wall_seconds or 0.0
        if bench.times[trial.candidate] <= (1 + NEAR) * best:
            return count, seconds, len(trials)
    return math.inf, math.inf, len(trials)


def rows_of(task: Task, seeds: int) -> list[dict[str, object]]:
    rows = []
    first = alice(task)
    hers = record_of_search(first, search(first, 0, ()))
    for pace in PACES:
        for seed in range(seeds):
            bench = bob(task, pace, seed)
            cold = search(bench, 1, ())
            own = record_of_search(bench, cold)
            runs = {
                "cold": cold,
                "a neighbor's record": search(bench, 2, (known_on(bench, hers),)),
                "the same machine's record": search(bench, 3, (known_on(bench, own),)),
            }
            for name, trials in runs.items():
                to_near, seconds, made = score(bench, trials)
                row = {
                    "task": task.name,
                    "pace": pace,
                    "seed": seed,
                    "with": name,
                    "trials_made": made,
                }
                rows.append(row | {"trials": to_near, "seconds": seconds})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="bobs for each table and pace")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rows = [row for task in table_tasks(development=False) for row in rows_of(task, options.seeds)]
    print(
        "| with | searches | trials to within 5%: median | 90% | target met | seconds: median | "
        "trials made |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, target in TARGETS.items():
        mine = [row for row in rows if row["with"] == name]
        trials = sorted(float(str(row["trials"])) for row in mine)
        seconds = statistics.median(float(str(row["seconds"])) for row in mine)
        made = statistics.mean(float(str(row["trials_made"])) for row in mine)
        met = statistics.mean(count <= target for count in trials)
        p90 = trials[math.ceil(0.9 * len(trials)) - 1]
        print(
            f"| {name} | {len(mine)} | {statistics.median(trials):g} | {p90:g} | <= {target}: "
            f"{met:.0%} "
            f"| {seconds:.1f} | {made:.1f} |"
        )
    if options.output:
        options.output.write_text("\n".join(map(json.dumps, rows)) + "\n")


if __name__ == "__main__":
    main()
