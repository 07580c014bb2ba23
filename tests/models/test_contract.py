"""Rules that every family must keep, run over the registry."""

import copy
from importlib.util import find_spec
from itertools import product

import pytest
import torch
from PIL import Image
from torch import nn

from autotune.knobs.blocks import apply_recomputation, swap_blocks
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.models.adapter import add_adapter
from autotune.models.family import build_on_meta, denoising_loss
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import Candidate
from autotune.plan.job import ModelRef
from autotune.plan.workload import Bucket
from autotune.train.model import load_transformer
from tests.kinds import KINDS
from tests.models.small import CAPTIONS

QUICK = (*KINDS, "kandinsky5-video-lite", "qwen-image-edit-plus")
pytestmark = pytest.mark.quick(*QUICK)


def batch_and_noise(small):
    batch = small.family.collate([small.sample(caption) for caption in CAPTIONS])
    generator = torch.Generator().manual_seed(0)
    return batch, torch.randn(batch["latents"].shape, generator=generator)


def test_shapes_are_as_announced(small):
    sample = small.sample()
    config = resolve_model(ModelRef.of(small.folder)).config
    num_tokens, num_controls = len(sample["prompt_embeds"]), small.family.max_controls
    announced = small.family.sample_shapes(config, small.bucket, num_tokens, num_controls)
    assert {name: tuple(tensor.shape) for name, tensor in sample.items()} == announced


def test_tokens_are_counted_without_an_encoder(small):
    captions = [*CAPTIONS, "", "&amp; naïve — 数 " * 7]
    size = (small.bucket.width_px, small.bucket.height_px)
    sizes = [[size] * small.family.max_controls] * len(captions)
    counted = small.family.count_text_tokens(small.folder, captions, sizes)
    assert counted == [len(small.sample(caption)["prompt_embeds"]) for caption in captions]


@pytest.mark.quick(*KINDS)
def test_largest_shapes_run(small):
    family, config = small.family, small.transformer.config
    most, least = family.max_side_px, family.size_multiple_px
    largest = {(most, least, 1), (least, most, 1), (least, least, family.max_frames)}
    for width, height, frames in largest:
        bucket = Bucket(width_px=width, height_px=height, num_frames=frames, num_items=1)
        shapes = family.sample_shapes(config, bucket, family.max_text_tokens, family.max_controls)
        batch = family.collate([{name: torch.ones(shape) for name, shape in shapes.items()}])
        with torch.no_grad():
            velocity = family.predict(small.transformer, batch["latents"], small.levels(0.5), batch)
        assert velocity.shape == batch["latents"].shape


@pytest.mark.quick(*KINDS)
def test_target_sets_nest(small):
    layers = {}
    for name in ("attention", "attention+mlp", "all-linear"):
        transformer = build_on_meta(small.family, small.transformer.config)
        with torch.device("meta"):
            add_adapter(small.family, transformer, small.workload(name), torch.float32)
        keys = [key for key, _ in transformer.named_modules() if key.endswith(".lora_A")]
        layers[name] = {key.removesuffix(".lora_A") for key in keys}
    assert layers["attention"] < layers["attention+mlp"] <= layers["all-linear"]
    blocks = {each for block in small.family.blocks(small.transformer) for each in block.modules()}
    in_blocks = {
        key
        for key, layer in small.transformer.named_modules()
        if type(layer) is nn.Linear and layer in blocks
    }
    assert layers["all-linear"] <= in_blocks
    transformer = copy.deepcopy(small.transformer).requires_grad_(True)
    batch = small.family.collate([small.sample()])
    small.family.predict(transformer, batch["latents"], small.levels(0.5), batch).sum().backward()
    used = [name for name, each in transformer.named_parameters() if each.grad is not None]
    assert not (in_blocks - layers["all-linear"]) & {name.removesuffix(".weight") for name in used}


@pytest.mark.quick(*KINDS)
def test_every_adapter_layer_learns(small):
    transformer, parameters = small.adapted("all-linear")
    batch, noise = batch_and_noise(small)
    denoising_loss(small.family, transformer, batch, noise, small.levels(0.3, 0.8)).backward()
    trained = {name: each for name, each in transformer.named_parameters() if each.requires_grad}
    assert len(trained) == len(parameters)
    still = {name for name, each in trained.items() if each.grad is None or not each.grad.any()}
    last = small.family.last_block(transformer)
    assert transformer.get_submodule(last) is small.family.blocks(transformer)[-1]
    assert all(name.startswith(f"{last}.") for name in still), still


