"""`autotune estimate`: what one candidate would take, on this machine or one that nobody here
owns."""

from dataclasses import dataclass
from typing import Any

import autotune
from autotune.cli.options import REQUIRED, Json, WorkloadOptions, given, option, takes
from autotune.cli.output import print_result, show_events


@dataclass(frozen=True, kw_only=True)
class EstimateOptions:
    """What `autotune estimate` can be asked; the names are those of `autotune.estimate`. None:
    not given."""

    model: str = option(
        "A known model's name, or a folder in the diffusers layout.", default=REQUIRED
    )
    hardware: str | None = option(
        "A GPU of the catalog, or a saved probe; by default this machine."
    )
    micro_batch_size: int = option("Images per forward pass.", default=1, min=1)
    checkpointing: str = option("none, all, or how many blocks.", default="all")
    quantization: str = option(
        "Weight format, e.g. none or another of `plan --list-knobs`.", default="none"
    )
    attention: str = option(
        "Attention backend, e.g. native or another of `plan --list-knobs`.", default="native"
    )
    swapped_blocks: int = option("Blocks whose weights stay in host memory.", default=0, min=0)
    modulation: str = option("resident, or ahead: its layers are not loaded.", default="resident")
    compile: str = option("off or block.", default="off")
    num_steps: int | None = option("Optimizer steps of the job.", "--steps", min=1)
    as_json: Json = False


@takes(EstimateOptions, WorkloadOptions)
def estimate(options: EstimateOptions, work: WorkloadOptions) -> None:
    """Predict memory, time and cost of one candidate; runs nothing and downloads nothing."""
    from autotune.report.machine import estimate_text

    arguments = given(options, but=("as_json", "checkpointing")) | work.values()
    with show_events() as show:
        answer = autotune.estimate(
            checkpointed_blocks=_checkpointed(options.checkpointing), on_event=show, **arguments
        )
    print_result(answer, options.as_json, estimate_text)


def _checkpointed(text: str) -> Any:
    """The number of blocks; None for all."""
    if text in ("none", "all"):
        return text
    if not (text.isascii() and text.isdigit()):
        raise autotune.InvalidInput(
            f"--checkpointing {text!r} is no number of blocks", hint="give none, all or a number"
        )
    return int(text)
