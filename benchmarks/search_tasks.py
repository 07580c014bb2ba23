"""Tasks for `search.py`: complete truths to search in. Measured tables, and simulated machines.

A simulated machine starts from the cost model's own predictions for a published model on a GPU of
the catalog, and bends them in structure: see `World`.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autotune.cost.calibration import Calibration, PriorResiduals, features_of, residual_of
from autotune.cost.predict import CostModel, choice_of
from autotune.knobs.knob import TuningContext
from autotune.machine.probe import hardware_named
from autotune.models.registry import FAMILIES
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import BLOCK_COUNTS, Candidate, Choice, TrialResult
from autotune.plan.hardware import HardwareProfile
from autotune.plan.job import ModelRef
from autotune.plan.prediction import Prediction, StepTime
from autotune.plan.workload import Bucket, Workload
from autotune.search.space import SearchSpace, build_search_space, expand_block_counts

Floats = NDArray[np.float64]
Terms = tuple[tuple[str, float], ...]

TABLES = Path(__file__).parent / "results" / "tables"
DEVELOPMENT_TABLES = ("flux1-dev-128",)
"""Constants of the search may be chosen on these and on simulated machines of DEVELOPMENT_BASES,
never on the rest."""

DEVELOPMENT_BASES = (
    ("flux1-dev", "nvidia-rtx-3090"),
    ("qwen-image", "nvidia-l40s"),
    ("qwen-image", "nvidia-rtx-4060-ti-16gb"),
)
BASES = (
    ("qwen-image", "nvidia-h100-sxm"),
    ("flux1-dev", "nvidia-rtx-4090"),
    ("kandinsky5-image-lite", "nvidia-rtx-4090"),
    ("qwen-image", "nvidia-rtx-4090"),
    ("flux1-dev", "nvidia-rtx-4060-ti-16gb"),
    ("qwen-image", "nvidia-a100-80gb"),
)
NUM_STEPS = 625
"""Of the run that a simulated machine's search is for."""
THINNING = 10
"""One in so many candidates is left: its neighbors differ in a few blocks."""
LOAD_SECONDS, LOAD_RATE = 3.0, 3e9
"""Of the model, where a trial stores its weights in another way than the last."""


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

    def single_process(self) -> "StepMemoryModel":
        return StepMemoryModel(self.cost.single_process())


@dataclass(frozen=True)
class Task:
    """A space, what is believed about it, and all that is true of it."""

    name: str
    measured: bool
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
        trials = [TrialResult.model_validate_json(line) for line in lines_of(path)[1:]]
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


def lines_of(path: Path) -> list[str]:
    """A table's lines but those of int8 products, which were measured before their rows were
    rotated: no format of today takes as long."""
    head, *lines = path.read_text().splitlines()
    return [head, *(line for line in lines if '"int8-matmul"' not in line)]


@cache
def _table_task(path: Path) -> Task:
    first, *lines = lines_of(path)
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
    return Task(path.stem, True, space, cost, hardware.device.budget_bytes, truth, _seconds(truth))


def _values(candidates: tuple[Candidate, ...], knob: str) -> tuple[Choice, ...]:
    return tuple(dict.fromkeys(getattr(candidate, knob) for candidate in candidates))


def simulated_tasks(*, development: bool, seeds: range) -> list[Task]:
    bases = DEVELOPMENT_BASES if development else BASES
    return [_simulated(family, gpu, seed) for family, gpu in bases for seed in seeds]


class Phase(NamedTuple):
    name: str
    run_memory_bytes: float


class Row(NamedTuple):
    """What the search asks of a `Prediction`."""

    candidate: Candidate
    step_seconds: float
    time_uncertainty: float
    memory_uncertainty: float
    allocated_memory_bytes: float
    run_memory_bytes: float
    host_memory_bytes: int
    phases: tuple[Phase, ...]

    @property
    def training(self) -> Phase:
        return self.phases[0]


