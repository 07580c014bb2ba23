"""Training goes on from an adapter's file, and writes the adapter in the dtype that is asked
for."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import autotune
from autotune.errors import InvalidInput
from autotune.models.adapter import add_adapter
from autotune.models.family import build_on_meta
from autotune.models.resolve import resolve_model
from autotune.plan.job import Job, ModelRef
from autotune.train.checkpoint import start_from, starting_values, update_norm
from autotune.weights.adapters import Adapter, read_adapter, write_adapter
from autotune.weights.names import LoraLayer
from tests.train.small import machine, make_plan, write_model_and_images


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_model_and_images(tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("form", ["diffusers", "comfyui", "kohya"])
def test_an_adapter_of_any_format_and_alpha_starts_as_the_same_update(
    form: str, small: tuple[Path, Path], tmp_path: Path
) -> None:
    model, plan = resolve_model(ModelRef.of(small[0])), make_plan(*small, machine())
    transformer = build_on_meta(model.family, model.config).to_empty(device="cpu")
    add_adapter(model.family, transformer, plan.frozen.workload, torch.float32)
    made = {}
    for name, module in transformer.named_modules():
        if "default" in getattr(module, "lora_A", ()):
            shapes = module.lora_A["default"].weight.shape, module.lora_B["default"].weight.shape
            made[name] = LoraLayer(torch.randn(shapes[0]), torch.randn(shapes[1]), alpha=7.0)
    write_adapter(
        tmp_path / "a.safetensors", Adapter(made, {}), form, model.family.transformer_class
    )  # type: ignore[arg-type]
    start_from(tmp_path / "a.safetensors", transformer, model.family)
    for name, layer in made.items():
        module = transformer.get_submodule(name)
        got = (
            module.lora_B["default"].weight
            @ module.lora_A["default"].weight
            * module.scaling["default"]
        )
        torch.testing.assert_close(got, layer.up @ layer.down * (7.0 / layer.rank))


def test_a_run_goes_on_from_the_adapter_of_another_and_saves_as_asked(
    small: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plan, name = make_plan(*small, machine(), num_steps=2), "pytorch_lora_weights.safetensors"
    autotune.train(plan, output=str(tmp_path / "first"))
    first = read_adapter(tmp_path / "first" / name)
    halves = {
        key: LoraLayer(layer.down, layer.up * 100, layer.alpha)
        for key, layer in first.layers.items()
    }
    write_adapter(tmp_path / "strong.safetensors", Adapter(halves, {}), "diffusers")
    goes_on = {
        "from_adapter": str(tmp_path / "strong.safetensors"),
        "save_dtype": "bf16",
        "adapter_format": "kohya",
    }
    report = autotune.train(plan, output=str(tmp_path / "second"), **goes_on)  # type: ignore[arg-type]
    assert {tensor.dtype for tensor in load_file(tmp_path / "second" / name).values()} == {
        torch.bfloat16
    }
    second = read_adapter(tmp_path / "second" / name).layers
    assert Job.model_fields["save_dtype"].default == "bf16", "as peers save, unless said"
    assert report.adapter == "kohya_lora_weights.safetensors"
    for_kohya = tmp_path / "second" / report.adapter
    assert all(key.startswith("lora_unet_transformer_blocks_") for key in load_file(for_kohya))
    assert {key: update_norm(layer) for key, layer in read_adapter(for_kohya).layers.items()} == {
        key: update_norm(layer) for key, layer in second.items()
    }
    for key, layer in halves.items():
        assert update_norm(second[key]) == pytest.approx(update_norm(layer), rel=0.2, abs=1e-3)


def test_an_adapter_of_other_rank_or_layers_is_refused(
    small: tuple[Path, Path], tmp_path: Path
) -> None:
    model, plan = resolve_model(ModelRef.of(small[0])), make_plan(*small, machine())
    transformer = build_on_meta(model.family, model.config)
    add_adapter(model.family, transformer, plan.frozen.workload, torch.float32)
    layers = {
        name: LoraLayer(torch.ones(3, module.in_features), torch.ones(module.out_features, 3), 3.0)
        for name, module in transformer.named_modules()
        if "default" in getattr(module, "lora_A", ())
    }
    write_adapter(tmp_path / "a.safetensors", Adapter(layers, {}), "diffusers")
    with pytest.raises(InvalidInput, match="has rank 3, the plan 2"):
        starting_values(tmp_path / "a.safetensors", transformer, model.family)
    layers.pop(min(layers))
    write_adapter(tmp_path / "b.safetensors", Adapter(layers, {}), "diffusers")
    with pytest.raises(InvalidInput, match="adapts other layers than the plan"):
        starting_values(tmp_path / "b.safetensors", transformer, model.family)
