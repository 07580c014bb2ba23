"""The published models, built without their weights, have the published sizes."""

import json
from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
import yaml
from diffusers import AutoencoderKLLTX2Audio
from diffusers.pipelines.ltx2 import LTX2Vocoder
from diffusers.pipelines.ltx2.vocoder import LTX2VocoderWithBWE
from safetensors.torch import load_file, save_file

from autotune.errors import InvalidInput
from autotune.models.family import build_on_meta, public_config
from autotune.models.registry import FAMILIES
from autotune.models.resolve import read_parts, resolve_model
from autotune.plan.candidate import Candidate
from autotune.plan.job import ModelRef
from autotune.search.comparison import LEVERS
from tests.kinds import KINDS
from tests.small import write_small_pipeline

PUBLISHED = yaml.safe_load((Path(__file__).parent / "published.yaml").read_text())
MODELS = {each.name: each for name, family in FAMILIES.items() for each in family.models}


@pytest.mark.quick(*KINDS, "ltx-2.5", "wan-2.2-14b", "flux2-klein")
@pytest.mark.parametrize("name", sorted(MODELS))
def test_names_give_the_published_model(name):
    spec = resolve_model(ModelRef.of(name)).spec
    assert spec.num_parameters == MODELS[name].num_parameters
    assert spec == resolve_model(ModelRef.of(MODELS[name].hub_id)).spec


def published_folder(folder, name):
    family = FAMILIES[name]
    known = [PUBLISHED.get(part) for part in (name, f"{name} vae")]
    if not all(known):
        with torch.device("meta"):
            made = getattr(diffusers, family.transformer_class)(**family.transformer_config)
            other = getattr(diffusers, family.parts.vae_class)(**family.parts.vae_config)
        known = [public_config(json.loads(each.to_json_string())) for each in (made, other)]
    for part in family.components:
        (folder / part).mkdir()
        if part in (*family.text_encoders, *family.decoders[1:]):
            save_file({"weight": torch.zeros(1)}, folder / part / "model.safetensors")
    parts = {family.denoiser: family.transformer_class, "vae": family.parts.vae_class}
    named = {"_class_name": family.pipeline_class, **family.pipeline_config}
    index = {**named, **{part: ["diffusers", cls] for part, cls in parts.items()}}
    (folder / "model_index.json").write_text(json.dumps(index))
    for part, config in zip((family.denoiser, "vae"), known, strict=True):
        named = {"_class_name": parts[part], "_diffusers_version": "0.34.0.dev0", **config}
        (folder / part / "config.json").write_text(json.dumps(named))
    return folder


@pytest.mark.quick(*KINDS)
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_published_folders_are_that_model(tmp_path, name):
    family, model = FAMILIES[name], resolve_model(ModelRef.of(published_folder(tmp_path, name)))
    assert model.spec.architecture == resolve_model(ModelRef.of(name)).spec.architecture
    parts = read_parts(model)
    assert parts.vae_class == family.parts.vae_class
    kind = getattr(diffusers, parts.vae_class)
    with torch.device("meta"):
        vaes = [kind(**known.vae_config) for known in (parts, family.parts)]
    ours, theirs = (json.loads(json.dumps(vae.config)) for vae in vaes)
    assert ours | {"_use_default_values": None} == theirs | {"_use_default_values": None}
    assert read_parts(replace(model, folder=None)) == family.parts


def test_each_pipeline_belongs_to_one_family():
    for family in FAMILIES.values():
        index = {**family.pipeline_config, "_class_name": family.pipeline_class}
        assert [other for other in FAMILIES.values() if other.is_pipeline(index)] == [family]


@pytest.mark.parametrize(
    ("index", "found"),
    [
        ({}, "wan-2.1"),  # as diffusers wrote it before there was another
        ({"expand_timesteps": True, "boundary_ratio": None}, "wan-2.2"),
        ({"expand_timesteps": False, "boundary_ratio": 0.875}, "wan-2.2-14b"),
        ({"expand_timesteps": True, "boundary_ratio": 0.875}, None),  # nobody has published such
    ],
)
def test_pipeline_kinds_are_told_apart(tmp_path, index, found):
    folder = published_folder(tmp_path, found or "wan-2.1")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline", **index}))
    if found:
        assert resolve_model(ModelRef.of(folder)).family.name == found
    else:
        with pytest.raises(InvalidInput, match=r"another kind than wan-2.1 and wan-2.2"):
            resolve_model(ModelRef.of(folder))


def test_what_decodes_sound_is_counted(tmp_path):
    family, folder = FAMILIES["ltx-2.3"], tmp_path / "small"
    with torch.device("meta"):
        sound, *vocoders = AutoencoderKLLTX2Audio(), LTX2VocoderWithBWE(), LTX2VocoderWithBWE()
        vocoders.append(LTX2Vocoder())
    sizes = [sum(each.numel() for each in model.parameters()) for model in (sound, *vocoders)]
    published = [model.parts.decoder_parameters for model in family.models]
    assert published == [sizes[0] + vocoder for vocoder in sizes[1:]]
    write_small_pipeline(family, folder, ["a red fox"])
    files = [file for part in ("audio_vae", "vocoder") for file in (folder / part).glob("*.saf*")]
    stored = sum(tensor.numel() for file in files for tensor in load_file(file).values())
    assert read_parts(resolve_model(ModelRef.of(folder))).decoder_parameters == stored > 0


def test_sparse_attention_is_refused():
    family = FAMILIES["kandinsky5-video-lite"]
    with pytest.raises(InvalidInput, match="nabla"):
        build_on_meta(family, {**family.transformer_config, "attention_type": "nabla"})


@pytest.mark.parametrize("name", FAMILIES)
def test_levers_are_declared_or_excluded(name):
    family = FAMILIES[name]
    assert (family.modulation is None) == ("modulation" in family.excluded)
    if family.modulation:
        config = {**family.transformer_config, **family.tiny_config}
        assert list(family.modulation.find(build_on_meta(family, config)))
    assert (not family.attention_layouts) == ("norm_rope" in family.excluded)
    assert set(family.excluded) <= set(Candidate.model_fields)
    assert all(reason.strip() for reason in family.excluded.values())
    missing = {title for knob, title in LEVERS.items() if knob in family.excluded}
    is_unet = "UNet" in family.transformer_class
    assert len(LEVERS) - len(missing) >= (3 if is_unet else 4)
