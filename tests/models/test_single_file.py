"""A model in one file, with a base for its other parts, is planned, trained and told apart."""

import json
import os
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

import autotune
from autotune.errors import InvalidInput
from autotune.models.family import build_on_meta
from autotune.models.registry import FAMILIES, find_published, get_family
from autotune.models.resolve import fetch_model, is_on_hub, resolve_model
from autotune.models.single_file import named_expert, sort_by_name
from autotune.plan.job import ModelRef
from autotune.train.model import load_transformer
from autotune.weights.adapters import read_adapter
from autotune.weights.files import BadWeights, HubError
from autotune.weights.stream import load_component
from tests.train.small import SETTINGS
from tests.weights.fake_hub import COMMIT, hub_in_this_process
from tests.weights.original_layouts import LAYOUTS, write

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def in_one_file(family, folder, file):
    """Move the transformer's weights out of a pipeline's folder, in the authors' layout."""
    weights = folder / FAMILIES[family].denoiser / "diffusion_pytorch_model.safetensors"
    write(LAYOUTS[family](load_file(weights)), file)
    weights.unlink()
    return file


def header_only(state, file):
    """A file of the right size and header, with nothing in it: sparse."""
    header, end = {}, 0
    for name, tensor in state.items():
        shape, offsets = list(tensor.shape), [end, end + tensor.nbytes]
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": offsets}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(file, 8 + len(text) + end)
    return file


@pytest.mark.quick("flux1-dev", "sdxl")
@pytest.mark.parametrize(
    "family",
    [
        *("anima", "flux1-dev", "ideogram-4", "ltx-2.3", "minimax-h3"),
        *("qwen-image", "sd3.5", "sdxl", "wan-2.1", "z-image"),
    ],
)
def test_file_and_base_are_the_folder(family, small_pipelines, tmp_path):
    small = small_pipelines(family)
    shutil.copytree(small.folder, tmp_path / "base")
    file = in_one_file(family, tmp_path / "base", tmp_path / "model.safetensors")
    model = resolve_model(ModelRef(name=str(file), base=str(tmp_path / "base")))
    whole = resolve_model(ModelRef.of(small.folder))
    assert model.spec == whole.spec.changed(name="model")
    got, expected = (
        load_transformer(each, SETTINGS, torch.device("cpu"))[0].state_dict()
        for each in (model, whole)
    )
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


def test_animas_conditioner_comes_from_its_file(small_pipelines, tmp_path):
    small, name = small_pipelines("anima"), "text_conditioner"
    shutil.copytree(small.folder, tmp_path / "base")
    file = in_one_file("anima", tmp_path / "base", tmp_path / "model.safetensors")
    weights = tmp_path / "base" / name / "diffusion_pytorch_model.safetensors"
    inside = {f"net.llm_adapter.{key}": each for key, each in load_file(weights).items()}
    save_file({**load_file(file), **inside}, file)
    weights.unlink()
    model = resolve_model(ModelRef(name=str(file), base=str(tmp_path / "base")))
    assert load_transformer(model, SETTINGS, torch.device("cpu"))
    found = load_component(model.weights, name, dtype=torch.float32, weights=model.part_files[name])
    expected = small.pipeline.text_conditioner.state_dict()
    assert all(torch.equal(each, expected[key]) for key, each in found.state_dict().items())


