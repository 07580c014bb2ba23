import copy
import json
import logging
import time
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, strategies as st

from autotune.errors import InvalidInput
from autotune.exchange import convert_weights
from autotune.weights import names as layouts
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
from autotune.weights.files import CorruptFile, read_header
from autotune.weights.tensors import save_file
from tests.weights.conftest import bits
from tests.weights.test_streaming import FLUX, QWEN, flux_inputs, qwen_inputs

FORMATS = ("diffusers", "comfyui", "kohya")
INFO = AdapterInfo(model="tiny", plan_digest="sha256:0", rank=4, alpha=6.5, training_steps=10)
# Top-level and nested modules that share their last name: hardest for those that match by name. Of
# FLUX's last layer diffusers' converter drops alphas, and it demands full size of linear1.
TARGETS = {
    "qwen": r".*to_q|.*to_out\.0|proj_out|.*img_mlp\.net\.2",
    "flux": r"transformer_blocks\.0\.(.*to_[qkv]|.*add_[qkv]_proj|.*to_out\.0|ff.*(proj|2))"
    r"|single.*proj_out",
}


@pytest.fixture(scope="module", params=TARGETS)
def trained(request):
    import diffusers
    from peft import LoraConfig

    cls, config, inputs, pipeline = {
        "qwen": ("QwenImageTransformer2DModel", QWEN, qwen_inputs, "QwenImagePipeline"),
        "flux": ("FluxTransformer2DModel", FLUX, flux_inputs, "FluxPipeline"),
    }[request.param]
    torch.manual_seed(0)
    base = getattr(diffusers, cls)(**config).eval()
    model = copy.deepcopy(base)
    targets = TARGETS[request.param]
    config = LoraConfig(r=4, lora_alpha=6.5, target_modules=targets, init_lora_weights=False)
    model.add_adapter(config)
    return base, model, inputs(torch.float32), getattr(diffusers, pipeline)


def state_of(model):
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, adapter_name=next(iter(model.peft_config)))


