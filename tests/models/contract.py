"""What every family must keep: one function per promise, run over the registry and on a family
that a test adds."""

import copy

import torch
from torch import nn

from autotune.models.adapter import add_adapter
from autotune.models.family import build_on_meta, denoising_loss
from autotune.models.resolve import resolve_model
from autotune.plan.job import ModelRef
from autotune.plan.workload import Bucket
from tests.models.small import CAPTIONS, Small


def resolves_from_its_folder(small: Small) -> None:
    model = resolve_model(ModelRef.of(small.folder))
    assert model.family.name == small.family.name
    assert model.spec.num_parameters == sum(p.numel() for p in small.transformer.parameters())
    assert model.spec.num_blocks == len(small.family.blocks(small.transformer))


def shapes_are_as_announced(small: Small) -> None:
    sample = small.sample()
    config = resolve_model(ModelRef.of(small.folder)).config
    announced = small.family.sample_shapes(
        config, small.bucket, len(sample["prompt_embeds"]), num_controls=small.family.max_controls
    )
    assert {name: tuple(tensor.shape) for name, tensor in sample.items()} == announced


def tokens_are_counted_without_an_encoder(small: Small) -> None:
    captions = [*CAPTIONS, "", "&amp; naïve — 数 " * 7]
    controls = [small.controls(small.bucket)] * len(captions)
    sizes = [[(small.bucket.width_px, small.bucket.height_px)] * small.family.max_controls] * len(
        captions
    )
    with torch.no_grad():
        pairs = zip(captions, controls, strict=True)
        encoded = [
            small.family.encode_caption(small.pipeline, caption, pixels)
            for caption, pixels in pairs
        ]
    assert small.family.count_text_tokens(small.folder, captions, sizes) == [
        len(s["prompt_embeds"]) for s in encoded
    ]


def largest_shapes_run(small: Small) -> None:
    """The longest caption with the longest sides and, in a model for clips, with the most
    frames."""
    family, config = small.family, small.transformer.config
    most, least = family.max_side_px, family.size_multiple_px
    for width, height, frames in {
        (most, least, 1),
        (least, most, 1),
        (least, least, family.max_frames),
    }:
        bucket = Bucket(width_px=width, height_px=height, num_frames=frames, num_items=1)
        shapes = family.sample_shapes(config, bucket, family.max_text_tokens, family.max_controls)
        batch = family.collate([{name: torch.ones(shape) for name, shape in shapes.items()}])
        with torch.no_grad():
            velocity = family.predict(small.transformer, batch["latents"], small.levels(0.5), batch)
        assert velocity.shape == batch["latents"].shape


def every_model_can_be_made_tiny(small: Small) -> None:
    """The published models and the small one alike: quick checks run on what remains."""
    family = small.family
    bucket = Bucket(
        width_px=4 * family.size_multiple_px,
        height_px=4 * family.size_multiple_px,
        num_frames=1,
        num_items=1,
    )
    for given in (small.transformer.config, *(model.config for model in family.models)):
        config = {**given, **family.tiny_config}
        transformer = family.build_transformer(config)
        shapes = family.sample_shapes(config, bucket, 8, family.max_controls)
        batch = family.collate([{name: torch.ones(shape) for name, shape in shapes.items()}])
        with torch.no_grad():
            predicted = family.predict(transformer, batch["latents"], small.levels(0.5), batch)
        assert predicted.shape == batch["latents"].shape
        assert sum(p.numel() for p in transformer.parameters()) < 40e6


