"""Tasks for `search.py`: complete truths to search in. Measured tables, and machines simulated in
another form.

A simulated machine starts from the cost model's own predictions for a published model on a GPU of
the catalog, and bends them in ways that the search's model cannot express: factors of pairs of
choices, micro-batches that saturate, recomputation that costs more than its share, a slow stretch
before the memory wall, and 3% noise.
"""

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from autotune.cost.calibration import PriorResiduals
from autotune.cost.predict import CostModel
from autotune.knobs.knob import TuningContext
from autotune.machine.probe import hardware_named
from autotune.models.registry import FAMILIES
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import BLOCK_COUNTS, Candidate, Choice, TrialResult
from autotune.plan.hardware import HardwareProfile
from autotune.plan.job import ModelRef
from autotune.plan.prediction import Prediction
from autotune.plan.workload import Bucket, Workload
from autotune.search.space import SearchSpace, build_search_space, expand_block_counts

TABLES = Path(__file__).parent / "results" / "tables"
DEVELOPMENT_TABLES = ("flux1-dev-128",)
"""Constants of the search may be chosen on these and on simulated machines of DEVELOPMENT_BASES,
never on the rest."""

Prior = Literal["good", "bad"]
BIAS: Mapping[Prior, tuple[float, float]] = {"good": (0.10, 0.03), "bad": (0.35, 0.25)}
"""One sigma of the logarithm by which the prior is wrong about speed and about memory."""

DEVELOPMENT_BASES = (("flux1-dev", "nvidia-rtx-3090"), ("qwen-image", "nvidia-l40s"))
BASES = (
    ("qwen-image", "nvidia-h100-sxm"),
    ("flux1-dev", "nvidia-rtx-4090"),
    ("kandinsky5-image-lite", "nvidia-rtx-4090"),
    ("flux1-dev", "nvidia-a100-80gb"),
    ("qwen-image", "nvidia-a100-80gb"),
    ("kandinsky5-image-lite", "nvidia-l40s"),
)


@dataclass(frozen=True)
class StepMemoryModel:
    """A cost model that counts steps alone, as tables do: of models as small as theirs the other
    phases need more."""

    cost: CostModel

    def predict(self, candidate: Candidate) -> Prediction:
        whole = self.cost.predict(candidate)
        step_bytes = whole.allocated_memory_bytes
        step = whole.training.changed(run_memory_bytes=step_bytes)
        return whole.changed(run_memory_bytes=step_bytes, phases=(step,))

    def with_calibration(
        self, trials: Sequence[TrialResult], priors: Sequence[PriorResiduals] = ()
    ) -> "StepMemoryModel":
        return StepMemoryModel(self.cost.with_calibration(trials, priors))

    def as_trials_run(self) -> "StepMemoryModel":
        return StepMemoryModel(self.cost.as_trials_run())


@dataclass(frozen=True)
class Task:
    """A space, what is believed about it, and all that is true of it."""

    name: str
    measured: bool
    prior: Prior | None
    space: SearchSpace
    cost: Any
    budget_bytes: int
    truth: Mapping[Candidate, TrialResult]
    """What a trial of each candidate tells, with the noise of one measurement."""
    seconds: Mapping[Candidate, float]
    """True step seconds of those that run, as far as they are known: the luck of a measurement
    is no speed."""

    @property
    def best_seconds(self) -> float:
        return min(self.seconds.values())

    @cached_property
    def _by_setting(self) -> dict[tuple[Choice, ...], list[Candidate]]:
        """Candidates by the knobs that are no numbers of blocks."""
        found: dict[tuple[Choice, ...], list[Candidate]] = {}
        for candidate in self.space.candidates:
            found.setdefault(_setting(candidate), []).append(candidate)
        return found

    def nearest(self, values: Mapping[str, Any]) -> Candidate:
        """The candidate of the space with these values, or the nearest numbers of blocks."""
        wanted = self.space.candidates[0].changed(**values)
        alike = self._by_setting.get(_setting(wanted), self.space.candidates)
        return min(
            alike,
            key=lambda one: sum(abs(getattr(one, n) - getattr(wanted, n)) for n in BLOCK_COUNTS),
        )

    def chosen_seconds(self, results: Sequence[TrialResult]) -> float:
        """True step seconds of the fastest of these trials; infinite if none ran."""
        ran = [result for result in results if result.outcome == "ok"]
        if not ran:
            return math.inf
        return self.seconds[
            min(ran, key=lambda result: result.median_step_seconds or math.inf).candidate
        ]