def pipeline_of(cls, transformer):
    names = ("scheduler", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    parts = {name: None for name in names if name in cls.__init__.__code__.co_varnames}
    return cls(transformer=copy.deepcopy(transformer), **parts)


def outputs(model, inputs):
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


@pytest.mark.parametrize("format", FORMATS)
def test_pipelines_give_the_trained_outputs(trained, tmp_path, caplog, format):
    base, model, inputs, cls = trained
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
    loaded = state_of(pipeline.transformer)
    assert loaded.keys() == state_of(model).keys()
    assert torch.allclose(outputs(pipeline.transformer, inputs), outputs(model, inputs), atol=1e-6)
    assert not torch.allclose(outputs(base, inputs), outputs(model, inputs), atol=1e-3)


@pytest.mark.parametrize("format", FORMATS)
def test_mixed_ranks_load_into_pipelines(trained, tmp_path, format):
    base, model, inputs, cls = trained
    save_adapter(tmp_path / "a.safetensors", state_of(model), INFO)
    layers = dict(read_adapter(tmp_path / "a.safetensors").layers)
    for name in list(layers)[::3]:
        down, up = layers[name].down[:2].clone(), layers[name].up[:, :2].clone()
        layers[name] = layouts.LoraLayer(down, up, 1.5)
    write_adapter(tmp_path / "odd.safetensors", Adapter(layers, {}), format)
    pipeline, merged = pipeline_of(cls, base), copy.deepcopy(base)
    pipeline.load_lora_weights(tmp_path, weight_name="odd.safetensors")
    for name, layer in layers.items():
        weight = merged.get_submodule(name).weight
        weight.data += layer.up @ layer.down * (layer.alpha / layer.rank)
    assert torch.allclose(outputs(pipeline.transformer, inputs), outputs(merged, inputs), atol=1e-5)


words = st.sampled_from(["blocks", "0", "1", "to_q", "to_out", "proj_out", "ff", "net"])
names = st.lists(words, min_size=1, max_size=4).map(".".join)
kinds = st.sampled_from([torch.float32, torch.bfloat16])
parts = st.tuples(st.integers(1, 3), st.floats(1e-3, 1e4), kinds)
layers = st.dictionaries(names, parts, min_size=1, max_size=5).filter(
    lambda found: len({name.replace(".", "_") for name in found}) == len(found)
)


@given(layers, st.permutations(FORMATS))
def test_conversions_keep_the_adapter(found, chain):
    made = {
        name: layouts.LoraLayer(torch.randn(rank, 5).to(kind), torch.randn(6, rank).to(kind), alpha)
        for name, (rank, alpha, kind) in found.items()
    }
    adapter = Adapter(made, {"autotune": INFO.model_dump_json()})
    state, metadata = serialize_adapter(adapter, chain[0])
    for to in chain[1:]:
        state, metadata = serialize_adapter(parse_adapter(state, metadata), to)
    result = parse_adapter(state, metadata)
    assert result.info == INFO
    assert result.layers.keys() == made.keys()
    for name, layer in made.items():
        back = result.layers[name]
        assert bits(back.down) == bits(layer.down)
        assert back.up.dtype == layer.up.dtype
        expected, tolerance = layer.up * (layer.alpha / layer.rank), torch.finfo(layer.up.dtype).eps
        assert (back.up * (back.alpha / back.rank)).allclose(expected, rtol=tolerance)


LOKR_PARTS = {
    "whole": layouts.lokr_shapes((12, 20), 8, 2),
    "product": layouts.lokr_shapes((12, 20), 2, 2),
    "products": layouts.lokr_shapes((48, 48), 2, 0, decompose_both=True),
}


def lycoris_update(parts):
    """The change of a weight by LyCORIS's formula, of which ComfyUI's is a part: element by element
    w1[i, j] * w2[k, l], with alpha over rank only if a factor is a product."""
    scale = parts["alpha"] / len(parts["lokr_w2_b"]) if "lokr_w2_b" in parts else 1
    halves = []
    for name in ("lokr_w1", "lokr_w2"):
        halves.append(parts[name] if name in parts else parts[f"{name}_a"] @ parts[f"{name}_b"])
    (rows, columns), (own_rows, own_columns) = (half.shape for half in halves)
    whole = torch.empty(rows * own_rows, columns * own_columns)
    for i in range(rows * own_rows):
        for j in range(columns * own_columns):
            left = halves[0][i // own_rows, j // own_columns]
            whole[i, j] = left * halves[1][i % own_rows, j % own_columns] * scale
    return whole


@pytest.mark.parametrize("kind", LOKR_PARTS)
def test_lokr_is_lycoris_in_every_format(kind):
    module = "transformer_blocks.0.attn.to_q"
    parts = {name: torch.randn(shape) for name, shape in LOKR_PARTS[kind].items()}
    parts["alpha"] = torch.tensor(3.0)
    expected = lycoris_update(parts)
    name = "lycoris_" + module.replace(".", "_")
    adapter = parse_adapter({f"{name}.{part}": x for part, x in parts.items()}, {}, [module])
    for to in FORMATS:
        state, metadata = serialize_adapter(adapter, to, "QwenImageTransformer2DModel")
        adapter = parse_adapter(state, metadata)
        found = {key.rpartition(".")[2]: tensor for key, tensor in state.items()}
        written = lycoris_update({"alpha": len(found.get("lokr_w2_b", ())), **found})
        torch.testing.assert_close(written, expected)


def test_peft_scales_whole_factors_too():
    parts = {name: torch.randn(shape) for name, shape in LOKR_PARTS["whole"].items()}
    state = {f"transformer.a.{name}": tensor for name, tensor in parts.items()}
    config = {"transformer.r": 4, "transformer.alpha": 2, "transformer.rank_pattern": {"a": 8}}
    (layer,) = parse_adapter(state, {DIFFUSERS_KEY: json.dumps(config)}).layers.values()
    assert torch.equal(layer.factors["lokr_w1"], parts["lokr_w1"] / 4)


def test_small_lokr_takes_little_memory():
    side = 400_000  # 640 GB, multiplied out
    parts = {
        "a.lokr_w1": torch.ones(2, 2),
        "a.lokr_w2_a": torch.ones(side, 1),
        "a.lokr_w2_b": torch.ones(1, side),
    }
    state = {f"diffusion_model.{name}": tensor for name, tensor in parts.items()}
    (layer,) = parse_adapter(state, {}).layers.values()
    assert layer.shape == (2 * side, 2 * side)


def test_lokr_is_cut_as_peft_cuts():
    from peft.tuners.lokr.layer import factorization

    for factor in (-1, 1, 2, 4, 7, 8, 16, 100):
        for size in (*range(1, 65), 127, 360, 3072, 12288):
            assert layouts.factorize(size, max(0, factor)) == factorization(size, factor)


@pytest.mark.parametrize("transformer", ["FluxTransformer2DModel", "MiniMaxH3Transformer3DModel"])
def test_lokr_is_written_where_read(transformer):
    names = [f"transformer_blocks.0.attn.to_{part}" for part in ("q", "out.0")]
    made = {name: torch.randn(shape) for name, shape in layouts.lokr_shapes((16, 16), 2, 4).items()}
    adapter = Adapter(dict.fromkeys(names, layouts.KroneckerLayer(made)), {})
    with pytest.raises(InvalidInput, match="is a part of"):
        serialize_adapter(adapter, "kohya", transformer)
    if transformer == "MiniMaxH3Transformer3DModel":  # ComfyUI knows no names of such parts
        with pytest.raises(InvalidInput, match="is a part of"):
            serialize_adapter(adapter, "comfyui", transformer)
        return
    state, _ = serialize_adapter(adapter, "comfyui", transformer)
    assert {key.rpartition(".")[0] for key in state} == {f"transformer.{name}" for name in names}
    joined = {f"diffusion_model.double_blocks.0.img_attn.qkv.{part}": x for part, x in made.items()}
    with pytest.raises(InvalidInput, match="has no such parts"):
        parse_adapter(joined, {}, transformer=transformer)


FOREIGN = {
    "lora_unet_blocks_0_to_q.lora_down.weight": torch.ones(2, 3),
    "lora_unet_blocks_0_to_q.lora_up.weight": torch.ones(4, 2),
}


def pair(down, up, module="a", **more):
    key = f"diffusion_model.{module}"
    parts = {"lora_A.weight": down, "lora_B.weight": up, **more}
    return {f"{key}.{name}": tensor for name, tensor in parts.items()}


def test_foreign_kohya_files_need_names():
    with pytest.raises(InvalidInput, match="blocks_0_to_q"):
        parse_adapter(FOREIGN, {})
    with pytest.raises(InvalidInput, match=r"no layer blocks_0_to_q") as told:
        parse_adapter(FOREIGN, {}, module_names=["blocks.0", "blocks.0.to_k"])
    assert "another model" in told.value.hint
    adapter = parse_adapter(FOREIGN, {}, module_names=["blocks.0", "blocks.0.to_q"])
    assert adapter.layers["blocks.0.to_q"].alpha == 2  # no alpha stored: it equals the rank


@pytest.mark.parametrize(
    ("key", "told"),
    {
        "lora_unet_input_blocks_1_0_in_layers_2.lora_up.weight": "LoCon",
        "lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha": "text encoder",
        "transformer_blocks.0.attn.to_q.lora_A.weight": "no prefix",
        "base_model.model.blocks.0.to_q.lora_A.weight": "save_pretrained",
        "transformer.blocks.0.to_q.lora_A.default.weight": "adapter's name",
        "transformer.blocks.0.to_q.hada_w1_a": "a LoHa",
    }.items(),
)
def test_foreign_forms_are_named(key, told):
    with pytest.raises(InvalidInput, match=told):
        parse_adapter({key: torch.ones(2, 2)}, {})


@pytest.mark.parametrize(
    ("state", "metadata", "error"),
    [
        ({}, {}, InvalidInput),
        ({"weight": torch.ones(1)}, {}, InvalidInput),
        ({"transformer.a.lora_A.weight": torch.ones(1, 2)}, {}, CorruptFile),
        ({"transformer.a.dora_scale": torch.ones(1, 2)}, {}, InvalidInput),
        (pair(torch.ones(1, 2), torch.ones(2, 3)), {}, CorruptFile),
        (pair(torch.tensor(1.0), torch.ones(2, 1)), {}, CorruptFile),
        (pair(torch.ones(0, 2), torch.ones(2, 0)), {}, CorruptFile),
        (pair(torch.ones(1, 2), torch.ones(2, 1), alpha=torch.ones(2)), {}, CorruptFile),
        (pair(torch.ones(1, 2), torch.ones(2, 1), alpha=torch.tensor(torch.inf)), {}, CorruptFile),
        (pair(torch.ones(4, 9), torch.ones(7, 4), "single_blocks.0.linear1"), {}, CorruptFile),
        ({"transformer.a.lokr_w1": torch.ones(2, 2)}, {}, CorruptFile),
        (FOREIGN, {"autotune_modules": "{"}, CorruptFile),
        (FOREIGN, {"autotune_modules": "[1]"}, CorruptFile),
    ],
)
def test_unsound_adapters_are_refused(state, metadata, error):
    with pytest.raises(error) as caught:
        parse_adapter(state, metadata)
    assert caught.value.hint


@pytest.mark.parametrize("to", FORMATS)
def test_an_fp8_adapter_is_converted_exactly(to):
    down, up = torch.randn(2, 8), torch.randn(8, 2)
    small = [each.to(torch.float8_e4m3fn) for each in (down, up)]
    state = pair(*small, "double_blocks.0.img_attn.proj")
    tensors, metadata = serialize_adapter(parse_adapter(state, {}), to, "FluxTransformer2DModel")
    (back,) = parse_adapter(tensors, metadata).layers.values()
    assert back.down.dtype == torch.bfloat16
    assert torch.equal(back.up @ back.down, small[1].bfloat16() @ small[0].bfloat16())


@pytest.mark.parametrize(
    ("module", "width", "told"),
    [
        ("transformer_blocks.0.attn.to_w", 3072, "no layer"),
        ("transformer_blocks.60.attn.to_q", 3072, "no layer"),
        ("transformer_blocks.0.attn.to_q", 8, "differs in shape"),
        ("double_blocks.0.img_attn.qkv", 3072, "no layer"),
    ],
)
def test_unknown_layers_are_not_converted(tmp_path, module, width, told):
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file(source, pair(torch.ones(2, width), torch.ones(width, 2), module))
    with pytest.raises(InvalidInput, match=told):
        convert_weights(source, out, model="qwen-image")
    assert not out.exists()


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


def alphas_of(patterns, names):
    metadata = {DIFFUSERS_KEY: json.dumps({"transformer.alpha_pattern": patterns})}
    keys = (f"transformer.{name}.lora_{part}.weight" for name in names for part in "AB")
    layers = parse_adapter({key: torch.ones(1, 1) for key in keys}, metadata).layers
    return {name: layers[name].alpha for name in names}


def test_many_alpha_patterns_are_fast():
    names = [f"blocks.{number}.attn.to_q" for number in range(2000)]  # took minutes one by one
    expected = {name: float(number + 1) for number, name in enumerate(names)}
    patterns = {f"^{name}".replace(".", r"\."): alpha for name, alpha in expected.items()}
    started = time.process_time()
    assert alphas_of(patterns, names) == expected
    assert time.process_time() - started < 3


def test_first_alpha_pattern_counts():
    patterns = {"^to_q": 9.0, "attn.to_q": 2.0, "to_q": 3.0, "o_q": 4.0}
    found = alphas_of(patterns, ["to_q", "a.attn.to_q", "a.to_q", "a.xto_q"])
    assert found == {"to_q": 9.0, "a.attn.to_q": 2.0, "a.to_q": 3.0, "a.xto_q": 1.0}


@pytest.mark.parametrize("to", ["comfyui", "kohya"])
def test_ambiguous_adapters_need_their_model(tmp_path, to):
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    shared = "transformer_blocks.3.attn.to_out.0"  # of FLUX.1 and Qwen-Image, equally wide
    layer = layouts.LoraLayer(torch.ones(2, 3072), torch.ones(3072, 2), 2.0)
    write_adapter(source, Adapter({shared: layer}, {}), "diffusers")
    with pytest.raises(InvalidInput, match="may be for one of several") as caught:
        convert_weights(source, out, to=to)
    assert "--model" in caught.value.hint
    assert not out.exists()
    for model, name in (("flux1-dev", "double_blocks.3.img_attn.proj"), ("qwen-image", shared)):
        convert_weights(source, out, to=to, model=model, overwrite=out.exists())
        with pytest.raises(InvalidInput, match="there already"):
            convert_weights(source, out, to=to, model=model)
        written = name.replace(".", "_") if to == "kohya" else name
        assert any(written in key for key in read_header(out).by_name)
        assert list(read_adapter(out).layers) == [shared]


WIDTH = 3072  # diffusers' converter takes no other

FLUX1 = layouts.LAYOUTS[layouts.FLUX1_CLASS]
SINGLE = "single_transformer_blocks.3."
QKV = tuple(f"attn.to_{letter}" for letter in "qkv")


def layer(rank, inputs, outputs, alpha=None):
    down, up = torch.randn(rank, inputs), torch.randn(outputs, rank)
    return layouts.LoraLayer(down, up, float(alpha or rank))


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, made in expected.items():
        assert (bits(found[name].down), bits(found[name].up)) == (bits(made.down), bits(made.up))
        assert found[name].alpha == made.alpha


def update(found):
    return found.up @ found.down * (found.alpha / found.rank)


def test_diffusers_reads_full_single_blocks():
    from diffusers import FluxPipeline

    layers = {SINGLE + part: layer(2, WIDTH, WIDTH) for part in QKV}
    layers[SINGLE + "proj_mlp"] = layer(2, WIDTH, 4 * WIDTH)
    layers[SINGLE + "proj_out"] = layer(2, 5 * WIDTH, WIDTH)
    layers[SINGLE + "norm.linear"] = layer(2, WIDTH, 3 * WIDTH)
    tensors, metadata = serialize_adapter(Adapter(layers, {}), "kohya")
    names = ("linear1", "linear2", "modulation_lin")
    found = {key.split(".")[0] for key in tensors}
    assert found == {f"lora_unet_single_blocks_3_{name}" for name in names}
    loaded = FluxPipeline.lora_state_dict(dict(tensors))
    assert len(loaded) == 2 * len(layers)
    for name, made in layers.items():
        assert bits(loaded[f"transformer.{name}.lora_A.weight"]) == bits(made.down)
        assert bits(loaded[f"transformer.{name}.lora_B.weight"]) == bits(made.up)
    assert_same(parse_adapter(tensors, metadata).layers, layers)


@pytest.mark.parametrize("rank", [2, 3])
def test_joined_layers_split_by_rows(rank):
    trained = layer(rank, 8, 24, alpha=5)
    back = layouts.split_layers({"double_blocks.0.img_attn.qkv": trained}, FLUX1)
    assert list(back) == [f"transformer_blocks.0.{part}" for part in QKV]
    assert torch.allclose(torch.cat([update(found) for found in back.values()]), update(trained))


TOLD = yaml.safe_load((Path(__file__).parent / "told.yaml").read_text())


@pytest.mark.parametrize(("names", "answer"), TOLD)
def test_names_tell_their_model(names, answer):
    in_blocks = [f"transformer_blocks.{name}" if name[0].isdigit() else name for name in names]
    assert layouts.find_class(in_blocks) == answer