def target_sets_nest_and_cover_all_linears(small: Small) -> None:
    layers = {}
    for name in ("attention", "attention+mlp", "all-linear"):
        transformer = build_on_meta(small.family, small.transformer.config)
        with torch.device("meta"):
            add_adapter(small.family, transformer, small.workload(name), torch.float32)
        layers[name] = {
            key.removesuffix(".lora_A")
            for key, _ in transformer.named_modules()
            if key.endswith("lora_A")
        }
    assert layers["attention"] < layers["attention+mlp"] <= layers["all-linear"]
    blocks = {
        id(module) for block in small.family.blocks(small.transformer) for module in block.modules()
    }
    linears = {
        key: layer for key, layer in small.transformer.named_modules() if type(layer) is nn.Linear
    }
    in_blocks = {key for key, layer in linears.items() if id(layer) in blocks}
    assert layers["all-linear"] <= in_blocks
    assert not (in_blocks - layers["all-linear"]) & _layers_with_a_part(small)


def _layers_with_a_part(small: Small) -> set[str]:
    """Those that what is predicted depends on: not those of sound beside a picture, say."""
    transformer = copy.deepcopy(small.transformer).requires_grad_(True)
    batch = small.family.collate([small.sample()])
    small.family.predict(transformer, batch["latents"], small.levels(0.5), batch).sum().backward()
    return {
        name
        for name, layer in transformer.named_modules()
        if getattr(layer, "weight", None) is not None and layer.weight.grad is not None
    }


def every_adapter_layer_learns(small: Small) -> None:
    transformer, parameters = small.adapted("all-linear")
    batch = small.family.collate([small.sample(caption) for caption in CAPTIONS])
    noise = torch.randn(batch["latents"].shape, generator=torch.Generator().manual_seed(0))
    denoising_loss(small.family, transformer, batch, noise, small.levels(0.3, 0.8)).backward()
    names = [name for name, parameter in transformer.named_parameters() if parameter.requires_grad]
    still = {
        n for n, p in zip(names, parameters, strict=True) if p.grad is None or not p.grad.any()
    }
    last = small.family.last_block(transformer)
    assert transformer.get_submodule(last) is small.family.blocks(transformer)[-1]
    assert all(name.startswith(f"{last}.") for name in still), still


def batching_changes_nothing(small: Small) -> None:
    """Samples of different caption lengths give together what each gives alone."""
    family, transformer = small.family, small.transformer
    samples = [small.sample(caption) for caption in CAPTIONS]
    noise = torch.randn(2, *samples[0]["latents"].shape, generator=torch.Generator().manual_seed(3))
    levels = small.levels(0.25, 0.9)
    with torch.no_grad():
        together = family.predict(transformer, noise, levels, family.collate(samples))
        alone = [
            family.predict(
                transformer, noise[i : i + 1], levels[i : i + 1], family.collate(samples[i : i + 1])
            )
            for i in range(2)
        ]
    assert together.shape == noise.shape
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-3, atol=1e-4)


def padding_what_is_masked_changes_nothing(small: Small) -> None:
    """Neither outputs nor gradients, in fp32; and where attention gets no mask there is no more
    padding."""
    family = small.family
    samples = [small.sample(caption) for caption in CAPTIONS]
    plain, padded = family.collate(samples), family.collate(samples, 128)
    if family.separates_prompts or not family.has_attention_mask(2, "masked"):
        assert {name: tensor.shape for name, tensor in padded.items()} == {
            n: t.shape for n, t in plain.items()
        }
        return
    images = sum(
        t[0, 0].numel() // family.patch**2 for name, t in padded.items() if "latents" in name
    )
    assert (images + padded["prompt_embeds"].shape[1]) % 128 == 0
    assert padded["prompt_mask"].sum() == plain["prompt_mask"].sum() < padded["prompt_mask"].numel()
    noise = torch.randn(plain["latents"].shape, generator=torch.Generator().manual_seed(3))
    found = []
    for batch in (plain, padded):
        transformer, parameters = small.adapted()
        with torch.no_grad():
            output = family.predict(transformer, noise, small.levels(0.25, 0.9), batch)
        denoising_loss(family, transformer, batch, noise, small.levels(0.25, 0.9)).backward()
        found.append([output, *(p.grad for p in parameters if p.grad is not None)])
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm()) <= 1e-5 * float(one.norm())


