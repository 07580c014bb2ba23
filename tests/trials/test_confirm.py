"""A rehearsal goes through every phase of a run, as far as the model's files allow, and keeps
what it knows.
"""

import gc
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune.data.encoders import Encoders
from autotune.families.registry import get_family
from autotune.families.resolve import resolve_model
from autotune.knobs.compile import CompiledBlock
from autotune.schema.candidate import CachingSettings
from autotune.schema.trial import TrialResult
from autotune.schema.workload import Workload
from autotune.trials import phases
from autotune.trials.phases import _largest_preview, _rehearse_caching
from autotune.trials.requests import ChildState, Failure, RehearsalRequest
from autotune.trials.runner import ProcessTrialRunner
from tests.small import write_small_pipeline
from tests.trials.conftest import FIRST, GIB, runner_for, workload


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
    monkeypatch.setattr(runner, "ask", lambda request: replace(failure, partial=known))
    result = runner.confirm(FIRST, CachingSettings(), 1.0)
    assert result.outcome == "ok"
    assert result.step_seconds == (1.0,)
    assert "it failed" in result.message
    monkeypatch.setattr(runner, "ask", lambda request: failure)
    assert runner.confirm(FIRST, CachingSettings(), 1.0).outcome == failure.outcome


def test_the_phase_that_fails_is_named(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.trials.runner.CPU_SPARE_BYTES", 0)
    with runner_for(small_model, workload(small_model, side_px=2048), 5 * GIB // 8) as runner:
        result = runner.confirm(FIRST, CachingSettings(), 1.0)
    assert result.outcome == "oom", result
    assert "in the training phase" in result.message


@pytest.mark.slow
def test_caching_that_fails_is_named_and_the_settings_are_judged_by_the_rest(
    small_model: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(small_model, tmp_path / "model")
    (model / "text_encoder" / "model.safetensors").write_bytes(b"damaged")
    with runner_for(model, workload(model)) as runner:
        result = runner.confirm(FIRST, CachingSettings(), 1.0)
    assert result.outcome == "ok", result
    assert [phase.name for phase in result.phases] == ["loading", "training", "saving"]
    assert "in the caching phase" in result.message


def test_text_encoders_are_gone_before_pixels_are_encoded_and_all_of_it_before_the_transformer(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in training, and by reference counts: nothing collects garbage while the transformer is
    loaded.
    """
    model = resolve_model(str(small_model))
    caching = CachingSettings()
    request = RehearsalRequest(
        str(small_model), workload(small_model), FIRST, "cpu", 3, caching=caching, max_seconds=1.0
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
        _rehearse_caching(
            request,
            model,
            torch.device("cpu"),
            _largest_preview(request, model, tmp_path),
            tmp_path / "cache",
        )
        assert seen == [None]
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


def test_the_rehearsed_caption_of_an_edit_model_is_as_long_as_those_of_the_data(
    tmp_path: Path,
) -> None:
    """The control image's tokens count as the caption's in a workload, and come by themselves in
    a rehearsal.
    """
    family, longest = get_family("qwen-image-edit"), " ".join(["photo"] * 20)
    write_small_pipeline(family, tmp_path / "model", [longest])
    model = resolve_model(str(tmp_path / "model"))
    assert model.config_folder is not None
    (tokens,) = family.count_text_tokens(model.config_folder, [longest], [[(64, 64)]])
    values = {"max_text_tokens": tokens, "num_control_images": 1}
    work = Workload.model_validate({**dict(workload(tmp_path / "model")), **values})
    request = RehearsalRequest(
        str(tmp_path), work, FIRST, "cpu", 3, caching=CachingSettings(), max_seconds=1.0
    )
    preview = _largest_preview(request, model, tmp_path)
    assert len(preview.control_paths) == 1
    (rehearsed,) = family.count_text_tokens(model.config_folder, [preview.prompt], [[(64, 64)]])
    assert tokens - 15 < rehearsed <= tokens


def test_previews_are_rehearsed_without_compiled_code_as_in_a_run(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[bool] = []

    class Sampler:
        def attach(self, transformer: nn.Module) -> None:
            self.modules = list(transformer.modules())

        def sample(self, *_: object) -> None:
            compiled.append(any(module._compiled_call_impl for module in self.modules))

        compare_adapter = sample

    monkeypatch.setattr(
        CompiledBlock, "__call__", lambda block, *inputs, **named: block._plain(*inputs, **named)
    )
    monkeypatch.setattr(phases, "_rehearse_caching", lambda *_: Sampler())
    settings = FIRST.changed(compile="block")
    asked = RehearsalRequest(
        str(small_model),
        workload(small_model),
        settings,
        "cpu",
        2,
        caching=CachingSettings(),
        max_seconds=0.0,
    )
    assert phases.rehearse(asked, ChildState()).outcome == "ok"
    assert compiled == [False, False]