@dataclass(frozen=True, eq=False)
class Sheet:
    """First predictions of candidates, in arrays of one length."""

    candidates: tuple[Candidate, ...]
    parts: Mapping[str, Floats]
    """Seconds of a step by class, and `arriving_seconds` of all transfers of swapped blocks."""
    allocated: Floats
    besides: Floats
    """Bytes of the training step that the allocator does not count."""
    elastic: Floats
    """Bytes by which less may be allocated than predicted."""
    others: Floats
    """Bytes of the largest other phase."""
    host: list[int]
    weights: Floats
    num_blocks: int
    num_images: int
    budget_bytes: int

    @cached_property
    def seconds(self) -> Floats:
        names = ("recompute_seconds", "arriving_seconds")
        return sum((part for name, part in self.parts.items() if name not in names), np.zeros(1))

    @cached_property
    def index(self) -> dict[Candidate, int]:
        return {candidate: at for at, candidate in enumerate(self.candidates)}

    @cached_property
    def terms(self) -> list[Terms]:
        return [features_of(candidate) for candidate in self.candidates]

    @staticmethod
    def of(candidates: Sequence[Candidate], cost: CostModel) -> "Sheet":
        cost.prepare(candidates)
        predictions = [cost.predict_uncalibrated(each) for each in candidates]
        arriving = [_arriving_seconds(each, cost) for each in candidates]
        parts = {
            name: [getattr(p.step_time, name) for p in predictions]
            for name in StepTime.model_fields
        }
        steps = [p.training for p in predictions]
        return Sheet(
            tuple(candidates),
            {
                **{name: np.array(part) for name, part in parts.items()},
                "arriving_seconds": np.array(arriving),
            },
            np.array([float(p.allocated_memory_bytes) for p in predictions]),
            np.array(
                [float(step.run_memory_bytes - step.allocated_memory_bytes) for step in steps]
            ),
            np.array(
                [
                    float(s.breakdown.transient_bytes + s.breakdown.saved_activation_bytes)
                    for s in steps
                ]
            ),
            np.array(
                [
                    float(max(x.run_memory_bytes for x in p.phases if x.name != "train"))
                    for p in predictions
                ]
            ),
            [p.host_memory_bytes for p in predictions],
            np.array([float(s.breakdown.weight_bytes) for s in steps]),
            cost.workload.model.num_blocks,
            cost.workload.effective_batch_size,
            cost.budget_bytes,
        )


