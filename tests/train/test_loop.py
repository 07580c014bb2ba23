"""The loop and its step: rates, weights of losses, gradients, and steps that fail."""

import contextlib
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autotune.cost.kernels import substitutes
from autotune.data.encode import EncodedDataset
from autotune.errors import AutotuneError
from autotune.events import StepFinished
from autotune.models.family import TORCH_LOCK
from autotune.models.registry import get_family
from autotune.plan.candidate import Candidate
from autotune.plan.plan import TrainingPlan
from autotune.train import loop as loop_module
from autotune.train.folder import list_checkpoints, update_norm
from autotune.train.model import apply_settings
from autotune.train.optimizer import AdapterOptimizer, LearningRate
from autotune.train.step import Noising, StepOutcome, optimizer_step
from autotune.weights.names import LoraLayer
from tests.train.conftest import Bench, values_of
from tests.train.small import SETTINGS

SMALLER = SETTINGS.changed(micro_batch_size=1, checkpointed_blocks=1)
OTHER_STORAGE = SETTINGS.changed(micro_batch_size=1, quantization="torchao-int8")


def adamw(parameter: nn.Parameter, **options: float) -> AdapterOptimizer:
    rates = {"learning_rate": 1e-2, "weight_decay": 0.0, "max_grad_norm": 1.0, **options}
    return AdapterOptimizer([parameter], **rates)  # type: ignore[arg-type]


def rates(bench: Bench, schedule: str, **job: object) -> list[float]:
    inner = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-3)
    rate = LearningRate(inner, bench.plan(lr_scheduler=schedule, **job).job, 4, epoch_steps=2)
    seen = []
    for _ in range(4):
        seen.append(rate.value)
        inner.step()
        rate.step(1.0)
    return seen


