"""A rehearsal goes through every phase of a run, as far as the model's files allow, and keeps what it knows."""

from pathlib import Path

import pytest

from autotune.schema import CachingSettings, TrialResult
from autotune.trials.runner import ProcessTrialRunner
from autotune.trials.worker import Failure
from tests.trials.conftest import FIRST, GIB, workload


def test_every_phase_is_rehearsed_and_the_steps_are_more_than_a_trials(runner: ProcessTrialRunner) -> None:
    result = runner.confirm(FIRST, CachingSettings(), 10.0)
    assert result.outcome == "ok", result.message
    assert result.confirms
    assert [phase.name for phase in result.phases] == ["caching", "loading", "training", "previews", "saving"]
    assert all(phase.seconds > 0 and (phase.host_bytes or 0) > 0 for phase in result.phases)
    assert len(result.step_seconds) >= 10
    assert (result.peak_memory_bytes or 0) > 0
    short = runner.run(FIRST)
    assert not short.confirms
    assert short.peak_memory_bytes == pytest.approx(result.peak_memory_bytes, rel=0.01)


def test_on_a_timeout_what_is_known_stands(
    runner: ProcessTrialRunner, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = TrialResult(candidate=FIRST, outcome="ok", step_seconds=(1.0,), peak_memory_bytes=GIB, confirms=True)
    monkeypatch.setattr(runner, "ask", lambda request: Failure("timeout", "no answer within 600 s", so_far=known))
    result = runner.confirm(FIRST, CachingSettings(), 1.0)
    assert result.outcome == "ok"
    assert result.step_seconds == (1.0,)
    assert "600 s" in result.message
    monkeypatch.setattr(runner, "ask", lambda request: Failure("timeout", "no answer within 600 s"))
    assert runner.confirm(FIRST, CachingSettings(), 1.0).outcome == "timeout"


def test_the_phase_that_fails_is_named(small_model: Path) -> None:
    with ProcessTrialRunner(str(small_model), workload(small_model, side_px=2048), "cpu", GIB) as runner:
        result = runner.confirm(FIRST, CachingSettings(), 1.0)
    assert result.outcome == "oom", result
    assert "in the caching phase" in result.message