def _arriving_seconds(candidate: Candidate, cost: CostModel) -> float:
    choice = choice_of(candidate)
    visiting = sum(cost.tables.model_bytes(choice).block_weight_bytes[: candidate.swapped_blocks])
    accumulation = -(-cost.workload.effective_batch_size // candidate.micro_batch_size)
    return 2 * accumulation * visiting / cost.tables.rates_of(choice).host_to_device


class SheetCost:
    """The cost model of one sheet, corrected by trials: thousands of predictions at once."""

    def __init__(self, sheet: Sheet, calibration: Calibration | None = None) -> None:
        self.sheet = sheet
        self.calibration = calibration or Calibration.of((), rates_measured=False)
        self._known: dict[Terms, tuple[float, ...]] = {}

    def _corrections(self, terms: Terms, candidate: Candidate) -> tuple[float, ...]:
        if terms not in self._known:
            time, memory = self.calibration.time, self.calibration.memory
            factors = [math.exp(each.log_factor(candidate)) for each in (time, memory)]
            doubts = time.uncertainty(candidate), memory.uncertainty(candidate)
            self._known[terms] = (*factors, *doubts)
        return self._known[terms]

    def predict(self, candidate: Candidate) -> Row:
        sheet, at = self.sheet, self.sheet.index[candidate]
        factor, of_memory, time_sigma, memory_sigma = self._corrections(sheet.terms[at], candidate)
        first, others = sheet.allocated[at], sheet.others[at]
        allocated = first + max(-sheet.elastic[at], (of_memory - 1) * first)
        train = allocated + sheet.besides[at]
        return Row(
            candidate,
            factor * sheet.seconds[at],
            time_sigma,
            memory_sigma,
            allocated,
            max(train, others),
            sheet.host[at],
            (Phase("train", train), Phase("others", others)),
        )

    def with_calibration(
        self, trials: Sequence[TrialResult], priors: Sequence[PriorResiduals] = ()
    ) -> "SheetCost":
        first: Any = SheetCost(self.sheet) if self.calibration.time.index else self
        pairs = [
            (each.candidate, residual_of(each, first.predict(each.candidate))) for each in trials
        ]
        known = [(candidate, residual) for candidate, residual in pairs if residual]
        return SheetCost(self.sheet, Calibration.of(known, rates_measured=False, priors=priors))

    def single_process(self) -> "SheetCost":
        return self


@cache
def _base(family: str, gpu: str) -> tuple[SearchSpace, Sheet]:
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
    context = TuningContext(hardware, model.family, workload)
    space = expand_block_counts(build_search_space(context), cost)
    space = replace(space, candidates=space.candidates[::THINNING])
    both = (each for one in space.candidates for each in (one, space.without_rules(one)))
    return space, Sheet.of(list(dict.fromkeys(both)), cost)


def _simulated(family: str, gpu: str, seed: int) -> Task:
    space, sheet = _base(family, gpu)
    world = World(sheet, np.random.default_rng([seed, *f"{family} {gpu}".encode()]))
    runs = np.flatnonzero(world.used <= sheet.budget_bytes)
    if not len(runs):
        return _simulated(family, gpu, seed + 1000)
    seconds = {sheet.candidates[at]: float(world.seconds[at]) for at in runs}
    name, cost = f"{family} {gpu} {seed}", SheetCost(sheet)
    return Task(name, False, space, cost, sheet.budget_bytes, Trials(world), seconds)


class World:
    """A machine that differs from the cost model in structure: transfers that do not overlap, a
    floor by the host, factors of formats, backends, recomputation and the card, memory by 8%."""

    def __init__(self, sheet: Sheet, rng: np.random.Generator) -> None:
        self.sheet, parts, candidates = sheet, sheet.parts, sheet.candidates

        def by(name: str, sigma: float) -> Floats:
            values = [getattr(each, name) for each in candidates]
            factors = {value: np.exp(rng.normal(0, sigma)) for value in sorted(set(values))}
            return np.array([factors[value] for value in values])

        recomputed, swapped, micro = (
            np.array([getattr(each, name) for each in candidates])
            for name in ("recomputed_blocks", "swapped_blocks", "micro_batch_size")
        )
        products = (
            parts["matmul_seconds"]
            + parts["adapter_seconds"]
            + parts["dequantization_seconds"]
            + parts["convolution_seconds"]
        )
        moves = parts["elementwise_seconds"] + parts["optimizer_seconds"]
        before = products + moves + parts["attention_seconds"]
        device = by("quantization", 0.15) * products + np.exp(rng.normal(0, 0.1)) * moves
        device += by("attention", 0.1) * parts["attention_seconds"]
        device *= np.exp(rng.normal(0, 0.2)) * (
            1 + rng.uniform(-0.1, 0.3) * parts["recompute_seconds"] / before
        )
        overlap, rate = rng.uniform(0, 1), rng.uniform(0.5, 1)
        covered = overlap * device * swapped / sheet.num_blocks
        device += np.maximum(0.0, parts["arriving_seconds"] / rate - covered)
        launching = (1 + recomputed / sheet.num_blocks / 3) * by("quantization", 0.15) / micro
        floor = rng.uniform(0, 1.2) * sheet.seconds.min() * launching
        self.seconds = np.maximum(device, floor)
        memory = rng.uniform(0.92, 1.08) * by("quantization", 0.01)
        self.allocated = np.maximum(sheet.allocated - sheet.elastic, sheet.allocated * memory)
        self.used = np.maximum(self.allocated + sheet.besides, sheet.others)
        self.noise = np.exp(rng.normal(0, 0.02, len(candidates)))


class Trials(Mapping[Candidate, TrialResult]):
    """What a trial of each candidate tells."""

    def __init__(self, world: World) -> None:
        self.world = world

    def __getitem__(self, candidate: Candidate) -> TrialResult:
        world, at = self.world, self.world.sheet.index[candidate]
        if world.used[at] > world.sheet.budget_bytes:
            return TrialResult(candidate=candidate, outcome="oom", message="simulated")
        steps = (float(world.seconds[at] * world.noise[at]),) * 3
        peak = int(world.allocated[at])
        return TrialResult(
            candidate=candidate, outcome="ok", step_seconds=steps, peak_memory_bytes=peak
        )

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.world.sheet.candidates)

    def __len__(self) -> int:
        return len(self.world.sheet.candidates)
