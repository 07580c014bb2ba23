"""Three recorded searches and the plans that come of them. After a deliberate change of plans:

python -m tests.planning.golden        # then read the difference, and commit it
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.planning import planner
from autotune.planning.problem import PlanningProblem
from autotune.planning.recording import (
    Recording,
    read_recording,
    recording_of,
    replayed,
    write_recording,
)
from autotune.planning.request import PlanRequest
from autotune.schema.candidate import Candidate
from autotune.schema.hardware import HardwareProfile
from autotune.schema.plan_file import plan_text
from autotune.sharing.record import Record, shareable_machine
from autotune.training.describe import WorkloadOverrides
from tests import builders
from tests.planning.formula import by_formula
from tests.planning.machines import make_plan, surroundings

FOLDER = Path(__file__).parent / "golden"
CAPABILITIES = ("attention.native", "attention._native_cudnn", "precision.bf16")


@dataclass(frozen=True)
class Golden:
    """A question; its recording and its plan lie in FOLDER under its name."""

    name: str
    request: PlanRequest
    hardware: HardwareProfile | None = None
    """Of a simulated machine; None where trials were measured."""
    num_blocks: int = 50
    wall_gib: float = 0.0
    known: bool = False
    """Whether another search has answered the question on such a machine."""


def plain(
    family: str,
    workload_overrides: WorkloadOverrides,
    keep: Mapping[str, object],
    exclusions: tuple[tuple[str, str], ...] = (),
) -> PlanRequest:
    """Knobs that are not in `keep` stay at their usual value, so that new ones change no
    recording.
    """
    defaults = Candidate.model_validate(
        {"micro_batch_size": 1, "checkpointed_blocks": 0, "precision": "bf16", **keep}
    )
    pins = tuple(
        (name, str(value)) for name, value in dict(defaults).items()
        if name not in ("micro_batch_size", "checkpointed_blocks", "quantization", "attention")
    )  # fmt: skip
    return PlanRequest(
        model=family,
        workload_overrides=workload_overrides,
        pins=pins,
        exclusions=exclusions,
        max_trials=8,
        job_overrides={"num_steps": 2000},
    )


SIZE = WorkloadOverrides(size_px=(256, 256), effective_batch_size=2)
SIMULATED = builders.hardware(*CAPABILITIES, budget_bytes=20 * 2**30, compute_capability=(9, 0))
IMAGES = plain("kandinsky5-image-lite", SIZE, {})
GOLDEN = (
    Golden("wall", IMAGES, SIMULATED, wall_gib=14),
    Golden("known", IMAGES, SIMULATED, wall_gib=20, known=True),
    Golden(
        "measured",
        plain(
            "qwen-image",
            WorkloadOverrides(size_px=(112, 112), rank=8, effective_batch_size=4),
            {"precision": "fp32"},
            (
                ("checkpointed_blocks", "3"),
                ("attention", "_native_flash"),
                ("quantization", "torchao-fp8"),
            ),
        ),
        num_blocks=6,
    ),
)


def replayed_text(golden: Golden) -> str:
    """The plan that the recording gives, as the file would be."""
    recording = read_recording(FOLDER / f"{golden.name}.jsonl")
    with by_formula(golden.num_blocks):
        return plan_text(make_plan(golden.request, recording.hardware, backend=replayed(recording)))


def _simulated(golden: Golden) -> Recording:
    """A search on a machine that is a third slower than predicted, with 3% noise and a wall."""
    assert golden.hardware
    case = PlanningProblem.build(golden.request, golden.hardware, surroundings())
    rng = random.Random(golden.name)
    slow = {"native": 1.3, "_native_cudnn": 1.1}
    trials = {}
    for candidate in case.space.candidates:
        predicted = case.cost.predict(candidate)
        memory = int(predicted.allocated_memory_bytes * 1.04)
        time = predicted.step_seconds * slow[candidate.attention] * rng.gauss(1, 0.03)
        fits = memory < golden.wall_gib * 2**30
        trials[candidate] = builders.trial(
            candidate, round(time, 4) if fits else None, memory, wall_seconds=30.0
        )
    backend = replace(surroundings(trials.__getitem__), autotune_version="0.1.0")
    made = make_plan(golden.request, golden.hardware, backend=backend)
    if not golden.known:
        return recording_of(made, golden.hardware, ())
    first = made.frozen
    record = Record.model_validate(
        {
            "schema_version": 2, "autotune_version": "0.1.0", "measured_on": "2026-11-01",
            "machine": shareable_machine(golden.hardware), "workload": first.workload,
            "settings": first.settings,
            "expected": first.expected, "trials": first.trials,
            "search_seconds": first.search_seconds,
        },
        strict=False,
    )  # fmt: skip
    known = replayed(Recording("0.1.0", golden.hardware, ((record.name, record),), ()))
    backend = replace(backend, find_matches=known.find_matches)
    result = planner.make_plan(golden.request, golden.hardware, backend=backend)
    return recording_of(result.plan, golden.hardware, result.matches.records)


def main() -> None:
    """Simulate and plan anew; measured trials stay."""
    for golden in GOLDEN:
        if golden.hardware:
            with by_formula():
                write_recording(FOLDER / f"{golden.name}.jsonl", _simulated(golden))
        (FOLDER / f"{golden.name}.yaml").write_text(replayed_text(golden))


if __name__ == "__main__":
    main()
