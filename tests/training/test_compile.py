"""Steps through blocks compiled one by one learn what plain steps learn: adapters, masks, checkpointing and all."""

from pathlib import Path

import pytest
import torch

from autotune.knobs.compile import Compile, CompiledBlock
from autotune.schema.candidate import Candidate
from autotune.schema.workload import Bucket
from autotune.training.loop import TrainingLoop
from autotune.training.model import apply_settings, eager_eval
from autotune.training.step import Noising
from autotune.trials.steps import synthetic_samples
from tests.training.conftest import Bench


@pytest.mark.parametrize(
    ("checkpointed", "backend"),
    [
        (0, "aot_eager"),  # the graphs of inductor, without its generated code
        (3, "aot_eager"),
        pytest.param(0, "inductor", marks=pytest.mark.slow),  # 45 s on a CPU
        pytest.param(3, "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_learn_the_same(bench: Bench, tmp_path: Path, checkpointed: int, backend: str) -> None:
    settings = Candidate(micro_batch_size=2, checkpointed_blocks=checkpointed, precision="fp32")
    plan = bench.plan(num_steps=3, settings=settings)
    apply_settings(bench.trained, settings)
    blocks = bench.resolved.family.blocks(bench.trained.transformer)

    def run(name: str) -> tuple[list[torch.Tensor], TrainingLoop]:
        loop = bench.loop(plan, tmp_path / name)
        return [master.detach().clone() for master in loop.optimizer.masters], loop

    try:
        plain, _ = run("plain")
        if backend == "inductor":
            Compile().apply(bench.trained.transformer, bench.resolved.family, "block")
        else:
            for block in blocks:
                block._compiled_call_impl = CompiledBlock(block, backend)
        compiled, loop = run("compiled")
        with eager_eval(bench.trained.transformer):
            assert all(block._compiled_call_impl is None for block in blocks)
            aside = loop.evaluate()
        assert all(block._compiled_call_impl is not None for block in blocks)
        assert aside == pytest.approx(loop.evaluate(), rel=1e-4)
    finally:
        for block in blocks:
            block._compiled_call_impl = None
        apply_settings(bench.trained, plan.frozen.settings.model_copy(update={"checkpointed_blocks": 0}))
    for one, other in zip(compiled, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("checkpointed", [0, 1])
def test_buckets_and_captions_compile_a_block_at_most_twice(bench: Bench, checkpointed: int) -> None:
    """Which blocks torch compiles, and for what, is its frontend's choice: a backend that only counts will do."""
    family, transformer = bench.resolved.family, bench.trained.transformer
    buckets = [Bucket(width_px=w, height_px=h, num_frames=1, num_items=2) for w, h in ((32, 32), (64, 32), (32, 96))]
    work = bench.plan().frozen.workload.changed(text_padding="exact")
    compiled: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> object:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    apply_settings(bench.trained, Candidate(micro_batch_size=2, checkpointed_blocks=checkpointed, precision="fp32"))
    blocks = family.blocks(transformer)
    try:
        for block in blocks:
            block._compiled_call_impl = CompiledBlock(block, count)
        for bucket in buckets:
            for length in (9, 7, 4):
                samples = synthetic_samples(family, bench.resolved.config, work, bucket, [length] * 2, torch.float32)
                loss = Noising().loss(family, transformer, family.collate(samples), 0, 0)
                loss.backward()  # type: ignore[no-untyped-call]
        assert len(blocks) > 2
        assert 1 <= len(compiled) <= 2
    finally:
        for block in blocks:
            block._compiled_call_impl = None
        for parameter in bench.trained.adapter:
            parameter.grad = None
        apply_settings(bench.trained, Candidate(micro_batch_size=2, checkpointed_blocks=0, precision="fp32"))
