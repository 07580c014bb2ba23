import pytest
import torch

from autotune.weights.adapters import Adapter, parse_adapter, serialize_adapter
from autotune.weights.names import (
    FLUX1_CLASS,
    LAYOUTS,
    SD3_CLASS,
    LoraLayer,
    find_class,
    join_layers,
    split_layers,
)
from tests.weights.conftest import bits

WIDTH = 3072
"""Of the published model: diffusers' converter takes no other."""

FLUX1 = LAYOUTS[FLUX1_CLASS]
SINGLE = "single_transformer_blocks.3."
SHAPES = (("attn.to_q", 1, 3), ("attn.to_k", 4, 1), ("attn.to_v", 2, 2.5))
QKV = tuple(f"attn.to_{letter}" for letter in "qkv")


def layer(rank, inputs, outputs, alpha=None):
    return LoraLayer(
        torch.randn(rank, inputs),
        torch.randn(outputs, rank),
        float(rank if alpha is None else alpha),
    )


def update(found):
    return found.up @ found.down * (found.alpha / found.rank)


@pytest.mark.parametrize("to", ["comfyui", "kohya"])
def test_diffusers_reads_single_blocks_of_full_size_as_the_same_matrices(to):
    from diffusers import FluxPipeline

    layers = {SINGLE + part: layer(2, WIDTH, WIDTH) for part in QKV}
    layers[SINGLE + "proj_mlp"] = layer(2, WIDTH, 4 * WIDTH)
    layers[SINGLE + "proj_out"] = layer(2, 5 * WIDTH, WIDTH)
    layers[SINGLE + "norm.linear"] = layer(2, WIDTH, 3 * WIDTH)
    tensors, metadata = serialize_adapter(Adapter(layers, {}), to)
    prefix = {"comfyui": "diffusion_model.single_blocks.3.", "kohya": "lora_unet_single_blocks_3_"}[
        to
    ]
    assert {key.split(".lora")[0].split(".alpha")[0] for key in tensors} == {
        prefix + name
        for name in (
            "linear1",
            "linear2",
            "modulation.lin" if to == "comfyui" else "modulation_lin",
        )
    }
    loaded = FluxPipeline.lora_state_dict(dict(tensors))
    assert loaded.keys() == {
        f"transformer.{name}.lora_{side}.weight" for name in layers for side in "AB"
    }
    for name, made in layers.items():
        assert bits(loaded[f"transformer.{name}.lora_A.weight"]) == bits(made.down)
        assert bits(loaded[f"transformer.{name}.lora_B.weight"]) == bits(made.up)
    back = parse_adapter(tensors, metadata).layers
    assert back.keys() == layers.keys()
    for name, made in layers.items():
        assert (bits(back[name].down), bits(back[name].up)) == (bits(made.down), bits(made.up))
        assert back[name].alpha == made.alpha


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("to", ["comfyui", "kohya"])
def test_double_blocks_are_read_exactly_where_diffusers_rounds_alpha_into_the_matrices(to, dtype):
    from diffusers import FluxPipeline

    inner = {
        f"transformer_blocks.2.attn.{part}": layer(4, WIDTH, WIDTH, 6.5)
        for part in ("to_q", "to_k", "to_v")
    }
    made = {**inner, SINGLE + "proj_out": layer(4, 5 * WIDTH, WIDTH, 6.5)}
    made = {
        name: LoraLayer(found.down.to(dtype), found.up.to(dtype), found.alpha)
        for name, found in made.items()
    }
    tensors, metadata = serialize_adapter(Adapter(made, {}), to)
    ours, theirs = (
        parse_adapter(tensors, metadata).layers,
        FluxPipeline.lora_state_dict(dict(tensors)),
    )
    assert len(theirs) == 2 * len(made)
    for name, expected in made.items():
        down, up = (theirs[f"transformer.{name}.lora_{side}.weight"] for side in "AB")
        assert bits(ours[name].down) + bits(ours[name].up) == bits(expected.down) + bits(
            expected.up
        )
        assert ours[name].alpha == 6.5
        error = update(LoraLayer(down.float(), up.float(), 4.0)) - update(expected).float()
        assert (
            error.norm()
            <= (1e-2 if dtype == torch.bfloat16 else 1e-6) * update(expected).float().norm()
        )


def test_parts_that_were_not_trained_do_not_come_back():
    layers = {
        SINGLE + "attn.to_k": layer(2, 8, 8, alpha=3),
        SINGLE + "attn.to_v": layer(2, 8, 8, alpha=3),
    }
    joined = join_layers(layers, FLUX1)
    assert joined["single_blocks.3.linear1"].up.shape == (8 * 7, 8)
    back = split_layers(joined, FLUX1)
    assert back.keys() == layers.keys()
    for name, made in layers.items():
        assert (bits(back[name].down), bits(back[name].up)) == (bits(made.down), bits(made.up))
        assert back[name].alpha == made.alpha


def test_different_ranks_and_alphas_in_one_layer_keep_their_updates():
    layers = {SINGLE + part: layer(rank, 8, 8, alpha) for part, rank, alpha in SHAPES}
    back = split_layers(join_layers(layers, FLUX1), FLUX1)
    assert {name: found.rank for name, found in back.items()} == {
        name: made.rank for name, made in layers.items()
    }
    for name, made in layers.items():
        assert torch.allclose(update(back[name]), update(made), atol=1e-5)


@pytest.mark.parametrize("rank", [2, 3])
def test_a_layer_that_was_trained_as_one_is_split_by_rows(rank):
    trained = layer(rank, 8, 24, alpha=5)
    back = split_layers({"double_blocks.0.img_attn.qkv": trained}, FLUX1)
    assert list(back) == [f"transformer_blocks.0.{part}" for part in QKV]
    assert torch.allclose(torch.cat([update(found) for found in back.values()]), update(trained))


@pytest.mark.parametrize(
    ("names", "answer"),
    [
        (["transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.attn.to_q"], FLUX1_CLASS),
        (
            ["transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.attn.to_out"],
            "Flux2Transformer2DModel",
        ),
        (
            ["transformer_blocks.18.attn.to_q", "transformer_blocks.0.ff.net.2"],
            None,
        ),  # also Stable Diffusion 3.5's
        (["transformer_blocks.0.attn.add_q_proj", "proj_out"], None),  # also Qwen-Image's
        (
            ["transformer_blocks.0.attn.to_q", "transformer_blocks.19.attn.to_q"],
            None,
        ),  # FLUX.1 has 19: one of the two
        (["transformer_blocks.0.attn.to_q", "transformer_blocks.38.attn.to_q"], ""),
        (["transformer_blocks.19.attn.to_q", "transformer_blocks.0.ff.net.2"], SD3_CLASS),
        (["transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn2.to_q"], SD3_CLASS),
        (["transformer_blocks.0.attn.to_q", "transformer_blocks.0.img_mlp.net.2"], ""),
        (["blocks.0.to_q", "proj_out"], ""),
        ([], ""),
    ],
)
def test_names_tell_a_model_another_one_or_neither(names, answer):
    assert find_class(names) == answer
