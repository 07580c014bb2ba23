import copy

import pytest
import torch
from torch import nn

from autotune.weights.empty import build_empty
from autotune.weights.files import BadWeights, ModelMismatch, open_weights
from autotune.weights.stream import (
    cast_as_loaded,
    from_pretrained_dtypes,
    load_into,
    transformers_renaming,
)
from autotune.weights.tensors import LOADERS, save_file
from tests.weights.conftest import bits, save_model

HEADS = {"attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": (4, 6, 6)}
SMALL = {"in_channels": 16, "joint_attention_dim": 16, **HEADS}
QWEN = {**SMALL, "out_channels": 4, "num_layers": 2}
FLUX = {**SMALL, "num_layers": 1, "num_single_layers": 1, "pooled_projection_dim": 16}
FLUX["guidance_embeds"] = True


def qwen_inputs(dtype):
    return {
        "hidden_states": torch.randn(1, 16, 16, dtype=dtype),
        "encoder_hidden_states": torch.randn(1, 5, 16, dtype=dtype),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "img_shapes": [[(1, 4, 4)]],
    }


def flux_inputs(dtype):
    inputs = qwen_inputs(dtype)
    del inputs["img_shapes"]
    ids = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(5, 3)}
    pooled = torch.randn(1, 16, dtype=dtype)
    return {**inputs, **ids, "pooled_projections": pooled, "guidance": torch.tensor([3.5])}


MODELS = {
    "QwenImageTransformer2DModel": (QWEN, qwen_inputs),
    "FluxTransformer2DModel": (FLUX, flux_inputs),
}


@pytest.fixture(scope="module", params=MODELS)
def published(request, tmp_path_factory):
    import diffusers

    cls, (config, inputs) = getattr(diffusers, request.param), MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    cls(**config).save_pretrained(folder, max_shard_size="50KB")
    return cls, config, inputs, folder


