"""Steps through blocks compiled one by one learn what plain steps learn: adapters, masks, checkpointing and all."""

import os
from pathlib import Path

import pytest
import torch

from autotune.schema import Candidate
from autotune.training.loop import Loop
from autotune.training.model import apply_settings, as_written
from tests.training.conftest import Bench

BACKEND = os.environ.get("AUTOTUNE_TEST_COMPILER", "aot_eager")
"""`inductor` generates code, too, which takes a minute on a CPU; the graphs are the same."""


@pytest.mark.parametrize("checkpointed", [0, 3])
def test_compiled_blocks_learn_the_same(bench: Bench, tmp_path: Path, checkpointed: int) -> None:
    settings = Candidate(micro_batch_size=2, checkpointed_blocks=checkpointed, precision="fp32")
    plan = bench.plan(num_steps=3, settings=settings)
    apply_settings(bench.trained, settings)
    blocks = bench.resolved.family.blocks(bench.trained.transformer)

    def run(name: str) -> tuple[list[torch.Tensor], Loop]:
        loop = bench.loop(plan, tmp_path / name)
        return [master.detach().clone() for master in loop.optimizer.masters], loop

    try:
        plain, _ = run("plain")
        for block in blocks:
            block.compile(backend=BACKEND, dynamic=False)
        compiled, loop = run("compiled")
        with as_written(bench.trained.transformer):
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
