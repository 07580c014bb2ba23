"""The published models, built without their weights, have the published sizes."""

import json
from dataclasses import replace

import diffusers
import pytest
import torch
from diffusers import AutoencoderKLLTX2Audio
from diffusers.pipelines.ltx2 import LTX2Vocoder
from diffusers.pipelines.ltx2.vocoder import LTX2VocoderWithBWE
from safetensors.torch import load_file, save_file

from autotune.cost.model import TracedModel
from autotune.errors import InvalidInput
from autotune.models.family import build_on_meta
from autotune.models.registry import FAMILIES, get_family
from autotune.models.resolve import check_weights, read_parts, resolve_model
from autotune.plan.job import ModelRef
from autotune.plan.workload import Bucket
from autotune.weights.files import BadWeights
from tests.builders import workload
from tests.kinds import KINDS
from tests.models.published import CONFIGS
from tests.small import write_small_pipeline

NUM_BLOCKS = {
    "qwen-image": 60,
    "qwen-image-2512": 60,
    "qwen-image-edit-2511": 60,
    "qwen-image-edit": 60,
    "qwen-image-edit-plus": 60,
    "flux1-dev": 57,
    "flux1-kontext": 57,
    "chroma": 57,
    "chroma-base": 57,
    "kandinsky5-image-lite": 52,
    "kandinsky5-video-lite": 34,
    "flux2-dev": 56,
    "flux2-klein": 25,
    "flux2-klein-9b": 32,
    "flux2-klein-4b-distilled": 25,
    "flux2-klein-9b-distilled": 32,
    "qwen-image-2.1": 32,
    "qwen-image-2.1-turbo": 32,
    "krea-2": 28,
    "krea-2-turbo": 28,
    "wan-2.1": 30,
    "wan-2.1-14b": 40,
    "wan-2.2": 30,
    "wan-2.2-14b": 40,
    "sdxl": 86,
    "sd3.5": 38,
    "sd3.5-medium": 24,
    "sd3.5-turbo": 38,
    "z-image": 34,
    "z-image-turbo": 34,
    "ltx-2.3": 48,
    "ltx-2": 48,
}


MODELS = {each.name or name: each for name, family in FAMILIES.items() for each in family.models}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_name_and_hub_id_give_the_published_model(name):
    by_name, by_hub_id = (
        resolve_model(ModelRef.of(name)).spec,
        resolve_model(ModelRef.of(MODELS[name].hub_id)).spec,
    )
    assert (by_name.num_parameters, by_name.num_blocks) == (
        MODELS[name].num_parameters,
        NUM_BLOCKS[name],
    )
    assert by_name == by_hub_id


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_autoencoders_decode_in_tiles_of_the_published_size(name):
    parts = FAMILIES[name].parts
    with torch.device("meta"):
        vae = getattr(diffusers, parts.vae_class)(**parts.vae_config)
    sides = [
        getattr(vae, side, None) for side in ("tile_sample_min_size", "tile_sample_min_height")
    ]
    others = {"AutoencoderKL": 1024, "AutoencoderKLFlux2": 1024, "AutoencoderKLLTX2Video": 512}
    assert max(filter(None, sides)) == others.get(parts.vae_class, 256)


def _written_configs(family):
    """What diffusers writes for the family's first model: every argument of the classes."""
    built = [
        (family.transformer_class, family.transformer_config),
        (family.parts.vae_class, family.parts.vae_config),
    ]
    with torch.device("meta"):
        models = [getattr(diffusers, cls)(**config) for cls, config in built]
    return [
        {k: v for k, v in json.loads(model.to_json_string()).items() if k[0] != "_"}
        for model in models
    ]


def published_folder(folder, name):
    """The folder of a published model, with its configurations, and encoders of one number."""
    family = FAMILIES[name]
    transformer, vae = CONFIGS.get(name) or _written_configs(family)
    for part in family.components:
        (folder / part).mkdir()
        if part in family.text_encoders:
            save_file({"weight": torch.zeros(1)}, folder / part / "model.safetensors")
    parts = {family.denoiser: family.transformer_class, "vae": family.parts.vae_class}
    named = {"_class_name": family.pipeline_class, **family.pipeline_config}
    index = {**named, **{part: ["diffusers", cls] for part, cls in parts.items()}}
    (folder / "model_index.json").write_text(json.dumps(index))
    for part, config in ((family.denoiser, transformer), ("vae", vae)):
        named = {"_class_name": parts[part], "_diffusers_version": "0.34.0.dev0", **config}
        (folder / part / "config.json").write_text(json.dumps(named))
    return folder


