"""A plan's own trials give it again, byte for byte, on any machine. After a deliberate change of
plans: `python -m tests.search.test_golden`, then read the difference and commit it."""

import json
import random
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import pytest

from autotune.cost.calibration import Posterior
from autotune.plan.candidate import Candidate
from autotune.plan.file import load_plan, plan_text
from autotune.plan.hardware import HardwareProfile
from autotune.plan.request import PlanRequest
from autotune.search.problem import PlanningProblem
from autotune.share.store import Record, build_record
from tests import builders
from tests.search.formula import by_formula
from tests.search.machines import CAPABILITIES, make_plan, matches_of, replay, surroundings

FOLDER = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Golden:
    """A request; its plan lies in FOLDER under its name, beside what the plan does not hold."""

    name: str
    request: PlanRequest
    num_blocks: int = 50
    wall_gib: float | None = None
    """Memory of a simulated machine; None where trials were measured."""
    known: bool = False
    """Whether another search has answered the request on such a machine."""

    def replayed(self):
        beside = json.loads((FOLDER / f"{self.name}.json").read_text())
        hardware, *records = (
            kind.model_validate_json(json.dumps(data))
            for kind, data in zip((HardwareProfile, Record), beside, strict=False)
        )
        plan = load_plan(FOLDER / f"{self.name}.yaml")
        with by_formula(self.num_blocks):
            again = replay(self.request, hardware, plan.frozen.trials, records, version="0.1.0")
        return plan_text(again)


def plain(family, keep, exclusions=(), **workload):
    """Knobs that are not in `keep` stay at their usual value, so that new ones change no plan."""
    settings = {"micro_batch_size": 1, "checkpointed_blocks": 0, "precision": "bf16", **keep}
    searched = ("micro_batch_size", "checkpointed_blocks", "quantization", "attention")
    pins = ((name, str(value)) for name, value in Candidate.model_validate(settings))
    return PlanRequest(
        model=family,
        pins=tuple(pin for pin in pins if pin[0] not in searched),
        exclusions=exclusions,
        num_steps=2000,
        **workload,
    )


SIMULATED = builders.hardware(*CAPABILITIES, budget_bytes=20 * 2**30, compute_capability=(9, 0))
IMAGES = plain("kandinsky5-image-lite", {}, resolution=(256, 256), effective_batch_size=2)
MEASURED = plain(
    "qwen-image",
    {"precision": "fp32"},
    (("checkpointed_blocks", "3"), ("attention", "_native_flash"), ("quantization", "torchao-fp8")),
    resolution=(112, 112),
    rank=8,
    effective_batch_size=4,
)
GOLDEN = (
    Golden("wall", IMAGES, wall_gib=14),
    Golden("known", IMAGES, wall_gib=20, known=True),
    Golden("measured", MEASURED, num_blocks=6),
)


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.name)
def test_trials_give_their_plan_again(golden, seed, monkeypatch):
    """With a seed, the last bits of logarithms, exponentials and products differ, as they do
    between CPUs."""
    if seed is not None:
        rng = random.Random(seed)

        def inexact(exact):
            return lambda *asked: exact(*asked) * (1 + rng.uniform(-1, 1) * 2**-48)

        for name in ("log_factor", "uncertainty"):
            monkeypatch.setattr(Posterior, name, inexact(getattr(Posterior, name)))
    expected = (FOLDER / f"{golden.name}.yaml").read_text()
    assert golden.replayed() == expected, "deliberate? then: python -m tests.search.test_golden"


def _simulate(golden):
    """A search on a machine that is a third slower than predicted, with 3% noise and a wall."""
    problem = PlanningProblem.build(golden.request, SIMULATED, surroundings())
    rng = random.Random(golden.name)
    slow = {"native": 1.3, "_native_cudnn": 1.1}
    trials = {}
    for candidate in problem.space.candidates:
        predicted = problem.cost.predict(candidate)
        memory = int(predicted.allocated_memory_bytes * 1.04)
        time = predicted.step_seconds * slow[candidate.attention] * rng.gauss(1, 0.03)
        seconds = round(time, 4) if memory < (golden.wall_gib or 0) * 2**30 else None
        trials[candidate] = builders.trial(candidate, seconds, memory, wall_seconds=30.0)

    def plan(*records):
        backend = replace(
            surroundings(trials.__getitem__),
            autotune_version="0.1.0",
            find_matches=lambda *asked: matches_of(records, *asked),
        )
        return make_plan(golden.request, SIMULATED, backend=backend)

    records = [_record_of(plan())] if golden.known else []
    beside = [item.model_dump(mode="json", exclude_defaults=True) for item in (SIMULATED, *records)]
    (FOLDER / f"{golden.name}.json").write_text(json.dumps(beside, indent=1) + "\n")
    (FOLDER / f"{golden.name}.yaml").write_text(plan_text(plan(*records)))


def _record_of(plan):
    made = build_record(plan, SIMULATED)
    return made.changed(measured_on=date(2026, 11, 1), calibration=(), conclusive=True)


def main():
    for golden in GOLDEN:
        if golden.wall_gib is None:
            (FOLDER / f"{golden.name}.yaml").write_text(golden.replayed())
            continue
        with by_formula():
            _simulate(golden)


if __name__ == "__main__":
    main()
