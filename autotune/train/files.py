"""Names of what a run writes into its output folder, for those who write and those who read it."""

import re
from pathlib import Path

ADAPTER_FILE = "pytorch_lora_weights.safetensors"
"""The name that diffusers looks for in a folder."""
CHECKPOINTS = "checkpoints"
"""The folder inside a run's output folder that holds them."""
CHECKPOINT_FILE = "checkpoint-{:06}.safetensors"
CHECKPOINT_PATTERN = re.compile(r"checkpoint-(\d{6,})\.safetensors")
REPORT_FILE = "report.json"
PREVIEWS = "previews"
"""Folder of the samples that are made during training."""
PREVIEW_NAME = re.compile(r"step-(\d{1,9})-(\d{1,2})\.png")
"""Name of a preview, with the number of steps that had been taken, and which of the job's
prompts it shows."""


def preview_file(step: int, number: int) -> str:
    """Where a preview lies, relative to the output folder."""
    return f"{PREVIEWS}/step-{step:06}-{number}.png"


def comparison_file(adapter: str, number: int) -> str:
    """Where the last picture of a prompt lies, `with` or `without` the adapter, relative to the
    output folder."""
    return f"{PREVIEWS}/{adapter}-{number}.png" if number else f"sample_{adapter}_adapter.png"


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in `folder`, of whatever run, by their steps, oldest first."""
    matches = (
        (CHECKPOINT_PATTERN.fullmatch(path.name), path) for path in folder.glob("checkpoint-*")
    )
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def checkpoints_of(output: Path) -> set[Path]:
    """The checkpoints of the run whose output folder this is."""
    return set(list_checkpoints(output / CHECKPOINTS).values())
