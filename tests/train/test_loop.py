"""The loop and its step: rates, weights of losses, gradients, and steps that fail."""

import contextlib
import copy
import math
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from autotune.cost.kernels import substitutes
from autotune.data.encode import EncodedDataset, Encoders
from autotune.errors import AutotuneError
from autotune.knobs.settings import ROUNDING
from autotune.models.family import TORCH_LOCK
from autotune.models.registry import get_family
from autotune.plan.candidate import CachingSettings
from autotune.train import loop as loop_module, validation
from autotune.train.folder import judge_adapter, list_checkpoints, update_norm
from autotune.train.model import apply_settings
from autotune.train.optimizer import AdapterOptimizer, LearningRate
from autotune.train.sample import PreviewSampler
from autotune.train.step import Noising, optimizer_step
from autotune.weights.adapters import Adapter, write_adapter
from autotune.weights.names import LoraLayer
from tests.train.conftest import CPU, values_of
from tests.train.small import SETTINGS
from tests.train.test_resume import same

SMALLER = SETTINGS.changed(micro_batch_size=1, checkpointed_blocks=1)
OTHER_STORAGE = SETTINGS.changed(micro_batch_size=1, quantization="torchao-int8")


def adamw(*parameters, **options):
    rates = {"learning_rate": 1e-2, "weight_decay": 0.0, "max_grad_norm": 1.0, **options}
    return AdapterOptimizer(list(parameters), **rates)


def rates(bench, schedule, **job):
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


def test_padding_changes_no_loss(bench, tmp_path, monkeypatch):
    plan = bench.plan(num_steps=2, validation="40%", validation_every=1)
    lengths = []
    monkeypatch.setattr(validation, "VALIDATION_DRAWS", 4)
    collate, sample = type(bench.trained).collate, EncodedDataset.sample

    def uneven(data, index, *draw):
        tensors = sample(data, index, *draw)
        return {**tensors, "prompt_embeds": tensors["prompt_embeds"][index % 2 :]}

    def watched(model, samples):
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
        steps = []
        loop = bench.loop(plan, tmp_path / str(multiple), held_out=2, on_step=steps.append)
        found.append(
            [*(each.loss for each in steps), loop.evaluate(), *loop.validation.meter.measure(2)]
        )
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


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.floats(0.5, 32))
def test_norms_are_those_of_products(rank, inputs, outputs, alpha):
    generator = torch.Generator().manual_seed(rank * 100 + inputs * 10 + outputs)
    down = torch.randn(rank, inputs, generator=generator)
    up = torch.randn(outputs, rank, generator=generator)
    expected = float((up.double() @ down.double()).norm()) * alpha / rank
    assert update_norm(LoraLayer(down, up, alpha)) == pytest.approx(expected, rel=1e-6)
    assert math.isnan(update_norm(LoraLayer(down * math.nan, up, alpha)))
    assert update_norm(LoraLayer(down, up * 0, alpha)) == 0


def test_last_block_may_stay_still(tmp_path):
    """Where nothing reads its output, as of MM-DiT's text stream."""
    down, up = torch.ones(1, 2), torch.ones(3, 1)
    ups = {"blocks.0.a": up * 0, "blocks.0.b": up, "blocks.1.a": up * 0, "blocks.10.a": up * 0}
    layers = {name: LoraLayer(down, each, 2.0) for name, each in ups.items()}
    layers["blocks.2.a"] = LoraLayer(down, up * math.inf, 2.0)
    write_adapter(tmp_path / "a.safetensors", Adapter(layers, {}), "diffusers")
    losses = {"base_loss": 1.0, "adapter_loss": 0.5}
    found = judge_adapter(tmp_path / "a.safetensors", last_block="blocks.1", **losses)
    assert (found.num_layers, found.num_unmoved, found.num_not_finite) == (5, 2, 1)
    norms = {**dict.fromkeys(layers, 0.0), "blocks.0.b": pytest.approx(2 * 6**0.5)}
    assert found.layer_norms == norms
    assert (found.base_loss, found.adapter_loss) == (1.0, 0.5)


def test_half_failed_steps_repeat():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = adamw(parameter)
    # As torch leaves it when there is no room for the rest.
    optimizer.inner.state[parameter]["step"] = torch.tensor(0.0)
    optimizer.discard_step()
    parameter.square().sum().backward()
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
def as_before(bench):
    yield
    apply_settings(bench.trained, SETTINGS)
    for parameter in bench.trained.adapter:
        parameter.grad = None


def planned(bench, *fallbacks, **frozen):
    plan = bench.plan(num_steps=3, checkpointing_steps=1)
    changed = plan.frozen.model_copy(update={"fallbacks": fallbacks, **frozen})
    return plan.model_copy(update={"frozen": changed})


def break_down(monkeypatch, error):
    """Fails in the middle of the second step: after its first micro-batch's backward pass."""
    left = [error]

    def step(family, network, optimizer, batches, **how):
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
    steps = []
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
    tried = []

    def step(*arguments, **named):
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
    def step(*arguments, **named):
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
    attention = []

    def spoil(gradient):
        block = bench.trained.transformer.transformer_blocks[0]
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
    steps = []
    plan = bench.plan(num_steps=1)
    with ThreadPoolExecutor(1) as thread:
        with substitutes("flash", "cuda"), TORCH_LOCK:
            run = thread.submit(bench.loop, plan, tmp_path, on_step=steps.append)
            assert not wait([run], timeout=1).done
        run.result()
    assert len(steps) == 1


