"""The published models, built without their weights, have the published sizes."""

import diffusers
import pytest
import torch

from autotune.errors import InvalidInput
from autotune.families.registry import FAMILIES, family_named
from autotune.families.resolve import build_on_meta, resolve_model

PUBLISHED = {
    "qwen-image": (20_430_401_088, 60),
    "qwen-image-edit": (20_430_401_088, 60),
    "qwen-image-edit-plus": (20_430_401_088, 60),
    "flux1-dev": (11_901_408_320, 57),
    "kandinsky5-image-lite": (6_022_080_576, 52),
    "kandinsky5-video-lite": (2_007_702_848, 34),
}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_name_and_hub_id_give_the_published_model(name):
    by_name, by_hub_id = resolve_model(name).spec, resolve_model(FAMILIES[name].hub_id).spec
    assert (by_name.num_parameters, by_name.num_blocks) == PUBLISHED[name]
    assert by_name == by_hub_id


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_autoencoders_decode_in_tiles_of_the_published_size(name):
    parts = FAMILIES[name].parts
    with torch.device("meta"):
        vae = getattr(diffusers, parts.vae_class)(**parts.vae_config)
    sides = [getattr(vae, side, None) for side in ("tile_sample_min_size", "tile_sample_min_height")]
    assert max(filter(None, sides)) == (1024 if parts.vae_class == "AutoencoderKL" else 256)


def test_each_pipeline_class_belongs_to_one_family():
    assert len({family.pipeline_class for family in FAMILIES.values()}) == len(FAMILIES)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(InvalidInput) as caught:
        family_named("sdxl")
    assert "flux1-dev" in caught.value.hint


def test_sparse_attention_is_refused():
    family = FAMILIES["kandinsky5-video-lite"]
    with pytest.raises(InvalidInput, match="nabla"):
        build_on_meta(family, {**family.transformer_config, "attention_type": "nabla"})


@pytest.mark.parametrize(("num_images", "num_steps"), [(1, 125), (5, 125), (20, 500), (160, 4000), (100_000, 4000)])
def test_steps_follow_the_number_of_images(num_images, num_steps):
    assert FAMILIES["qwen-image"].defaults.num_steps(num_images) == num_steps


@pytest.mark.parametrize("name", ["qwen-image-edit", "qwen-image-edit-plus"])
def test_missing_or_surplus_controls_are_refused(name):
    family = FAMILIES[name]
    for controls in ((), [[]], [[None] * (family.max_controls + 1)]):
        with pytest.raises(InvalidInput, match="control"):
            family.encode_captions(None, ["make it blue"], controls)
