"""A rehearsal goes through every phase of a run that the files allow."""

import gc
import weakref
from typing import Any

import pytest
import torch

from autotune.data.encode import Encoders
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import CachingSettings, TrialResult
from autotune.plan.job import ModelRef
from autotune.search.rehearsal import RehearsalRequest, largest_preview, rehearse_caching
from autotune.search.worker import Failure
from tests.search.conftest import FIRST, GIB, workload

PHASES = ["caching", "loading", "training", "previews", "saving"]


def test_every_phase_is_rehearsed(runner):
    result = runner.confirm(FIRST, CachingSettings(), 1.0)
    assert result.outcome == "ok", result.message
    assert result.confirms
    assert [phase.name for phase in result.phases] == PHASES
    assert all(phase.seconds > 0 and (phase.host_bytes or 0) > 0 for phase in result.phases)
    short = runner.run(FIRST)
    assert not short.confirms
    assert short.peak_memory_bytes == pytest.approx(result.peak_memory_bytes, rel=0.01)


def test_later_failures_keep_what_is_known(runner, monkeypatch):
    known = TrialResult(
        candidate=FIRST, outcome="ok", step_seconds=(1.0,), peak_memory_bytes=GIB, confirms=True
    )
    failure = Failure("timeout", "it failed")
    monkeypatch.setattr(runner, "send", lambda request: failure)
    assert runner.confirm(FIRST, CachingSettings(), 1.0).outcome == "timeout"
    failure.partial = known
    result = runner.confirm(FIRST, CachingSettings(), 1.0)
    assert (result.outcome, result.step_seconds) == ("ok", (1.0,))
    assert "it failed" in result.message


def test_encoders_go_before_pixels(small_model, tmp_path, monkeypatch):
    """And all of it before the transformer is loaded: as in training, by reference counts."""
    caching, work = CachingSettings(), workload(small_model)
    model = resolve_model(ModelRef.of(small_model))
    request = RehearsalRequest(model, work, FIRST, "cpu", 3, caching=caching, max_seconds=1.0)
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
        preview = largest_preview(request, model, tmp_path)
        rehearse_caching(request, model, preview, tmp_path / "cache")
        assert seen == [None]
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()