def test_padding_what_is_masked_changes_nothing(small):
    """Neither outputs nor gradients; and where attention gets no mask there is no more padding."""
    family = small.family
    samples = [small.sample(caption) for caption in CAPTIONS]
    plain, padded = family.collate(samples), family.collate(samples, 128)
    if family.separates_prompts or not family.has_attention_mask(2, "masked"):
        shapes = {name: tensor.shape for name, tensor in padded.items()}
        assert shapes == {name: tensor.shape for name, tensor in plain.items()}
        return
    latents = [tensor[0, 0] for name, tensor in padded.items() if "latents" in name]
    images = sum(each.numel() // family.patch**2 for each in latents)
    assert (images + padded["prompt_embeds"].shape[1]) % 128 == 0
    assert padded["prompt_mask"].sum() == plain["prompt_mask"].sum() < padded["prompt_mask"].numel()
    noise, found = batch_and_noise(small)[1], []
    for batch in (plain, padded):
        transformer, parameters = small.adapted()
        with torch.no_grad():
            output = family.predict(transformer, noise, small.levels(0.25, 0.9), batch)
        denoising_loss(family, transformer, batch, noise, small.levels(0.25, 0.9)).backward()
        found.append([output, *(p.grad for p in parameters if p.grad is not None)])
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm()) <= 1e-5 * float(one.norm())


@pytest.mark.slow
def test_every_format_loads_from_files(small):
    resolved, family = resolve_model(ModelRef.of(small.folder)), small.family
    formats = [
        name
        for name, one in WEIGHT_FORMATS.items()
        if one.needs.library is None or find_spec(one.needs.library)
    ]
    batch, noise = batch_and_noise(small)
    with torch.no_grad():
        stock = denoising_loss(family, small.transformer, batch, noise, small.levels(0.3, 0.8))
    for quantization, swapped, modulation in product(formats, (0, 2), ("resident", "ahead")):
        if "modulation" in family.excluded and modulation == "ahead":
            continue
        if swapped and not WEIGHT_FORMATS[quantization].can_offload:
            continue
        settings = Candidate(
            micro_batch_size=2,
            checkpointed_blocks=0,
            precision="fp32",
            quantization=quantization,
            swapped_blocks=swapped,
            modulation=modulation,
        )
        loaded, _ = load_transformer(resolved, settings, torch.device("cpu"))
        assert not [name for name, one in loaded.state_dict().items() if one.is_meta]
        swap_blocks(loaded.requires_grad_(False), family, swapped)
        if modulation == "resident":
            with torch.no_grad():
                loss = denoising_loss(family, loaded, batch, noise, small.levels(0.3, 0.8))
            rounding = 1e-6 if quantization == "none" else 0.1  # Kandinsky 5: last bits
            assert float(loss) == pytest.approx(float(stock), rel=rounding)


def test_masks_are_announced(small, monkeypatch):
    samples = [small.sample(caption) for caption in CAPTIONS]
    seen = []
    small.transformer.set_attention_backend("native")
    stock = nn.functional.scaled_dot_product_attention

    def spy(*args, attn_mask=None, **options):
        seen.append(attn_mask is not None)
        return stock(*args, attn_mask=attn_mask, **options)

    def is_masked(samples):
        batch = small.family.collate(samples)
        seen.clear()
        with torch.no_grad():
            levels = small.levels(*[0.5] * len(samples))
            small.family.predict(small.transformer, batch["latents"], levels, batch)
        return any(seen)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", spy)
    assert is_masked(samples[:1]) == small.family.has_attention_mask(1, "masked")
    assert is_masked([samples[0]] * 2) == small.family.has_attention_mask(2, "exact")
    # Two may share a padded length.
    assert is_masked(samples) <= small.family.has_attention_mask(2, "masked")


@pytest.mark.quick(*KINDS)
def test_samples_are_deterministic_and_sized(small):
    number = small.family.max_controls + small.family.starts_from_picture
    controls = [Image.new("RGB", (40, 56), "green")] * number
    bucket = Bucket(width_px=64, height_px=32, num_frames=small.bucket.num_frames, num_items=1)
    options = {"num_steps": 2, "controls": controls}
    runs = [
        small.family.sample(small.pipeline, CAPTIONS[0], bucket, seed=seed, **options)
        for seed in (0, 0, 1)
    ]
    assert [len(run) for run in runs] == [bucket.num_frames] * 3
    assert runs[0][0].size == (64, 32)
    pixels = [run[0].tobytes() for run in runs]
    assert pixels[0] == pixels[1]
    assert pixels[0] != pixels[2]


def test_batching_changes_nothing(small):
    family, transformer = small.family, small.transformer
    batch, noise = batch_and_noise(small)
    levels = small.levels(0.25, 0.9)
    with torch.no_grad():
        together = family.predict(transformer, noise, levels, batch)
        alone = [
            family.predict(transformer, one, level, family.collate([small.sample(caption)]))
            for one, level, caption in zip(noise.split(1), levels.split(1), CAPTIONS, strict=True)
        ]
    assert together.shape == noise.shape
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-3, atol=1e-4)


@pytest.mark.quick(*KINDS, "chroma", "krea-2", "z-image")  # diffusers may forget a mask
def test_checkpointing_gives_equal_gradients(small):
    batch, noise = batch_and_noise(small)
    found = []
    for count in (0, 2):
        transformer, parameters = small.adapted()
        apply_recomputation(transformer, small.family, count)
        denoising_loss(small.family, transformer, batch, noise, small.levels(0.4, 0.6)).backward()
        found.append([p.grad for p in parameters if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
