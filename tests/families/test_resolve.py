import json
import os
import shutil

import pytest

from autotune.errors import InvalidInput
from autotune.families.resolve import fetch_model, read_parts, resolve_model


@pytest.fixture
def folder(small_pipelines, tmp_path):
    """A copy of a model's small files; weights are not read."""
    return shutil.copytree(
        small_pipelines("qwen-image").folder, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")
    )


def test_weights_are_not_needed_and_names_do_not_matter(folder, small_pipelines):
    resolved = resolve_model(str(folder))
    original = resolve_model(str(small_pipelines("qwen-image").folder))
    assert resolved.spec.architecture == original.spec.architecture
    assert resolved.spec.name == "model"
    assert resolved.folder == folder


def test_every_missing_component_is_named(folder):
    shutil.rmtree(folder / "vae")
    with pytest.raises(InvalidInput, match="no vae/"):
        resolve_model(str(folder))


def test_another_pipeline_is_refused_by_name(folder):
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "PixArtAlphaPipeline"}))
    with pytest.raises(InvalidInput, match="PixArtAlphaPipeline") as caught:
        resolve_model(str(folder))
    assert "FluxPipeline" in caught.value.hint


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", "null", "[" * 9999])
@pytest.mark.parametrize("name", ["model_index.json", "transformer/config.json"])
def test_damaged_configuration_is_an_error_with_its_file(folder, name, text):
    (folder / name).write_text(text)
    with pytest.raises(InvalidInput, match=r"\.json"):
        resolve_model(str(folder))


@pytest.mark.parametrize("config", [{"num_layers": "many"}, {"no_such_argument": 1}, {"axes_dims_rope": [1, 2, 3]},
                                    {"attention_head_dim": -8}, {"num_attention_heads": 10**15}])  # fmt: skip
def test_configuration_that_builds_no_model_is_refused(folder, config):
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match="does not build"):
        resolve_model(str(folder))


@pytest.mark.parametrize("number", [0, -1])
def test_a_transformer_without_blocks_is_refused(folder, number):
    (folder / "transformer" / "config.json").write_text(json.dumps({"num_layers": number}))
    with pytest.raises(InvalidInput, match="without blocks"):
        resolve_model(str(folder))


def test_as_many_blocks_as_would_take_all_memory_are_refused(folder):
    (folder / "transformer" / "config.json").write_text(json.dumps({"num_layers": 10**9}))
    with pytest.raises(InvalidInput, match="asks for 1000000000 num_layers"):
        resolve_model(str(folder))


def test_a_pipe_in_place_of_a_configuration_is_not_waited_for(folder):
    (folder / "transformer" / "config.json").unlink()
    os.mkfifo(folder / "transformer" / "config.json")
    with pytest.raises(InvalidInput, match="is no file"):
        resolve_model(str(folder))


@pytest.mark.parametrize("entry", [["os", "system"], ["antigravity", "X"], [], [["x"], "y"]])
def test_parts_from_elsewhere_than_diffusers_and_transformers_are_refused(folder, entry):
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "tokenizer": entry}))
    with pytest.raises(InvalidInput, match=r"tokenizer in .* comes from"):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    ("vae", "config"), [("NoSuchVae", {}), ("utils", {}), ("UNet2DModel", {"block_out_channels": "x"})]
)
def test_an_autoencoder_that_cannot_be_built_is_refused_before_anything_is_traced(
    small_pipelines, tmp_path, vae, config
):
    folder = shutil.copytree(small_pipelines("qwen-image").folder, tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "vae": ["diffusers", vae]}))
    (folder / "vae" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match=f"does not build a {vae}"):
        read_parts(resolve_model(str(folder)))


@pytest.mark.parametrize("revision", ["../../../x", "a/../../b", "/etc", "", "a b", "\x1b[2J"])
def test_a_revision_leads_nowhere_out_of_the_cache(revision):
    for find in (resolve_model, fetch_model):
        with pytest.raises(InvalidInput, match="is no revision of"):
            find(f"Qwen/Qwen-Image@{revision}")


def test_unknown_name_lists_known_models():
    with pytest.raises(InvalidInput) as caught:
        resolve_model("no/such-model")
    assert "kandinsky5-video-lite" in caught.value.hint