def bf16_trains(small: Small) -> None:
    """Loaded as a run loads it: modules that must stay in fp32 do, and everything still fits
    together."""
    transformer = type(small.transformer).from_pretrained(
        small.folder / small.family.denoiser, torch_dtype=torch.bfloat16
    )
    parameters = add_adapter(small.family, transformer, small.workload(), torch.bfloat16)
    batch = small.family.collate([small.sample(caption) for caption in CAPTIONS])
    noise = torch.randn(batch["latents"].shape, generator=torch.Generator().manual_seed(0))
    levels = small.levels(0.3, 0.8)
    exact = denoising_loss(small.family, small.transformer, batch, noise, levels)
    batch = {
        key: value.bfloat16() if value.is_floating_point() else value
        for key, value in batch.items()
    }
    loss = denoising_loss(small.family, transformer, batch, noise.bfloat16(), levels)
    loss.backward()
    assert abs(float(loss.detach() - exact)) < 0.05 * float(exact)
    assert all(
        p.grad is not None and p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all()
        for p in parameters
    )


def masks_are_announced(small: Small) -> None:
    samples = [small.sample(caption) for caption in CAPTIONS]
    seen = []
    small.transformer.set_attention_backend("native")
    original = nn.functional.scaled_dot_product_attention

    def spy(*args, attn_mask=None, **kwargs):
        seen.append(attn_mask is not None)
        return original(*args, attn_mask=attn_mask, **kwargs)

    def masked(batch_samples) -> bool:
        batch = small.family.collate(batch_samples)
        seen.clear()
        with torch.no_grad():
            levels = small.levels(*[0.5] * len(batch_samples))
            small.family.predict(small.transformer, batch["latents"], levels, batch)
        return any(seen)

    nn.functional.scaled_dot_product_attention = spy
    try:
        assert masked(samples[:1]) == small.family.has_attention_mask(1, "masked")
        assert masked([samples[0]] * 2) == small.family.has_attention_mask(2, "exact")
        assert masked(samples) <= small.family.has_attention_mask(
            2, "masked"
        )  # two may share a padded length
    finally:
        nn.functional.scaled_dot_product_attention = original


def checkpointing_gives_equal_gradients(small: Small) -> None:
    from autotune.knobs.blocks import apply_recomputation

    batch = small.family.collate([small.sample()])
    noise = torch.randn(batch["latents"].shape, generator=torch.Generator().manual_seed(0))
    found = []
    for count in (0, 2):
        transformer, parameters = small.adapted()
        apply_recomputation(transformer, small.family, count)
        denoising_loss(small.family, transformer, batch, noise, small.levels(0.4)).backward()
        found.append([p.grad for p in parameters if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def samples_are_deterministic_and_sized(small: Small) -> None:
    from PIL import Image

    controls = [Image.new("RGB", (40, 56), "green")] * small.family.max_controls
    bucket = Bucket(width_px=64, height_px=32, num_frames=small.bucket.num_frames, num_items=1)
    runs = [
        small.family.sample(
            small.pipeline, CAPTIONS[0], bucket, num_steps=2, seed=seed, controls=controls
        )
        for seed in (0, 0, 1)
    ]
    assert [len(run) for run in runs] == [bucket.num_frames] * 3
    assert runs[0][0].size == (64, 32)
    pixels = [run[0].tobytes() for run in runs]
    assert pixels[0] == pixels[1]
    assert pixels[0] != pixels[2]


PROMISES = (
    resolves_from_its_folder,
    shapes_are_as_announced,
    tokens_are_counted_without_an_encoder,
    largest_shapes_run,
    every_model_can_be_made_tiny,
    target_sets_nest_and_cover_all_linears,
    every_adapter_layer_learns,
    batching_changes_nothing,
    padding_what_is_masked_changes_nothing,
    bf16_trains,
    masks_are_announced,
    checkpointing_gives_equal_gradients,
    samples_are_deterministic_and_sized,
)
