"""`autotune estimate`: what one candidate would take, on this machine or one that nobody here owns."""

from dataclasses import dataclass
from typing import Annotated

import typer

import autotune
from autotune import reporting
from autotune.cli.options import (
    ADAPTERS,
    Adapter,
    Assume,
    Batch,
    Blocks,
    Ema,
    Frames,
    HostMemory,
    Json,
    Optimizer,
    OptimizerOptions,
    Price,
    Rank,
    Resolution,
    Steps,
    Targets,
    given,
    named_values,
    one_of,
    takes,
)
from autotune.cli.output import print_result, show_events


@dataclass(frozen=True, kw_only=True)
class EstimateOptions:
    """What `autotune estimate` can be asked; the names are those of `autotune.estimate`. None: not given."""

    model: Annotated[str, typer.Option(help="A known model's name, or a folder in the diffusers layout.")]
    hardware: Annotated[str | None, typer.Option(help="A GPU of the catalog, or a saved probe; else here.")] = None
    host_memory: HostMemory = None
    assume: Assume = None
    resolution: Resolution = None
    num_frames: Frames = None
    text_tokens: Annotated[int | None, typer.Option(help="Length of an encoded caption.")] = None
    rank: Rank = None
    targets: Targets = None
    adapted_blocks: Blocks = None
    adapter: Adapter = None
    ema_decay: Ema = None
    optimizer: Optimizer = None
    optimizer_options: OptimizerOptions = None
    effective_batch_size: Batch = None
    micro_batch_size: Annotated[int, typer.Option(min=1, help="Images per forward pass.")] = 1
    checkpointing: Annotated[str, typer.Option(help="none, all, or how many blocks.")] = "all"
    quantization: Annotated[str, typer.Option(help="Weight format, e.g. none or another of `plan --list-knobs`.")] = (
        "none"
    )
    attention: Annotated[
        str, typer.Option(help="Attention backend, e.g. native or another of `plan --list-knobs`.")
    ] = "native"
    precision: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; by default the device's choice.")] = None
    swapped_blocks: Annotated[int, typer.Option(min=0, help="Blocks whose weights wait on the host.")] = 0
    modulation: Annotated[str, typer.Option(help="resident, or ahead: its layers are not loaded.")] = "resident"
    compile: Annotated[str, typer.Option(help="off or block.")] = "off"
    allocator: Annotated[str | None, typer.Option(help="default or expandable; by default what suits.")] = None
    num_steps: Steps = None
    price_per_hour: Price = None
    as_json: Json = False


@takes(EstimateOptions)
def estimate(options: EstimateOptions) -> None:
    """Predict memory, time and cost of one candidate; runs nothing and downloads nothing."""
    one_of("--adapter", options.adapter, ADAPTERS)
    chosen = {"optimizer_options": named_values(options.optimizer_options)}
    arguments = {**given(options, but=("as_json", "checkpointing")), **given(chosen)}
    with show_events() as show:
        answer = autotune.estimate(checkpointed_blocks=_checkpointed(options.checkpointing), on_event=show, **arguments)
    print_result(answer, options.as_json, reporting.estimate_text)


def _checkpointed(text: str) -> int | None:
    """The number of blocks; None for all."""
    if text in ("none", "all"):
        return 0 if text == "none" else None
    if not (text.isascii() and text.isdigit()):
        raise autotune.InvalidInput(
            f"--checkpointing {text!r} is no number of blocks", hint="give none, all or a number"
        )
    return int(text)
