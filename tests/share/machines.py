"""Machines that answer trials as the cost model says, bent by factors it cannot know; and
planning on them."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache
from pathlib import Path

from autotune.cost.predict import CostModel
from autotune.events import Event, Notice, RecordsMatched
from autotune.plan.candidate import Candidate, TrialResult
from autotune.plan.hardware import HardwareProfile
from autotune.plan.plan import TrainingPlan
from autotune.plan.request import PlanRequest
from autotune.search.planner import make_plan
from autotune.search.problem import PlannerBackend, PlanningProblem
from autotune.share.record import Record, build_record
from autotune.share.store import Store
from autotune.share.warm_start import find_matches
from autotune.system.version import __version__
from tests import builders
from tests.builders import GIB, trial
from tests.search.machines import request, surroundings
from tests.share.examples import machine, rate

QUESTION = request()
CAPABILITIES = (
    "attention.native",
    "attention._native_cudnn",
    "precision.bf16",
    "quantization.torchao-int8",
)
RATES = (
    rate("memory.bandwidth", 3e12), rate("matmul.bf16.4096x3072x3072", 6e14),
    *builders.attention_rates(CAPABILITIES)
)  # fmt: skip
H100 = {
    "name": "NVIDIA H100 80GB HBM3", "compute_capability": (9, 0), "total_memory_bytes": 80 * GIB,
    "budget_bytes": 78 * GIB, "power_limit_watts": 700.0, "rates": RATES,
}  # fmt: skip


def gpu(**changes: object) -> HardwareProfile:
    """An H100 on which everything that trains is open."""
    capabilities = tuple(
        machine().capabilities[0].model_copy(update={"name": name}) for name in CAPABILITIES
    )
    return machine(**{**H100, "capabilities": capabilities, **changes})


@cache
def case_on_gpu() -> PlanningProblem:
    return PlanningProblem.build(QUESTION, gpu(), surroundings())


@dataclass
class Simulated:
    """A machine whose every trial is decided beforehand. `slow`: factors of its choices; `seed`:
    of its noise."""

    hardware: HardwareProfile = field(default_factory=gpu)
    slow: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    tried: list[Candidate] = field(default_factory=list)

    @property
    def cost(self) -> CostModel:
        return case_on_gpu().cost.for_hardware(self.hardware)

    def run(self, candidate: Candidate) -> TrialResult:
        self.tried.append(candidate)
        predicted = self.cost.predict_uncalibrated(candidate)
        rng = random.Random(f"{candidate} {self.seed}")
        factor = math.prod(self.slow.get(str(choice), 1.0) for _, choice in candidate)
        seconds = predicted.step_seconds * 1.2 * factor * rng.gauss(1, 0.01)
        fits = predicted.run_memory_bytes <= self.hardware.device.budget_bytes
        return trial(
            candidate,
            seconds if fits else None,
            int(predicted.allocated_memory_bytes * 1.01),
            wall_seconds=9,
        )

    def backend(self, *stores: Store) -> PlannerBackend:
        return replace(
            surroundings(self.run),
            find_matches=lambda *problem: find_matches(*problem, stores),
            autotune_version=__version__,
        )

    @property
    def best_seconds(self) -> float:
        silent = replace(self, tried=[])
        results = [silent.run(candidate) for candidate in case_on_gpu().space.candidates]
        return min(r.median_step_seconds or math.inf for r in results)


@dataclass(frozen=True)
class Planned:
    """A plan with what was told while it was made."""

    plan: TrainingPlan
    record: Record
    doubts: tuple[str, ...]
    match: str | None

    @property
    def trials(self) -> tuple[TrialResult, ...]:
        return self.plan.frozen.trials


def planned_on(simulated: Simulated, *stores: Store, asked: PlanRequest = QUESTION) -> Planned:
    told: list[Event] = []
    made = make_plan(asked, simulated.hardware, told.append, simulated.backend(*stores))
    record = build_record(made.plan, simulated.hardware, made.residuals).changed(
        measured_on=date(2026, 3, 1)
    )
    notices = (event for event in told if isinstance(event, Notice))
    doubts = tuple(event.text for event in notices if event.topic == "records")
    kinds = (event.kind for event in told if isinstance(event, RecordsMatched))
    return Planned(made.plan, record, doubts, next(kinds, None))


def store_with(folder: Path, records: Sequence[Record]) -> Store:
    store = Store(str(folder))
    store.add(*records)
    return store
