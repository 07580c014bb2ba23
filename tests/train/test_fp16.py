"""Training in fp16: a loss scale that finds itself, steps that overflow, resuming."""

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotune.data.encode import Encoders
from autotune.errors import AutotuneError
from autotune.events import StepFinished
from autotune.knobs.settings import ROUNDING
from autotune.plan.candidate import CachingSettings
from autotune.train.loop import TrainingLoop
from autotune.train.model import apply_settings
from autotune.train.optimizer import AdapterOptimizer
from autotune.train.sample import PreviewSampler
from tests.train.conftest import CPU, Bench, values_of
from tests.train.small import SETTINGS
from tests.train.test_loop import adamw
from tests.train.test_resume import same

FP16 = SETTINGS.changed(precision="fp16")


@pytest.fixture(scope="module")
def half(bench: Bench) -> Bench:
    """The same model in fp16, with the same adapter at its start."""
    return bench.changed(FP16)


def overflow(monkeypatch: pytest.MonkeyPatch, at: Callable[[int], bool]) -> None:
    """Makes the backward passes of some micro-batches overflow, by their number."""
    scale, calls = AdapterOptimizer.scale, [0]

    def scaled(self: AdapterOptimizer, loss: Tensor) -> Tensor:
        calls[0] += 1
        return scale(self, loss) * (1e30 if at(calls[0] - 1) else 1.0)

    monkeypatch.setattr(AdapterOptimizer, "scale", scaled)


def run(
    bench: Bench, folder: Path, kill_after: int | None = None, **job: Any
) -> tuple[TrainingLoop, list[StepFinished]]:
    steps: list[StepFinished] = []
    plan = bench.plan(settings=FP16, checkpointing_steps=1, **job)
    apply_settings(bench.trained, FP16)  # a run before may have changed its attention
    return bench.loop(plan, folder, on_step=steps.append, kill_after=kill_after), steps


def test_fp16_learns_what_fp32_learns(bench, half, tmp_path):
    expected: list[StepFinished] = []
    plain = bench.loop(bench.plan(), tmp_path / "fp32", on_step=expected.append)
    loop, steps = run(half, tmp_path / "fp16")
    assert {parameter.dtype for parameter in loop.optimizer.parameters} == {torch.float16}
    assert {master.dtype for master in loop.optimizer.masters} == {torch.float32}
    assert [step.loss_scale for step in steps] == [2.0**16] * 6
    for step, plain_step in zip(steps, expected, strict=True):
        assert step.loss == pytest.approx(plain_step.loss, rel=0.01)
        norm = pytest.approx(plain_step.gradient_norm, rel=ROUNDING["fp16"][0])
        assert step.gradient_norm == norm
    both = (values_of(each.optimizer.masters) for each in (loop, plain))
    found, wanted = (torch.cat([value.flatten() for value in values]) for values in both)
    # Adam moves by the sign of tiny gradients, too.
    assert float((found - wanted).norm() / wanted.norm()) < 0.1


def test_an_overflow_is_counted(half, tmp_path, monkeypatch):
    overflow(monkeypatch, lambda call: call == 2)  # the second step, which has two micro-batches
    loop, steps = run(half, tmp_path, num_steps=3)
    assert [step.gradient_norm is None for step in steps] == [False, True, False]
    assert [step.loss_scale for step in steps] == [2.0**16] + [2.0**15] * 2
    assert [step.overflowed_gradients for step in steps] == [0, 1, 1]
    assert steps[-1].nonfinite_gradients == steps[-1].gradient_spikes == 0
    assert not loop.warnings
    assert loop.settings == FP16  # no other attention is tried


