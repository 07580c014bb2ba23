"""Steps through blocks compiled one by one learn what plain steps learn."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from autotune.knobs.blocks import CompiledBlock, compile_blocks
from autotune.train.model import apply_settings, eager_eval
from tests.train.conftest import values_of
from tests.train.small import SETTINGS


@pytest.fixture(autouse=True)
def _fresh(bench, monkeypatch):
    """The graphs of inductor, run as they are."""
    torch._dynamo.reset()
    monkeypatch.setattr(CompiledBlock, "backend", "aot_eager_decomp_partition")
    yield
    for block in bench.resolved.family.blocks(bench.trained.transformer):
        block._compiled_call_impl = None
    for parameter in bench.trained.adapter:
        parameter.grad = None
    apply_settings(bench.trained, SETTINGS)


@pytest.mark.parametrize(
    ("checkpointed", "backend"),
    [
        # The graphs of inductor, without its generated code.
        pytest.param(0, "aot_eager", marks=pytest.mark.slow),
        pytest.param(3, "aot_eager", marks=pytest.mark.slow),
        pytest.param(0, "inductor", marks=pytest.mark.slow),  # 45 s on a CPU
        pytest.param(3, "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_learn_the_same(bench, tmp_path, monkeypatch, checkpointed, backend):
    monkeypatch.setattr(CompiledBlock, "backend", backend)
    family, transformer = bench.resolved.family, bench.trained.transformer
    plan = bench.plan(num_steps=2, settings=SETTINGS.changed(checkpointed_blocks=checkpointed))
    apply_settings(bench.trained, plan.frozen.settings)
    plain = values_of(bench.loop(plan, tmp_path / "plain").optimizer.masters)
    compile_blocks(transformer, family, "block")
    loop = bench.loop(plan, tmp_path / "compiled")
    compiled, blocks = values_of(loop.optimizer.masters), family.blocks(transformer)
    with eager_eval(transformer):
        assert all(block._compiled_call_impl is None for block in blocks)
        aside = loop.evaluate()
    assert all(block._compiled_call_impl is not None for block in blocks)
    assert aside == pytest.approx(loop.evaluate(), rel=1e-4)
    torch.testing.assert_close(compiled, plain, rtol=1e-3, atol=1e-5)


def test_recomputing_keeps_its_input_only():
    block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).requires_grad_(False)
    given = torch.randn(32, 64, requires_grad=True)
    kept = set()
    block(given).sin().sum().backward()
    expected, given.grad = given.grad, None
    recomputing = CompiledBlock(block._call_impl, is_adapted=True).recomputing
    recomputing(given)

    def keep(tensor):
        kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = recomputing(given)
    assert kept - {parameter.data_ptr() for parameter in block.parameters()} == {given.data_ptr()}
    with FlopCounterMode(display=False) as counter:
        out.sin().sum().backward()
    torch.testing.assert_close(given.grad, expected)
    # One product again, and two of the gradient.
    assert counter.get_total_flops() == 3 * 2 * 32 * 64 * 256


def test_recomputing_repeats_its_dropout():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Dropout(0.5)).requires_grad_(False)
    given = torch.randn(32, 64, requires_grad=True)
    out = CompiledBlock(block._call_impl, is_adapted=True).recomputing(given).sum()
    torch.rand(3)
    out.backward()
    # The block is linear, once it is known what drops out.
    torch.testing.assert_close((given * given.grad).sum(), out)


def test_all_shapes_share_two_graphs(monkeypatch):
    graphs, block = [], nn.Linear(4, 4)
    block.forward = lambda x, linear=block.forward: linear(x).sin()  # torch leaves its own alone

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(CompiledBlock, "backend", staticmethod(backend))
    compiled, frozen = (CompiledBlock(block._call_impl, is_adapted) for is_adapted in (True, False))
    given = torch.randn(1, 1, 4)
    assert torch.equal(compiled(given), block(given))
    assert not graphs, "the first block's stream needs no gradient: it runs uncompiled"
    given.requires_grad_()
    for size in (2, 3, 5):
        for stream in (given.repeat(size, 7, 1), given.repeat(7, size, 1).transpose(0, 1)):
            assert torch.equal(compiled(stream), block(stream))
    assert len(graphs) == 2
    frozen(given.detach())
    assert len(graphs) == 3
