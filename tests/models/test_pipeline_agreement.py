"""`predict` and latents are those of the stock pipeline's own call of the transformer."""

import functools

import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.minimax_h3 import before_denoise
from diffusers.modular_pipelines.minimax_h3.decoders import MiniMaxH3AudioDecodeStep
from diffusers.pipelines.qwenimage import (
    pipeline_qwenimage_edit as edit,
    pipeline_qwenimage_edit_plus as plus,
)
from PIL import Image

from autotune.models import qwen_image
from autotune.models.modular import ModularFamily
from autotune.models.noise import FlowMatching
from autotune.models.registry import FAMILIES
from autotune.plan.workload import Bucket
from tests.kinds import KINDS
from tests.models.small import CAPTIONS, NO_GUIDANCE, mask_padding

AREA = 64 * 64


def _calls(transformer, monkeypatch, answer=None):
    """Record the noisy input and the output, or its `answer`, of every call; of a model with sound
    of those in which the picture does not hear it, as in training."""
    calls = []
    forward = transformer.forward

    @functools.wraps(forward)
    def record(*args, **kwargs):
        output = forward(*args, **kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        # A pipeline may write into it.
        hidden = hidden.clone() if isinstance(hidden, torch.Tensor) else list(hidden)
        output = output if answer is None else answer(output)
        if kwargs.get("isolate_modalities", True):
            calls.append((hidden, output if isinstance(output, torch.Tensor) else output[0]))
        return output

    monkeypatch.setattr(transformer, "forward", record)
    return calls


def _options(small, monkeypatch):
    """Arguments of the stock pipeline for one small picture without classifier-free guidance."""
    family, size = small.family, (small.bucket.width_px, small.bucket.height_px)
    options = {"width": size[0], "height": size[1]}
    if not family.name.startswith("qwen"):
        options["guidance_scale"] = NO_GUIDANCE.get(family.name, 1.0)
    if family.name == "kandinsky5-image-lite":
        monkeypatch.setattr(small.pipeline, "resolutions", [size])
    if family.name == "flux1-kontext":
        options |= {"max_area": size[0] * size[1], "_auto_resize": False}
    if family.name == "chroma":
        mask_padding(small.pipeline, monkeypatch)
    if family.can_train_clips:
        options["num_frames"] = small.bucket.num_frames
    if family.name == "minimax-h3":  # in training it hears nothing
        del options["guidance_scale"]
        monkeypatch.setattr(before_denoise, "audio_latent_num_frames", lambda *_: 0)
        monkeypatch.setattr(MiniMaxH3AudioDecodeStep, "__call__", lambda _, *given: given)
        monkeypatch.setattr(type(small.pipeline), "min_duration", 0.0)
    if family.name == "ideogram-4":
        options |= {"guidance_schedule": None, "max_sequence_length": 64}
    if family.name == "qwen-image-2.1":
        options["output_resolution"] = size[1]
    if family.name == "ltx-2.3":
        options |= {"audio_guidance_scale": 1.0, "guidance_rescale": 0.0}
        options |= {"stg_scale": 0.0, "audio_stg_scale": 0.0}
    return options


@pytest.fixture
def controls(small, monkeypatch):
    """Control images as pixels, at the pipeline's own size, with its megapixel made small."""
    stock_size = edit.calculate_dimensions
    monkeypatch.setattr(edit, "calculate_dimensions", lambda _, ratio: stock_size(AREA, ratio))
    monkeypatch.setattr(plus, "VAE_IMAGE_SIZE", AREA)
    monkeypatch.setattr(qwen_image.QwenImageEdit, "condition_area_px", AREA)
    sizes = [(64, 64), (96, 32), (32, 96)][: small.family.max_controls]
    buckets = [Bucket(width_px=w, height_px=h, num_frames=1, num_items=1) for w, h in sizes]
    return [small.pixels(bucket, seed=number) for number, bucket in enumerate(buckets)]


def _image(pixels):
    values = ((pixels[:, 0] + 1) * 127.5).round().byte().permute(1, 2, 0)
    return Image.fromarray(values.numpy())


def _unpack(family, hidden, shape):
    """Latents (1, channels, frames, height, width) from what the transformer takes and returns."""
    channels, frames, height, width = shape
    if isinstance(hidden, list):
        hidden = torch.stack(hidden)
    if family.name.startswith("kandinsky5"):
        return hidden[..., :channels].permute(0, 4, 1, 2, 3)
    if family.name == "minimax-h3":
        tokens = hidden[0].unflatten(0, (frames, height // family.patch, width // family.patch))
        each = torch.nn.functional.pixel_shuffle(tokens.permute(0, 3, 1, 2), family.patch)
        return each.transpose(0, 1)[None]
    if hidden.ndim == 3:
        if family.can_train_clips:
            return hidden.mT.reshape(1, *shape)
        rows, columns = height // family.patch, width // family.patch
        comes_last = family.name in ("ideogram-4", "qwen-image-2.1")
        tokens = hidden[:, -rows * columns :] if comes_last else hidden
        tokens = tokens[:, : rows * columns].mT.unflatten(2, (rows, columns))
        return torch.nn.functional.pixel_shuffle(tokens, family.patch)[:, :, None]
    # Others are for an image to begin with.
    return hidden[:, :channels].reshape(1, channels, frames, height, width)


def _pack(family, pipeline, latents):
    """The inverse, as the pipeline takes `latents` to begin with."""
    if family.name.startswith("kandinsky5"):
        given = latents.permute(0, 2, 3, 4, 1)
        if not family.can_train_clips:
            return given
        return torch.cat([given, torch.zeros_like(given), torch.zeros_like(given[..., :1])], dim=-1)
    if family.can_train_clips or isinstance(family, ModularFamily):
        return latents
    if family.name in UNPACKED:
        return latents[:, :, 0] / getattr(pipeline.scheduler, "init_noise_sigma", 1.0)
    return torch.nn.functional.pixel_unshuffle(latents[:, :, 0], family.patch).flatten(2).mT


UNPACKED = ("z-image", "sdxl", "flux2-klein", "flux2-dev", "sd3.5")
"""Families whose pipelines take latents (batch, channels, height, width)."""


@pytest.mark.quick(*KINDS)
def test_predict_equals_pipelines_call_of_transformer(small, controls, monkeypatch):
    family, pipeline = small.family, small.pipeline
    # The encoder sees 8-bit images: round the pixels likewise.
    controls = [((pixels + 1) * 127.5).round() / 127.5 - 1 for pixels in controls]
    options = _options(small, monkeypatch)
    if controls:
        images = [_image(pixels) for pixels in controls]
        options["image"] = images if family.max_controls > 1 else images[0]
    clip = small.pixels(small.bucket)
    if family.starts_from_picture:
        clip = ((clip + 1) * 127.5).round() / 127.5 - 1
        options["image"] = _image(clip)
    with monkeypatch.context() as patch:
        calls = _calls(small.transformer, patch)
        kind = "np" if isinstance(family, ModularFamily) else "latent"
        called = small.stock() if family.name == "ideogram-4" else pipeline  # ours packs its text
        called(prompt=CAPTIONS[1], num_inference_steps=3, output_type=kind, **options)
    hidden, theirs = calls[1]
    timestep = pipeline.scheduler.timesteps[1]
    level = timestep.float() / (1000 if isinstance(family.noise, FlowMatching) else 1)
    if family.name == "minimax-h3":
        level = 1 - timestep
    else:
        assert 100 < timestep < 990

    with torch.no_grad():
        sample = family.encode_caption(pipeline, CAPTIONS[1], controls)
        for number, pixels in enumerate(controls, start=1):
            sample[f"control_latents_{number}"] = family.encode_pixels(pipeline, pixels)
        sample |= family.encode_item(pipeline, clip)
        shape = sample["latents"].shape
        noisy = _unpack(family, hidden, shape)
        ours = family.predict(small.transformer, noisy, level[None], family.collate([sample]))
    # Their pipelines count from noise to picture.
    sign = -1 if family.name in ("z-image", "minimax-h3", "ideogram-4") else 1
    torch.testing.assert_close(ours, sign * _unpack(family, theirs, shape), rtol=1e-4, atol=1e-5)


def test_pictures_to_edit_are_optional(small_pipelines, monkeypatch):
    small = small_pipelines("qwen-image-2.1")
    test_predict_equals_pipelines_call_of_transformer(small, [], monkeypatch)


@pytest.mark.quick("anima")
@pytest.mark.parametrize(
    "name", [name for name, family in FAMILIES.items() if isinstance(family, ModularFamily)]
)
def test_blocks_draw_as_stock_pipelines(name, small_pipelines, monkeypatch):
    small = small_pipelines(name)
    family, bucket, stock = small.family, small.bucket, small.stock()
    monkeypatch.setattr(type(stock), "min_duration", 0.0, raising=False)
    ours = family.sample(small.pipeline, CAPTIONS[0], bucket, num_steps=3, seed=4)
    how = {"width": bucket.width_px, "height": bucket.height_px, "output_type": "pil"}
    how |= {"num_inference_steps": 3, "generator": torch.Generator().manual_seed(4)}
    if family.can_train_clips:
        how["num_frames"] = bucket.num_frames
    output = "videos" if family.can_train_clips else "images"
    theirs = stock(prompt=CAPTIONS[0], output=output, **how)
    theirs = theirs[0] if family.can_train_clips else theirs
    assert [each.tobytes() for each in ours] == [each.tobytes() for each in theirs]


def test_ideogram_draws_as_stock_pipeline(small_pipelines):
    small = small_pipelines("ideogram-4")
    family, bucket = small.family, small.bucket
    (ours,) = family.sample(small.pipeline, CAPTIONS[0], bucket, num_steps=3, seed=4)
    how = {"width": bucket.width_px, "height": bucket.height_px, "num_inference_steps": 3}
    how |= {"guidance_scale": 7.0, "guidance_schedule": None}
    how |= {"max_sequence_length": 64, "generator": torch.Generator().manual_seed(4)}
    (theirs,) = small.stock()(prompt=CAPTIONS[0], **how).images
    assert np.abs(np.asarray(ours, int) - np.asarray(theirs, int)).max() <= 1


@pytest.mark.quick(*KINDS)
def test_encoded_pixels_decode_to_vaes_reconstruction(small, controls, monkeypatch):
    """With a transformer that predicts nothing, the pipeline decodes the latents it was given."""
    family, pipeline = small.family, small.pipeline
    pixels = small.pixels(small.bucket)
    options = _options(small, monkeypatch)
    with torch.no_grad():
        latents = family.encode_pixels(pipeline, pixels)[None]
        flat = not family.can_train_clips and pipeline.vae.config.get("z_dim") is None
        shown = small.shown(pixels[None])
        raw = pipeline.vae.encode(shown[:, :, 0] if flat else shown).latent_dist.mode()
        expected = pipeline.vae.decode(raw).sample
    shifts = pipeline.scheduler.config.get("use_dynamic_shifting")
    pipeline.scheduler.set_timesteps(2, **({"mu": 1.0} if shifts else {}))
    given = _pack(family, pipeline, latents)
    if controls or family.starts_from_picture:
        options["image"] = _image(controls[0] if controls else pixels)
    with monkeypatch.context() as patch:
        for name in (family.denoiser, *family.other_denoisers):
            _calls(getattr(pipeline, name), patch, answer=_still)
        options |= {"num_inference_steps": 2, "output_type": "np", "return_dict": False}
        called = small.stock() if family.name == "ideogram-4" else pipeline
        decoded = called(prompt=CAPTIONS[0], latents=given.clone(), **options)[0]
    expected = small.seen(expected)[0].clamp(0, 1)
    expected = np.moveaxis(expected.numpy(), 0, -1)
    expected = expected if expected.ndim == decoded[0].ndim else expected[0]
    np.testing.assert_allclose(decoded[0], expected, atol=2e-5)


def _still(output):
    if isinstance(output, torch.Tensor):
        return torch.zeros_like(output)
    if isinstance(output, list):
        return [torch.zeros_like(one) for one in output]
    if isinstance(output, tuple):
        return _still(output[0]), *output[1:]
    return type(output)(sample=torch.zeros_like(output.sample))
