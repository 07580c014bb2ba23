"""VAEs in files of their authors' layout are read as the very tensors of diffusers' models,
without a copy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import save_file

from autotune.weights.files import BadWeights, open_weights
from autotune.weights.single_file import has_part, view_part
from autotune.weights.stream import load_into
from tests.weights.original_parts import State, flux2_vae, ldm_vae, wan22_vae, wan_vae, within

WAN = {"base_dim": 8, "z_dim": 4, "num_res_blocks": 2}
LDM = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "latent_channels": 4,
}
BLOCKS = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}
STAGES = {"base_dim": 8, "decoder_base_dim": 8, "num_res_blocks": 2}
WAN22 = {
    **STAGES,
    "z_dim": 4,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
}
VAES: dict[str, tuple[str, dict[str, Any], Callable[[State], State]]] = {
    "qwen-image": ("AutoencoderKLQwenImage", WAN, wan_vae),
    "wan-2.1": ("AutoencoderKLWan", WAN, wan_vae),
    "wan-2.2": ("AutoencoderKLWan", WAN22, wan22_vae),
    "flux1-dev": ("AutoencoderKL", {**LDM, **BLOCKS}, ldm_vae),
    "flux2-klein": ("AutoencoderKLFlux2", {**LDM, **BLOCKS}, flux2_vae),
}


def make(of: str, seed: int) -> Any:
    torch.manual_seed(seed)
    kind, config, _ = VAES[of]
    model = getattr(diffusers, kind)(**config)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand_like(buffer))
    return model


@pytest.mark.parametrize("prefix", ["", "first_stage_model."])
@pytest.mark.parametrize("of", VAES)
def test_a_vae_in_its_authors_layout_is_the_model_of_diffusers(
    of: str, prefix: str, tmp_path: Path
) -> None:
    model, empty = make(of, 0), make(of, 1)
    state = within(VAES[of][2](model.state_dict()), prefix)
    others = {"model.diffusion_model.input_blocks.0.weight": torch.ones(2, 2)} if prefix else {}
    save_file(
        {name: tensor.contiguous() for name, tensor in (state | others).items()},
        tmp_path / "vae.safetensors",
    )
    source = open_weights(tmp_path / "vae.safetensors")
    assert has_part(source, "vae") is bool(prefix)
    load_into(empty, view_part(source, "vae", empty))
    for name, tensor in model.state_dict().items():
        assert torch.equal(empty.state_dict()[name], tensor), name


def test_the_vae_of_another_model_is_refused(tmp_path: Path) -> None:
    save_file(wan_vae(make("wan-2.1", 0).state_dict()), tmp_path / "vae.safetensors")
    other = make("flux1-dev", 1)
    with pytest.raises(BadWeights):
        load_into(other, view_part(open_weights(tmp_path / "vae.safetensors"), "vae", other))
