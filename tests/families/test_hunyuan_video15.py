"""What HunyuanVideo 1.5 needs besides what every family is held to."""

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock

from autotune.cost.predict import CostModel
from autotune.families.hunyuan_transformer import causal_mask
from autotune.families.resolve import resolve_model
from autotune.hardware.store import hardware_named
from autotune.schema.workload import Bucket
from tests.builders import workload


@pytest.mark.parametrize("batch_size", [None, 2])
def test_masks_of_the_autoencoder_are_those_of_diffusers(batch_size):
    asked = (3, 4, torch.float32, "cpu", batch_size)
    assert torch.equal(
        causal_mask(*asked), HunyuanVideo15AttnBlock.prepare_causal_attention_mask(*asked)
    )


def test_a_clip_is_encoded_in_tiles_or_it_would_fit_no_card():
    model = resolve_model("hunyuanvideo-1.5")
    clip = Bucket(width_px=640, height_px=640, num_frames=121, num_items=1)
    work = workload(model=model.spec, buckets=(clip,), resolution_px=640)
    cost = CostModel.build(hardware_named("4090"), work, model.family, model.config)
    assert cost.model.vae_cost("bf16").encode_transient_bytes < 16 * 2**30
