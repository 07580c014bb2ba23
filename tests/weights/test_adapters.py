import copy
import json
import logging
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import InvalidInput
from autotune.weights.adapters import (
    DIFFUSERS_KEY,
    Adapter,
    AdapterInfo,
    parse_adapter,
    read_adapter,
    save_adapter,
    serialize_adapter,
    write_adapter,
)
from autotune.weights.files import BadWeights, CorruptFile, PickledWeights
from autotune.weights.names import LoraLayer
from tests.weights.conftest import bits
from tests.weights.test_streaming import FLUX, QWEN, flux_inputs, qwen_inputs

FORMATS = ("diffusers", "comfyui", "kohya")
INFO = AdapterInfo(model="tiny", plan_digest="sha256:0", rank=4, alpha=6.5, training_steps=10)
CASES = {
    "qwen": ("QwenImageTransformer2DModel", QWEN, qwen_inputs, "QwenImagePipeline"),
    "flux": ("FluxTransformer2DModel", FLUX, flux_inputs, "FluxPipeline"),
    "flux-outside": ("FluxTransformer2DModel", FLUX, flux_inputs, "FluxPipeline"),
}
# Top-level and nested modules that share their last name; the hardest for formats that match by
# name.
TARGETS = {
    "qwen": r".*to_q|.*to_out\.0|proj_out|.*img_mlp\.net\.2",
    "flux": r"transformer_blocks\.0\.(.*to_[qkv]|.*add_[qkv]_proj|.*to_out\.0|ff.*(proj|2))|single.*proj_out",
    "flux-outside": r".*to_q|.*proj_out|.*to_out\.0",
}


@pytest.fixture(scope="module", params=CASES)
def trained(request):
    """A small transformer with an adapter that does something, alpha other than rank."""
    import diffusers
    from peft import LoraConfig

    cls_name, config, inputs, pipeline = CASES[request.param]
    torch.manual_seed(0)
    base = getattr(diffusers, cls_name)(**config).eval()
    model = copy.deepcopy(base)
    model.add_adapter(
        LoraConfig(
            r=4, lora_alpha=6.5, target_modules=TARGETS[request.param], init_lora_weights=False
        )
    )
    return base, model, inputs(torch.float32), getattr(diffusers, pipeline)


def skip_what_diffusers_cannot_read(model, format):
    adapted = [name for name, _ in model.named_parameters() if "lora" in name]
    if format != "diffusers" and any("single" in name and "to_q" in name for name in adapted):
        pytest.skip(
            "of FLUX, diffusers' converter drops alphas of the last layer, and demands full size "
            "of linear1"
        )


def state_of(model):
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model)