def test_scale_recovers_after_steps_without_overflow():
    parameter = nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = adamw(parameter)
    assert optimizer.scaler
    optimizer.scaler.set_growth_interval(2)
    scales = []
    for factor in (1.0, 1e30, 1.0, 1.0, 1.0):
        before = optimizer.masters[0].detach().clone()
        optimizer.scale((parameter.float() * factor / 8).sum()).backward()  # type: ignore[no-untyped-call]
        norm = optimizer.step()
        scales.append(optimizer.loss_scale)
        assert bool(norm.isfinite()) == (factor == 1.0)
        assert torch.equal(before, optimizer.masters[0]) == (factor != 1.0)
        if factor == 1.0:
            assert float(norm) == pytest.approx(0.25)  # unscaled before it is clipped
    assert scales == [2.0**16, 2.0**15, 2.0**15, 2.0**16, 2.0**16]


def test_kills_keep_overflows(half, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        overflow(patch, lambda call: call == 2)
        whole, _ = run(half, tmp_path / "whole", num_steps=4)
    with monkeypatch.context() as patch:
        overflow(patch, lambda call: call == 2)
        run(half, tmp_path / "killed", 3, num_steps=4)
    ended, steps = run(half, tmp_path / "killed", num_steps=4)
    assert [step.step for step in steps] == [3, 4]
    assert steps[-1].overflowed_gradients == 1
    assert same(ended, whole)
    assert ended.optimizer.numbers() == whole.optimizer.numbers()


def test_failed_steps_keep_their_scale():
    parameter = nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = adamw(parameter)
    optimizer.scale((parameter.float() / 8).sum()).backward()  # type: ignore[no-untyped-call]
    optimizer.inner.step = lambda: (_ for _ in ()).throw(torch.OutOfMemoryError())
    with contextlib.suppress(torch.OutOfMemoryError):
        optimizer.step()
    del optimizer.inner.step
    optimizer.discard_step()
    optimizer.scale((parameter.float() / 8).sum()).backward()  # type: ignore[no-untyped-call]
    assert float(optimizer.step()) == pytest.approx(0.25)
    assert optimizer.loss_scale == 2.0**16


@pytest.mark.slow
def test_kernel_that_always_overflows_is_replaced(half, tmp_path):
    def spoil(gradient: Tensor) -> Tensor:
        attention = half.trained.transformer.transformer_blocks[0].attn.processor._attention_backend
        return gradient * (math.inf if attention.value == "native" else 1.0)

    hook = half.trained.adapter[-1].register_hook(spoil)
    try:
        loop, steps = run(half, tmp_path, num_steps=9)
    finally:
        hook.remove()
    assert [step.gradient_norm is None for step in steps] == [True] * 7 + [False] * 2
    assert steps[-1].loss_scale == 2.0**8
    assert (steps[-1].overflowed_gradients, steps[-1].nonfinite_gradients) == (7, 1)
    assert loop.settings.attention == "_native_math"
    assert "a gradient was not finite at step 8" in loop.warnings[0]


def test_overflowing_activations_are_an_error(half, tmp_path):
    transformer = half.trained.transformer
    hook = transformer.register_forward_hook(lambda _module, _args, output: (output[0] * 1e9,))
    try:
        with pytest.raises(AutotuneError, match="probably activations overflow fp16") as raised:
            run(half, tmp_path)
    finally:
        hook.remove()
    assert "--pin precision=fp32" in raised.value.hint


def test_levels_reach_fp16_exactly(bench):
    seen: dict[str, Any] = {}

    class Recorder(nn.Module):
        def forward(self, hidden: Tensor, **given: Any) -> Tensor:
            seen.update(given, hidden=hidden)
            return hidden

    sampler = PreviewSampler(Encoders(bench.resolved, CachingSettings(), CPU, FP16.precision))
    sizes, levels = torch.tensor([[2049.0, 4097.0]]), torch.tensor([[998.77, 0.0]])
    recorder, added = Recorder(), {"time_ids": sizes, "text_embeds": torch.ones(1, 2)}
    with sampler._casting([recorder]):
        recorder(torch.ones(1, 2), timestep=levels, added=added, rest=None)
    assert seen["timestep"] is levels
    assert seen["added"]["time_ids"] is sizes
    assert seen["hidden"].dtype == seen["added"]["text_embeds"].dtype == torch.float16
