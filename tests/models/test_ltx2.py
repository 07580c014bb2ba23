"""LTX-2's pipeline with prompts that have been through the connectors shows what the stock
pipeline shows."""

import pytest
import torch
from diffusers import LTX2Pipeline

from tests.models.small import CAPTIONS


@pytest.mark.slow
def test_previews_need_neither_gemma_nor_the_connectors(small_pipelines) -> None:
    small = small_pipelines("ltx-2.3")
    options = {
        "width": 64,
        "height": 32,
        "num_frames": 9,
        "num_inference_steps": 2,
        "guidance_scale": 3.0,
    }
    options |= {"stg_scale": 0.0, "audio_stg_scale": 0.0, "output_type": "np", "return_dict": False}

    def sampled(pipeline):
        return pipeline(CAPTIONS[0], generator=torch.Generator().manual_seed(0), **options)

    stock = sampled(LTX2Pipeline.from_pretrained(small.folder))
    pipeline = small.family.load_pipeline(small.folder)
    encoded = pipeline.encode_prompt(CAPTIONS[0])
    without = small.family.load_pipeline(small.folder, text_encoder=None, connectors=None)
    without.encode_prompt = lambda **_: encoded
    for ours, theirs in zip(sampled(without), stock, strict=True):
        torch.testing.assert_close(
            torch.as_tensor(ours), torch.as_tensor(theirs), rtol=1e-4, atol=1e-5
        )
