"""Steps through blocks compiled one by one learn what plain steps learn: adapters, masks, checkpointing and all."""

from pathlib import Path

import pytest
import torch

from autotune.families.adapter import add_adapter
from autotune.families.registry import get_family
from autotune.knobs.compile import Compile, CompiledBlock
from autotune.schema.candidate import Candidate
from autotune.schema.workload import Bucket, ModelSpec
from autotune.training.loop import TrainingLoop
from autotune.training.model import apply_knobs, apply_settings, eager_eval
from autotune.training.step import Noising
from autotune.trials.steps import synthetic_samples
from tests.builders import workload
from tests.training.conftest import Bench


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
        Compile().apply(bench.trained.transformer, bench.resolved.family, "block")
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


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """What torch compiles, and for what, is its frontend's choice: a backend that only counts will do."""
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(CompiledBlock, "backend", staticmethod(count))
    return graphs


@pytest.mark.quick("1")
@pytest.mark.parametrize("checkpointed", [0, 1])
def test_buckets_and_captions_compile_a_block_at_most_twice(
    bench: Bench, checkpointed: int, compiled: list[torch.fx.GraphModule]
) -> None:
    family, transformer = bench.resolved.family, bench.trained.transformer
    buckets = [Bucket(width_px=w, height_px=h, num_frames=1, num_items=2) for w, h in ((32, 32), (64, 32), (32, 96))]
    work = bench.plan().frozen.workload.changed(text_padding="exact")
    settings = Candidate(micro_batch_size=2, checkpointed_blocks=checkpointed, precision="fp32")
    apply_settings(bench.trained, settings.changed(compile="block"))
    try:
        for bucket in buckets:
            for length in (9, 7, 4):
                samples = synthetic_samples(family, bench.resolved.config, work, bucket, [length] * 2, torch.float32)
                loss = Noising().loss(family, transformer, family.collate(samples), 0, 0)
                loss.backward()  # type: ignore[no-untyped-call]
        assert len(family.blocks(transformer)) > 2
        assert 1 <= len(compiled) <= 2
    finally:
        for parameter in bench.trained.adapter:
            parameter.grad = None
        apply_settings(bench.trained, settings.changed(checkpointed_blocks=0))


def test_text_that_is_learned_before_the_image_makes_no_other_graph(compiled: list[torch.fx.GraphModule]) -> None:
    """The first visual block of Kandinsky 5 gets text with a gradient and an image without one."""
    family = get_family("kandinsky5-image-lite")
    config = {**family.transformer_config, **family.tiny_config, "num_text_blocks": 2, "num_visual_blocks": 3}
    spec = ModelSpec(family=family.name, architecture="x", num_parameters=1, num_blocks=5, name="x")
    work = workload(model=spec, text_padding="exact")
    transformer = family.build_transformer(config).requires_grad_(False)
    add_adapter(family, transformer, work, torch.float32)
    settings = Candidate(micro_batch_size=2, checkpointed_blocks=0, precision="fp32", compile="block")
    apply_knobs(family, transformer, settings, needs_reload=False)
    bucket = Bucket(width_px=64, height_px=64, num_frames=1, num_items=2)
    samples = synthetic_samples(family, config, work, bucket, [7, 7], torch.float32)
    Noising().loss(family, transformer, family.collate(samples), 0, 0)
    assert len(compiled) == len(family.block_lists)
