"""Our search against Optuna's samplers, on tasks whose every answer is known.

    python benchmarks/search.py [--development] [--output FILE]

Regret: how much slower the one that was measured fastest so far truly is than the best there is,
after 4, 8 and 12 different trials. Trials that fail count as trials; repeats of a configuration,
which Optuna's samplers make, are free. Optuna's samplers draw each knob by itself: what they draw
stands for the candidate that is nearest to it. Only `ours, until it stops` ends before 12 by
itself; its best so far then stands for later counts. On simulated machines, ours alone: the regret
of the plan that is frozen for a run of 625 steps, after as many trials as pay, and after eight.
"""

import argparse
import json
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autotune.system.process import silence_libraries

silence_libraries()

import numpy as np
import optuna
from search_tasks import (
    LOAD_RATE,
    LOAD_SECONDS,
    NUM_STEPS,
    Task,
    capped_tasks,
    measured_once,
    simulated_tasks,
    table_tasks,
)

from autotune.plan.candidate import BLOCK_COUNTS, Candidate, TrialResult
from autotune.search.next import ResidualSearch, SearchLimits, best_seconds, search_cost_seconds
from autotune.search.study import run_search
from autotune.search.trials import CLEARLY_SLOWER
from autotune.search.winner import choose_winner, confirm_winner, score_finalists

AFTER = (4, 8, 12)
NEAR = 0.05
CAP = 2.0
"""Regret of a search that has found nothing that runs."""
SEEDS = 3
"""Runs of a sampler that draws at random; ours does not."""


def ours(task: Task, seed: int) -> list[TrialResult]:
    sampler = ResidualSearch(task.space, task.cost, task.budget_bytes)
    results: list[TrialResult] = []
    while len(results) < max(AFTER) and (candidate := sampler.next_candidate(results)):
        results.append(task.truth[candidate])
    return results


def ours_stopping(task: Task, seed: int) -> list[TrialResult]:
    sampler = ResidualSearch(task.space, task.cost, task.budget_bytes)
    limits = SearchLimits(max_trials=max(AFTER), max_seconds=math.inf)
    return list(run_search(sampler, task.truth.__getitem__, limits, lambda result: None))


def by_optuna(
    make: Callable[[int], optuna.samplers.BaseSampler],
) -> Callable[[Task, int], list[TrialResult]]:
    def search(task: Task, seed: int) -> list[TrialResult]:
        study = optuna.create_study(sampler=make(seed))
        seen: dict[Candidate, TrialResult] = {}
        for _ in range(8 * max(AFTER)):
            trial = study.ask()
            result = task.truth[task.nearest(_draw(trial, task.space.choices))]
            trial.set_constraint("runs", 0.0 if result.outcome == "ok" else 1.0)
            study.tell(trial, result.median_step_seconds or 1e9)
            seen.setdefault(result.candidate, result)
            if len(seen) == max(AFTER):
                break
        return list(seen.values())

    return search


