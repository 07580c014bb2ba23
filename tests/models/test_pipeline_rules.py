"""Rules of the pipelines that families restate are the pipelines' own, over their whole range."""

import shutil

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import (
    pipeline_qwenimage_edit as edit,
    pipeline_qwenimage_edit_plus as plus,
)
from hypothesis import given, settings, strategies as st
from PIL import Image

from autotune.models.latents import build_empty_pipeline
from autotune.models.registry import FAMILIES, find_published
from autotune.models.resolve import resolve_model
from autotune.plan.job import ModelRef
from autotune.plan.workload import Bucket
from tests.models.small import CAPTIONS, mask_padding
from tests.small import ltx2

sides = st.integers(1, 4096)


def record(transformer, argument, monkeypatch):
    seen, forward = [], transformer.forward

    def call(**given):
        seen.append(given[argument])
        return forward(**given)

    monkeypatch.setattr(transformer, "forward", call)
    return seen


def preview(small, width, height, controls=()):
    bucket = Bucket(width_px=width, height_px=height, num_frames=1, num_items=1)
    options = {"num_steps": 2, "seed": 0, "controls": controls}
    return small.family.sample(small.pipeline, CAPTIONS[0], bucket, **options)[0]


even = st.integers(1, 6).map(lambda half: 2 * half)


@given(sides, sides)
@settings(max_examples=100)
def test_controls_get_the_pipelines_size(width, height):
    one, several = FAMILIES["qwen-image-edit"], FAMILIES["qwen-image-edit-plus"]
    ratio = width / height
    assert one._condition_size(width, height) == edit.calculate_dimensions(1024**2, ratio)[:2]
    size = plus.calculate_dimensions(plus.CONDITION_IMAGE_SIZE, ratio)
    assert several._condition_size(width, height) == size


@given(sides, sides)
@settings(max_examples=100)
def test_video_positions_scale_as_in_pipeline(height, width):
    stock = build_empty_pipeline("Kandinsky5T2VPipeline")._get_scale_factor(height, width)
    assert FAMILIES["kandinsky5-video-lite"]._rope_scale(height, width) == stock


def test_controls_of_edit_2511_are_clean(small_pipelines):
    small = small_pipelines("qwen-image-edit-plus")
    levels, predictions = small.levels(0.9, 0.3), {}
    samples = [small.sample(caption) for caption in CAPTIONS]
    noisy = torch.stack([samples[0]["latents"]] * 2)
    together, alone = small.family.collate(samples), small.family.collate(samples[:1])
    for name in ("qwen-image-edit-plus", "qwen-image-edit-2511"):
        config = {**small.transformer.config, **find_published(name)[1].config}
        transformer = small.family.build_transformer(config)
        transformer.load_state_dict(small.transformer.state_dict())
        with torch.no_grad():
            predictions[name] = small.family.predict(transformer, noisy, levels, together)
            first = small.family.predict(transformer, noisy[:1], levels[:1], alone)[0]
        torch.testing.assert_close(predictions[name][0], first, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(*predictions.values(), rtol=1e-3)


@pytest.mark.parametrize("name", ["qwen-image-edit", "qwen-image-edit-plus"])
def test_previews_see_controls_at_trained_size(small_pipelines, name, monkeypatch):
    small = small_pipelines(name)
    seen = record(small.transformer, "img_shapes", monkeypatch)
    before = edit.calculate_dimensions, plus.VAE_IMAGE_SIZE
    preview(small, 64, 64, controls=[Image.new("RGB", (64, 64))])
    assert all(list(shapes[0]) == [(1, 4, 4), (1, 4, 4)] for shapes in seen)
    assert len(seen) == 4  # guidance calls the transformer twice a step
    assert (edit.calculate_dimensions, plus.VAE_IMAGE_SIZE) == before


def test_kontext_previews_see_trained_controls(small_pipelines, monkeypatch):
    small = small_pipelines("flux1-kontext")
    seen = record(small.transformer, "img_ids", monkeypatch)
    image = preview(small, 32, 64, controls=[Image.new("RGB", (200, 100))])
    assert image.size == (32, 64)
    expected = [[n, y, x] for n in (0, 1) for y in range(4) for x in range(2)]
    assert all(ids.tolist() == expected for ids in seen)


def test_preview_of_chroma_masks_padding(small_pipelines, monkeypatch):
    small = small_pipelines("chroma")
    options = {"num_inference_steps": 2, "width": 32, "height": 32, "output_type": "np"}
    options["guidance_scale"] = small.family.defaults.sampling_guidance

    def stock():
        generator = torch.Generator().manual_seed(0)
        images = small.pipeline(CAPTIONS[0], generator=generator, return_dict=False, **options)[0]
        return torch.from_numpy(images[0]) * 255

    with monkeypatch.context() as patch:
        masks = record(small.transformer, "attention_mask", patch)
        image = preview(small, 32, 32)
    # Some attention backends refuse any; guidance calls the transformer twice a step.
    assert masks == [None] * 4
    ours, as_it_is = torch.tensor(np.asarray(image), dtype=torch.float32), stock()
    mask_padding(small.pipeline, monkeypatch)
    torch.testing.assert_close(ours, stock(), rtol=0, atol=0.51)
    assert not torch.allclose(ours, as_it_is, rtol=0, atol=0.51)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ltx-2.3", "ltx-2.5"])
def test_ltx_previews_need_no_gemma(name, small_pipelines, tmp_path):
    small = small_pipelines("ltx-2.3")
    family, folder = small.family, small.folder
    if name == "ltx-2.5":
        folder = tmp_path / "model"
        parts = ltx2.build_later_parts(family, CAPTIONS)
        diffusers.LTX2Pipeline(**parts).save_pretrained(folder)
    options = {"width": 64, "height": 32, "num_frames": 9, "num_inference_steps": 2}
    options |= {"guidance_scale": 3.0, "stg_scale": 0.0, "audio_stg_scale": 0.0}

    options |= {"output_type": "np", "return_dict": False}

    def sampled(pipeline):
        return pipeline(CAPTIONS[0], generator=torch.Generator().manual_seed(0), **options)

    stock = sampled(diffusers.LTX2Pipeline.from_pretrained(folder))
    shutil.rmtree(folder / "duration_head", ignore_errors=True)  # which `fetch` leaves out
    pipeline = family.load_pipeline(folder)
    assert resolve_model(ModelRef.of(folder)).family is family
    encoded = pipeline.encode_prompt(CAPTIONS[0])
    without = family.load_pipeline(folder, text_encoder=None, connectors=None)
    without.encode_prompt = lambda **_: encoded
    for ours, theirs in zip(sampled(without), stock, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