@pytest.mark.quick(*KINDS)
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_folder_of_a_published_model_is_that_model(tmp_path, name):
    family, model = FAMILIES[name], resolve_model(ModelRef.of(published_folder(tmp_path, name)))
    assert model.spec.architecture == resolve_model(ModelRef.of(name)).spec.architecture
    parts = read_parts(model)
    assert parts.vae_class == family.parts.vae_class
    with torch.device("meta"):
        vaes = [
            getattr(diffusers, known.vae_class)(**known.vae_config)
            for known in (parts, family.parts)
        ]
    ours, theirs = (json.loads(json.dumps(vae.config)) for vae in vaes)
    assert {**ours, "_use_default_values": None} == {**theirs, "_use_default_values": None}
    without_weights = replace(model, folder=None)
    assert read_parts(without_weights) == family.parts


def test_the_models_that_decode_sound_are_counted(tmp_path):
    """Of a folder those that are there; of the published models what diffusers' classes have by
    default."""
    folder, family = tmp_path / "small", FAMILIES["ltx-2.3"]
    write_small_pipeline(family, folder, ["a red fox"])
    files = [
        *(folder / "audio_vae").glob("*.safetensors"),
        *(folder / "vocoder").glob("*.safetensors"),
    ]
    stored = [tensor.numel() for file in files for tensor in load_file(file).values()]
    assert read_parts(resolve_model(ModelRef.of(folder))).decoder_parameters == sum(stored) > 0
    with torch.device("meta"):
        sound, later, first = AutoencoderKLLTX2Audio(), LTX2VocoderWithBWE(), LTX2Vocoder()
    numbers = [
        sum(parameter.numel() for parameter in model.parameters())
        for model in (sound, later, first)
    ]
    published = [model.parts.decoder_parameters for model in family.models]
    assert published == [numbers[0] + numbers[1], numbers[0] + numbers[2]]
    (folder / "vocoder" / files[-1].name).write_bytes(b"damaged")
    with pytest.raises(BadWeights):
        check_weights(resolve_model(ModelRef.of(folder)))


def test_keys_that_an_autoencoder_ignores_are_ignored_in_planning_too(tmp_path):
    folder = published_folder(tmp_path, "flux1-dev")
    path = folder / "vae" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "of_another_release": None}))
    model = resolve_model(ModelRef.of(folder))
    small = workload(
        model=model.spec, buckets=(Bucket(width_px=64, height_px=64, num_frames=1, num_items=1),)
    )
    traced = TracedModel(model.family, model.config, small, "cpu", read_parts(model))
    assert traced.vae_cost("bf16").weight_bytes == 2 * 83_819_683


def test_each_pipeline_belongs_to_one_family():
    for family in FAMILIES.values():
        index = {**family.pipeline_config, "_class_name": family.pipeline_class}
        assert [other for other in FAMILIES.values() if other.is_pipeline(index)] == [family]


@pytest.mark.parametrize(
    ("index", "found"),
    [
        ({}, "wan-2.1"),  # as diffusers wrote it before there was another
        ({"expand_timesteps": False, "boundary_ratio": None}, "wan-2.1"),
        ({"expand_timesteps": True, "boundary_ratio": None}, "wan-2.2"),
        ({"expand_timesteps": False, "boundary_ratio": 0.875}, "wan-2.2-14b"),
        ({"expand_timesteps": True, "boundary_ratio": 0.875}, None),  # nobody has published such
    ],
)
def test_kinds_of_one_pipeline_are_told_apart(tmp_path, index, found):
    folder = published_folder(tmp_path, found or "wan-2.1")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline", **index}))
    if found:
        assert resolve_model(ModelRef.of(folder)).family.name == found
    else:
        with pytest.raises(InvalidInput, match=r"another kind than wan-2.1 and wan-2.2"):
            resolve_model(ModelRef.of(folder))


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(InvalidInput) as caught:
        get_family("flux1")
    assert "flux1-dev" in caught.value.hint


def test_sparse_attention_is_refused():
    family = FAMILIES["kandinsky5-video-lite"]
    with pytest.raises(InvalidInput, match="nabla"):
        build_on_meta(family, {**family.transformer_config, "attention_type": "nabla"})


@pytest.mark.parametrize(
    ("num_images", "num_steps"), [(1, 125), (5, 125), (20, 500), (160, 4000), (100_000, 4000)]
)
def test_steps_follow_the_number_of_images(num_images, num_steps):
    assert FAMILIES["qwen-image"].defaults.num_steps(num_images) == num_steps


@pytest.mark.parametrize("name", ["qwen-image-edit", "qwen-image-edit-plus"])
def test_missing_or_surplus_controls_are_refused(name):
    family = FAMILIES[name]
    for controls in ((), [None] * (family.max_controls + 1)):
        with pytest.raises(InvalidInput, match="control"):
            family.encode_caption(None, "make it blue", controls)
        with pytest.raises(InvalidInput, match="control"):
            family.sampling_arguments(None, "make it blue", None, controls)