def test_each_schedule_has_its_shape(bench):
    assert rates(bench, "constant") == [1e-3] * 4
    assert rates(bench, "constant_with_warmup", lr_warmup_steps=2) == [0, 5e-4, 1e-3, 1e-3]
    assert rates(bench, "linear") == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    cosine = [1e-3 * 0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    assert rates(bench, "cosine") == pytest.approx(cosine)


def _keep_loss(losses: list[float], event: StepFinished) -> None:
    losses.append(event.loss)


def test_padding_changes_no_loss(bench, tmp_path, monkeypatch):
    plan = bench.plan(num_steps=2, validation="40%", validation_every=1)
    lengths: list[int] = []
    collate, sample = type(bench.trained).collate, EncodedDataset.sample

    def uneven(data: EncodedDataset, index: int, *draw: Any) -> Any:
        tensors = sample(data, index, *draw)
        return {**tensors, "prompt_embeds": tensors["prompt_embeds"][index % 2 :]}

    def watched(model: Any, samples: Any) -> Any:
        batch = collate(model, samples)
        if "prompt_mask" in batch:
            lengths.append(batch["latents"][0, 0].numel() // 4 + batch["prompt_embeds"].shape[1])
        return batch

    monkeypatch.setattr(type(bench.trained), "collate", watched)
    monkeypatch.setattr(EncodedDataset, "sample", uneven)
    found = []
    for multiple in (1, 128):
        monkeypatch.setattr(bench.trained, "token_multiple", multiple)
        lengths.clear()
        losses: list[float] = []
        keep = partial(_keep_loss, losses)
        loop = bench.loop(plan, tmp_path / str(multiple), held_out=2, on_step=keep)
        assert loop.validation.meter
        found.append([*losses, loop.evaluate(), *loop.validation.meter.measure(2)])
        assert len(lengths) > 4  # steps, evaluations and both kinds of measurement
        assert all((tokens % 128 == 0) == (multiple == 128) for tokens in lengths)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_loss_weights_are_those_of_diffusers(bench):
    family, transformer = bench.resolved.family, bench.trained.transformer
    batch = family.collate([bench.encoded.sample(0)])
    plain, weighted = Noising(3, 2.2), Noising(3, 2.2, weighting="sigma_sqrt")
    with torch.no_grad():
        losses = [float(each.loss(family, transformer, batch, 0, 0)) for each in (plain, weighted)]
    _, sigma = plain.draw(0, 0, batch["latents"].shape[1:])
    assert losses[1] == pytest.approx(losses[0] * sigma**-2, rel=1e-5)


class Replica(nn.Module):
    """Stands for a model wrapped for several processes: counts passes that it does not average."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.unsynchronized = 0

    def forward(self, *values: Any, **named: Any) -> Any:
        return self.module(*values, **named)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.unsynchronized += 1
        yield


def test_gradients_are_averaged_once_per_step(bench):
    averaged: list[Tensor] = []
    rates = {"learning_rate": 0.0, "weight_decay": 0.0, "max_grad_norm": 1.0}
    optimizer = AdapterOptimizer(bench.trained.adapter, **rates)  # type: ignore[arg-type]
    family, replica = bench.resolved.family, Replica(bench.trained.transformer)
    batches = [family.collate([bench.encoded.sample(index)]) for index in (0, 0, 0)]
    how: Any = {"effective_batch_size": 3, "step": 0, "average": averaged.append}
    optimizer_step(family, replica, optimizer, batches, **how)
    assert replica.unsynchronized == 2
    assert len(averaged) == 1  # the loss


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.floats(0.5, 32))
def test_norms_are_those_of_products(rank, inputs, outputs, alpha):
    generator = torch.Generator().manual_seed(rank * 100 + inputs * 10 + outputs)
    down = torch.randn(rank, inputs, generator=generator)
    up = torch.randn(outputs, rank, generator=generator)
    expected = float((up.double() @ down.double()).norm()) * alpha / rank
    assert update_norm(LoraLayer(down, up, alpha)) == pytest.approx(expected, rel=1e-6)
    assert math.isnan(update_norm(LoraLayer(down * math.nan, up, alpha)))
    assert update_norm(LoraLayer(down, up * 0, alpha)) == 0


def test_half_failed_steps_repeat():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = adamw(parameter)
    # As torch leaves it when there is no room for the rest.
    optimizer.inner.state[parameter]["step"] = torch.tensor(0.0)
    optimizer.discard_step()
    parameter.square().sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert (parameter != 1).all()


def test_shift_by_resolution_is_the_pipelines():
    assert get_family("flux1-dev").defaults.shift_at(4096) == pytest.approx(3.1582, rel=1e-3)
    assert get_family("qwen-image").defaults.shift_at(8192) == pytest.approx(2.4596, rel=1e-3)


def test_checkpoints_go_by_epochs(bench, tmp_path):
    plan = bench.plan(num_steps=3, checkpointing_epochs=1, checkpoints_total_limit=5)
    bench.loop(plan, tmp_path)  # five images in steps of four
    assert list(list_checkpoints(tmp_path / "checkpoints")) == [2, 3]


@pytest.fixture
def as_before(bench: Bench) -> Iterator[None]:
    yield
    apply_settings(bench.trained, SETTINGS)
    for parameter in bench.trained.adapter:
        parameter.grad = None


def planned(bench: Bench, *fallbacks: Candidate, **frozen: Any) -> TrainingPlan:
    plan = bench.plan(num_steps=3, checkpointing_steps=1)
    changed = plan.frozen.model_copy(update={"fallbacks": fallbacks, **frozen})
    return plan.model_copy(update={"frozen": changed})


def break_down(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Fails in the middle of the second step: after its first micro-batch's backward pass."""
    left = [error]

    def step(family: Any, network: Any, optimizer: Any, batches: Any, **how: Any) -> StepOutcome:
        if how["step"] == 1 and left:
            for parameter in optimizer.parameters:
                parameter.grad = torch.ones_like(parameter)
            next(iter(batches))
            raise left.pop()
        return optimizer_step(family, network, optimizer, batches, **how)

    monkeypatch.setattr(loop_module, "optimizer_step", step)


@pytest.mark.usefixtures("as_before")
def test_safer_settings_go_on(bench, tmp_path, monkeypatch):
    whole = bench.loop(planned(bench), tmp_path / "a")
    undisturbed = values_of(whole.model.adapter)
    break_down(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    steps: list[int] = []
    plan = planned(bench, OTHER_STORAGE, SMALLER)
    loop = bench.loop(plan, tmp_path / "b", on_step=lambda event: steps.append(event.step))
    assert steps == [1, 2, 3]
    assert loop.settings == SMALLER  # the other storage would need a reload
    assert "memory ran out at step 2" in loop.warnings[0]
    assert 0 < loop.peak_bytes < whole.peak_bytes  # of the settings that the report names
    torch.testing.assert_close(values_of(loop.model.adapter), undisturbed, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("as_before")
def test_no_fallback_comes_twice(bench, tmp_path, monkeypatch):
    """With the kernel that computes right the step needs more memory than there is."""
    tried: list[int] = []

    def step(*arguments: Any, **named: Any) -> StepOutcome:
        tried.append(len(tried))
        assert len(tried) <= 6
        if len(tried) % 2 == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return replace(optimizer_step(*arguments, **named), gradient_norm=math.nan)

    monkeypatch.setattr(loop_module, "optimizer_step", step)
    words = "memory ran out at step 1, and the plan names no safer settings"
    with pytest.raises(AutotuneError, match=words):
        bench.loop(planned(bench, SMALLER, SMALLER.changed(checkpointed_blocks=2)), tmp_path)
    assert len(tried) == 6


@pytest.mark.usefixtures("as_before")
def test_no_checkpoint_has_nan(bench, tmp_path, monkeypatch):
    def step(*arguments: Any, **named: Any) -> StepOutcome:
        norm = math.inf if named["step"] == 1 else 1.0
        return replace(optimizer_step(*arguments, **named), gradient_norm=norm)

    monkeypatch.setattr(loop_module, "optimizer_step", step)
    with pytest.raises(AutotuneError, match="norm of the gradient is inf at step 2"):
        bench.loop(planned(bench), tmp_path)
    assert list(list_checkpoints(tmp_path / "checkpoints")) == [1]


@pytest.mark.quick("1")
@pytest.mark.parametrize("selective", [0, 1])
@pytest.mark.usefixtures("as_before")
def test_kernel_that_gives_nan_is_replaced(bench, tmp_path, selective):
    """Blocks that keep what fused attention returns recompute all of the other one."""
    settings = SETTINGS.changed(checkpointed_blocks=0, selective_blocks=selective)
    plan = planned(bench, settings=settings)
    apply_settings(bench.trained, settings)
    undisturbed = values_of(bench.loop(plan, tmp_path / "a").model.adapter)
    attention: list[Any] = []

    def spoil(gradient: Tensor) -> Tensor:
        block = bench.trained.transformer.transformer_blocks[0]  # type: ignore[index]
        attention.append(block.attn.processor._attention_backend)
        return gradient * (math.nan if len(attention) == 3 else 1)  # in the second step

    hook = bench.trained.adapter[-1].register_hook(spoil)
    try:
        loop = bench.loop(plan, tmp_path / "b")
    finally:
        hook.remove()
    passes = len(attention) // 4  # three steps, of which one was taken twice
    expected = ["native"] * 2 * passes + ["_native_math"] * 2 * passes
    assert [name.value for name in attention] == expected
    assert loop.settings.attention == "_native_math"
    assert "a gradient was not finite at step" in loop.warnings[0]
    torch.testing.assert_close(values_of(loop.model.adapter), undisturbed, rtol=1e-3, atol=1e-5)


def test_no_step_runs_while_thread_traces(bench, tmp_path):
    steps: list[StepFinished] = []
    plan = bench.plan(num_steps=1)
    with ThreadPoolExecutor(1) as thread:
        with substitutes("flash", "cuda"), TORCH_LOCK:
            run = thread.submit(bench.loop, plan, tmp_path, on_step=steps.append)
            assert not wait([run], timeout=1).done
        run.result()
    assert len(steps) == 1
