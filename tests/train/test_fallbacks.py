"""Memory that runs out while training: the plan's next safer settings take over, and what is
learned stays the same."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.errors import AutotuneError
from autotune.plan.candidate import Candidate
from autotune.plan.plan import TrainingPlan
from autotune.train import loop as loop_module
from autotune.train.folder import list_checkpoints
from autotune.train.model import apply_settings
from autotune.train.step import StepOutcome, optimizer_step
from tests.train.conftest import Bench
from tests.train.small import SETTINGS

SMALLER = SETTINGS.model_copy(update={"micro_batch_size": 1, "checkpointed_blocks": 1})
OTHER_STORAGE = SETTINGS.model_copy(update={"micro_batch_size": 1, "quantization": "torchao-int8"})


@pytest.fixture(autouse=True)
def _as_before(bench: Bench) -> Iterator[None]:
    yield
    apply_settings(bench.trained, SETTINGS)
    for parameter in bench.trained.adapter:
        parameter.grad = None


def planned(bench: Bench, *fallbacks: Candidate) -> TrainingPlan:
    plan = bench.plan(num_steps=4, preview_prompts=())
    return plan.model_copy(
        update={"frozen": plan.frozen.model_copy(update={"fallbacks": fallbacks})}
    )


def breaks_down(
    monkeypatch: pytest.MonkeyPatch, *, at: int, error: Exception, times: int = 1
) -> None:
    """Fails in the middle of a step: after the backward pass of its first micro-batch."""
    left = [times]

    def step(
        family: Any, network: Any, optimizer: Any, batches: Any, **arguments: Any
    ) -> StepOutcome:
        if arguments["step"] == at and left[0]:
            left[0] -= 1
            for parameter in optimizer.parameters:
                parameter.grad = torch.ones_like(parameter)
            next(iter(batches))
            raise error
        return optimizer_step(family, network, optimizer, batches, **arguments)

    monkeypatch.setattr(loop_module, "optimizer_step", step)


@pytest.mark.quick("CUDA out of memory")
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")]
)
def test_the_step_is_taken_again_with_the_next_safer_settings(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    whole = bench.loop(planned(bench), tmp_path / "a")
    undisturbed = [p.detach().clone() for p in whole.model.adapter]
    breaks_down(monkeypatch, at=2, error=error)
    steps: list[int] = []
    loop = bench.loop(
        planned(bench, OTHER_STORAGE, SMALLER),
        tmp_path / "b",
        on_step=lambda event: steps.append(event.step),
    )
    assert steps == [1, 2, 3, 4]
    assert loop.settings == SMALLER  # the other storage would need a reload
    assert "memory ran out at step 3" in loop.warnings[0]
    assert 0 < loop.peak_bytes < whole.peak_bytes  # of the settings that the report names
    for parameter, expected in zip(loop.model.adapter, undisturbed, strict=True):
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-6)


def test_no_settings_are_tried_twice_if_gradients_and_memory_fail_in_turns(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kernel that computes right the step needs more memory than there is."""
    smallest = SMALLER.changed(checkpointed_blocks=2)
    tried: list[int] = []

    def step(*arguments: Any, **named: Any) -> StepOutcome:
        tried.append(len(tried))
        assert len(tried) <= 6
        if len(tried) % 2 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return replace(optimizer_step(*arguments, **named), gradient_norm=math.nan)

    monkeypatch.setattr(loop_module, "optimizer_step", step)
    with pytest.raises(
        AutotuneError, match="memory ran out at step 1, and the plan names no safer settings"
    ):
        bench.loop(planned(bench, SMALLER, smallest), tmp_path)
    assert len(tried) == 6


def test_other_errors_are_not_taken_for_a_lack_of_memory(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks_down(monkeypatch, at=1, error=RuntimeError("size mismatch"))
    with pytest.raises(RuntimeError, match="size mismatch"):
        bench.loop(planned(bench, SMALLER), tmp_path)


@pytest.mark.quick("inf")
@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_gradient_that_is_no_number_ends_the_run_before_a_checkpoint_has_it(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norm: float
) -> None:
    def step(*arguments: Any, **named: Any) -> StepOutcome:
        return replace(
            optimizer_step(*arguments, **named), gradient_norm=norm if named["step"] == 2 else 1.0
        )

    monkeypatch.setattr(loop_module, "optimizer_step", step)
    plan = planned(bench)
    plan = plan.model_copy(update={"job": plan.job.changed(checkpointing_steps=1)})
    with pytest.raises(AutotuneError, match=r"norm of the gradient is (inf|nan) at step 3"):
        bench.loop(plan, tmp_path)
    assert max(list_checkpoints(tmp_path / "checkpoints")) == 2


@pytest.mark.quick("nan")
@pytest.mark.parametrize("selective", [0, 1])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_kernel_whose_gradient_is_no_number_is_replaced_and_the_step_taken_again(
    bench: Bench, tmp_path: Path, bad: float, selective: int
) -> None:
    """Blocks that keep what fused attention returns recompute all of the other one: the result
    is the same."""
    plan = planned(bench)
    settings = SETTINGS.changed(checkpointed_blocks=0, selective_blocks=selective)
    plan = plan.model_copy(update={"frozen": plan.frozen.model_copy(update={"settings": settings})})
    apply_settings(bench.trained, settings)
    undisturbed = [p.detach().clone() for p in bench.loop(plan, tmp_path / "a").model.adapter]
    watched, attention = bench.trained.adapter[-1], []

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        attention.append(
            bench.trained.transformer.transformer_blocks[0].attn.processor._attention_backend
        )
        return gradient * (bad if len(attention) == 3 else 1)  # in the second step

    hook = watched.register_hook(spoil)
    try:
        loop = bench.loop(plan, tmp_path / "b")
    finally:
        hook.remove()
    passes = len(attention) // 5  # four steps, of which one was taken twice
    assert [name.value for name in attention] == ["native"] * 2 * passes + [
        "_native_math"
    ] * 3 * passes
    assert loop.settings.attention == "_native_math"
    assert "a gradient was not finite at step" in loop.warnings[0]
    assert loop.done == 4
    for parameter, expected in zip(loop.model.adapter, undisturbed, strict=True):
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-3, atol=1e-5)
