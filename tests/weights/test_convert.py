"""`convert_weights` of adapters whose model must be told."""

from pathlib import Path

import pytest
import torch

from autotune.api import convert_weights
from autotune.errors import InvalidInput
from autotune.weights.adapters import Adapter, read_adapter, write_adapter
from autotune.weights.files import read_header
from autotune.weights.names import LoraLayer

ATTENTION = "transformer_blocks.3.attn.to_out.0"
"""A name that FLUX.1 and Qwen-Image share, of equally wide layers."""


@pytest.fixture
def ambiguous(tmp_path: Path) -> Path:
    layer = LoraLayer(torch.ones(2, 8), torch.ones(8, 2), 2.0)
    write_adapter(tmp_path / "in.safetensors", Adapter({ATTENTION: layer}, {}), "diffusers")
    return tmp_path / "in.safetensors"


@pytest.mark.parametrize("to", ["comfyui", "kohya"])
def test_an_adapter_that_may_be_of_two_models_is_written_once_its_model_is_told(
    ambiguous: Path, to: str
) -> None:
    out = ambiguous.parent / "out.safetensors"
    with pytest.raises(InvalidInput, match="may be for FLUX") as caught:
        convert_weights(ambiguous, out, to=to)
    assert "--model" in caught.value.hint
    assert not out.exists()
    for model, name in (("flux1-dev", "double_blocks.3.img_attn.proj"), ("qwen-image", ATTENTION)):
        convert_weights(ambiguous, out, to=to, model=model)
        written = name.replace(".", "_") if to == "kohya" else name
        assert any(written in key for key in read_header(out).by_name)
        assert list(read_adapter(out).layers) == [ATTENTION]
