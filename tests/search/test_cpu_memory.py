"""On a CPU one figure decides everywhere: what the process as a whole takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from autotune.errors import InvalidInput, NothingFits
from autotune.plan.candidate import Candidate, PhasePeak, TrialResult
from autotune.plan.hardware import HardwareProfile
from autotune.search.problem import PlannerBackend
from autotune.search.trials import ProcessTrialRunner, TrialFunction
from autotune.train.fit import hardware_misfits
from autotune.train.prepare import prepare
from tests import builders
from tests.builders import GIB, trial
from tests.search.machines import CAPABILITIES, make_plan, request, surroundings

PROCESS_BYTES = GIB * 3 // 2
CACHING_BYTES = GIB // 2
"""What the text encoder takes beyond a step."""


def machine(budget_bytes: int) -> HardwareProfile:
    made = builders.hardware(*CAPABILITIES, kind="cpu", budget_bytes=budget_bytes)
    return made.changed(device=made.device.changed(memory_kind="host", compute_capability=None))


def backend() -> PlannerBackend:
    """Trials that are measured as on a CPU, and judged as by the real runner."""

    def measure(cost: Any, candidate: Candidate, *, confirms: bool = False) -> TrialResult:
        tensors = int(1.01 * cost.predict_uncalibrated(candidate).allocated_memory_bytes)
        host = {
            "training": tensors + PROCESS_BYTES,
            "caching": tensors + PROCESS_BYTES + CACHING_BYTES,
        }
        phases = [
            PhasePeak(name=name, seconds=1.0, device_bytes=None, host_bytes=size)
            for name, size in host.items()
        ]
        seconds = 5 - 0.01 * tensors / GIB  # the larger, the faster
        measured = {
            "host_memory_bytes": host["training"],
            "phases": tuple(phases) if confirms else (),
        }
        result = trial(candidate, seconds, tensors, confirms=confirms, wall_seconds=1.0, **measured)
        budget, kept = cost.budget_bytes, cost.resident_encoder_bytes
        with ProcessTrialRunner(
            cost.hardware, None, cost.workload, budget_bytes=budget, resident_bytes=kept
        ) as runner:
            return runner.classify(candidate, result)

    @contextmanager
    def trials(model: Any, cost: Any) -> Iterator[TrialFunction]:
        yield lambda candidate: measure(cost, candidate)

    def rehearse(model: str, cost: Any, candidate: Candidate, max_seconds: float) -> TrialResult:
        return measure(cost, candidate, confirms=True)

    return replace(surroundings(), trials=trials, rehearse=rehearse)


@pytest.mark.usefixtures("_by_formula")
def test_plan_check_and_train_agree():
    fitting = []
    for eighths in range(19 * 8, 13 * 8, -16):
        hardware = machine(eighths * GIB // 8)
        try:
            plan = make_plan(request(max_trials=8), hardware, backend=backend())
        except NothingFits:
            fitting.append(False)
            continue
        fitting.append(True)
        assert plan.frozen.trials[-1].confirms
        assert plan.frozen.expected.run_memory_bytes <= hardware.device.budget_bytes
        assert hardware_misfits(plan, hardware) == ()  # what `check` asks
        with pytest.raises(InvalidInput, match="names no data"):  # `train` gets beyond the machine
            prepare(plan, hardware, resume=False)
    assert fitting == sorted(fitting, reverse=True)
    assert {True, False} == set(fitting)
