"""A rehearsal goes through every phase of a run, as far as the model's files allow, and keeps
what it knows."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.data.encode import Encoders
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import CachingSettings, TrialResult
from autotune.plan.job import ModelRef
from autotune.search.trials import ProcessTrialRunner
from autotune.search.worker import Failure, RehearsalRequest, largest_preview, rehearse_caching
from tests.search.conftest import FIRST, GIB, workload


def test_every_phase_is_rehearsed_and_the_steps_are_more_than_a_trials(
    runner: ProcessTrialRunner,
) -> None:
    result = runner.confirm(FIRST, CachingSettings(), 10.0)
    assert result.outcome == "ok", result.message
    assert result.confirms
    assert [phase.name for phase in result.phases] == [
        "caching",
        "loading",
        "training",
        "previews",
        "saving",
    ]
    assert all(phase.seconds > 0 and (phase.host_bytes or 0) > 0 for phase in result.phases)
    assert (result.peak_memory_bytes or 0) > 0
    short = runner.run(FIRST)
    assert not short.confirms
    assert len(result.step_seconds) > len(
        short.step_seconds
    )  # on a busy machine few fit into ten seconds
    assert short.peak_memory_bytes == pytest.approx(result.peak_memory_bytes, rel=0.01)


@pytest.mark.parametrize("failure", [Failure("timeout", "it failed"), Failure("oom", "it failed")])
def test_where_a_later_phase_fails_what_is_known_stands(
    runner: ProcessTrialRunner, monkeypatch: pytest.MonkeyPatch, failure: Failure
) -> None:
    known = TrialResult(
        candidate=FIRST, outcome="ok", step_seconds=(1.0,), peak_memory_bytes=GIB, confirms=True
    )
    monkeypatch.setattr(runner, "send", lambda request: failure)
    failure.partial = known
    result = runner.confirm(FIRST, CachingSettings(), 1.0)
    assert result.outcome == "ok"
    assert result.step_seconds == (1.0,)
    assert "it failed" in result.message
    failure.partial = None
    assert runner.confirm(FIRST, CachingSettings(), 1.0).outcome == failure.outcome


def test_text_encoders_are_gone_before_pixels_are_encoded_and_all_of_it_before_the_transformer(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in training, and by reference counts: nothing collects garbage while the transformer is
    loaded."""
    model = resolve_model(ModelRef.of(small_model))
    caching = CachingSettings()
    request = RehearsalRequest(
        ModelRef.of(small_model),
        workload(small_model),
        FIRST,
        "cpu",
        3,
        caching=caching,
        max_seconds=1.0,
    )
    loaded, seen = Encoders.load_pipeline, []
    refs: list[weakref.ref[Any]] = []

    def watched(encoders: Encoders, **options: bool) -> Any:
        pipeline = loaded(encoders, **options)
        if not refs:
            refs.extend(weakref.ref(part) for part in (pipeline.text_encoder, pipeline.vae))
        return pipeline

    def encode_pixels(pipeline: Any, pixels: torch.Tensor) -> None:
        seen.append(refs[0]())

    monkeypatch.setattr(Encoders, "load_pipeline", watched)
    monkeypatch.setattr(type(model.family), "encode_pixels", staticmethod(encode_pixels))
    gc.disable()
    try:
        rehearse_caching(
            request, model, largest_preview(request, model, tmp_path), tmp_path / "cache"
        )
        assert seen == [None]
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()
