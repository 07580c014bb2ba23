"""Learning rates, loss weights, gradients and checkpoints of the loop: each against what it says
of itself."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autotune.data.encode import EncodedDataset
from autotune.models.registry import get_family
from autotune.plan.file import seal, with_job
from autotune.train.checkpoint import update_norm
from autotune.train.folder import list_checkpoints
from autotune.train.optimizer import AdapterOptimizer, LearningRate
from autotune.train.step import Noising, optimizer_step
from autotune.weights.names import LoraLayer
from tests.train.conftest import Bench


def rates(
    bench: Bench, num_steps: int, losses: list[float] | None = None, **job: object
) -> list[float]:
    adamw = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-3)
    rate = LearningRate(adamw, bench.plan(num_steps=num_steps, **job).job, num_steps, epoch_steps=2)
    seen = []
    for number in range(num_steps):
        seen.append(rate.value)
        adamw.step()
        rate.step(losses[number] if losses else 1.0)
    return seen


def test_each_schedule_has_its_shape(bench: Bench) -> None:
    assert rates(bench, 4, lr_scheduler="constant") == [1e-3] * 4
    assert rates(bench, 4, lr_scheduler="constant_with_warmup", lr_warmup_steps=2) == [
        0,
        5e-4,
        1e-3,
        1e-3,
    ]
    assert rates(bench, 4, lr_scheduler="linear") == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    cosine = [1e-3 * 0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    assert rates(bench, 4, lr_scheduler="cosine") == pytest.approx(cosine)


def test_padding_for_cudnn_reaches_steps_evaluations_and_held_out_losses_and_changes_none(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = bench.plan(num_steps=2, validation="40%", validation_every=1)
    settings = plan.frozen.settings.changed(micro_batch_size=2)
    plan = seal(plan.job, plan.frozen.changed(settings=settings))
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
        loop = bench.loop(
            plan,
            tmp_path / str(multiple),
            held_out=2,
            on_step=lambda event, to=losses: to.append(event.loss),
        )
        found.append([*losses, loop.evaluate(), *loop.validation.meter.measure(2)])  # type: ignore[union-attr]
        assert len(lengths) > 4  # steps, evaluations and both kinds of measurement
        assert all((tokens % 128 == 0) == (multiple == 128) for tokens in lengths)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize(
    ("scheme", "weight"), [("none", lambda s: 1.0), ("sigma_sqrt", lambda s: s**-2)]
)
def test_loss_weights_are_those_of_diffusers(bench: Bench, scheme: str, weight: object) -> None:
    family, transformer = bench.resolved.family, bench.trained.transformer
    batch = family.collate([bench.encoded.sample(0)])
    with torch.no_grad():
        plain = Noising(3, 2.2).loss(family, transformer, batch, 0, 0)
        weighted = Noising(3, 2.2, weighting=scheme).loss(family, transformer, batch, 0, 0)  # type: ignore[arg-type]
    _, sigma = Noising(3, 2.2).draw(0, 0, batch["latents"].shape[1:])
    assert float(weighted) == pytest.approx(float(plain) * weight(sigma), rel=1e-5)  # type: ignore[operator]


class Replica(torch.nn.Module):
    """Stands for a model wrapped for several processes: counts the passes that it may not
    average."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.unsynchronized = 0

    def forward(self, *values: Any, **named: Any) -> Any:
        return self.module(*values, **named)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.unsynchronized += 1
        yield


