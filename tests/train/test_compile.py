"""Steps through blocks compiled one by one learn what plain steps learn: adapters, masks,
checkpointing and all."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from autotune.knobs.blocks import CompiledBlock, compile_blocks
from autotune.plan.candidate import Candidate
from autotune.plan.workload import Bucket
from autotune.search.worker import synthetic_samples
from autotune.train.loop import TrainingLoop
from autotune.train.model import apply_settings, eager_eval
from autotune.train.step import Noising
from tests.train.conftest import Bench


@pytest.mark.quick("3")
@pytest.mark.parametrize(
    ("checkpointed", "backend"),
    [
        (0, "aot_eager"),  # the graphs of inductor, without its generated code
        (3, "aot_eager"),
        pytest.param(0, "inductor", marks=pytest.mark.slow),  # 45 s on a CPU
        pytest.param(3, "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_learn_the_same(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpointed: int, backend: str
) -> None:
    monkeypatch.setattr(CompiledBlock, "backend", backend)
    settings = Candidate(micro_batch_size=2, checkpointed_blocks=checkpointed, precision="fp32")
    plan = bench.plan(num_steps=3, settings=settings)
    apply_settings(bench.trained, settings)
    blocks = bench.resolved.family.blocks(bench.trained.transformer)

    def run(name: str) -> tuple[list[torch.Tensor], TrainingLoop]:
        loop = bench.loop(plan, tmp_path / name)
        return [master.detach().clone() for master in loop.optimizer.masters], loop

    try:
        plain, _ = run("plain")
        compile_blocks(bench.trained.transformer, bench.resolved.family, "block")
        compiled, loop = run("compiled")
        with eager_eval(bench.trained.transformer):
            assert all(block._compiled_call_impl is None for block in blocks)
            aside = loop.evaluate()
        assert all(block._compiled_call_impl is not None for block in blocks)
        assert aside == pytest.approx(loop.evaluate(), rel=1e-4)
    finally:
        for block in blocks:
            block._compiled_call_impl = None
        apply_settings(
            bench.trained, plan.frozen.settings.model_copy(update={"checkpointed_blocks": 0})
        )
    for one, other in zip(compiled, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """What torch compiles, and for what, is its frontend's choice: a backend that only counts
    will do."""
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(CompiledBlock, "backend", staticmethod(count))
    return graphs


@pytest.mark.quick("2")
@pytest.mark.parametrize("checkpointed", [0, 1, 2])
def test_buckets_and_captions_compile_a_block_at_most_twice(
    bench: Bench, checkpointed: int, compiled: list[torch.fx.GraphModule]
) -> None:
    family, transformer = bench.resolved.family, bench.trained.transformer
    buckets = [
        Bucket(width_px=w, height_px=h, num_frames=1, num_items=2)
        for w, h in ((32, 32), (64, 32), (32, 96))
    ]
    work = bench.plan().frozen.workload.changed(text_padding="exact")
    settings = Candidate(micro_batch_size=2, checkpointed_blocks=checkpointed, precision="fp32")
    apply_settings(bench.trained, settings.changed(compile="block"))
    try:
        for bucket in buckets:
            for length in (9, 7, 4):
                samples = synthetic_samples(
                    family, bench.resolved.config, work, bucket, [length] * 2, torch.float32
                )
                loss = Noising().loss(family, transformer, family.collate(samples), 0, 0)
                loss.backward()  # type: ignore[no-untyped-call]
        assert len(family.blocks(transformer)) > 2
        kinds = 2 if checkpointed == 2 else 1  # the first block is not compiled
        assert kinds <= len(compiled) <= 2 * kinds
    finally:
        for parameter in bench.trained.adapter:
            parameter.grad = None
        apply_settings(bench.trained, settings.changed(checkpointed_blocks=0))


DEPTHS = {
    "flux1-dev": {"num_layers": 2, "num_single_layers": 3},
    "kandinsky5-image-lite": {"num_text_blocks": 2, "num_visual_blocks": 3},
    "wan-2.1": {"num_layers": 3},
}
"""Families whose streams are parts of others, or whose tables of positions are views, with
several blocks of a kind."""


PARTITIONED = "aot_eager_decomp_partition"
"""The graphs of inductor, run as they are."""


def test_a_block_that_recomputes_keeps_its_input_alone_and_leaves_out_its_last_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CompiledBlock, "backend", PARTITIONED)
    torch._dynamo.reset()
    block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).requires_grad_(False)
    given, kept = torch.randn(32, 64, requires_grad=True), {}
    block(given).sin().sum().backward()
    expected, given.grad = given.grad, None
    recomputing = CompiledBlock(block._call_impl, is_adapted=True).recomputing
    recomputing(given)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t
    ):
        out = recomputing(given)
    assert kept.keys() - {parameter.data_ptr() for parameter in block.parameters()} == {
        given.data_ptr()
    }
    with FlopCounterMode(display=False) as counter:
        out.sin().sum().backward()
    torch.testing.assert_close(given.grad, expected)
    assert counter.get_total_flops() == 3 * 2 * 32 * 64 * 256, (
        "one product again, and two of the gradient"
    )


def test_a_block_that_recomputes_drops_out_what_it_dropped_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CompiledBlock, "backend", PARTITIONED)
    torch._dynamo.reset()
    block = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Dropout(0.5)).requires_grad_(False)
    given = torch.randn(32, 64, requires_grad=True)
    out = CompiledBlock(block._call_impl, is_adapted=True).recomputing(given).sum()
    torch.rand(3)
    out.backward()
    # The block is linear, once it is known what drops out.
    torch.testing.assert_close((given * given.grad).sum(), out)
