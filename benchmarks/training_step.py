"""Step time and start-up of autotune's training against a plain loop.

    PYTHONPATH=. python benchmarks/training_step.py [--size demo|mid] [--steps N] [--rounds R]

The reference is what a careful user writes by hand with diffusers, peft and torch alone: everything
encoded once and kept in memory, the model with a LoRA, fused AdamW, gradient clipping,
accumulation, one read of the loss per step. It gets the same settings, data order and shapes. Both
run in this process, interleaved A B A B, so that other load on the machine meets both alike; the
overhead is the median, over all pairs, of our step over its neighbor.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from autotune.system.process import silence_libraries, silence_progress_bars

silence_libraries()

import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from peft import LoraConfig

from autotune.events import StepFinished
from autotune.models.registry import get_family
from autotune.plan.candidate import Candidate
from autotune.train.run import train
from tests.events import steps_to
from tests.train.small import machine, make_plan, write_model_and_images

BATCH, MICRO_BATCH, RANK, SHIFT = 4, 2, 2, 2.2
MID_SIZE = {
    "num_layers": 8,
    "attention_head_dim": 64,
    "num_attention_heads": 12,
    "axes_dims_rope": (16, 24, 24),
}


def make_model(folder: Path, size: str) -> tuple[Path, Path]:
    model, images = write_model_and_images(folder)
    if size == "mid":
        torch.manual_seed(0)
        QwenImageTransformer2DModel(
            in_channels=64, out_channels=16, joint_attention_dim=128, **MID_SIZE
        ).save_pretrained(model / "transformer")
    return model, images


class PlainLoop:
    """Nothing of autotune's in the loop; only its file reading is used to see the same pixels."""

    def __init__(self, model: Path, images: Path, resolution_px: int) -> None:
        from diffusers.image_processor import VaeImageProcessor
        from PIL import Image

        pipeline = QwenImagePipeline.from_pretrained(model, transformer=None)
        pixels = VaeImageProcessor()
        mean = torch.tensor(pipeline.vae.config.latents_mean).view(1, -1, 1, 1, 1)
        std = torch.tensor(pipeline.vae.config.latents_std).view(1, -1, 1, 1, 1)
        self.latents, self.prompts = [], []
        with torch.no_grad():
            for path in sorted(images.glob("*.png")):
                image = Image.open(path).convert("RGB").resize((resolution_px, resolution_px))
                encoded = pipeline.vae.encode(
                    pixels.preprocess(image)[:, :, None]
                ).latent_dist.mode()
                self.latents.append((encoded - mean) / std)
                self.prompts.append(
                    pipeline.encode_prompt(prompt=[path.with_suffix(".txt").read_text().strip()])[0]
                )
        del pipeline
        self.transformer = QwenImageTransformer2DModel.from_pretrained(model / "transformer")
        self.transformer.requires_grad_(False)
        self.transformer.add_adapter(
            LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
        )
        self.parameters = [p for p in self.transformer.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, weight_decay=1e-3, fused=True)

    def step(self, number: int) -> float:
        total = torch.zeros(())
        for start in range(0, BATCH, MICRO_BATCH):
            chosen = [(number * BATCH + start + i) % len(self.latents) for i in range(MICRO_BATCH)]
            clean = torch.cat([self.latents[index] for index in chosen])
            longest = max(self.prompts[index].shape[1] for index in chosen)
            lengths = [self.prompts[index].shape[1] for index in chosen]
            prompt = torch.cat(
                [
                    torch.nn.functional.pad(
                        self.prompts[i], (0, 0, 0, longest - self.prompts[i].shape[1])
                    )
                    for i in chosen
                ]
            )
            mask = None
            if min(lengths) < longest:
                mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
            noise = torch.randn_like(clean)
            sigma = torch.sigmoid(torch.randn(len(chosen)))
            sigma = SHIFT * sigma / (1 + (SHIFT - 1) * sigma)
            share = sigma.view(-1, 1, 1, 1, 1)
            noisy = (1 - share) * clean + share * noise
            b, c, _, h, w = noisy.shape
            packed = (
                noisy.view(b, c, h // 2, 2, w // 2, 2)
                .permute(0, 2, 4, 1, 3, 5)
                .reshape(b, h * w // 4, c * 4)
            )
            out = self.transformer(
                hidden_states=packed,
                encoder_hidden_states=prompt,
                encoder_hidden_states_mask=mask,
                timestep=sigma,
                img_shapes=[[(1, h // 2, w // 2)]] * b,
                return_dict=False,
            )[0]
            velocity = (
                out.view(b, h // 2, w // 2, c, 2, 2)
                .permute(0, 3, 1, 4, 2, 5)
                .reshape(b, c, 1, h, w)
            )
            loss = (
                torch.nn.functional.mse_loss(velocity.float(), (noise - clean).float())
                * len(chosen)
                / BATCH
            )
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(total)


class Interleaved:
    """Called after each of our steps: notes what it took, then takes and times a step of the
    plain loop."""

    def __init__(self, plain: PlainLoop) -> None:
        self.plain = plain
        self.ours: list[float] = []
        self.theirs: list[float] = []
        self.waits: list[float] = []
        self.started = self.ended = time.perf_counter()
        self.start_seconds = 0.0

    def __call__(self, event: StepFinished) -> None:
        # From the end of the last pause to now: all that our loop does between two steps is inside.
        now = time.perf_counter()
        self.start_seconds = self.start_seconds or now - self.started
        self.ours.append(now - self.ended)
        self.waits.append(event.data_seconds)
        begun = time.perf_counter()
        self.plain.step(event.step)
        self.ended = time.perf_counter()
        self.theirs.append(self.ended - begun)


def compare_steps(size: str, steps: int, rounds: int, resolution_px: int) -> dict[str, Any]:
    """Each of our steps is followed by one of the plain loop; the first three of a round warm
    up."""
    hardware = machine()
    ours: list[float] = []
    theirs: list[float] = []
    waits: list[float] = []
    starts: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, images = make_model(folder, size)
        for number in range(rounds):
            begun = time.perf_counter()
            plain = PlainLoop(model, images, resolution_px)
            plain.step(0)
            plain_start = time.perf_counter() - begun
            plan = make_plan(
                model,
                images,
                hardware,
                resolution_px=resolution_px,
                num_steps=steps,
                output=str(folder / f"out{number}"),
                settings=Candidate(
                    micro_batch_size=MICRO_BATCH, checkpointed_blocks=0, precision="fp32"
                ),
                checkpointing_steps=max(5, steps // 3),
                report_to="tensorboard",
            )
            both = Interleaved(plain)
            # An empty cache, as the plain loop has.
            train(plan, hardware, folder / f"cache{number}", steps_to(both))
            ours += both.ours[3:]
            theirs += both.theirs[3:]
            waits += both.waits[3:]
            starts.append((both.start_seconds, plain_start))
    return {
        "what": (
            f"step, {size}, {resolution_px} px, batch {BATCH} in micro-batches of "
            f"{MICRO_BATCH}, "
            "fp32"
        ),
        "num_steps": len(ours),
        "autotune_step_seconds": statistics.median(ours),
        "plain_step_seconds": statistics.median(theirs),
        "overhead": statistics.median(our / their for our, their in zip(ours, theirs, strict=True))
        - 1,
        "quartiles_autotune": statistics.quantiles(ours, n=4),
        "quartiles_plain": statistics.quantiles(theirs, n=4),
        "data_wait_share": sum(waits) / sum(ours),
        "start_seconds_autotune": statistics.median(ours for ours, _ in starts),
        "start_seconds_plain": statistics.median(theirs for _, theirs in starts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=["demo", "mid"], default="demo")
    parser.add_argument("--resolution", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    silence_progress_bars()
    assert get_family("qwen-image").defaults.timestep_shift == SHIFT
    result = compare_steps(options.size, options.steps, options.rounds, options.resolution)
    machine_text = (
        f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print(
        json.dumps({"date": time.strftime("%Y-%m-%d"), "machine": machine_text, **result}, indent=1)
    )


if __name__ == "__main__":
    main()