def _setting(candidate: Candidate) -> tuple[Choice, ...]:
    return tuple(value for name, value in candidate if name not in BLOCK_COUNTS)


def _seconds(truth: Mapping[Candidate, TrialResult]) -> dict[Candidate, float]:
    """Of a table, whose measurements are the truth."""
    return {
        c: result.median_step_seconds or math.inf
        for c, result in truth.items()
        if result.outcome == "ok"
    }


def table_tasks(*, development: bool) -> list[Task]:
    paths = sorted(
        path for path in TABLES.glob("*.jsonl") if (path.stem in DEVELOPMENT_TABLES) == development
    )
    return [_table_task(path) for path in paths]


CAPS = (0.2, 0.4, 0.6, 0.8)
"""Shares of the configurations that fit."""


def merged(trials: Sequence[TrialResult]) -> list[TrialResult]:
    """One trial of each candidate, with the steps of all its measurements."""
    found: dict[Candidate, TrialResult] = {}
    for trial in trials:
        known = found.get(trial.candidate)
        both = (*known.step_seconds, *trial.step_seconds) if known else trial.step_seconds
        found[trial.candidate] = trial.changed(step_seconds=both)
    return list(found.values())


def cap_bytes(trials: Sequence[TrialResult], share: float) -> int:
    """What that share of the trials fits in."""
    peaks = sorted(trial.peak_memory_bytes or 0 for trial in trials)
    return peaks[round(share * (len(peaks) - 1))]


def capped_tasks(*, development: bool, measured: bool) -> list[Task]:
    """The tables again, each with so little memory that only some of its configurations fit.

    `measured`: a trial tells how far beyond the cap it was, as on a CPU; on a GPU it only ends.
    """
    return [
        _capped(task, share, measured)
        for task in table_tasks(development=development)
        for share in CAPS
    ]


def _capped(task: Task, share: float, measured: bool) -> Task:
    budget = cap_bytes(tuple(task.truth.values()), share)
    known = {} if measured else {"step_seconds": (), "peak_memory_bytes": None}
    truth = {
        candidate: result
        if (result.peak_memory_bytes or 0) <= budget
        else result.changed(outcome="oom", message="more than may be taken", **known)
        for candidate, result in task.truth.items()
    }
    name = f"{task.name}, {share:.0%} fit, {'measured' if measured else 'ended'}"
    return replace(task, name=name, budget_bytes=budget, truth=truth, seconds=_seconds(truth))


def measured_once() -> list[float]:
    """Regrets of the fastest by its first measurement alone, in each reporting table under each
    cap and without."""
    found = []
    for path in sorted(TABLES.glob("*.jsonl")):
        if path.stem in DEVELOPMENT_TABLES:
            continue
        trials = [
            TrialResult.model_validate_json(line) for line in path.read_text().splitlines()[1:]
        ]
        first = {trial.candidate: trial for trial in reversed(trials)}
        truth = merged(trials)
        for share in (*CAPS, 1.0):
            limit = cap_bytes(truth, share)
            fitting = _seconds(
                {one.candidate: one for one in truth if (one.peak_memory_bytes or 0) <= limit}
            )
            chosen = min(
                fitting, key=lambda candidate: first[candidate].median_step_seconds or math.inf
            )
            found.append(fitting[chosen] / min(fitting.values()) - 1)
    return found


@cache
def _table_task(path: Path) -> Task:
    first, *lines = path.read_text().splitlines()
    head = json.loads(first)
    hardware = HardwareProfile.model_validate_json(json.dumps(head["hardware"]))
    workload = Workload.model_validate_json(json.dumps(head["workload"]))
    trials = merged([TrialResult.model_validate_json(line) for line in lines])
    candidates = tuple(trial.candidate for trial in trials)
    cost = StepMemoryModel(
        CostModel.build(hardware, workload, FAMILIES[head["family"]], head["config"])
    )
    choices = {name: _values(candidates, name) for name in Candidate.model_fields}
    space = SearchSpace(candidates, choices, {}, {})
    truth = {trial.candidate: trial for trial in trials}
    return Task(
        path.stem, True, None, space, cost, hardware.device.budget_bytes, truth, _seconds(truth)
    )


def _values(candidates: tuple[Candidate, ...], knob: str) -> tuple[Choice, ...]:
    return tuple(dict.fromkeys(getattr(candidate, knob) for candidate in candidates))