def assert_same_tensors(model, reference):
    mine, theirs = model.state_dict(), reference.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype, name
        assert bits(mine[name]) == bits(tensor), name
    for mine, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        assert mine.equal(theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loader", LOADERS)
def test_models_equal_from_pretrained(published, loader, dtype):
    cls, config, inputs, folder = published
    # A copy, because weights in a map are unaligned, and kernels round otherwise on those.
    reference = copy.deepcopy(cls.from_pretrained(folder, torch_dtype=dtype))
    model = build_empty(lambda: cls(**config), dtype=dtype)
    policy = from_pretrained_dtypes(model, dtype)
    load_into(model, open_weights(folder), loader=loader, dtype_policy=policy)
    assert_same_tensors(model, reference)
    assert not model.training
    arguments = inputs(dtype)
    with torch.no_grad():
        outputs = copy.deepcopy(model)(**arguments, return_dict=False)[0]
        assert outputs.equal(reference(**arguments, return_dict=False)[0])


def test_buffers_in_files_are_cast_as_loaded(tmp_path):
    from diffusers import SD3Transformer2DModel

    sizes = {"sample_size": 8, "in_channels": 4, "out_channels": 4, "pos_embed_max_size": 8}
    widths = dict.fromkeys(("caption_projection_dim", "joint_attention_dim"), 16)
    heads = {"attention_head_dim": 8, "num_attention_heads": 2, "pooled_projection_dim": 16}
    model = SD3Transformer2DModel(num_layers=1, **sizes, **widths, **heads)
    model.save_pretrained(tmp_path)
    reference = SD3Transformer2DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    cast_as_loaded(model, torch.bfloat16)
    dtypes = [{n: t.dtype for n, t in m.state_dict().items()} for m in (model, reference)]
    assert dtypes[0] == dtypes[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp32_modules_stay_fp32(tmp_path, dtype):
    from diffusers import WanTransformer3DModel

    heads = {"num_attention_heads": 1, "attention_head_dim": 12, "rope_max_seq_len": 32}
    sizes = {"in_channels": 4, "out_channels": 4, "text_dim": 8, "freq_dim": 8, "ffn_dim": 16}
    config = {**heads, **sizes, "num_layers": 1}
    WanTransformer3DModel(**config).save_pretrained(tmp_path)
    reference = WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=dtype)
    model = build_empty(lambda: WanTransformer3DModel(**config), dtype=dtype)
    load_into(model, open_weights(tmp_path), dtype_policy=from_pretrained_dtypes(model, dtype))
    assert len({tensor.dtype for tensor in reference.parameters()}) == 2
    assert_same_tensors(model, reference)


def test_renamed_encoders_load_published_names(tmp_path):
    from transformers import Qwen2_5_VLForConditionalGeneration

    from tests.small.parts import qwen_text_encoder, qwen_tokenizer

    tokenizer = qwen_tokenizer(["a cat"], "system user assistant {}")
    original = qwen_text_encoder(tokenizer, hidden_size=64)
    original.save_pretrained(tmp_path)
    assert not set(open_weights(tmp_path).locations) <= original.state_dict().keys()
    reference = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model = build_empty(lambda: type(reference)(reference.config), dtype=torch.bfloat16)
    policy, rename = from_pretrained_dtypes(model, torch.bfloat16), transformers_renaming(model)
    load_into(model, open_weights(tmp_path), dtype_policy=policy, rename=rename)
    assert_same_tensors(model, reference)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.block[0].weight
        self.register_buffer("counts", torch.arange(3))
        self.register_buffer("table", torch.arange(5.0), persistent=False)
        self.angles = torch.arange(5.0) * 2


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(1)
    original = Small()
    save_model(tmp_path, original.state_dict(), max_shard_bytes=70)
    return original, open_weights(tmp_path)


@pytest.mark.parametrize(
    "compute",
    [
        lambda: torch.rand(1 << 40, 4),
        lambda: torch.arange(1 << 16).outer(torch.arange(1 << 16)),
        lambda: [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(3)],
        lambda: nn.Parameter(torch.ones(1 << 10, 1 << 30)),
    ],
    ids=["drawn", "product", "many", "parameter"],
)
def test_endless_computations_are_refused(compute, monkeypatch):
    build_empty(lambda: nn.Linear(1 << 15, 1 << 14))  # reserved, never written
    build_empty(lambda: torch.zeros(1 << 20).expand(1 << 20, -1))  # a view
    monkeypatch.setattr("autotune.weights.empty.MAX_COMPUTED_BYTES", 5 << 19)
    with pytest.raises(BadWeights, match="asks for larger tables, more than any model has"):
        build_empty(compute)


@pytest.mark.parametrize("loader", LOADERS)
def test_ties_and_buffers_end_right(saved, loader):
    original, source = saved
    model = build_empty(Small)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.angles.equal(original.angles)
    load_into(model, source, loader=loader)
    assert_same_tensors(model, original)
    assert model.tied.weight is model.block[0].weight
    assert isinstance(model.first.weight, nn.Parameter)
    assert model.first.weight.requires_grad


def test_tied_weights_have_either_name(saved, tmp_path):
    original, _ = saved
    for dropped in ("tied.weight", "block.0.weight"):
        state = {name: tensor for name, tensor in original.state_dict().items() if name != dropped}
        save_file(tmp_path / "one.safetensors", state)
        model = build_empty(Small)
        load_into(model, open_weights(tmp_path / "one.safetensors"))
        assert_same_tensors(model, original)


@pytest.mark.parametrize("loader", LOADERS)
def test_quantizing_on_arrival_equals_quantizing_afterwards(published, loader):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    cls, config, inputs, folder = published

    def quantize(name, module):
        if isinstance(module, nn.Linear):
            quantize_(module, Int8WeightOnlyConfig())

    dtype = torch.bfloat16
    model = build_empty(lambda: cls(**config), dtype=dtype)
    policy = from_pretrained_dtypes(model, dtype)
    load_into(model, open_weights(folder), loader=loader, dtype_policy=policy, transform=quantize)
    reference = copy.deepcopy(cls.from_pretrained(folder, torch_dtype=dtype))
    quantize_(reference, Int8WeightOnlyConfig())
    arguments = inputs(dtype)
    with torch.no_grad():
        found, expected = (each(**arguments, return_dict=False)[0] for each in (model, reference))
    assert found.equal(expected)
    assert type(model.proj_out.weight) is type(reference.proj_out.weight)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda state: state.pop("first.bias"), "lacks first.bias"),
        (lambda state: state.update(stray=torch.ones(1)), "stray"),
        (lambda state: state.update({"first.bias": torch.ones(5)}), "first.bias has shape"),
        (lambda state: state.update({"first.bias": torch.ones(4, 1)}), "first.bias has shape"),
        (lambda state: state.update({"first.bias": torch.ones(4).to(torch.int8)}), "I8"),
        (lambda state: state.update(counts=torch.ones(3)), "counts is F32"),
    ],
)
def test_foreign_files_are_refused_unread(saved, monkeypatch, change, word):
    state = dict(saved[0].state_dict())
    change(state)
    other = saved[1].path / "other.safetensors"
    save_file(other, state)
    monkeypatch.setattr(type(LOADERS["pread"]), "stream", None)
    with pytest.raises(ModelMismatch, match=word) as caught:
        load_into(build_empty(Small), open_weights(other), loader="pread")
    assert caught.value.hint
