import json
import shutil

import pytest

from autotune.errors import InvalidInput
from autotune.families.resolve import resolve_model


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


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", "null"])
@pytest.mark.parametrize("name", ["model_index.json", "transformer/config.json"])
def test_damaged_configuration_is_an_error_with_its_file(folder, name, text):
    (folder / name).write_text(text)
    with pytest.raises(InvalidInput, match=r"\.json"):
        resolve_model(str(folder))


@pytest.mark.parametrize("config", [{"num_layers": "many"}, {"no_such_argument": 1}, {"axes_dims_rope": [1, 2, 3]}])
def test_configuration_that_builds_no_model_is_refused(folder, config):
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match="does not build"):
        resolve_model(str(folder))


def test_unknown_name_lists_known_models():
    with pytest.raises(InvalidInput) as caught:
        resolve_model("no/such-model")
    assert "kandinsky5-video-lite" in caught.value.hint