def simulated_tasks(prior: Prior, *, development: bool, seeds: range) -> list[Task]:
    bases = DEVELOPMENT_BASES if development else BASES
    return [_simulated(family, gpu, prior, seed) for family, gpu in bases for seed in seeds]


@cache
def _base(family: str, gpu: str) -> tuple[SearchSpace, CostModel, HardwareProfile]:
    hardware, model = hardware_named(gpu), resolve_model(ModelRef.of(family))
    workload = Workload(
        model=model.spec,
        resolution_px=512,
        buckets=(Bucket(width_px=512, height_px=512, num_frames=1, num_items=20),),
        max_text_tokens=128,
        text_padding="exact",
        rank=16,
        lora_alpha=16.0,
        targets="attention",
        effective_batch_size=8,
        quality="high",
    )
    cost = CostModel.build(hardware, workload, model.family, model.config)
    return (
        expand_block_counts(
            build_search_space(TuningContext(hardware, model.family, workload)), cost
        ),
        cost,
        hardware,
    )


def _simulated(family: str, gpu: str, prior: Prior, seed: int) -> Task:
    space, cost, hardware = _base(family, gpu)
    rng = random.Random(f"{family} {gpu} {prior} {seed}")
    speed, memory = BIAS[prior]
    bend = _Bend(rng, speed, memory, wall_bytes=hardware.device.budget_bytes)
    truth, seconds = {}, {}
    for candidate in dict.fromkeys(
        c for one in space.candidates for c in (one, space.without_rules(one))
    ):
        true_seconds, truth[candidate] = bend.result(cost.predict(candidate))
        if truth[candidate].outcome == "ok":
            seconds[candidate] = true_seconds
    name = f"{family} {gpu} {prior} {seed}"
    if not seconds:
        return _simulated(family, gpu, prior, seed + 1000)
    return Task(name, False, prior, space, cost, hardware.device.budget_bytes, truth, seconds)


class _Bend:
    """How a hidden machine differs from what the cost model says of it."""

    def __init__(self, rng: random.Random, speed: float, memory: float, wall_bytes: int) -> None:
        self.rng, self.speed, self.wall_bytes = rng, speed, wall_bytes
        self.factors: dict[tuple[object, ...], float] = {}
        self.offset = rng.gauss(0, speed)
        self.memory_offset = rng.gauss(0, memory)
        self.saturation = rng.uniform(0.0, 0.25)
        self.recompute = rng.uniform(-0.2, 0.4) * speed
        self.cliff = rng.uniform(1.0, 6.0)

    def factor(self, sigma: float, *key: object) -> float:
        """The same for the same key."""
        return self.factors.setdefault(key, self.rng.gauss(0, sigma))

    def result(self, predicted: Prediction) -> tuple[float, TrialResult]:
        """True step seconds, and what a trial tells."""
        c, blocks = predicted.candidate, predicted.candidate.recomputed_blocks
        pairs = self.factor(self.speed / 3, c.quantization, c.attention)
        pairs += self.factor(self.speed / 4, c.quantization, c.micro_batch_size > 1)
        pairs += self.factor(self.speed / 6, c.attention, c.micro_batch_size)
        alone = self.factor(self.speed / 2, c.quantization) + self.factor(
            self.speed / 2, c.attention
        )
        alone += self.factor(self.speed / 3, "norm_rope", c.norm_rope)
        alone += self.factor(self.speed / 3, "modulation", c.modulation)
        alone += self.factor(self.speed / 3, "swap") * min(1.0, c.swapped_blocks / 20)
        log = self.offset + alone + pairs + self.recompute * math.sqrt(blocks / 60)
        log += self.saturation * (1 - c.micro_batch_size**-0.5)
        peak = predicted.allocated_memory_bytes
        besides = predicted.run_memory_bytes - peak
        weights = predicted.training.breakdown.weight_bytes
        factor = math.exp(self.memory_offset + self.factor(0.01, "memory", c.quantization))
        bent = max(weights, peak * factor)
        used = bent + besides
        full = used / self.wall_bytes
        log += max(0.0, full - 0.93) * self.cliff  # the allocator frees and asks again
        seconds = predicted.step_seconds * math.exp(log)
        took = seconds * math.exp(self.rng.gauss(0, 0.03))
        if full > 1:
            return seconds, TrialResult(candidate=c, outcome="oom", message="simulated")
        return seconds, TrialResult(
            candidate=c, outcome="ok", step_seconds=(took,) * 3, peak_memory_bytes=int(bent)
        )
