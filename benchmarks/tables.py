"""Complete tables of real steps: every configuration of a restricted space, for benchmarks of the
search.

    taskset -c 1 python benchmarks/tables.py [NAME ...]      writes
    benchmarks/results/tables/NAME.jsonl

Mid-size models of five families with random weights. Time is the process's own on one core, so that
other work on the machine counts little. Its speed drifts all the same, by a tenth within a minute
and more: next to each timed step runs one of a reference in the same precision, and what counts is
their ratio, times the reference's median when the table began. Configurations run in an order drawn
at random; what is clearly slower than the best so far takes fewer steps. No optimum should be luck:
of those that fit under each cap on memory that `search.py` sets, the faster third runs twice, and
whatever is then among the fastest six five times. First line: machine, workload, transformer and
the reference's seconds; then one measurement per line, as it is made: a run that was cut goes on.
"""

import itertools
import json
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.system.process import silence_libraries

silence_libraries()

import torch
from configs import MID
from cost_accuracy import workload_of
from cpu_truth import RealSteps
from search_tasks import CAPS, cap_bytes, merged

from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import KNOBS
from autotune.machine.probe import cached_profile
from autotune.models.registry import FAMILIES
from autotune.plan.candidate import Candidate, Choice, TrialResult
from autotune.plan.hardware import HardwareProfile
from autotune.plan.words import label_of
from autotune.plan.workload import Workload
from autotune.search.space import build_search_space

FOLDER = Path(__file__).parent / "results" / "tables"
CLEARLY_SLOWER = 1.5
"""Times the best median: two timed steps are enough."""
NUM_FASTEST = 6
NUM_RUNS = 5
"""Of each of the fastest few."""
NUM_TIMED_STEPS = 5
"""Of one measurement, whose time is their median."""
NUM_REFERENCE_STEPS = 15
"""Whose median says what the reference takes when a table begins."""


@dataclass(frozen=True)
class Table:
    """A question whose every answer is measured."""

    family: str
    side_px: int
    batch: int
    values: Mapping[str, tuple[Choice, ...]]
    """What is combined, by knob; each other knob has the first value that the search would try."""


BASE: Mapping[str, tuple[Choice, ...]] = {
    "micro_batch_size": (1, 2),
    "quantization": ("none", "torchao-int8", "int8-rotated"),
    "precision": ("bf16", "fp32"),
    "attention": ("native", "_native_math"),
}
AHEAD: Mapping[str, tuple[Choice, ...]] = {"modulation": ("resident", "ahead")}
FUSED: Mapping[str, tuple[Choice, ...]] = {"norm_rope": ("stock", "fused")}


def blocks(whole: tuple[int, ...], selective: tuple[int, ...]) -> Mapping[str, tuple[Choice, ...]]:
    return {"checkpointed_blocks": whole, "selective_blocks": selective}


TABLES = {
    "flux1-dev-128": Table("flux1-dev", 128, 2, {**BASE, **AHEAD, **blocks((0, 3, 7), (0, 4))}),
    "qwen-image-128": Table(
        "qwen-image", 128, 2, {**BASE, **AHEAD, **blocks((0, 1, 2, 3, 4, 5), (0, 2, 5))}
    ),
    "flux2-klein-128": Table(
        "flux2-klein", 128, 2, {**BASE, **FUSED, **blocks((0, 1, 3, 4, 6, 7), (0, 3, 7))}
    ),
    "z-image-128": Table(
        "z-image", 128, 2, {**BASE, **FUSED, **blocks((0, 2, 4, 6, 8, 9), (0, 3, 9))}
    ),
    "wan-2.1-64": Table(
        "wan-2.1",
        64,
        2,
        {
            **BASE,
            "quantization": ("none", "torchao-int8", "int8-rotated", "bnb-nf4"),
            **blocks((0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 5)),
        },
    ),
}


def workload_for(table: Table) -> Workload:
    usual = workload_of(table.family)
    size = {"width_px": table.side_px, "height_px": table.side_px}
    return usual.changed(
        resolution_px=table.side_px,
        buckets=tuple(bucket.changed(**size) for bucket in usual.buckets),
        effective_batch_size=table.batch,
        quality="compact",  # with which products in 8 bits may be searched
    )


def configurations(table: Table, hardware: HardwareProfile, workload: Workload) -> list[Candidate]:
    """All combinations that do not conflict and that leave the last block alone, in an order
    drawn at random."""
    context = TuningContext(hardware, FAMILIES[table.family], workload)
    usual = build_search_space(context).candidates[0]
    rows = itertools.product(*table.values.values())
    combined = [usual.changed(**dict(zip(table.values, row, strict=True))) for row in rows]
    kept = [
        one
        for one in combined
        if one.recomputed_blocks < workload.model.num_blocks
        and not any(knob.why_not(one, context) for knob in KNOBS)
    ]
    random.Random(0).shuffle(kept)
    return kept


