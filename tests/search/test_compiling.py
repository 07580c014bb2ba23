"""Settings are compiled only if measured steps pay the measured start-up back."""

from dataclasses import replace

import pytest

from autotune.events import TrialFinished
from autotune.plan.base import log_event
from autotune.plan.hardware import Capability
from tests import builders
from tests.events import events_of
from tests.search.machines import CAPABILITIES, answer, make_plan, request, surroundings

COMPILING = builders.hardware(*CAPABILITIES, "compile", compute_capability=(9, 0))
STEPS = 1000
PLAIN = (("norm_rope", "stock"), ("modulation", "resident"))
"""What leaves compiled blocks something to gain."""
FEW = tuple((knob, "0") for knob in ("selective_blocks", "swapped_blocks"))
"""What leaves few candidates to predict."""


def machine(saved_seconds, *startup_seconds):
    """A machine whose compiled steps are so much faster than others; each trial of them starts
    up as told."""
    tried = []

    def run(candidate):
        plain = answer(candidate.changed(compile="off"))
        if candidate.compile == "off":
            return plain
        tried.append(candidate)
        startup = startup_seconds[min(len(tried), len(startup_seconds)) - 1]
        seconds = plain.median_step_seconds - saved_seconds
        warmup = seconds + startup, seconds
        return builders.trial(candidate, seconds, plain.peak_memory_bytes, warmup_seconds=warmup)

    return run, tried


def plan_on(run, on_event=log_event, **changes):
    asked = request(num_steps=STEPS, max_trials=3, pins=PLAIN + FEW)
    return make_plan(asked, COMPILING, on_event, replace(surroundings(run), **changes))


def reason_of(plan):
    return next(reason for reason in plan.frozen.reasons if reason.knob == "compile")


@pytest.fixture(autouse=True)
def hopeful(monkeypatch):
    """The cost model expects next to nothing of the start-up, so that a trial decides."""
    monkeypatch.setattr("autotune.knobs.registry.STARTUP_SECONDS", {"cuda": 0.001, "cpu": 0.001})


def test_cached_code_is_tried_again():
    run, tried = machine(0.3, 400.0, 50.0)
    told = []
    plan = plan_on(run, events_of(TrialFinished, lambda event: told.append(event.result)))
    assert plan.frozen.trials == tuple(told), "the plan holds what was shown"
    assert plan.frozen.settings.compile == "block"
    compiled = [trial for trial in plan.frozen.trials if trial.candidate.compile == "block"]
    assert [trial.outcome for trial in compiled] == ["unpaid", "ok"]
    assert "50 s to start" in reason_of(plan).why
    assert len(tried) == 2


def test_unpaid_compiling_is_left():
    plan = plan_on(machine(-0.1, 1.0)[0])
    assert plan.frozen.settings.compile == "off"
    assert "steps become 0.1 s slower" in reason_of(plan).rejected[0].reason
    again = plan_on(machine(0.3, 400.0, 350.0)[0])
    assert again.frozen.settings.compile == "off"
    assert "350 s to start" in reason_of(again).rejected[0].reason, "by the last trial"


def test_wrong_gradients_compile_nothing():
    run, tried = machine(0.3, 1.0)

    def check(context, choices, model):
        told = {"available": False, "reason": "gradients differ by 3"}
        verdict = Capability(name="parity.compile.block", **told)
        assert choices["precision"], "what compiled code is compared with"
        return () if "off" in choices["compile"] else (verdict,)

    plan = plan_on(run, check_gradients=check)
    assert plan.frozen.settings.compile == "off"
    assert not tried
    assert "gradients differ" in reason_of(plan).rejected[0].reason
    assert plan.frozen.trials[-1].outcome == "numerics"
