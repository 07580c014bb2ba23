"""Kinds of adapters: trained, saved, loaded by diffusers, and gone on with."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from autotune.errors import InvalidInput
from autotune.models.adapter import add_adapter, block_numbers, choose_layers
from autotune.models.family import build_on_meta
from autotune.models.registry import get_family
from autotune.plan.job import Job
from autotune.plan.workload import WorkloadRequest
from autotune.train.folder import ADAPTER_FILE, start_from, starting_values, update_norm
from autotune.train.model import apply_settings, eager_eval, load_model
from autotune.train.workload import describe_workload
from autotune.weights.adapters import Adapter, read_adapter, write_adapter
from autotune.weights.names import KroneckerLayer, LoraLayer
from tests.train.conftest import CPU, save, values_of

CHANGES = {
    "rslora": {"adapter": "rslora"},
    "dora": {"adapter": "dora"},
    "lokr": {"adapter": "lokr", "rank": 2, "lora_alpha": 3.0},
    "lokr-whole": {"adapter": "lokr", "rank": 64, "lokr_factor": 4},
    "blocks": {"adapted_blocks": "1", "targets": "to_q,*.to_out.0"},
    "average": {"ema_decay": 0.9},
}


def saved(loop, file):
    loop.optimizer.turn_to_average()
    return save(loop, file)


@pytest.mark.quick("dora")
@pytest.mark.parametrize("kind", CHANGES)
def test_diffusers_computes_what_was_trained(bench, tmp_path, kind):
    changed = bench.changed(**CHANGES[kind])
    plan = changed.plan(num_steps=3, checkpointing_steps=1, learning_rate=1e-2)
    whole = saved(changed.loop(plan, tmp_path / "whole"), tmp_path / "whole.safetensors")
    changed.loop(plan, tmp_path / "cut", kill_after=2)
    loop = changed.loop(plan, tmp_path / "cut")
    resumed = saved(loop, tmp_path / "resumed.safetensors")
    assert whole.read_bytes() == resumed.read_bytes()
    loss = loop.evaluate()
    work, family = plan.frozen.workload, changed.resolved.family
    again = load_model(changed.resolved, work, plan.frozen.settings, CPU, seed=1)
    start_from(resumed, again.transformer, again.family)
    loop.model = dataclasses.replace(loop.model, transformer=again.transformer)
    assert loop.evaluate() == pytest.approx(loss, rel=1e-5)
    stock = family.load_pipeline(changed.model_folder)
    loader = stock.transformer.load_lora_adapter if "lokr" in kind else stock.load_lora_weights
    loader(tmp_path, weight_name="resumed.safetensors")
    loop.model = dataclasses.replace(loop.model, transformer=stock.transformer)
    assert loop.evaluate() == pytest.approx(loss, rel=1e-5)
    stock.transformer.disable_adapters()
    assert loop.evaluate() != pytest.approx(loss, rel=1e-5)


def test_patterns_and_blocks_choose_layers():
    family = get_family("qwen-image")
    model = build_on_meta(family, {**family.transformer_config, "num_layers": 4})
    chosen = str(choose_layers(family, model, "to_q,img_mlp.*", "1-2")).replace("\\", "").split("|")
    names = ("attn.to_q", "img_mlp.net.0.proj", "img_mlp.net.2")
    assert chosen == [f"transformer_blocks.{block}.{name}" for block in (1, 2) for name in names]
    assert block_numbers("0-1,3", 4) == {0, 1, 3}
    wrong = {("to_z", "all"): "no layer", ("attention", "2-4"): "not blocks"}
    wrong["atention", "all"] = "no target set"
    for (targets, blocks), what in wrong.items():
        with pytest.raises(InvalidInput, match=what):
            choose_layers(family, model, targets, blocks)


def test_uneven_patterns_are_refused(bench):
    config = {**bench.resolved.config, "num_layers": 5}
    deep = dataclasses.replace(bench.resolved, config=config, folder=None)
    with pytest.raises(InvalidInput, match="names different layers in different blocks") as caught:
        describe_workload(deep, None, WorkloadRequest(targets="transformer_blocks.2.attn.to_q"))
    assert "--blocks" in caught.value.hint
    work = describe_workload(deep, None, WorkloadRequest(targets="to_q", adapted_blocks="2"))
    transformer = build_on_meta(deep.family, config)
    assert len(add_adapter(deep.family, transformer, work, torch.float32)) == 2


def test_dropout_changes_no_evaluation(bench, tmp_path):
    dropping = bench.changed(lora_dropout=0.5)
    loop = dropping.loop(dropping.plan(num_steps=2), tmp_path / "dropping")
    plain = bench.loop(bench.plan(num_steps=2), tmp_path / "plain")
    assert not all(map(torch.equal, loop.optimizer.masters, plain.optimizer.masters))
    for one, other in zip(bench.trained.adapter, dropping.trained.adapter, strict=True):
        one.data.copy_(other)
    assert loop.evaluate() != pytest.approx(plain.evaluate(), rel=1e-6)
    with eager_eval(dropping.trained.transformer):
        assert loop.evaluate() == pytest.approx(plain.evaluate(), rel=1e-6)


def test_interrupted_and_recomputed_dropout_is_same(bench, tmp_path):
    dropping = bench.changed(lora_dropout=0.5)
    plan = dropping.plan(num_steps=3, checkpointing_steps=1)
    whole = values_of(dropping.loop(plan, tmp_path / "whole").optimizer.masters)
    torch.rand(7)
    dropping.loop(plan, tmp_path / "cut", kill_after=2)
    resumed = values_of(dropping.loop(plan, tmp_path / "cut").optimizer.masters)
    apply_settings(dropping.trained, plan.frozen.settings.changed(checkpointed_blocks=3))
    recomputed = dropping.loop(plan, tmp_path / "recomputed").optimizer.masters
    assert all(map(torch.equal, whole, resumed))
    assert all(map(torch.equal, whole, recomputed))


@pytest.fixture
def empty(bench):
    transformer = build_on_meta(bench.resolved.family, bench.resolved.config)
    work = bench.plan().frozen.workload
    add_adapter(bench.resolved.family, transformer, work, torch.float32)
    return transformer


def layers_of(transformer, rank, alpha):
    layers = {}
    for name, module in transformer.named_modules():
        if "default" in getattr(module, "lora_A", ()):
            down, up = torch.randn(rank, module.in_features), torch.randn(module.out_features, rank)
            layers[name] = LoraLayer(down, up, alpha)
    return layers


@pytest.mark.parametrize("form", ["diffusers", "comfyui", "kohya"])
def test_any_format_starts_as_the_same(bench, empty, form, tmp_path):
    made, family = layers_of(empty, 2, 7.0), bench.resolved.family
    write_adapter(tmp_path / "a.safetensors", Adapter(made, {}), form, family.transformer_class)
    values = starting_values(tmp_path / "a.safetensors", empty, family)
    for name, layer in made.items():
        up, down = (values[f"{name}.lora_{half}.default.weight"] for half in "BA")
        scaling = empty.get_submodule(name).scaling["default"]
        torch.testing.assert_close(up @ down * scaling, layer.up @ layer.down * 3.5)


@pytest.mark.parametrize("kind", ["lokr", "lokr-whole"])
def test_lokr_starts_as_the_same(bench, kind, tmp_path):
    family, own = bench.resolved.family, build_on_meta(bench.resolved.family, bench.resolved.config)
    work = bench.plan().frozen.workload.changed(**CHANGES[kind])
    add_adapter(family, own, work, torch.float32)
    adapted = {n: m for n, m in own.named_modules() if "default" in getattr(m, "scaling", ())}
    made = {}
    for name, module in adapted.items():
        parts = {part: getattr(module, part) for part in module.adapter_layer_names}
        shapes = {part: each["default"].shape for part, each in parts.items() if each}
        made[name] = KroneckerLayer({part: torch.randn(shape) for part, shape in shapes.items()})
    write_adapter(tmp_path / "a.safetensors", Adapter(made, {}), "diffusers")
    values = starting_values(tmp_path / "a.safetensors", own, family)
    for name, layer in made.items():
        found = KroneckerLayer({p: values[f"{name}.{p}.default"] for p in layer.factors})
        one, other = (
            torch.kron(*map(each.matrix, ("lokr_w1", "lokr_w2"))) for each in (layer, found)
        )
        torch.testing.assert_close(other * adapted[name].scaling["default"], one)


def test_other_shapes_are_refused(bench, empty, tmp_path):
    file, layers = tmp_path / "a.safetensors", layers_of(empty, 2, 3.0)
    name, layer = min(layers.items())
    for width in (7, 999):
        odd = {name: dataclasses.replace(layer, down=torch.randn(2, width))}
        write_adapter(file, Adapter(layers | odd, {}), "diffusers")
        with pytest.raises(InvalidInput, match="shape"):
            starting_values(file, empty, bench.resolved.family)
    layers = layers_of(empty, 3, 3.0)
    write_adapter(file, Adapter(layers, {}), "diffusers")
    with pytest.raises(InvalidInput, match="has rank 3, the plan 2"):
        starting_values(file, empty, bench.resolved.family)
    layers.pop(min(layers))
    write_adapter(file, Adapter(layers, {}), "diffusers")
    with pytest.raises(InvalidInput, match="adapts other layers than the plan"):
        starting_values(file, empty, bench.resolved.family)


def test_run_goes_on_from_anothers_adapter(bench, empty, tmp_path):
    first, output = layers_of(empty, 2, 2.0), tmp_path / "second"
    write_adapter(tmp_path / "first.safetensors", Adapter(first, {}), "diffusers")
    given = {"from_adapter": str(tmp_path / "first.safetensors"), "adapter_format": "kohya"}
    plan = bench.plan(num_steps=1, save_dtype="bf16", output=str(output), **given)
    report = bench.train(plan)
    tensors = load_file(output / ADAPTER_FILE).values()
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert Job.model_fields["save_dtype"].default == "bf16", "as peers save, unless said"
    assert report.adapter == "kohya_lora_weights.safetensors"
    for_kohya, second = output / report.adapter, read_adapter(output / ADAPTER_FILE).layers
    assert all(key.startswith("lora_unet_transformer_blocks_") for key in load_file(for_kohya))
    norms = {key: update_norm(layer) for key, layer in second.items()}
    exported = read_adapter(for_kohya).layers
    assert norms == {key: update_norm(layer) for key, layer in exported.items()}
    expected = {key: update_norm(layer) for key, layer in first.items()}
    assert norms == pytest.approx(expected, rel=0.05)