def pipeline_of(cls, transformer):
    names = ("scheduler", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    parts = {name: None for name in names if name in cls.__init__.__code__.co_varnames}
    return cls(transformer=copy.deepcopy(transformer), **parts)


def outputs(model, inputs):
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


@pytest.mark.parametrize("format", FORMATS)
def test_a_pipeline_loads_every_key_and_gives_the_trained_outputs(
    trained, tmp_path, caplog, format
):
    base, model, inputs, cls = trained
    skip_what_diffusers_cannot_read(model, format)
    path = tmp_path / "pytorch_lora_weights.safetensors"
    save_adapter(path, state_of(model), INFO)
    if format != "diffusers":
        write_adapter(path, read_adapter(path), format)
    pipeline = pipeline_of(cls, base)
    logging.getLogger("diffusers").setLevel(logging.WARNING)
    with caplog.at_level(logging.WARNING):
        pipeline.load_lora_weights(tmp_path, weight_name=path.name)
    told = [record.message for record in caplog.records]
    assert not [line for line in told if "unexpected keys" in line or "missing keys" in line]
    loaded = state_of_named(pipeline.transformer)
    assert loaded.keys() == state_of(model).keys()
    assert torch.allclose(outputs(pipeline.transformer, inputs), outputs(model, inputs), atol=1e-6)
    assert not torch.allclose(outputs(base, inputs), outputs(model, inputs), atol=1e-3)


def state_of_named(transformer):
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(transformer, adapter_name=next(iter(transformer.peft_config)))


@pytest.mark.parametrize("format", FORMATS)
def test_layers_of_different_ranks_and_alphas_load_into_a_pipeline(trained, tmp_path, format):
    base, model, inputs, cls = trained
    skip_what_diffusers_cannot_read(model, format)
    save_adapter(tmp_path / "a.safetensors", state_of(model), INFO)
    adapter = read_adapter(tmp_path / "a.safetensors")
    odd = {
        name: layer
        if number % 3
        else LoraLayer(layer.down[:2].clone(), layer.up[:, :2].clone(), 1.5)
        for number, (name, layer) in enumerate(adapter.layers.items())
    }
    write_adapter(tmp_path / "odd.safetensors", Adapter(odd, {}), format)
    pipeline = pipeline_of(cls, base)
    pipeline.load_lora_weights(tmp_path, weight_name="odd.safetensors")
    merged = copy.deepcopy(base)
    with torch.no_grad():
        for name, layer in odd.items():
            merged.get_submodule(name).weight += layer.up @ layer.down * (layer.alpha / layer.rank)
    assert torch.allclose(outputs(pipeline.transformer, inputs), outputs(merged, inputs), atol=1e-5)


names = st.lists(
    st.sampled_from(["blocks", "0", "1", "to_q", "to_out", "proj_out", "ff", "net"]),
    min_size=1,
    max_size=4,
).map(".".join)
layers = st.dictionaries(
    names, st.tuples(st.integers(1, 3), st.floats(1e-3, 1e4), st.sampled_from(["float32",
    "bfloat16"])), min_size=1,
    max_size=5,
).filter(lambda found: len({name.replace(".", "_") for name in found}) == len(found))  # fmt: skip


@given(layers, st.permutations(FORMATS))
def test_every_chain_of_conversions_keeps_weights_and_alphas(found, chain):
    made = {
        name: LoraLayer(
            torch.randn(rank, 5).to(getattr(torch, kind)),
            torch.randn(6, rank).to(getattr(torch, kind)),
            alpha,
        )
        for name, (rank, alpha, kind) in found.items()
    }
    state, metadata = serialize_adapter(
        Adapter(made, {"autotune": INFO.model_dump_json()}), chain[0]
    )
    for to in chain[1:]:
        state, metadata = serialize_adapter(parse_adapter(state, metadata), to)
    result = parse_adapter(state, metadata)
    assert result.info == INFO
    assert result.layers.keys() == made.keys()
    for name, layer in made.items():
        assert bits(result.layers[name].down) == bits(layer.down)
        assert bits(result.layers[name].up) == bits(layer.up)
        assert result.layers[name].alpha == layer.alpha


FOREIGN = {
    "lora_unet_blocks_0_to_q.lora_down.weight": torch.ones(2, 3),
    "lora_unet_blocks_0_to_q.lora_up.weight": torch.ones(4, 2),
}


def test_a_kohya_file_of_another_program_needs_the_models_names():
    with pytest.raises(InvalidInput, match="blocks_0_to_q"):
        parse_adapter(FOREIGN, {})
    adapter = parse_adapter(FOREIGN, {}, module_names=["blocks.0", "blocks.0.to_q"])
    assert adapter.layers["blocks.0.to_q"].alpha == 2  # no alpha stored: it equals the rank


@pytest.mark.parametrize(
    ("state", "metadata", "error"),
    [
        ({}, {}, InvalidInput),
        ({"weight": torch.ones(1)}, {}, InvalidInput),
        ({"transformer.a.lora_A.weight": torch.ones(1, 2), "text_encoder.b": torch.ones(1)}, {},
        InvalidInput),
        ({"transformer.a.lora_A.weight": torch.ones(1, 2)}, {}, CorruptFile),
        ({"transformer.a.dora_scale": torch.ones(1, 2)}, {}, InvalidInput),
        ({"transformer.a.lora_A.weight": torch.ones(1, 2),
        "transformer.a.lora_B.weight": torch.ones(2, 3)}, {},
         CorruptFile),
        ({"transformer.a.lora_A.weight": torch.tensor(1.0),
        "transformer.a.lora_B.weight": torch.ones(2, 1)}, {},
         CorruptFile),
        ({"transformer.a.lora_A.weight": torch.ones(0, 2),
        "transformer.a.lora_B.weight": torch.ones(2, 0)}, {},
         CorruptFile),
        ({"diffusion_model.a.lora_A.weight": torch.ones(1, 2),
        "diffusion_model.a.lora_B.weight": torch.ones(2, 1),
          "diffusion_model.a.alpha": torch.ones(2)}, {}, CorruptFile),
        ({"diffusion_model.a.lora_A.weight": torch.ones(1, 2),
        "diffusion_model.a.lora_B.weight": torch.ones(2, 1),
          "diffusion_model.a.alpha": torch.tensor(torch.inf)}, {}, CorruptFile),
        ({"diffusion_model.single_blocks.0.linear1.lora_down.weight": torch.ones(4, 9),
          "diffusion_model.single_blocks.0.linear1.lora_up.weight": torch.ones(7, 4)}, {},
          CorruptFile),
        (FOREIGN, {"autotune_modules": "{"}, CorruptFile),
        (FOREIGN, {"autotune_modules": "[1]"}, CorruptFile),
    ],
)  # fmt: skip
def test_what_is_no_sound_adapter_is_refused(state, metadata, error):
    with pytest.raises(error) as caught:
        parse_adapter(state, metadata)
    assert caught.value.hint


@pytest.mark.parametrize(
    "config",
    [
        "{",
        "[]",
        '{"transformer.lora_alpha": "x"}',
        '{"transformer.alpha_pattern": {"(": 1}}',
        '{"transformer.alpha_pattern": 3}',
        '{"transformer.lora_alpha": 1e999}',
        '{"transformer.alpha_pattern": {"(a+)+b": 1}}',
    ],
)
def test_a_damaged_configuration_is_refused(config):
    name = "transformer." + "a" * 40  # of which `(a+)+b` would try every way to cut it
    state = {f"{name}.lora_A.weight": torch.ones(1, 2), f"{name}.lora_B.weight": torch.ones(2, 1)}
    with pytest.raises(CorruptFile):
        parse_adapter(state, {DIFFUSERS_KEY: config})


def test_a_pickled_adapter_is_refused(tmp_path):
    (tmp_path / "lora.bin").write_bytes(b"\x80\x04")
    with pytest.raises(PickledWeights):
        read_adapter(tmp_path / "lora.bin")
    assert issubclass(PickledWeights, BadWeights)


def test_hundreds_of_alpha_patterns_take_no_time_for_each_layer_and_pattern() -> None:
    """Matched one by one, 2,000 of them took minutes for as many layers: Python keeps 512
    compiled expressions."""
    names = [f"blocks.{number}.attn.to_q" for number in range(2000)]
    patterns = {
        f"^{name}".replace(".", r"\."): float(number + 1) for number, name in enumerate(names)
    }
    metadata = {"lora_adapter_metadata": json.dumps({"transformer.alpha_pattern": patterns})}
    state = {
        f"transformer.{name}.lora_{part}.weight": torch.ones(1, 1)
        for name in names
        for part in "AB"
    }
    started = time.process_time()
    layers = parse_adapter(state, metadata).layers
    assert time.process_time() - started < 3
    assert [layers[name].alpha for name in names] == [float(number + 1) for number in range(2000)]


def test_of_several_alpha_patterns_the_first_that_ends_a_name_counts() -> None:
    patterns = {"^to_q": 9.0, "attn.to_q": 2.0, "to_q": 3.0, "o_q": 4.0}
    metadata = {"lora_adapter_metadata": json.dumps({"transformer.alpha_pattern": patterns})}
    names = ("to_q", "a.attn.to_q", "a.to_q", "a.xto_q")
    state = {
        f"transformer.{name}.lora_{part}.weight": torch.ones(1, 1)
        for name in names
        for part in "AB"
    }
    alphas = {name: layer.alpha for name, layer in parse_adapter(state, metadata).layers.items()}
    assert alphas == {"to_q": 9.0, "a.attn.to_q": 2.0, "a.to_q": 3.0, "a.xto_q": 1.0}
