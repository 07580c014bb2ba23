"""Tiny transformers of the real classes, and machines to predict for."""

from pathlib import Path

import torch
import yaml

from autotune.machine.catalog import load_catalog, profile_of_gpu
from autotune.models.registry import FAMILIES
from autotune.plan.hardware import Device, HardwareProfile, Host, Versions
from autotune.plan.workload import Bucket, ModelSpec, Workload
from tests.small import shortest_clip

CONFIGS = yaml.safe_load((Path(__file__).parent / "tiny_models.yaml").read_text())
TINY = {
    family: {
        name: tuple(value) if isinstance(value, list) and family != "z-image" else value
        for name, value in config.items()
    }
    for family, config in CONFIGS.items()
}


def cpu():
    memory = {"memory_kind": "host", "memory_kind_reason": "", "budget_reason": ""}
    device = Device(kind="cpu", index=0, name="cpu", budget_bytes=1 << 34, **memory)
    host = Host(
        cpu="cpu",
        logical_cores=2,
        memory_bytes=1 << 34,
        available_memory_bytes=1 << 34,
        system="Linux",
        memory_model="linux",
    )
    return HardwareProfile(device=device, host=host, versions=Versions(python="3.11"))


def gpu(name):
    return profile_of_gpu(next(card for card in load_catalog() if card.id == name))


def workload_of(name, **changes):
    family, config = FAMILIES[name], TINY.get(name, {})
    config = changes.pop("config", config)
    frames = shortest_clip(family)
    blocks = num_blocks(family, config)
    known = {"family": name, "architecture": "tiny", "num_parameters": 1, "name": name}
    values = {
        "model": ModelSpec(num_blocks=blocks, **known),
        "resolution_px": 96,
        "buckets": (Bucket(width_px=96, height_px=64, num_frames=frames, num_items=3),),
        "max_text_tokens": 12,
        "text_padding": "exact",
        "rank": 4,
        "lora_alpha": 4.0,
        "targets": "attention",
        "num_control_images": family.min_controls,
        "effective_batch_size": 2,
    }
    return Workload(**{**values, **changes})


def num_blocks(family, config):
    with torch.device("meta"):
        return len(family.blocks(family.build_transformer(config)))
