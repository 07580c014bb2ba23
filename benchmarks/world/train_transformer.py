"""Pretrain the small world's transformer: python benchmarks/world/train_transformer.py FOLDER
[--steps N].

FOLDER holds what `train_vae.py` wrote; the pipeline goes to FOLDER/model, in bf16. Seeded, and
resumable: a second call continues at the last checkpoint. The learning rate is constant and falls
in the last fifth of the steps, so that fewer or more steps can still be asked for until then.
"""

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel
from figures import excluded_prompts, judge
from scenes import draw_scene, to_tensor
from torch import nn
from train_vae import FlatFrames
from transformers import Qwen2_5_VLForConditionalGeneration

from autotune.families.loss import denoising_loss
from autotune.families.registry import get_family
from tests.small.parts import qwen_text_encoder, qwen_tokenizer
from tests.small.qwen_image import make_scheduler

NUM_SCENES, NUM_HELD, BATCH, RATE, WARMUP, BLANK_SHARE, TEXT_WIDTH = (
    12_000,
    512,
    64,
    1e-3,
    200,
    0.12,
    64,
)
WORDS = [
    *(
        "heart",
        "arrow",
        "ring",
        "hexagon",
        "crescent",
        "moon",
        "sun",
        "flower",
        "house",
        "tree",
        "cat",
        "dog",
        "fish",
    ),
    *(
        "bird",
        "boat",
        "car",
        "cloud",
        "photo",
        "picture",
        "icon",
        "logo",
        "style",
        "in",
        "with",
        "and",
        "of",
        "the",
    ),
    *(
        "striped",
        "dotted",
        "thin",
        "thick",
        "bright",
        "dark",
        "teal",
        "silver",
        "gold",
        "small",
        "large",
        "my",
        "sks",
    ),
]
"""What the tokenizer knows as one token besides the captions' words, so that new things can have
names.
"""
FAMILY = get_family("qwen-image")


def build(vae: AutoencoderKLQwenImage, captions: list[str]) -> QwenImagePipeline:
    """Random text encoder, which stays frozen; transformer whose modulation starts near zero,
    but not at zero.
    """
    torch.manual_seed(0)
    template = QwenImagePipeline(None, None, None, None, None).prompt_template_encode
    tokenizer = qwen_tokenizer([*captions, *WORDS, *(f" {word}" for word in WORDS)], template)
    config = qwen_text_encoder(tokenizer, hidden_size=TEXT_WIDTH).config
    config.vision_config.update(
        {"hidden_size": 32, "intermediate_size": 32, "num_heads": 1}
    )  # unused, but a part
    config.tie_word_embeddings = True
    text_encoder = Qwen2_5_VLForConditionalGeneration(config).eval()
    transformer = QwenImageTransformer2DModel(
        in_channels=64,
        out_channels=16,
        num_layers=4,
        attention_head_dim=40,
        num_attention_heads=3,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(8, 16, 16),
    )
    for name, module in transformer.named_modules():
        if name.endswith(("img_mod.1", "txt_mod.1", "norm_out.linear", "proj_out")):
            nn.init.normal_(module.weight, std=2e-3)
            nn.init.zeros_(module.bias)
    for part in (vae, text_encoder):  # as they will be shipped
        part.to(torch.bfloat16).to(torch.float32)
    pipeline = QwenImagePipeline(make_scheduler(), vae, text_encoder, tokenizer, transformer)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