@dataclass(frozen=True)
class Reference:
    """Steps that run beside those that are measured, so that a slow minute of the machine meets
    both."""

    steps: RealSteps
    seconds: float
    """What one takes: the unit of the table."""

    def timed(self) -> float:
        """Seconds of one step now, relative to its usual ones."""
        return self.steps.timed()[0] / self.seconds


class Bench:
    """Measures configurations of one table."""

    def __init__(
        self, table: Table, workload: Workload, reference_seconds: Mapping[str, float]
    ) -> None:
        """`reference_seconds`, by precision: what an earlier part of the table was measured by,
        if there is one."""
        self.table, self.workload = table, workload
        self.references: dict[str, Reference] = {}
        for precision in table.values["precision"]:
            steps = self._steps(
                Candidate(micro_batch_size=1, checkpointed_blocks=0, precision=str(precision))
            )
            usual = statistics.median(steps.timed()[0] for _ in range(NUM_REFERENCE_STEPS))
            self.references[str(precision)] = Reference(
                steps, reference_seconds.get(str(precision), usual)
            )

    def _steps(self, candidate: Candidate) -> RealSteps:
        return RealSteps(
            FAMILIES[self.table.family], MID[self.table.family], self.workload, candidate
        )

    def measured(
        self, candidate: Candidate, best_seconds: float, known: TrialResult | None
    ) -> TrialResult:
        """One measurement; memory, which does not vary, only if `known`, an earlier one, does
        not tell it."""
        steps, reference = self._steps(candidate), self.references[candidate.precision]
        steps.take()
        if known:
            steps.take()
            peak_bytes = known.peak_memory_bytes
        else:
            peak_bytes = steps.profiled()
            peak_bytes += steps.resident_bytes()
        seconds: list[float] = []
        before = reference.timed()
        for number in range(NUM_TIMED_STEPS):
            own, _ = steps.timed()
            after = reference.timed()
            seconds.append(round(own / ((before + after) / 2), 5))
            before = after
            if number and min(seconds) > CLEARLY_SLOWER * best_seconds:
                break
        return TrialResult(
            candidate=candidate,
            outcome="ok",
            step_seconds=tuple(seconds),
            peak_memory_bytes=peak_bytes,
        )


def measure(name: str, table: Table, hardware: HardwareProfile) -> None:
    """Measure what the file lacks, a line each."""
    path, workload = FOLDER / f"{name}.jsonl", workload_for(table)
    known_head = json.loads(path.open().readline()) if path.exists() else {}
    bench = Bench(table, workload, known_head.get("reference_seconds", {}))
    if not path.exists():
        asked = {
            "hardware": hardware.model_dump(mode="json"),
            "workload": workload.model_dump(mode="json"),
        }
        told = {
            "reference_seconds": {
                precision: one.seconds for precision, one in bench.references.items()
            }
        }
        path.write_text(
            json.dumps({**asked, "family": table.family, "config": MID[table.family], **told})
            + "\n"
        )
    trials = [TrialResult.model_validate_json(line) for line in path.read_text().splitlines()[1:]]

    def add(candidates: Sequence[Candidate], count: int) -> None:
        """Measure each until it has `count` measurements."""
        for candidate in candidates:
            known = [trial for trial in trials if trial.candidate == candidate]
            if len(known) >= count:
                continue
            best = min(
                (trial.median_step_seconds or math.inf for trial in trials), default=math.inf
            )
            trials.append(bench.measured(candidate, best, known[0] if known else None))
            with path.open("a") as file:
                file.write(trials[-1].model_dump_json(exclude_defaults=True) + "\n")
            print(
                name,
                len(trials),
                trials[-1].median_step_seconds,
                label_of(dict(candidate)),
                flush=True,
            )

    candidates = configurations(table, hardware, workload)
    add(candidates, 1)
    faster = fastest_under_caps(merged(trials[: len(candidates)]), lambda number: number // 3)
    add([candidate for candidate in candidates if candidate in faster], 2)
    while True:
        runs = Counter(trial.candidate for trial in trials)
        fastest = fastest_under_caps(merged(trials), lambda number: NUM_FASTEST)
        doubtful = [
            candidate
            for candidate in candidates
            if candidate in fastest and runs[candidate] < NUM_RUNS
        ]
        if not doubtful:
            return
        for candidate in doubtful:
            add([candidate], runs[candidate] + 1)


def fastest_under_caps(
    trials: Sequence[TrialResult], count: Callable[[int], int]
) -> set[Candidate]:
    """The fastest of those that fit under each cap, and without: `count` of how many fit."""
    found: set[Candidate] = set()
    for share in (*CAPS, 1.0):
        limit = cap_bytes(trials, share)
        fitting = [trial for trial in trials if (trial.peak_memory_bytes or 0) <= limit]
        fitting.sort(key=lambda trial: trial.median_step_seconds or math.inf)
        found.update(trial.candidate for trial in fitting[: count(len(fitting))])
    return found


def main() -> None:
    torch.set_num_threads(1)
    hardware = cached_profile()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or TABLES:
        measure(name, TABLES[name], hardware)


if __name__ == "__main__":
    main()