class Scaled:
    """Stands for a family: a linear model on latents alone."""

    def predict(self, transformer, noisy, sigmas, batch):
        return transformer(noisy.flatten(2).mT).mT.view(noisy.shape)


LATENTS = torch.randn(4, 3, 1, 2, 2, generator=torch.Generator().manual_seed(0))


def _run(sizes, dtype=torch.float32, steps=2, dropout=0.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(dropout)).to(dtype)
    rates = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5}
    optimizer = AdapterOptimizer(list(model.parameters()), **rates)
    outcomes = []
    for step in range(steps):
        batches = [{"latents": part.to(dtype)} for part in LATENTS.split(list(sizes))]
        how = {"effective_batch_size": 4, "noising": Noising(7, 2.0), "step": step}
        outcomes.append(optimizer_step(Scaled(), model, optimizer, batches, **how))
    return model, outcomes


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2), (3, 1)])
def test_any_split_of_batch_learns_same(sizes):
    whole, first = _run((4,))
    split, second = _run(sizes)
    for one, other in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    for one, other in zip(first, second, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-4)


def test_gradients_are_averaged_once_a_step():
    model, told, losses = nn.Linear(3, 3), [], []
    model.no_sync = lambda: contextlib.nullcontext(told.append("alone"))
    optimizer = adamw(*model.parameters())
    batches = (told.append("batch") or {"latents": part} for part in LATENTS.split(1))
    how = {"effective_batch_size": 4, "step": 0, "average": losses.append}
    optimizer_step(Scaled(), model, optimizer, batches, **how)
    assert told == ["batch", "alone"] * 3 + ["batch"]
    assert len(losses) == 1


def test_a_step_equals_one_written_out():
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    expected = copy.deepcopy(model)
    draws = [Noising(7, 2.0).draw(0, place, LATENTS.shape[1:]) for place in range(4)]
    loss = 0.0
    for clean, (noise, sigma) in zip(LATENTS, draws, strict=True):
        noisy = (1 - sigma) * clean + sigma * noise
        predicted = torch.einsum("oc,cthw->othw", expected.weight, noisy)
        predicted = predicted + expected.bias.view(3, 1, 1, 1)
        loss = loss + ((predicted - (noise - clean)) ** 2).mean() / 4
    loss.backward()
    norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
    torch.optim.AdamW(expected.parameters(), lr=1e-2, weight_decay=0.1).step()
    stepped, (outcome,) = _run((4,), steps=1)
    assert outcome.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert outcome.gradient_norm == pytest.approx(float(norm), rel=1e-5)
    for one, other in zip(stepped.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_bf16_parameters_keep_small_updates():
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = adamw(parameter, learning_rate=1e-4, max_grad_norm=1e9)
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert float(parameter.detach()) == pytest.approx(0.99, abs=0.004)


@given(st.integers(0, 2**31), st.integers(0, 10_000), st.integers(0, 64), st.floats(0.1, 10))
@settings(max_examples=50)
def test_draws_depend_on_their_place(seed, step, place, shift):
    noise, sigma = Noising(seed, shift).draw(step, place, (3, 1, 2, 2))
    again, same = Noising(seed, shift).draw(step, place, (3, 1, 2, 2))
    assert torch.equal(noise, again)
    assert sigma == same
    assert 0 < sigma < 1
    edges = [Noising(seed, shift).level_of_quantile(edge, (3, 1, 2, 2)) for edge in (0, 1)]
    assert all(0 < level < 1 for level in edges)
    assert not torch.equal(noise, Noising(seed, shift).draw(step, place + 1, (3, 1, 2, 2))[0])
    large, names = 2**63 + 7, ("logit_normal", "uniform")
    kinds = [Noising(large, 2.0, kind).level_at(3, 1, (4,)) for kind in names]
    assert kinds == pytest.approx([0.41205429, 0.82483163]), "a resumed run draws on"
    _, (first, *_) = _run((3, 1), dropout=0.5)
    assert first.loss == pytest.approx(2.10090995), "and drops out the same"


FP16 = SETTINGS.changed(precision="fp16")


@pytest.fixture(scope="module")
def half(bench):
    """The same model in fp16, with the same adapter at its start."""
    return bench.changed(FP16)


def overflow(monkeypatch, at):
    """Makes the backward passes of some micro-batches overflow, by their number."""
    scale, calls = AdapterOptimizer.scale, [0]

    def scaled(self, loss):
        calls[0] += 1
        return scale(self, loss) * (1e30 if at(calls[0] - 1) else 1.0)

    monkeypatch.setattr(AdapterOptimizer, "scale", scaled)


def run(bench, folder, kill_after=None, **job):
    steps = []
    plan = bench.plan(settings=FP16, checkpointing_steps=1, **job)
    apply_settings(bench.trained, FP16)  # a run before may have changed its attention
    return bench.loop(plan, folder, on_step=steps.append, kill_after=kill_after), steps


def test_fp16_learns_what_fp32_learns(bench, half, tmp_path):
    expected = []
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
    optimizer.scaler.set_growth_interval(2)
    scales = []
    for factor in (1.0, 1e30, 1.0, 1.0, 1.0):
        before = optimizer.masters[0].detach().clone()
        optimizer.scale((parameter.float() * factor / 8).sum()).backward()
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
    seen = {}

    class Recorder(nn.Module):
        def forward(self, hidden, **given):
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
