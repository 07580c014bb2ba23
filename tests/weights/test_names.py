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

WIDTH = 3072  # diffusers' converter takes no other

FLUX1 = LAYOUTS[FLUX1_CLASS]
SINGLE = "single_transformer_blocks.3."
SHAPES = (("attn.to_q", 1, 3), ("attn.to_k", 4, 1), ("attn.to_v", 2, 2.5))
QKV = tuple(f"attn.to_{letter}" for letter in "qkv")


def layer(rank, inputs, outputs, alpha=None):
    return LoraLayer(torch.randn(rank, inputs), torch.randn(outputs, rank), float(alpha or rank))


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


def test_double_blocks_are_exact():
    from diffusers import FluxPipeline

    made = {f"transformer_blocks.2.{part}": layer(4, WIDTH, WIDTH, 6.5) for part in QKV}
    made[SINGLE + "proj_out"] = layer(4, 5 * WIDTH, WIDTH, 6.5)
    tensors, metadata = serialize_adapter(Adapter(made, {}), "kohya")
    assert_same(parse_adapter(tensors, metadata).layers, made)
    theirs = FluxPipeline.lora_state_dict(dict(tensors))
    assert len(theirs) == 2 * len(made)
    probe = torch.randn(5 * WIDTH, 3)
    for name, expected in made.items():
        down, up = (theirs[f"transformer.{name}.lora_{side}.weight"] for side in "AB")
        inputs = probe[: down.shape[1]]
        wanted = expected.up @ (expected.down @ inputs) * (6.5 / 4)
        assert (up @ (down @ inputs) - wanted).norm() <= 1e-5 * wanted.norm()


def test_untrained_parts_stay_away():
    layers = {SINGLE + part: layer(2, 8, 8, alpha=3) for part in QKV[1:]}
    joined = join_layers(layers, FLUX1)
    assert joined["single_blocks.3.linear1"].up.shape == (8 * 7, 8)
    assert_same(split_layers(joined, FLUX1), layers)


def test_mixed_ranks_keep_their_updates():
    layers = {SINGLE + part: layer(rank, 8, 8, alpha) for part, rank, alpha in SHAPES}
    back = split_layers(join_layers(layers, FLUX1), FLUX1)
    assert {name: found.rank for name, found in back.items()} == {
        name: made.rank for name, made in layers.items()
    }
    for name, made in layers.items():
        assert torch.allclose(update(back[name]), update(made), atol=1e-5)


@pytest.mark.parametrize("rank", [2, 3])
def test_joined_layers_split_by_rows(rank):
    trained = layer(rank, 8, 24, alpha=5)
    back = split_layers({"double_blocks.0.img_attn.qkv": trained}, FLUX1)
    assert list(back) == [f"transformer_blocks.0.{part}" for part in QKV]
    assert torch.allclose(torch.cat([update(found) for found in back.values()]), update(trained))


@pytest.mark.parametrize(
    ("names", "answer"),
    [
        (["0.attn.to_q", SINGLE + "attn.to_q"], FLUX1_CLASS),
        (["0.attn.to_q", SINGLE + "attn.to_out"], "Flux2Transformer2DModel"),
        (["18.attn.to_q", "0.ff.net.2"], None),  # also Stable Diffusion 3.5's
        (["0.attn.add_q_proj", "proj_out"], None),  # also Qwen-Image's
        (["0.attn.to_q", "19.attn.to_q"], None),  # FLUX.1 has 19: one of the two
        (["0.attn.to_q", "38.attn.to_q"], ""),
        (["19.attn.to_q", "0.ff.net.2"], SD3_CLASS),
        (["0.attn.to_q", "0.attn2.to_q"], SD3_CLASS),
        (["0.attn.to_q", "0.img_mlp.net.2"], ""),
        (["blocks.0.to_q", "proj_out"], ""),
        ([], ""),
    ],
)
def test_names_tell_their_model(names, answer):
    in_blocks = [f"transformer_blocks.{name}" if name[0].isdigit() else name for name in names]
    assert find_class(in_blocks) == answer
