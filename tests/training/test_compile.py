"""Steps through blocks compiled one by one learn what plain steps learn: adapters, masks,
checkpointing and all.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from autotune.families.adapter import add_adapter
from autotune.families.registry import get_family
from autotune.knobs.compile import Compile, CompiledBlock
from autotune.quantization.quantized_layers import quantize_int8
from autotune.schema.candidate import Candidate
from autotune.schema.workload import Bucket, ModelSpec
from autotune.training.loop import TrainingLoop
from autotune.training.model import (
    MAX_COMPILED_GRAPHS,
    _prepare_compiler,
    apply_knobs,
    apply_settings,
    eager_eval,
)
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
        apply_settings(
            bench.trained, plan.frozen.settings.model_copy(update={"checkpointed_blocks": 0})
        )
    for one, other in zip(compiled, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """What torch compiles, and for what, is its frontend's choice: a backend that only counts
    will do.
    """
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
several blocks of a kind.
"""


@pytest.mark.quick(("flux1-dev", "1"))
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", DEPTHS)
def test_parts_and_views_as_inputs_make_no_other_graph(
    name: str, size: int, compiled: list[torch.fx.GraphModule]
) -> None:
    """Nor does Kandinsky 5's first visual block, which gets text with a gradient and an image
    without one.
    """
    family = get_family(name)
    config = {**family.transformer_config, **family.tiny_config, **DEPTHS[name]}
    transformer = family.build_transformer(config).requires_grad_(False)
    num_blocks = len(family.blocks(transformer))
    spec = ModelSpec(
        family=name, architecture="x", num_parameters=1, num_blocks=num_blocks, name="x"
    )
    work = workload(model=spec, text_padding="exact")
    add_adapter(family, transformer, work, torch.float32)
    settings = Candidate(
        micro_batch_size=size, checkpointed_blocks=0, precision="fp32", compile="block"
    )
    apply_knobs(family, transformer, settings, needs_reload=False)
    counts = []
    for width, height, length in ((64, 64, 9), (128, 64, 7), (64, 192, 4)):
        bucket = Bucket(width_px=width, height_px=height, num_frames=1, num_items=size)
        samples = synthetic_samples(family, config, work, bucket, [length] * size, torch.float32)
        Noising().loss(family, transformer, family.collate(samples), 0, 0)
        counts.append(len(compiled) / len(family.block_lists))
    assert counts == [1, 2, 2]


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


def test_compiled_layers_on_8_bits_keep_no_cast_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled FLUX.1 of int8 weights took more memory than in fp32."""
    monkeypatch.setattr(CompiledBlock, "backend", PARTITIONED)
    monkeypatch.setattr(torch._functorch.config, "cse", True)  # torch's own, put back afterwards
    torch._dynamo.reset()
    block = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).requires_grad_(
        False
    )
    for layer in (block[0], block[2]):
        quantize_int8(layer)
    Compile().apply(block, SimpleNamespace(blocks=lambda whole: [whole]), "block")  # type: ignore[arg-type]
    given, kept = torch.randn(2, 64, 256, requires_grad=True), {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t
    ):
        out = block(given)
    out.sum().backward()
    stored = {parameter.data_ptr() for parameter in block.parameters()}
    assert (
        sum(t.nbytes for address, t in kept.items() if address not in stored) == 4 * 128 * 1024
    ), "what GELU got"


def test_threads_of_backward_passes_may_compile_as_many_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vars(torch._dynamo.config)["_config"]["recompile_limit"], "default", 8)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "kept")
    _prepare_compiler()
    with ThreadPoolExecutor(1) as threads:
        assert (
            threads.submit(lambda: torch._dynamo.config.recompile_limit).result()
            == MAX_COMPILED_GRAPHS
        )
