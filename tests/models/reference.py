"""Each family's training loss in plain torch, from its pipeline's definition; uses nothing of
autotune."""

import torch
import torch.nn.functional as F

Tensors = dict[str, torch.Tensor]


def tokens_of(latents: torch.Tensor) -> torch.Tensor:
    """2x2 patches of (channels, 1, height, width), row by row, each channel's four pixels
    together."""
    rows = []
    for y in range(0, latents.shape[2], 2):
        for x in range(0, latents.shape[3], 2):
            rows.append(latents[:, 0, y : y + 2, x : x + 2].reshape(-1))
    return torch.stack(rows)[None]


def latents_of(tokens: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    channels, _, height, width = shape
    patches = iter(tokens[0])
    rows = [
        torch.cat([next(patches).reshape(channels, 2, 2) for _ in range(0, width, 2)], dim=2)
        for _ in range(0, height, 2)
    ]
    return torch.cat(rows, dim=1)[:, None]


def qwen_image(transformer, noisy, sigma, sample: Tensors):
    images = [
        noisy,
        *(
            sample[name]
            for name in ("control_latents_1", "control_latents_2", "control_latents_3")
            if name in sample
        ),
    ]
    tokens = [tokens_of(image) for image in images]
    out = transformer(
        hidden_states=torch.cat(tokens, dim=1),
        timestep=torch.tensor([sigma]),
        encoder_hidden_states=sample["prompt_embeds"][None],
        encoder_hidden_states_mask=None,
        img_shapes=[[(1, image.shape[2] // 2, image.shape[3] // 2) for image in images]],
    ).sample
    return latents_of(out[:, : tokens[0].shape[1]], noisy.shape)


def flux(transformer, noisy, sigma, sample: Tensors):
    _, _, height, width = noisy.shape
    positions = [[0.0, y, x] for y in range(height // 2) for x in range(width // 2)]
    out = transformer(
        hidden_states=tokens_of(noisy),
        timestep=torch.tensor([sigma]),
        guidance=torch.tensor([1.0]),
        pooled_projections=sample["pooled_prompt_embeds"][None],
        encoder_hidden_states=sample["prompt_embeds"][None],
        txt_ids=torch.zeros(512, 3),
        img_ids=torch.tensor(positions),
    ).sample
    return latents_of(out, noisy.shape)


def flux_kontext(transformer, noisy, sigma, sample: Tensors):
    _, _, height, width = noisy.shape
    places = [(y, x) for y in range(height // 2) for x in range(width // 2)]
    out = transformer(
        hidden_states=torch.cat([tokens_of(noisy), tokens_of(sample["control_latents_1"])], dim=1),
        timestep=torch.tensor([sigma]),
        guidance=torch.tensor([1.0]),
        pooled_projections=sample["pooled_prompt_embeds"][None],
        encoder_hidden_states=sample["prompt_embeds"][None],
        txt_ids=torch.zeros(512, 3),
        img_ids=torch.tensor(
            [[float(is_control), y, x] for is_control in (False, True) for y, x in places]
        ),
    ).sample
    return latents_of(out[:, : len(places)], noisy.shape)


def chroma(transformer, noisy, sigma, sample: Tensors):
    """Of one prompt, whose padding is left out, so that there is nothing to mask."""
    _, _, height, width = noisy.shape
    out = transformer(
        hidden_states=tokens_of(noisy),
        timestep=torch.tensor([sigma]),
        encoder_hidden_states=sample["prompt_embeds"][None],
        txt_ids=torch.zeros(len(sample["prompt_embeds"]), 3),
        img_ids=torch.tensor([[0.0, y, x] for y in range(height // 2) for x in range(width // 2)]),
    ).sample
    return latents_of(out, noisy.shape)


def kandinsky(transformer, noisy, sigma, sample: Tensors):
    channels, frames, height, width = noisy.shape
    video = transformer.config.visual_cond
    shown = torch.einsum("cthw->thwc", noisy)[None]
    if video:
        shown = F.pad(shown, (0, channels + 1))
    out = transformer(
        hidden_states=shown,
        encoder_hidden_states=sample["prompt_embeds"][None],
        pooled_projections=sample["pooled_prompt_embeds"][None],
        timestep=torch.tensor([1000 * sigma]),
        visual_rope_pos=[torch.arange(frames), torch.arange(height // 2), torch.arange(width // 2)],
        text_rope_pos=torch.arange(len(sample["prompt_embeds"])),
        scale_factor=(1, 3.16, 3.16) if video else (1.0, 1.0, 1.0),
    ).sample
    return torch.einsum("thwc->cthw", out[0])


def z_image(transformer, noisy, sigma, sample: Tensors):
    out = transformer([noisy], torch.tensor([1 - sigma]), [sample["prompt_embeds"]]).sample
    return -out[0]


def flux2(transformer, noisy, sigma, sample: Tensors):
    channels, _, height, width = noisy.shape
    out = transformer(
        hidden_states=torch.stack([noisy[:, 0, y, x] for y in range(height) for x in range(width)])[
            None
        ],
        timestep=torch.tensor([sigma]),
        encoder_hidden_states=sample["prompt_embeds"][None],
        img_ids=torch.tensor([[0.0, y, x, 0.0] for y in range(height) for x in range(width)]),
        txt_ids=torch.tensor([[0.0, 0.0, 0.0, place] for place in range(512)]),
        guidance=torch.tensor([1.0]) if transformer.config.guidance_embeds else None,
    ).sample
    return torch.einsum("pc->cp", out[0]).reshape(channels, 1, height, width)


def sdxl(unet, noisy, timestep, sample: Tensors):
    height, width = noisy.shape[2] * 8, noisy.shape[3] * 8
    return unet(
        sample=noisy[None, :, 0],
        timestep=int(timestep),
        encoder_hidden_states=sample["prompt_embeds"][None],
        added_cond_kwargs={
            "text_embeds": sample["pooled_prompt_embeds"][None],
            "time_ids": torch.tensor([[height, width, 0, 0, height, width]]).float(),
        },
    ).sample[0][:, None]


def wan(transformer, noisy, sigma, sample: Tensors):
    return transformer(
        noisy[None], torch.tensor([1000 * sigma]), sample["prompt_embeds"][None]
    ).sample[0]


def wan_22(transformer, noisy, sigma, sample: Tensors):
    """As its pipeline calls it: with a timestep for each token."""
    _, frames, height, width = noisy.shape
    steps = torch.full((1, frames * (height // 2) * (width // 2)), 1000 * sigma)
    return transformer(noisy[None], steps, sample["prompt_embeds"][None]).sample[0]


def krea(transformer, noisy, sigma, sample: Tensors):
    _, _, height, width = noisy.shape
    text = [[0, 0, 0]] * len(sample["prompt_embeds"])
    image = [[0, row, column] for row in range(height // 2) for column in range(width // 2)]
    out = transformer(
        tokens_of(noisy),
        sample["prompt_embeds"][None],
        torch.tensor([sigma]),
        torch.tensor(text + image, dtype=torch.float32),
    ).sample
    return latents_of(out, noisy.shape)


def qwen_image_21(transformer, noisy, sigma, sample: Tensors):
    channels, _, height, width = noisy.shape
    text = len(sample["prompt_embeds"])
    out = transformer(
        hidden_states=torch.stack([noisy[:, 0, y, x] for y in range(height) for x in range(width)])[
            None
        ],
        encoder_hidden_states=sample["prompt_embeds"][None],
        timestep=torch.tensor([sigma]),
        img_shapes=[[(1, height, width)]],
        img_mask=torch.tensor([[False] * text + [True] * (height * width // 4)]),
    ).sample
    return torch.einsum("pc->cp", out[0, text:]).reshape(channels, 1, height, width)


def sd3(transformer, noisy, sigma, sample: Tensors):
    return transformer(
        hidden_states=noisy[None, :, 0],
        encoder_hidden_states=sample["prompt_embeds"][None],
        pooled_projections=sample["pooled_prompt_embeds"][None],
        timestep=torch.tensor([1000 * sigma]),
    ).sample[0][:, None]


def ltx_2(transformer, noisy, sigma, sample: Tensors):
    """Of a picture: what a model with sound says of it while neither hears the other, whatever
    the sound."""
    _, frames, height, width = noisy.shape
    sound = torch.Generator().manual_seed(1)
    out = transformer(
        torch.stack(
            [noisy[:, t, y, x] for t in range(frames) for y in range(height) for x in range(width)]
        )[None],
        torch.randn(1, 5, transformer.config.audio_in_channels, generator=sound),
        sample["prompt_embeds"][None],
        torch.randn(1, 3, transformer.config.audio_cross_attention_dim, generator=sound),
        timestep=torch.full((1, frames * height * width), 1000 * sigma),
        audio_timestep=torch.tensor([[300.0]]),
        sigma=torch.tensor([1000 * sigma]),
        num_frames=frames,
        height=height,
        width=width,
        fps=24.0,
        audio_num_frames=5,
        isolate_modalities=True,
    ).sample
    return torch.einsum("pc->cp", out[0]).reshape(noisy.shape)


PREDICTIONS = {
    "ltx-2.3": ltx_2,
    "sd3.5": sd3,
    "chroma": chroma,
    "flux1-kontext": flux_kontext,
    "qwen-image-2.1": qwen_image_21,
    "krea-2": krea,
    "wan-2.1": wan,
    "wan-2.2": wan_22,
    "wan-2.2-14b": wan,
    "sdxl": sdxl,
    "flux2-klein": flux2,
    "flux2-dev": flux2,
    "z-image": z_image,
    "qwen-image": qwen_image,
    "qwen-image-edit": qwen_image,
    "qwen-image-edit-plus": qwen_image,
    "flux1-dev": flux,
    "kandinsky5-image-lite": kandinsky,
    "kandinsky5-video-lite": kandinsky,
}


def flow(clean, noise, sigma):
    return clean + sigma * (noise - clean), noise - clean


def epsilon(clean, noise, timestep):
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    left = float((1 - betas)[: int(timestep) + 1].prod())
    return left**0.5 * clean + (1 - left) ** 0.5 * noise, noise


def loss(name, transformer, samples, noises, levels):
    """Mean over samples of the mean squared error of the prediction, one sample at a time."""
    total = 0.0
    for sample, noise, level in zip(samples, noises, levels, strict=True):
        noisy, target = (epsilon if name == "sdxl" else flow)(sample["latents"], noise, level)
        total = (
            total + ((PREDICTIONS[name](transformer, noisy, level, sample) - target) ** 2).mean()
        )
    return total / len(samples)
