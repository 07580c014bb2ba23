"""Memory that runs out while training: the plan's next safer settings take over, and what is learned stays the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.errors import AutotuneError
from autotune.schema import Candidate, TrainingPlan
from autotune.training import loop as loop_module
from autotune.training.model import apply_settings
from autotune.training.step import StepOutcome, optimizer_step
from tests.training.conftest import Bench
from tests.training.small import SETTINGS

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
    return plan.model_copy(update={"frozen": plan.frozen.model_copy(update={"fallbacks": fallbacks})})


def breaks_down(monkeypatch: pytest.MonkeyPatch, *, at: int, error: Exception, times: int = 1) -> None:
    """Fails in the middle of a step: after the backward pass of its first micro-batch."""
    left = [times]

    def step(family: Any, network: Any, optimizer: Any, batches: Any, **arguments: Any) -> StepOutcome:
        if arguments["step"] == at and left[0]:
            left[0] -= 1
            for parameter in optimizer.parameters:
                parameter.grad = torch.ones_like(parameter)
            next(iter(batches))
            raise error
        return optimizer_step(family, network, optimizer, batches, **arguments)

    monkeypatch.setattr(loop_module, "optimizer_step", step)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")])
def test_the_step_is_taken_again_with_the_next_safer_settings(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    undisturbed = [p.detach().clone() for p in bench.loop(planned(bench), tmp_path / "a").model.adapter]
    breaks_down(monkeypatch, at=2, error=error)
    steps: list[int] = []
    loop = bench.loop(
        planned(bench, OTHER_STORAGE, SMALLER), tmp_path / "b", on_step=lambda event: steps.append(event.step)
    )
    assert steps == [1, 2, 3, 4]
    assert loop.settings == SMALLER  # the other storage would need a reload
    assert "memory ran out at step 3" in loop.warnings[0]
    for parameter, expected in zip(loop.model.adapter, undisturbed, strict=True):
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-6)


def test_without_safer_settings_the_error_names_the_way_on(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks_down(monkeypatch, at=1, error=torch.OutOfMemoryError("CUDA out of memory"), times=2)
    with pytest.raises(AutotuneError, match="ran out at step 2") as raised:
        bench.loop(planned(bench, SMALLER, OTHER_STORAGE), tmp_path)
    assert "--reserve" in raised.value.hint


def test_other_errors_are_not_taken_for_a_lack_of_memory(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks_down(monkeypatch, at=1, error=RuntimeError("size mismatch"))
    with pytest.raises(RuntimeError, match="size mismatch"):
        bench.loop(planned(bench, SMALLER), tmp_path)
