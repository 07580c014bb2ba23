"""Kinds of adapters, parts of a model and averages of steps: trained, saved, loaded by
diffusers, gone on with."""

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from autotune.errors import InvalidInput
from autotune.models.adapter import adapter_shapes, add_adapter, block_numbers, choose_layers
from autotune.models.family import build_on_meta
from autotune.models.registry import get_family
from autotune.plan.file import seal
from autotune.plan.plan import TrainingPlan
from autotune.plan.workload import WorkloadRequest
from autotune.train.checkpoint import save_trained, start_from
from autotune.train.loop import TrainingLoop
from autotune.train.model import load_model
from autotune.train.prepare import describe_workload
from autotune.weights.adapters import read_adapter
from tests.builders import workload
from tests.cost.tiny_models import TINY
from tests.train.conftest import CPU, Bench

CHANGES: dict[str, dict[str, Any]] = {
    "rslora": {"adapter": "rslora"},
    "dora": {"adapter": "dora"},
    "blocks": {"adapted_blocks": "1", "targets": "to_q,*.to_out.0"},
    "average": {"ema_decay": 0.9},
}


@pytest.mark.quick("qwen-image", ("sdxl", "lora"))
@pytest.mark.parametrize("adapter", ["lora", "dora"])
@pytest.mark.parametrize("name", sorted(TINY))
def test_the_shapes_of_an_adapter_are_known_without_making_it(name: str, adapter: str) -> None:
    family = get_family(name)
    for targets in ("attention", "all-linear"):
        asked = workload(targets=targets, adapter=adapter, rank=4)
        transformer = build_on_meta(family, TINY[name])
        expected = adapter_shapes(family, transformer, asked)
        made = add_adapter(family, transformer, asked, torch.float32)
        assert expected == Counter(tuple(parameter.shape) for parameter in made)


@dataclasses.dataclass(frozen=True)
class ChangedBench(Bench):
    """Its plans are for another adapter."""

    changes: dict[str, Any]

    def plan(self, **job: Any) -> TrainingPlan:
        plan = super().plan(**job)
        return seal(
            plan.job, plan.frozen.changed(workload=plan.frozen.workload.changed(**self.changes))
        )


@pytest.fixture(params=CHANGES)
def changed(request: pytest.FixtureRequest, bench: Bench) -> ChangedBench:
    fields = {field.name: getattr(bench, field.name) for field in dataclasses.fields(bench)}
    plan = ChangedBench(**fields, changes=CHANGES[request.param]).plan()
    trained = load_model(
        bench.resolved, plan.frozen.workload, plan.frozen.settings, CPU, plan.job.seed
    )
    initial = [parameter.detach().clone() for parameter in trained.adapter]
    return ChangedBench(
        **{**fields, "trained": trained, "initial": initial}, changes=CHANGES[request.param]
    )


def saved(loop: TrainingLoop, plan: TrainingPlan, file: Path) -> Path:
    loop.optimizer.turn_to_average()
    save_trained(
        file, loop.model, loop.optimizer, plan.frozen.workload, plan.digest, loop.num_steps
    )
    return file


@pytest.mark.quick("dora")
def test_it_goes_on_to_the_bit_and_diffusers_computes_with_the_file_what_was_trained(
    changed: ChangedBench, tmp_path: Path
) -> None:
    plan = changed.plan(num_steps=4, checkpointing_steps=1, learning_rate=1e-2)
    whole = saved(changed.loop(plan, tmp_path / "whole"), plan, tmp_path / "whole.safetensors")
    changed.loop(plan, tmp_path / "cut", kill_after=3)
    loop = changed.loop(plan, tmp_path / "cut")
    resumed = saved(loop, plan, tmp_path / "resumed.safetensors")
    assert whole.read_bytes() == resumed.read_bytes()
    loss = loop.evaluate()
    transformer = loop.model.transformer
    work, family = plan.frozen.workload, changed.resolved.family
    again = load_model(changed.resolved, work, plan.frozen.settings, CPU, seed=1)
    start_from(resumed, again.transformer, again.family)
    loop.model = dataclasses.replace(loop.model, transformer=again.transformer)
    assert loop.evaluate() == pytest.approx(loss, rel=1e-5)
    stock = family.load_pipeline(changed.model_folder)
    stock.load_lora_weights(tmp_path, weight_name="resumed.safetensors")
    loop.model = dataclasses.replace(loop.model, transformer=stock.transformer)
    assert loop.evaluate() == pytest.approx(loss, rel=1e-5)
    stock.transformer.disable_adapters()
    assert loop.evaluate() != pytest.approx(loss, rel=1e-5)
    loop.model = dataclasses.replace(loop.model, transformer=transformer)


@pytest.mark.quick("rslora")
def test_the_scale_of_rslora_is_told_as_an_alpha(changed: ChangedBench, tmp_path: Path) -> None:
    plan = changed.plan(num_steps=1)
    work = plan.frozen.workload
    file = saved(changed.loop(plan, tmp_path / "run"), plan, tmp_path / "one.safetensors")
    scale = math.sqrt(work.rank) if work.adapter == "rslora" else 1.0
    assert {layer.alpha for layer in read_adapter(file).layers.values()} == {
        work.lora_alpha * scale
    }
    has_norms = any(name.endswith("lora_magnitude_vector") for name in load_file(file))
    assert has_norms == (work.adapter == "dora")


def test_layers_are_chosen_by_pattern_and_block() -> None:
    family = get_family("qwen-image")
    model = build_on_meta(family, {**family.transformer_config, "num_layers": 4})
    chosen = str(choose_layers(family, model, "to_q,img_mlp.*", "1-2")).replace("\\", "").split("|")
    assert chosen == [
        f"transformer_blocks.{block}.{name}"
        for block in (1, 2)
        for name in ("attn.to_q", "img_mlp.net.0.proj", "img_mlp.net.2")
    ]
    assert block_numbers("0-1,3", 4) == {0, 1, 3}
    assert choose_layers(family, model, "attention") == family.target_sets["attention"]
    for targets, blocks, what in (
        ("to_z", "all", "no layer"),
        ("attention", "2-4", "not blocks"),
        ("atention", "all", "no target set"),
    ):
        with pytest.raises(InvalidInput, match=what):
            choose_layers(family, model, targets, blocks)


def test_patterns_that_tell_blocks_apart_are_refused(bench: Bench) -> None:
    family = get_family("qwen-image")
    deep = dataclasses.replace(
        bench.resolved, config={**bench.resolved.config, "num_layers": 5}, folder=None
    )
    with pytest.raises(InvalidInput, match="names different layers in different blocks") as caught:
        describe_workload(deep, None, WorkloadRequest(targets="transformer_blocks.2.attn.to_q"))
    assert "--blocks" in caught.value.hint
    work = describe_workload(deep, None, WorkloadRequest(targets="to_q", adapted_blocks="2"))
    assert len(add_adapter(family, build_on_meta(family, deep.config), work, torch.float32)) == 2
