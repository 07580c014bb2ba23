"""Pretrain the small world's VAE: python benchmarks/world/train_vae.py FOLDER [--steps N]. Seeded,
resumable.

Stock `AutoencoderKLQwenImage`, small. It sees known shapes, blobs and polygons in arbitrary colors,
never a new shape. Only the newest tap of a causal kernel ever sees a single frame, so training
convolves with that one in two dimensions.
"""

import argparse
import random
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders import autoencoder_kl_qwenimage as stock
from PIL import Image, ImageDraw
from scenes import draw_scene, psnr, to_tensor
from torch import nn
from torch.nn import functional as F

from autotune.demo import world

BATCH, POOL, RATE, CROP_PX = 16, 6000, 2e-3, 32


def flat_convolution(self, x, cache_x=None):
    down, across = self._padding[2], self._padding[0]
    return F.conv2d(x[:, :, 0], self.weight[:, :, -1], self.bias, self.stride[1:], (down, across))[
        :, :, None
    ]


def plain_norm(self, x):
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-12) * self.gamma


class FlatFrames:
    """Within it the stock classes take the short way for single frames, with the same results."""

    def __enter__(self):
        self.kept = stock.QwenImageCausalConv3d.forward, stock.QwenImageRMS_norm.forward
        stock.QwenImageCausalConv3d.forward, stock.QwenImageRMS_norm.forward = (
            flat_convolution,
            plain_norm,
        )

    def __exit__(self, *_):
        stock.QwenImageCausalConv3d.forward, stock.QwenImageRMS_norm.forward = self.kept


def build() -> AutoencoderKLQwenImage:
    vae = AutoencoderKLQwenImage(
        base_dim=12,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        temperal_downsample=[False, False, False],
    )
    with torch.no_grad():
        for name, module in vae.named_modules():
            if isinstance(module, (stock.QwenImageCausalConv3d, nn.Conv2d)):
                taps = module.weight[:, :, -1] if module.weight.dim() == 5 else module.weight
                module.weight.zero_()
                taps.normal_(std=taps[0].numel() ** -0.5)
                if module.bias is not None:
                    module.bias.zero_()
                if name.endswith(("conv2", ".proj")):  # residual ends
                    taps.zero_()
        vae.quant_conv.weight[16:] = 0
        vae.quant_conv.bias[16:] = -5  # log-variance of the posterior
    return vae


def draw_busy(rng: random.Random) -> Image.Image:
    """Known shapes, turned, polygons and blobs, in arbitrary colors."""

    def color():
        if rng.random() < 0.5:
            return tuple(rng.randrange(256) for _ in range(3))
        return rng.choice([*world.COLORS.values(), *world.GROUNDS.values()])

    k = 4
    image = Image.new("RGB", (64 * k, 64 * k), color())
    draw = ImageDraw.Draw(image)
    for _ in range(rng.randrange(1, 6)):
        kind, size, angle = rng.random(), rng.uniform(10, 46), rng.choice((0, rng.uniform(0, 6.3)))
        if kind < 0.5:
            points = world.outline(rng.choice(world.KNOWN_SHAPES))
        else:
            corners = rng.randrange(3, 9) if kind < 0.75 else 48
            waves = [(n, rng.uniform(0, 0.3 / n), rng.uniform(0, 6.3)) for n in (1, 2, 3, 4)]
            turns = [
                2 * np.pi * (i + (rng.uniform(-0.3, 0.3) if corners < 48 else 0)) / corners
                for i in range(corners)
            ]
            radii = [0.4 * (1 + sum(a * np.sin(n * t + p) for n, a, p in waves)) for t in turns]
            points = [
                (0.5 + r * np.cos(t), 0.5 + r * np.sin(t))
                for r, t in zip(radii, turns, strict=True)
            ]
        c, s, left, top = (
            np.cos(angle),
            np.sin(angle),
            *(rng.uniform(-8, 60 - size / 2) for _ in range(2)),
        )
        turned = [
            ((x - 0.5) * c - (y - 0.5) * s + 0.5, (x - 0.5) * s + (y - 0.5) * c + 0.5)
            for x, y in points
        ]
        draw.polygon(
            [((left + x * size) * k, (top + y * size) * k) for x, y in turned], fill=color()
        )
    return image.reduce(k)


def pool() -> torch.Tensor:
    rng = random.Random(1)
    images = [draw_busy(rng) if number % 2 else draw_scene(rng).draw() for number in range(POOL)]
    return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images])


