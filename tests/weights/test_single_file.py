"""Files of ComfyUI, Kohya and Civitai load to the weights of the folder they were written from."""

import diffusers
import pytest
import torch

from autotune.models.registry import FAMILIES
from autotune.weights.empty import build_empty
from autotune.weights.files import BadWeights, ModelMismatch, open_weights
from autotune.weights.single_file import has_part, view_as, view_part
from autotune.weights.stream import check_source, load_into
from tests.models.conftest import one_thread, small_pipelines  # noqa: F401 - fixtures
from tests.weights import original_layouts
from tests.weights.conftest import raw_file, write_raw

FLOAT8_STEP = 2.0**-3  # of e4m3's mantissa; half of it is the most that rounding changes a value


def loaded(state, family, like, folder):
    """What a file of `state` gives a model of the configuration of `like`."""
    file = original_layouts.write(state, folder / "model.safetensors")
    model = build_empty(lambda: FAMILIES[family].build_transformer(dict(like.config)))
    source = view_as(open_weights(file), model)
    check_source(model, source)
    load_into(model, source)
    return model.state_dict()


@pytest.mark.parametrize("family", original_layouts.LAYOUTS)
@pytest.mark.quick(*((name, "alone") for name in ("flux1-dev", "sd3.5", "sdxl")), "z-image")
@pytest.mark.parametrize("place", ["alone", "in a checkpoint"])
def test_authors_layouts_load_exactly(family, place, small_pipelines, tmp_path):
    transformer = small_pipelines(family).transformer
    state = transformer.state_dict()
    stored = original_layouts.LAYOUTS[family](state)
    if place == "in a checkpoint":
        stored = original_layouts.within(stored, "model.diffusion_model.")
        stored["first_stage_model.decoder.conv_in.weight"] = torch.ones(4, 4)
    got = loaded(stored, family, transformer, tmp_path)
    assert got.keys() == state.keys()
    assert [name for name in state if not torch.equal(got[name], state[name])] == []


@pytest.mark.parametrize("family", ["flux1-dev", "chroma"])
def test_norms_have_two_names(family, small_pipelines, tmp_path):
    transformer = small_pipelines(family).transformer
    state = transformer.state_dict()
    stored = original_layouts.with_plain_norms(original_layouts.LAYOUTS[family](state))
    got = loaded(stored, family, transformer, tmp_path)
    assert [name for name in state if not torch.equal(got[name], state[name])] == []


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("family", ["flux1-dev", "chroma", "qwen-image"])
def test_scaled_fp8_loads_with_scales(family, newer, small_pipelines, tmp_path):
    transformer = small_pipelines(family).transformer
    state = original_layouts.LAYOUTS[family](transformer.state_dict())
    stored = original_layouts.scaled_fp8(state, newer=newer)
    got = loaded(stored, family, transformer, tmp_path)
    for name, tensor in transformer.state_dict().items():
        if tensor.ndim != 2:
            assert torch.equal(got[name], tensor)
            continue
        largest = tensor.abs().max()
        error = (got[name] - tensor).abs()
        # Of a fused matrix the scale is that of the largest part.
        assert (error <= tensor.abs() * FLOAT8_STEP / 2 + largest * 1e-2).all()
        assert got[name].norm() == pytest.approx(tensor.norm().item(), rel=1e-2)


FUSED, NORM = "layers.0.attention.qkv.weight", "layers.0.attention.q_norm.weight"
SCALE = "layers.0.attention.qkv.weight_scale"


def quantize(dtype, scale):
    return lambda state: state.update({FUSED: state[FUSED].to(dtype), SCALE: scale})


CHANGES = {
    "lacks": (lambda state: state.pop(NORM), r"lacks layers\.0\.attention\.norm_q\.weight"),
    "extra": (lambda state: state.update({"more.weight": torch.ones(2)}), "unlike the model, more"),
    "narrow": (lambda state: state.update({FUSED: state[FUSED][:, :-1]}), "has shape"),
    "uneven": (lambda state: state.update({FUSED: state[FUSED][:-1]}), "has shape"),
    "int8": (quantize(torch.int8, torch.ones(1)), "quantized in a way"),
    "blocks": (quantize(torch.float8_e4m3fn, torch.ones(2, 2)), "quantized in a way"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_other_models_are_refused(how, small_pipelines, tmp_path):
    transformer = small_pipelines("z-image").transformer
    state, (change, words) = original_layouts.z_image(transformer.state_dict()), CHANGES[how]
    change(state)
    with pytest.raises(BadWeights, match=words) as caught:
        loaded(state, "z-image", transformer, tmp_path)
    assert caught.value.hint


def test_endless_rows_are_refused(tmp_path, small_pipelines):
    header = {"x": {"dtype": "F32", "shape": [1 << 40, 0], "data_offsets": [0, 0]}}
    file = write_raw(tmp_path, "model.safetensors", raw_file(header))
    with pytest.raises(ModelMismatch, match="rows"):
        view_as(open_weights(file), small_pipelines("z-image").transformer)


WAN_CONFIG = {"base_dim": 8, "z_dim": 4, "num_res_blocks": 2}
WAN22_CONFIG = WAN_CONFIG | {"decoder_base_dim": 8, "is_residual": True, "patch_size": 2}
WAN22_CONFIG |= dict.fromkeys(("in_channels", "out_channels"), 12)
STAGES = {"down_block_types": ("DownEncoderBlock2D",) * 2, "block_out_channels": (8, 16)}
STAGES["up_block_types"] = ("UpDecoderBlock2D",) * 2
LDM_CONFIG = {**STAGES, "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
VAES = {
    "qwen-image": ("AutoencoderKLQwenImage", WAN_CONFIG, original_layouts.wan_vae),
    "wan-2.1": ("AutoencoderKLWan", WAN_CONFIG, original_layouts.wan_vae),
    "wan-2.2": ("AutoencoderKLWan", WAN22_CONFIG, original_layouts.wan22_vae),
    "flux1-dev": ("AutoencoderKL", LDM_CONFIG, original_layouts.ldm_vae),
    "flux2-klein": ("AutoencoderKLFlux2", LDM_CONFIG, original_layouts.flux2_vae),
}


def make(of, seed):
    torch.manual_seed(seed)
    kind, config, _ = VAES[of]
    model = getattr(diffusers, kind)(**config)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand_like(buffer))
    return model


@pytest.mark.parametrize("prefix", ["", "first_stage_model."])
@pytest.mark.parametrize("of", VAES)
def test_authors_vaes_load_exactly(of, prefix, tmp_path):
    model, empty = make(of, 0), make(of, 1)
    state = original_layouts.within(VAES[of][2](model.state_dict()), prefix)
    others = {"model.diffusion_model.input_blocks.0.weight": torch.ones(2, 2)} if prefix else {}
    source = open_weights(original_layouts.write(state | others, tmp_path / "vae.safetensors"))
    assert has_part(source, "vae") is bool(prefix)
    load_into(empty, view_part(source, "vae", empty))
    for name, tensor in model.state_dict().items():
        assert torch.equal(empty.state_dict()[name], tensor), name
