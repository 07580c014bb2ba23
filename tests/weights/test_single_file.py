"""Files of ComfyUI, Kohya and Civitai load to the same weights as the folder that they were
written from."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from autotune.models.registry import FAMILIES
from autotune.weights.files import BadWeights, ModelMismatch, open_weights
from autotune.weights.single_file import view_as
from autotune.weights.stream import build_empty, check_source, load_into
from tests.models.conftest import one_thread, small_pipelines  # noqa: F401 - fixtures
from tests.weights.original_layouts import LAYOUTS, in_checkpoint, scaled_fp8

FLOAT8_STEP = 2.0**-3
"""Of e4m3's mantissa; half of it is the most that rounding changes a value."""


def saved(path: Path, state: dict[str, Tensor]) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    return path


def loaded(
    file: Path, family: str, like: nn.Module, *, loader: str = "safetensors"
) -> dict[str, Tensor]:
    config = dict(like.config)  # type: ignore[arg-type, call-overload]
    model = build_empty(lambda: FAMILIES[family].build_transformer(config))
    source = view_as(open_weights(file), model)
    check_source(model, source)
    load_into(model, source, loader=loader)
    return model.state_dict()


@pytest.mark.parametrize("family", LAYOUTS)
@pytest.mark.parametrize("place", ["alone", "in a checkpoint"])
def test_a_file_in_the_authors_layout_loads_to_the_very_same_weights(
    family: str, place: str, small_pipelines, tmp_path: Path
) -> None:
    transformer = small_pipelines(family).transformer
    state = transformer.state_dict()
    stored = LAYOUTS[family](state)
    if place == "in a checkpoint":
        stored = in_checkpoint(
            stored, **{"first_stage_model.decoder.conv_in.weight": torch.ones(4, 4)}
        )
    got = loaded(saved(tmp_path / "model.safetensors", stored), family, transformer)
    assert got.keys() == state.keys()
    assert [name for name in state if not torch.equal(got[name], state[name])] == []


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("family", ["flux1-dev", "qwen-image"])
def test_scaled_fp8_loads_as_the_stored_values_times_their_scales(
    family: str, newer: bool, small_pipelines, tmp_path: Path
) -> None:
    transformer = small_pipelines(family).transformer
    stored = scaled_fp8(LAYOUTS[family](transformer.state_dict()), newer=newer)
    got = loaded(saved(tmp_path / "model.safetensors", stored), family, transformer)
    for name, tensor in transformer.state_dict().items():
        if tensor.ndim != 2:
            assert torch.equal(got[name], tensor)
            continue
        largest = tensor.abs().max()
        error = (got[name] - tensor).abs()
        # Of a fused matrix the scale is that of the largest part, so very small values are less
        # exact.
        assert (error <= tensor.abs() * FLOAT8_STEP / 2 + largest * 1e-2).all()
        assert got[name].norm() == pytest.approx(tensor.norm().item(), rel=1e-2)


def change(state: dict[str, Tensor], how: str) -> dict[str, Tensor]:
    fused, norm = "layers.0.attention.qkv.weight", "layers.0.attention.q_norm.weight"
    others = {name: tensor for name, tensor in state.items() if name not in (fused, norm)}
    match how:
        case "lacks":
            return {**others, fused: state[fused]}
        case "extra":
            return {**state, "something.weight": torch.ones(2)}
        case "narrow":
            return {**others, norm: state[norm], fused: state[fused][:, :-1]}
        case "uneven":
            return {**others, norm: state[norm], fused: state[fused][:-1]}
        case "int8":
            quantized = {
                fused: state[fused].to(torch.int8),
                "layers.0.attention.qkv.weight_scale": torch.ones(1),
            }
            return {**others, norm: state[norm], **quantized}
        case _:
            odd = {
                fused: state[fused].to(torch.float8_e4m3fn),
                "layers.0.attention.qkv.weight_scale": torch.ones(2, 2),
            }
            return {**others, norm: state[norm], **odd}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("lacks", "lacks layers.0.attention.norm_q.weight"),
        ("extra", "no place for, something.weight"),
        ("narrow", "has shape"),
        ("uneven", "has shape"),
        ("int8", "quantized in a way that is not understood"),
        ("blocks", "quantized in a way that is not understood"),
    ],
)
def test_what_is_not_the_model_is_refused_from_the_header(
    how: str, words: str, small_pipelines, tmp_path: Path
) -> None:
    transformer = small_pipelines("z-image").transformer
    file = saved(
        tmp_path / "model.safetensors", change(LAYOUTS["z-image"](transformer.state_dict()), how)
    )
    with pytest.raises(BadWeights, match=words) as caught:
        loaded(file, "z-image", transformer)
    assert caught.value.hint


def test_a_header_that_asks_for_endless_rows_is_refused_before_a_marker_is_made(
    tmp_path: Path, small_pipelines
) -> None:
    header = json.dumps(
        {"x": {"dtype": "F32", "shape": [1 << 40, 0], "data_offsets": [0, 0]}}
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ModelMismatch, match="rows"):
        view_as(
            open_weights(tmp_path / "model.safetensors"), small_pipelines("z-image").transformer
        )
