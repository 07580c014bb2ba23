"""A training adapter learns as if it were merged by hand, and leaves nothing behind."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from autotune.errors import InvalidInput
from autotune.plan.file import seal
from autotune.train import validation
from autotune.train.prepare import read_inputs


def write_adapter(bench, file, seed=0):
    """Write a LoRA of some layers, inside and outside those that plans adapt."""
    generator, state = torch.Generator().manual_seed(seed), {}
    modules = dict(bench.trained.transformer.named_modules())
    for name in ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.img_mlp.net.2"):
        layer = modules[name]
        layer = getattr(layer, "base_layer", layer)
        shapes = {"A": (3, layer.in_features), "B": (layer.out_features, 3)}
        for side, shape in shapes.items():
            values = torch.randn(shape, generator=generator) * 0.1
            state[f"transformer.{name}.lora_{side}.weight"] = values
        state[f"transformer.{name}.alpha"] = torch.tensor(6.0)
    save_file(state, file)


def merge(model, state):
    merged = Path(shutil.copytree(model, model.parent / "merged"))
    for file in (merged / "transformer").glob("*.safetensors"):
        weights = load_file(file)
        for key in [key for key in state if key.endswith("lora_A.weight")]:
            name = key.removeprefix("transformer.").removesuffix(".lora_A.weight")
            if f"{name}.weight" in weights:
                added = state[key.replace("lora_A", "lora_B")] @ state[key] * 2.0
                plain = weights[f"{name}.weight"]
                weights[f"{name}.weight"] = (plain.float() + added).to(plain.dtype)
        save_file(weights, file, {"format": "pt"})
    return merged


@pytest.fixture
def file(bench, tmp_path):
    write_adapter(bench, tmp_path / "frozen.safetensors")
    return tmp_path / "frozen.safetensors"


def test_training_adapters_learn_as_merged(bench, tmp_path, file, monkeypatch):
    monkeypatch.setattr(validation, "VALIDATION_DRAWS", 4)
    merged = merge(bench.model_folder, load_file(file))
    try:
        job = {"num_steps": 2, "learning_rate": 1e-2, "validation": "20%", "checkpointing_steps": 2}
        plan = bench.plan(**job)
        kinds = {"plain": {}, "frozen": {"training_adapter": str(file)}}
        kinds["merged"] = {"model": str(merged)}
        adapters, bases = {}, {}
        for name, changes in kinds.items():
            output = tmp_path / name
            changed = plan.job.changed(output=str(output), **changes)
            report = bench.train(seal(changed, plan.frozen))
            adapters[name] = load_file(output / "pytorch_lora_weights.safetensors")
            bases[name] = report.verdict.base_loss
        pairs = [(adapters["merged"][key], value) for key, value in adapters["frozen"].items()]
        assert all(torch.equal(one, other) for one, other in pairs)
        assert not all(map(torch.equal, adapters["plain"].values(), adapters["frozen"].values()))
        assert bases["frozen"] == pytest.approx(bases["plain"], rel=1e-5)
        assert bases["merged"] != pytest.approx(bases["plain"], rel=1e-4)
        write_adapter(bench, file, seed=1)
        same = plan.job.changed(output=str(tmp_path / "frozen"), **kinds["frozen"])
        with pytest.raises(InvalidInput, match="weights"):
            bench.train(seal(same, plan.frozen), resume=True)
    finally:
        shutil.rmtree(merged)


def test_training_adapter_must_belong_to_model(bench, tmp_path, file):
    state = load_file(file)
    save_file({key.replace("attn", "other"): value for key, value in state.items()}, file)
    plan = bench.plan(output=str(tmp_path / "run"), training_adapter=str(file))
    with pytest.raises(InvalidInput, match="the model has no layer"):
        bench.train(plan)
    gone = bench.plan(output=str(tmp_path / "run"), training_adapter=str(tmp_path / "gone"))
    with pytest.raises(InvalidInput):
        read_inputs(gone, resume=False)