def _draw(trial: optuna.Trial, choices: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """A value of each knob that has several; numbers of blocks are drawn as numbers."""
    several = {name: values for name, values in choices.items() if len(values) > 1}
    return {
        name: trial.suggest_int(name, min(values), max(values))
        if name in BLOCK_COUNTS
        else trial.suggest_categorical(name, list(values))
        for name, values in several.items()
    }


SEARCHES = {
    "ours": (ours, 1),
    "ours, until it stops": (ours_stopping, 1),
    "gp": (by_optuna(lambda seed: optuna.samplers.GPSampler(seed=seed, n_startup_trials=3)), SEEDS),
    "tpe": (
        by_optuna(lambda seed: optuna.samplers.TPESampler(seed=seed, n_startup_trials=3)),
        SEEDS,
    ),
    "random": (by_optuna(lambda seed: optuna.samplers.RandomSampler(seed=seed)), SEEDS),
}


def regrets(task: Task, results: list[TrialResult]) -> list[float]:
    found = []
    for count in AFTER:
        found.append(min(CAP, task.chosen_seconds(results[:count]) / task.best_seconds - 1))
    return found


ALL_CAPS = "tables, all of these"


def group_of(task: Task) -> str:
    _, _, cap = task.name.partition(", ")
    return f"tables, {cap or 'all fit'}"


def table(rows: list[dict[str, Any]]) -> Iterable[str]:
    yield (
        "| tasks | search | n | mean regret after 4 | 8 | 12 | within 5% after 4 | 8 | 12 | "
        "failed "
        "of 8 | trials |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    tables = [row for row in rows if row["group"].startswith("tables")]
    for group in (*dict.fromkeys(row["group"] for row in tables), ALL_CAPS):
        for name in SEARCHES:
            among = tables if group == ALL_CAPS else [row for row in rows if row["group"] == group]
            mine = [row for row in among if row["search"] == name]
            if not mine:
                continue
            means = [
                f"{statistics.mean(row['regrets'][i] for row in mine):.1%}"
                for i in range(len(AFTER))
            ]
            near = [
                f"{statistics.mean(row['regrets'][i] <= NEAR for row in mine):.0%}"
                for i in range(len(AFTER))
            ]
            failed = statistics.mean(row["failed"] for row in mine)
            trials = statistics.mean(row["trials"] for row in mine)
            cells = (group, name, str(len(mine)), *means, *near, f"{failed:.1f}", f"{trials:.1f}")
            yield f"| {' | '.join(cells)} |"


def planned(task: Task) -> dict[str, Any]:
    """Plans of a simulated machine: when the search stops by itself, and after eight trials."""
    search = ResidualSearch(task.space, task.cost, task.budget_bytes)
    limits, results, stopped = SearchLimits(8, num_steps=NUM_STEPS), list[TrialResult](), None
    loaded: tuple[object, ...] | None = None
    while len(results) < limits.max_trials:
        if stopped is None and search.is_over(limits, results):
            stopped = len(results)
        if (chosen := search.next_candidate(results)) is None:
            break
        result, at = task.truth[chosen], task.cost.sheet.index[chosen]
        key = chosen.quantization, chosen.modulation
        load = LOAD_SECONDS + task.cost.sheet.weights[at] / LOAD_RATE
        best, seconds = best_seconds(results), result.median_step_seconds
        steps = 6 if seconds and seconds < CLEARLY_SLOWER * best else 5  # warm-ups and timed ones
        took = steps * seconds if seconds else task.cost.sheet.seconds[at]
        took += load if key != loaded else 0.0
        results.append(result.changed(wall_seconds=float(took)))
        loaded = key if seconds else None
    row: dict[str, Any] = {"task": task.name}
    for name, trials in (("planned", results[:stopped]), ("eight", results)):
        share = search_cost_seconds(trials) / (NUM_STEPS * task.best_seconds)
        row[name] = {"regret": _frozen(task, trials), "trials": len(trials), "share_of_run": share}
    return row


def _frozen(task: Task, results: list[TrialResult]) -> float:
    """Regret of what is frozen when winners were confirmed; no plan counts as `CAP`."""
    rng = np.random.default_rng(0)

    def rehearse(candidate: Candidate) -> TrialResult:
        seconds = task.seconds[candidate] * math.exp(rng.normal(0, 0.01))
        return task.truth[candidate].changed(step_seconds=(seconds,), confirms=True)

    problem: Any = SimpleNamespace(workload=SimpleNamespace(objective="throughput"))
    trials = confirm_winner(tuple(results), problem, rehearse)
    best = choose_winner(score_finalists(trials), "throughput")
    return task.seconds[best.candidate] / task.best_seconds - 1 if best else CAP


def simulated_table(rows: list[dict[str, Any]]) -> Iterable[str]:
    yield "| simulated | n | within 5% | 10% | mean regret | without a plan | trials | of the run |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in ("planned", "eight"):
        mine = [row[name] for row in rows]
        regret, trials, share = (
            [each[key] for each in mine] for key in ("regret", "trials", "share_of_run")
        )
        near = [f"{statistics.mean(each <= limit for each in regret):.1%}" for limit in (0.05, 0.1)]
        cells = (name, str(len(mine)), *near, f"{statistics.mean(regret):.1%}")
        last = f"{statistics.mean(trials):.1f}", f"{statistics.mean(share):.1%}"
        yield f"| {' | '.join((*cells, str(regret.count(CAP)), *last))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--development", action="store_true", help="the tasks that constants may be chosen on"
    )
    parser.add_argument("--only", nargs="*", default=list(SEARCHES), choices=list(SEARCHES))
    parser.add_argument(
        "--seeds", type=int, default=10, help="simulated machines per model and GPU"
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    tasks = table_tasks(development=options.development)
    for measured in (True, False):
        tasks += capped_tasks(development=options.development, measured=measured)
    rows = []
    for task in tasks:
        for name in options.only:
            search, seeds = SEARCHES[name]
            for seed in range(seeds):
                results = search(task, seed)
                failed = sum(result.outcome != "ok" for result in results[:8])
                row = {
                    "task": task.name,
                    "group": group_of(task),
                    "search": name,
                    "seed": seed,
                    "failed": failed,
                }
                rows.append({**row, "regrets": regrets(task, results), "trials": len(results)})
                if options.verbose:
                    print(rows[-1], flush=True)
    print("\n".join(table(rows)))
    machines = simulated_tasks(development=options.development, seeds=range(options.seeds))
    simulated = list(map(planned, machines))
    rows += simulated
    print("\n".join(simulated_table(simulated)))
    once = measured_once()
    near = sum(regret <= NEAR for regret in once)
    print(
        f"all measured once, the fastest taken: {statistics.mean(once):.1%}, {near} of {len(once)} "
        f"within {NEAR:.0%}"
    )
    if options.output:
        options.output.write_text("\n".join(map(json.dumps, rows)) + "\n")


if __name__ == "__main__":
    main()
