"""What `predict` hands to the transformer is what the stock pipeline hands to it, and latents are its latents."""

import numpy as np
import pytest
import torch
from PIL import Image

from autotune.families import qwen_image_edit
from autotune.schema.workload import Bucket
from tests.families.small import CAPTIONS

AREA = 64 * 64


def _calls(transformer, monkeypatch, answer=None):
    """Records the arguments of every call of `transformer`; with `answer`, gives that times the input instead."""
    calls = []
    forward = transformer.forward

    def record(*args, **kwargs):
        assert not args
        calls.append(kwargs)
        return forward(**kwargs) if answer is None else answer(kwargs, forward(**kwargs))

    monkeypatch.setattr(transformer, "forward", record)
    return calls


def _options(family, pipeline, monkeypatch):
    """Arguments of the stock pipeline for one small picture without classifier-free guidance."""
    options = {"guidance_scale": 1.0, "width": 48, "height": 64}
    if family.name.startswith("qwen"):
        del options["guidance_scale"]
    if family.name == "kandinsky5-image-lite":
        monkeypatch.setattr(pipeline, "resolutions", [(48, 64)])
    if family.can_train_clips:
        options["num_frames"] = 5
    return options


@pytest.fixture
def controls(small, monkeypatch):
    """Control images as pixels, at the size the pipeline would give them, with its megapixel made small."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus

    stock_size = edit.calculate_dimensions
    monkeypatch.setattr(edit, "calculate_dimensions", lambda _, ratio: stock_size(AREA, ratio))
    monkeypatch.setattr(plus, "VAE_IMAGE_SIZE", AREA)
    monkeypatch.setattr(qwen_image_edit.QwenImageEdit, "condition_area_px", AREA)
    sizes = [(64, 64), (96, 32), (32, 96)][: small.family.max_controls]
    return [
        small.pixels(Bucket(width_px=width, height_px=height, num_frames=1, num_items=1), seed=number)
        for number, (width, height) in enumerate(sizes)
    ]


def _image(pixels):
    values = ((pixels[:, 0] + 1) * 127.5).round().byte().permute(1, 2, 0)
    return Image.fromarray(values.numpy())


def _equal(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-5, atol=1e-5)
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            _equal(one, other)
    else:
        assert ours == theirs


def _unpack(family, hidden, shape):
    """Noisy latents (1, channels, frames, height, width) from what the pipeline gave to the transformer."""
    channels, _, height, width = shape
    if family.name.startswith("kandinsky5"):
        return hidden[..., :channels].permute(0, 4, 1, 2, 3)
    own = hidden[:, : height * width // 4]
    return torch.nn.functional.pixel_shuffle(own.mT.unflatten(2, (height // 2, width // 2)), 2)[:, :, None]


def test_predict_calls_the_transformer_as_the_pipeline_does(small, controls, monkeypatch):
    family, pipeline = small.family, small.pipeline
    # The encoder sees 8-bit images: round the pixels likewise.
    controls = [((pixels + 1) * 127.5).round() / 127.5 - 1 for pixels in controls]
    options = _options(family, pipeline, monkeypatch)
    if controls:
        images = [_image(pixels) for pixels in controls]
        options["image"] = images if family.max_controls > 1 else images[0]
    with monkeypatch.context() as patch:
        calls = _calls(pipeline.transformer, patch)
        pipeline(prompt=CAPTIONS[1], num_inference_steps=3, output_type="latent", **options)
    theirs = calls[1]
    sigma = pipeline.scheduler.sigmas[1]
    assert 0.1 < sigma < 0.99

    with torch.no_grad():
        sample = family.encode_caption(pipeline, CAPTIONS[1], controls)
        for number, pixels in enumerate(controls, start=1):
            sample[f"control_latents_{number}"] = family.encode_pixels(pipeline, pixels)
        sample["latents"] = family.encode_pixels(pipeline, small.pixels(small.bucket))
        noisy = _unpack(family, theirs["hidden_states"], sample["latents"].shape)
        with monkeypatch.context() as patch:
            calls = _calls(pipeline.transformer, patch)
            family.predict(pipeline.transformer, noisy, sigma[None], family.collate([sample]))
    (ours,) = calls

    of_no_effect = {"return_dict", "attention_kwargs", "joint_attention_kwargs"}
    given = {key for key, value in theirs.items() if value is not None} - of_no_effect
    assert given == {key for key, value in ours.items() if value is not None} - of_no_effect
    for key in given:
        _equal(ours[key], theirs[key])


def test_encoded_pixels_decode_to_the_vaes_reconstruction(small, controls, monkeypatch):
    """With a transformer that predicts no velocity, the pipeline decodes the very latents it was given."""
    family, pipeline = small.family, small.pipeline
    pixels = small.pixels(small.bucket)
    with torch.no_grad():
        latents = family.encode_pixels(pipeline, pixels)[None]
        flat = family.name in ("flux1-dev", "kandinsky5-image-lite")
        raw = pipeline.vae.encode(pixels[None][:, :, 0] if flat else pixels[None]).latent_dist.mode()
        expected = pipeline.vae.decode(raw).sample
    if family.name.startswith("kandinsky5"):
        given = latents.permute(0, 2, 3, 4, 1)
        if family.can_train_clips:
            given = torch.cat([given, torch.zeros_like(given), torch.zeros_like(given[..., :1])], dim=-1)
    else:
        given = torch.nn.functional.pixel_unshuffle(latents[:, :, 0], 2).flatten(2).mT
    options = _options(family, pipeline, monkeypatch)
    if controls:
        options["image"] = _image(controls[0])
    with monkeypatch.context() as patch:
        _calls(pipeline.transformer, patch, answer=_still)
        decoded = pipeline(
            prompt=CAPTIONS[0],
            num_inference_steps=2,
            latents=given.clone(),
            output_type="np",
            return_dict=False,
            **options,
        )[0]
    expected = ((expected[0] + 1) / 2).clamp(0, 1)
    expected = np.moveaxis(expected.numpy(), 0, -1)
    expected = expected if expected.ndim == decoded[0].ndim else expected[0]
    np.testing.assert_allclose(decoded[0], expected, atol=2e-5)


def _still(_, output):
    if isinstance(output, tuple):
        return (torch.zeros_like(output[0]),)
    return type(output)(sample=torch.zeros_like(output.sample))