class Scenes:
    """Encoded scenes, in groups whose captions have equally many tokens, so that no batch needs
    a mask.
    """

    def __init__(self, folder: Path) -> None:
        rng = random.Random(2)
        scenes = [draw_scene(rng) for _ in range(NUM_SCENES)]
        self.captions = [scene.caption for scene in scenes]
        vae = AutoencoderKLQwenImage.from_pretrained(folder / "vae").eval()
        self.pipeline = build(vae, self.captions)
        self.latents = self._encode_images([scene.draw() for scene in scenes])
        unique = sorted(set(self.captions))
        self.prompts = dict(zip(unique, self._encode_prompts(unique), strict=True))
        self.blank = self._encode_prompts([" "])[0]
        lengths = [len(self.prompts[caption]) for caption in self.captions[:-NUM_HELD]]
        self.groups = {
            length: [i for i, n in enumerate(lengths) if n == length] for length in set(lengths)
        }
        self.lengths = lengths

    @torch.no_grad()
    def _encode_images(self, images: list) -> torch.Tensor:
        with FlatFrames():
            vae, config = self.pipeline.vae, self.pipeline.vae.config
            parts = [to_tensor(images[i : i + 50]) for i in range(0, len(images), 50)]
            means = torch.cat([vae._encode(part[:, :, None])[:, :16] for part in parts])
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1, 1)
            for values in (config.latents_mean, config.latents_std)
        )
        return (means - mean) / std

    @torch.no_grad()
    def _encode_prompts(self, captions: list[str]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for start in range(0, len(captions), 64):
            embeds, mask = self.pipeline.encode_prompt(prompt=captions[start : start + 64])
            found += (
                embeds
                if mask is None
                else [e[: int(m.sum())] for e, m in zip(embeds, mask, strict=True)]
            )
        return found

    def pick(self, gen: torch.Generator) -> dict[str, torch.Tensor]:
        one = int(torch.randint(len(self.lengths), (), generator=gen))
        group = torch.tensor(self.groups[self.lengths[one]])
        chosen = group[torch.randint(len(group), (BATCH,), generator=gen)]
        blank = torch.rand((), generator=gen) < BLANK_SHARE  # for guidance
        prompts = [self.blank if blank else self.prompts[self.captions[int(i)]] for i in chosen]
        return {"latents": self.latents[chosen], "prompt_embeds": torch.stack(prompts)}

    def held_out_loss(self, transformer: nn.Module) -> float:
        gen, losses = torch.Generator().manual_seed(9), []
        held = [i for i in range(NUM_SCENES - NUM_HELD, NUM_SCENES) if "," not in self.captions[i]]
        held = [i for i in held if " and " not in self.captions[i]]
        for part in torch.tensor(held).split(64):
            prompts = torch.stack([self.prompts[self.captions[int(i)]] for i in part])
            losses.append(
                float(
                    loss_of(
                        transformer, {"latents": self.latents[part], "prompt_embeds": prompts}, gen
                    )
                )
            )
        return float(np.mean(losses))


def loss_of(
    transformer: nn.Module, batch: dict[str, torch.Tensor], gen: torch.Generator
) -> torch.Tensor:
    """Noise levels half uniform, half logit-normal, shifted towards much noise."""
    size = len(batch["latents"])
    uniform, normal = (
        torch.rand(size, generator=gen),
        torch.sigmoid(torch.randn(size, generator=gen)),
    )
    sigmas = torch.where(torch.rand(size, generator=gen) < 0.5, uniform, normal)
    noise = torch.randn(batch["latents"].shape, generator=gen)
    return denoising_loss(FAMILY, transformer, batch, noise, 1.8 * sigmas / (1 + 0.8 * sigmas))


def exchange(transformer: nn.Module, ema: list[torch.Tensor]) -> None:
    for p, e in zip(transformer.parameters(), ema, strict=True):
        p.data, e.data = e.data, p.data


def train(folder: Path, steps: int, every: int) -> None:
    data = Scenes(folder)
    transformer, gen = data.pipeline.transformer, torch.Generator().manual_seed(1)
    params = list(transformer.parameters())
    print(
        "parameters",
        {
            n: sum(p.numel() for p in c.parameters())
            for n, c in data.pipeline.components.items()
            if isinstance(c, nn.Module)
        },
        "groups",
        {n: len(g) for n, g in data.groups.items()},
        flush=True,
    )
    optimizer = torch.optim.AdamW(params, lr=RATE, betas=(0.9, 0.98), weight_decay=1e-3, fused=True)
    ema = [p.detach().clone() for p in params]
    begin, first, checkpoint, losses = time.process_time(), 0, folder / "transformer.pt", []
    if checkpoint.exists():
        kept = torch.load(checkpoint)
        transformer.load_state_dict(kept["model"]), optimizer.load_state_dict(kept["optimizer"])
        gen.set_state(kept["gen"])
        ema, first, begin = kept["ema"], kept["step"], begin - kept["seconds"]
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARMUP, (steps - step) / (0.2 * steps))
        loss = loss_of(transformer, data.pick(gen), gen)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        torch._foreach_lerp_(
            ema, [p.data for p in params], 1 - min(0.999, (1 + step) / (10 + step))
        )
        losses.append(float(loss.detach()))
        spent = time.process_time() - begin
        if (step + 1) % 100 == 0:
            print(
                f"step {step + 1} cpu {spent:.0f} s loss {np.mean(losses[-100:]):.4f}", flush=True
            )
        if (step + 1) % every == 0 or step + 1 == steps:
            state = {
                "model": transformer.state_dict(),
                "optimizer": optimizer.state_dict(),
                "gen": gen.get_state(),
            }
            torch.save(state | {"ema": ema, "step": step + 1, "seconds": spent}, checkpoint)
            exchange(transformer, ema)
            with torch.no_grad(), FlatFrames():
                found = {"held-out loss": round(data.held_out_loss(transformer), 4)}
                found |= judge(data.pipeline, excluded_prompts(1), folder / f"step-{step + 1}.png")
            print(f"step {step + 1} averaged weights {found}", flush=True)
            exchange(transformer, ema)
    exchange(transformer, ema)
    data.pipeline.to(torch.bfloat16)
    data.pipeline.save_pretrained(folder / "model")
    config = folder / "model" / "vae" / "config.json"  # without the path that it was loaded from
    named = {
        name: value
        for name, value in json.loads(config.read_text()).items()
        if name != "_name_or_path"
    }
    config.write_text(json.dumps(named, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=1000, help="steps between checkpoints")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    train(asked.folder, asked.steps, asked.every)