def test_a_transformer_not_trained_is_refused(tmp_path):
    with pytest.raises(InvalidInput, match="other transformer"):
        named_expert("minimax_h3_ref2va_bf16", get_family("minimax-h3"))
    with pytest.raises(InvalidInput, match="other transformer"):
        named_expert("ideogram4_unconditional_fp8_scaled", get_family("ideogram-4"))
    file = tmp_path / "adapter.safetensors"
    tensors = {f"transformer_ref.proj_in.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}
    save_file(tensors, file)
    with pytest.raises(InvalidInput, match="second transformer"):
        read_adapter(file)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("anima", "flux1-dev", "ideogram-4", "ltx-2.5", "sd3.5", "sd3.5-medium"),
        *("sdxl", "wan-2.1-14b", "z-image", "qwen-image"),
    ],
)
def test_published_files_are_recognized(name, tmp_path):
    found = find_published(name)
    assert found
    family, model = found
    own = dict(build_on_meta(family, model.config).state_dict())
    for state in (LAYOUTS[family.name](own), own):
        file = header_only(state, tmp_path / "model.safetensors")
        listed = {each.name: each for each in autotune.list_models(file=file)}
        assert name in listed
        classes = {get_family(each.family).transformer_class for each in listed.values()}
        assert classes == {family.transformer_class}
        if name == "flux1-dev":  # no file tells them apart
            assert list(listed) == ["flux1-dev", "flux1-kontext"]


def test_unusual_sizes_are_listed_beside_expected_ones(tmp_path):
    found = find_published("wan-2.1")
    assert found
    family, model = found
    cut = build_on_meta(family, {**model.config, "num_layers": 12})
    state = LAYOUTS[family.name](dict(cut.state_dict()))
    with pytest.raises(BadWeights) as error:
        autotune.list_models(file=header_only(state, tmp_path / "model.safetensors"))
    assert "in 12 blocks" in error.value.message
    assert "wan-2.1: 1.42 billion parameters in 30 blocks" in error.value.message


@pytest.mark.parametrize(
    ("file", "name", "expert"),
    [
        ("flux1-dev-kontext_fp8_scaled", "flux1-kontext", None),
        ("flux1-dev-fp8", "flux1-dev", None),
        ("wan2.2_t2v_low_noise_14B_fp8", "wan-2.2-14b", "low-noise"),
        ("Wan2_2-T2V-A14B-LOW_fp8_e4m3fn_scaled_KJ", "wan-2.2-14b", "low-noise"),
        ("wan22_t2v_14B_highnoise", "wan-2.2-14b", "high-noise"),
        ("wan2.1_t2v_14B", "wan-2.1-14b", None),
    ],
)
def test_file_names_tell_models_apart(file, name, expert):
    named = ("flux1-dev", "flux1-kontext") if "flux" in file else ("wan-2.1-14b", "wan-2.2-14b")
    alike = [found for each in named if (found := find_published(each))]
    family, model = sort_by_name(file, alike)[0]
    assert (model.name, named_expert(file, family)) == (name, expert)


def test_one_expert_has_to_be_said():
    with pytest.raises(InvalidInput) as refused:
        named_expert("wan2.2_t2v_14B", get_family("wan-2.2-14b"))
    assert refused.value.hint == "say it: --expert high-noise or --expert low-noise"


def test_adapters_are_no_models(tmp_path):
    file = tmp_path / "adapter.safetensors"
    save_file({"diffusion_model.layers.0.lora_A.weight": torch.ones(2, 2)}, file)
    with pytest.raises(BadWeights, match="it is an adapter"):
        resolve_model(ModelRef.of(file))


def test_hub_bases_come_without_transformers(small_pipelines, tmp_path):
    small = small_pipelines("flux1-dev")
    shutil.copytree(small.folder, tmp_path / "repo")
    file = in_one_file("flux1-dev", tmp_path / "repo", tmp_path / "model.safetensors")
    reference = ModelRef(name=str(file), base="team/small")
    with hub_in_this_process(tmp_path / "cache") as hub:
        hub.repos["team/small"] = small.folder
        assert is_on_hub(reference)
        planned = fetch_model(reference, weights=False)
        assert (planned.folder, planned.revision, planned.base) == (None, COMMIT, "team/small")
        model = fetch_model(ModelRef(name=str(file), base=f"team/small@{COMMIT}"))
        assert model.folder is not None
        assert "transformer/diffusion_pytorch_model.safetensors" not in hub.downloads
        assert resolve_model(ModelRef(name=str(file), base=f"team/small@{COMMIT}")) == model
        with pytest.raises(HubError) as caught:
            fetch_model(ModelRef(name=str(file), base="team/absent"))
        assert "--base" in caught.value.hint