def loss_of(vae, x: torch.Tensor, gen: torch.Generator):
    mean, logvar = vae._encode(x[:, :, None]).chunk(2, dim=1)
    logvar = logvar.clamp(-12, 4)
    vae.clear_cache()
    z = mean + torch.exp(0.5 * logvar) * torch.randn(mean.shape, generator=gen)
    error = (
        vae.decoder(vae.post_quant_conv(z))[:, :, 0] - x
    )  # `decode` clamps, where no gradient passes
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    return error.abs().mean() + error.square().mean() + 3e-4 * kl, error.square().mean()


def pick(images: torch.Tensor, share: float, gen: torch.Generator) -> torch.Tensor:
    x = images[torch.randint(len(images), (BATCH,), generator=gen)].float() / 127.5 - 1
    if torch.rand((), generator=gen) < 0.5:
        x = x.flip(3)
    if share > 0.85:
        return x[:4]
    row, column = (8 * int(v) for v in torch.randint(0, 5, (2,), generator=gen))
    return x[:, :, row : row + CROP_PX, column : column + CROP_PX]


def train(folder: Path, steps: int) -> None:
    torch.manual_seed(0)
    vae, gen, images = build(), torch.Generator().manual_seed(0), pool()
    print("parameters", sum(p.numel() for p in vae.parameters()), "steps", steps, flush=True)
    named = dict(vae.named_parameters())
    optimizer = torch.optim.AdamW(named.values(), lr=RATE, betas=(0.9, 0.99), weight_decay=1e-4)
    ema = {name: p.detach().clone() for name, p in named.items()}
    begin, first, checkpoint = time.process_time(), 0, folder / "vae.pt"
    if checkpoint.exists():
        kept = torch.load(checkpoint)
        (
            vae.load_state_dict(kept["vae"]),
            optimizer.load_state_dict(kept["optimizer"]),
            gen.set_state(kept["gen"]),
        )
        ema, first, begin = kept["ema"], kept["step"], begin - kept["seconds"]
    for step in range(first, steps):
        share = step / steps
        for group in optimizer.param_groups:
            group["lr"] = (
                RATE * min(1, (step + 1) / 100) * (0.49 * (1 + np.cos(np.pi * share)) + 0.02)
            )
        loss, mse = loss_of(vae, pick(images, share, gen), gen)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for name, p in named.items():
                ema[name].lerp_(p, 1 - min(0.995, (1 + step) / (10 + step)))
        if (step + 1) % 100 == 0:
            seconds = time.process_time() - begin
            print(
                f"step {step + 1} cpu {seconds:.0f} s psnr "
                f"{10 * np.log10(4 / float(mse.detach())):.1f}",
                flush=True,
            )
        if (step + 1) % 500 == 0:
            state = {
                "vae": vae.state_dict(),
                "optimizer": optimizer.state_dict(),
                "gen": gen.get_state(),
                "ema": ema,
            }
            torch.save(state | {"step": step + 1, "seconds": seconds}, checkpoint)
    vae.load_state_dict(ema, strict=False)
    vae.eval().requires_grad_(False)
    parts = (images[:2000:2].float() / 127.5 - 1).split(50)
    latents = torch.cat([vae._encode(part[:, :, None])[:, :16] for part in parts])
    vae.register_to_config(
        latents_mean=[round(float(v), 4) for v in latents.mean((0, 2, 3, 4))],
        latents_std=[round(float(v), 4) for v in latents.std((0, 2, 3, 4))],
    )
    vae.save_pretrained(folder / "vae")


def held_out(folder: Path) -> None:
    """Figures by the stock code, on scenes that were not drawn before."""
    vae = AutoencoderKLQwenImage.from_pretrained(folder / "vae").eval()
    rng = random.Random(10_000)
    for name, scenes in {
        "known shapes": [draw_scene(rng) for _ in range(64)],
        "new shapes": [draw_scene(rng, shapes=world.NEW_SHAPES) for _ in range(64)],
    }.items():
        x = to_tensor([scene.draw() for scene in scenes])
        with torch.no_grad():
            y = vae.decode(vae.encode(x[:, :, None]).latent_dist.mode()).sample[:, :, 0]
        print(f"held out, {name}: {psnr(x, y):.1f} dB", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=3500)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    with FlatFrames():
        train(asked.folder, asked.steps)
    held_out(asked.folder)