def test_gradients_are_averaged_once_per_step_however_many_micro_batches(bench: Bench) -> None:
    averaged: list[torch.Tensor] = []
    optimizer = AdapterOptimizer(
        bench.trained.adapter, learning_rate=0.0, weight_decay=0.0, max_grad_norm=1.0
    )
    family, replica = bench.resolved.family, Replica(bench.trained.transformer)
    batches = [family.collate([bench.encoded.sample(index)]) for index in (0, 0, 0)]
    optimizer_step(
        family, replica, optimizer, batches, effective_batch_size=3, step=0, average=averaged.append
    )
    assert replica.unsynchronized == 2
    assert len(averaged) == 1  # the loss


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.floats(0.5, 32))
def test_norm_of_an_update_is_that_of_the_product(
    rank: int, inputs: int, outputs: int, alpha: float
) -> None:
    generator = torch.Generator().manual_seed(rank * 100 + inputs * 10 + outputs)
    down, up = (
        torch.randn(rank, inputs, generator=generator),
        torch.randn(outputs, rank, generator=generator),
    )
    expected = float((up.double() @ down.double()).norm()) * alpha / rank
    assert update_norm(LoraLayer(down, up, alpha)) == pytest.approx(expected, rel=1e-6)
    assert math.isnan(update_norm(LoraLayer(down * math.nan, up, alpha)))
    assert update_norm(LoraLayer(down, up * 0, alpha)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_carries_an_optimizer_over_to_the_bit(dtype: torch.dtype) -> None:
    def fresh() -> AdapterOptimizer:
        parameter = nn.Parameter(torch.linspace(-1, 1, 8).to(dtype))
        return AdapterOptimizer(
            [parameter], learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1.0
        )

    def steps(optimizer: AdapterOptimizer, numbers: range) -> None:
        for number in numbers:
            (optimizer.parameters[0] * number).square().sum().backward()
            optimizer.step()

    whole, first, second = fresh(), fresh(), fresh()
    steps(whole, range(1, 7))
    steps(first, range(1, 4))
    second.load_state({name: tensor.clone() for name, tensor in first.state().items()})
    steps(second, range(4, 7))
    assert all(torch.equal(tensor, second.state()[name]) for name, tensor in whole.state().items())
    assert torch.equal(whole.parameters[0], second.parameters[0])


def test_a_step_that_ran_out_between_two_moments_can_be_taken_again() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = AdapterOptimizer(
        [parameter], learning_rate=1e-2, weight_decay=0.0, max_grad_norm=1.0
    )
    optimizer.inner.state[parameter]["step"] = torch.tensor(
        0.0
    )  # as torch leaves it when there is no room for the rest
    optimizer.discard_step()
    parameter.square().sum().backward()
    optimizer.step()
    assert (parameter != 1).all()


@pytest.mark.parametrize(
    ("name", "tokens", "shift"), [("flux1-dev", 4096, 3.1582), ("qwen-image", 8192, 2.4596)]
)
def test_shift_by_resolution_is_the_pipelines(name: str, tokens: int, shift: float) -> None:
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    defaults = get_family(name).defaults
    assert defaults.shift_at(tokens) == pytest.approx(shift, rel=1e-3)
    (low, start), (high, end) = defaults.shift_by_tokens or ((0, 0.0), (0, 0.0))
    assert math.log(defaults.shift_at(1024)) == pytest.approx(
        calculate_shift(1024, low, high, start, end)
    )


def test_a_plans_guidance_reaches_the_model() -> None:
    seen: list[float] = []
    family = get_family("flux1-dev")
    model = SimpleNamespace(config=SimpleNamespace(guidance_embeds=True))

    class Stub:
        config = model.config

        def __call__(self, **inputs: Any) -> tuple[torch.Tensor]:
            seen.append(float(inputs["guidance"][0]))
            return (inputs["hidden_states"],)

    batch = {"prompt_embeds": torch.zeros(1, 4, 8), "pooled_prompt_embeds": torch.zeros(1, 8)}
    for more in ({}, {"guidance": torch.tensor([3.5])}):
        family.predict(Stub(), torch.zeros(1, 16, 1, 4, 4), torch.zeros(1), {**batch, **more})  # type: ignore[arg-type]
    assert seen == [1.0, 3.5]


def test_checkpoints_go_by_epochs(bench: Bench, tmp_path: Path) -> None:
    plan = bench.plan(num_steps=5, checkpointing_epochs=1, checkpoints_total_limit=5)
    bench.loop(plan, tmp_path)
    every = -(-sum(item.repeats for item in bench.encoded.items) // 4)
    assert sorted(list_checkpoints(tmp_path / "checkpoints")) == sorted(
        {*range(every, 6, every), 5}
    )
    assert with_job(plan, checkpointing_steps=3).job.checkpoint_every(5, 4) == 3
