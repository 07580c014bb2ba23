"""Each family's training loss in plain torch, from its pipeline's definition; uses nothing of autotune."""

import torch
import torch.nn.functional as F

Tensors = dict[str, torch.Tensor]


def tokens_of(latents: torch.Tensor) -> torch.Tensor:
    """2x2 patches of (channels, 1, height, width), row by row, each channel's four pixels together."""
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
        *(sample[name] for name in ("control_latents_1", "control_latents_2", "control_latents_3") if name in sample),
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


PREDICTIONS = {
    "qwen-image": qwen_image,
    "qwen-image-edit": qwen_image,
    "qwen-image-edit-plus": qwen_image,
    "flux1-dev": flux,
    "kandinsky5-image-lite": kandinsky,
    "kandinsky5-video-lite": kandinsky,
}


def loss(name, transformer, samples, noises, sigmas):
    """Mean over samples of the mean squared error of the velocity, one sample at a time."""
    total = 0.0
    for sample, noise, sigma in zip(samples, noises, sigmas, strict=True):
        noisy = sample["latents"] + sigma * (noise - sample["latents"])
        predicted = PREDICTIONS[name](transformer, noisy, sigma, sample)
        total = total + ((predicted - (noise - sample["latents"])) ** 2).mean()
    return total / len(samples)
