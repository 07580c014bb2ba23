"""`autotune estimate`: what one candidate would take, on this machine or one that nobody here owns."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.options import Batch, Frames, Json, Price, Rank, Resolution, Steps, Targets, takes, tell
from autotune.errors import InvalidInput

if TYPE_CHECKING:
    from autotune.knobs import TuningContext
    from autotune.schema import Candidate


@dataclass(frozen=True, kw_only=True)
class EstimateOptions:
    """What `autotune estimate` can be asked. None: not said."""

    model: Annotated[str, typer.Option(help="A known model's name, or a folder in the diffusers layout.")]
    hardware: Annotated[str | None, typer.Option(help="A GPU of the catalog, or a saved probe; else here.")] = None
    resolution: Resolution = None
    frames: Frames = None
    text_tokens: Annotated[int | None, typer.Option(help="Length of an encoded caption.")] = None
    rank: Rank = None
    targets: Targets = None
    batch: Batch = None
    micro_batch_size: Annotated[int, typer.Option(min=1, help="Images per forward pass.")] = 1
    checkpointing: Annotated[str, typer.Option(help="none, all, or how many blocks.")] = "all"
    quantization: Annotated[str, typer.Option(help="Weight format, e.g. none or another of `plan --list-knobs`.")] = (
        "none"
    )
    attention: Annotated[
        str, typer.Option(help="Attention backend, e.g. native or another of `plan --list-knobs`.")
    ] = "native"
    precision: Annotated[str | None, typer.Option(help="bf16 or fp32; by default what the device prefers.")] = None
    swapped_blocks: Annotated[int, typer.Option(min=0, help="Blocks whose weights wait on the host.")] = 0
    compile: Annotated[str, typer.Option(help="off or block.")] = "off"
    allocator: Annotated[str | None, typer.Option(help="default or expandable; by default what suits.")] = None
    steps: Steps = None
    price: Price = None
    as_json: Json = False


@takes(EstimateOptions)
def estimate(asked: EstimateOptions) -> None:
    """Predict memory, time and cost of one candidate; runs nothing and downloads nothing."""
    from autotune.cli.machine import machine_for
    from autotune.cli.terminal import err
    from autotune.cost import Predictor, parse_resolution
    from autotune.cost import estimate as predict
    from autotune.families import parts_of, resolve_model
    from autotune.knobs import TuningContext
    from autotune.reporting import render
    from autotune.training import WorkloadOverrides, describe_workload, given

    machine = machine_for(asked.hardware)
    with err.status("tracing the model"):
        resolved = resolve_model(asked.model)
        usual_batch = max(asked.micro_batch_size, resolved.family.defaults.effective_batch_size)
        wishes = WorkloadOverrides(
            size_px=parse_resolution(asked.resolution) if asked.resolution else None,
            num_frames=asked.frames,
            text_tokens=asked.text_tokens,
            rank=asked.rank,
            targets=asked.targets or "attention",
            effective_batch_size=given(asked.batch, usual_batch),
        )
        context = TuningContext(machine, resolved.family, describe_workload(resolved, None, wishes))
        predictor = Predictor(machine, context.workload, resolved.family, resolved.config, parts_of(resolved))
        candidate = _candidate(asked, context)
        answer = predict(predictor, candidate, num_steps=asked.steps, price_per_hour=asked.price)
    tell(answer, asked.as_json, render)


def _candidate(asked: EstimateOptions, context: "TuningContext") -> "Candidate":
    """The settings that were asked for."""
    from autotune.knobs import Allocator
    from autotune.schema import Candidate

    return Candidate(
        micro_batch_size=asked.micro_batch_size,
        checkpointed_blocks=_checkpointed(asked.checkpointing, context.workload.model.num_blocks),
        quantization=asked.quantization,
        attention=asked.attention,
        precision=asked.precision or ("fp32" if context.hardware.device.kind == "cpu" else "bf16"),
        swapped_blocks=asked.swapped_blocks,
        compile=asked.compile,
        allocator=asked.allocator or str(Allocator().choices(context).admitted[0]),
    )


def _checkpointed(text: str, num_blocks: int) -> int:
    if text in ("none", "all"):
        return num_blocks if text == "all" else 0
    if not (text.isascii() and text.isdigit()):
        raise InvalidInput(f"--checkpointing {text!r} is no number of blocks", hint="give none, all or a number")
    return int(text)
