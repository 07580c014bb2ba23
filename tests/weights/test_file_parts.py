"""VAEs in files of their authors' layout are read as the very tensors of diffusers' models, without a copy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import save_file

from autotune.weights.errors import BadWeights
from autotune.weights.file_parts import has_part, view_part
from autotune.weights.sources import open_weights
from autotune.weights.streaming import load_into
from tests.weights.original_parts import State, flux2_vae, ldm_vae, wan_vae, within

WAN = {"base_dim": 8, "z_dim": 4, "num_res_blocks": 2}
LDM = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
BLOCKS = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
VAES: dict[str, tuple[dict[str, Any], Callable[[State], State]]] = {
    "AutoencoderKLQwenImage": (WAN, wan_vae),
    "AutoencoderKLWan": (WAN, wan_vae),
    "AutoencoderKL": ({**LDM, **BLOCKS}, ldm_vae),
    "AutoencoderKLFlux2": ({**LDM, **BLOCKS}, flux2_vae),
}


def make(kind: str, seed: int) -> Any:
    torch.manual_seed(seed)
    model = getattr(diffusers, kind)(**VAES[kind][0])
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand_like(buffer))
    return model


@pytest.mark.parametrize("prefix", ["", "first_stage_model."])
@pytest.mark.parametrize("kind", VAES)
def test_a_vae_in_its_authors_layout_is_the_model_of_diffusers(kind: str, prefix: str, tmp_path: Path) -> None:
    model, empty = make(kind, 0), make(kind, 1)
    state = within(VAES[kind][1](model.state_dict()), prefix)
    others = {"model.diffusion_model.input_blocks.0.weight": torch.ones(2, 2)} if prefix else {}
    save_file({name: tensor.contiguous() for name, tensor in (state | others).items()}, tmp_path / "vae.safetensors")
    source = open_weights(tmp_path / "vae.safetensors")
    assert has_part(source, "vae") is bool(prefix)
    load_into(empty, view_part(source, "vae", empty))
    for name, tensor in model.state_dict().items():
        assert torch.equal(empty.state_dict()[name], tensor), name


@pytest.mark.parametrize("kind", VAES)
def test_a_file_in_diffusers_own_layout_is_taken_as_it_is(kind: str, tmp_path: Path) -> None:
    model, empty = make(kind, 0), make(kind, 1)
    save_file(model.state_dict(), tmp_path / "vae.safetensors")
    load_into(empty, view_part(open_weights(tmp_path / "vae.safetensors"), "vae", empty))
    assert all(torch.equal(empty.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_the_vae_of_another_model_is_refused(tmp_path: Path) -> None:
    save_file(wan_vae(make("AutoencoderKLWan", 0).state_dict()), tmp_path / "vae.safetensors")
    other = make("AutoencoderKL", 1)
    with pytest.raises(BadWeights):
        load_into(other, view_part(open_weights(tmp_path / "vae.safetensors"), "vae", other))
