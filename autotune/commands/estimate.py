"""`autotune estimate`: what one candidate would take, on this machine or one that nobody here owns."""

from typing import Annotated

import typer

from autotune.errors import InvalidInput

HINT = "what goes with what: autotune plan --list-knobs"


def estimate(
    model: Annotated[str, typer.Option(help="A known model's name, or a folder in the diffusers layout.")],
    hardware: Annotated[str | None, typer.Option(help="A GPU of the catalogue, or a saved probe; else here.")] = None,
    resolution: Annotated[str | None, typer.Option(help="Side of a square in pixels, or WIDTHxHEIGHT.")] = None,
    frames: Annotated[int | None, typer.Option(help="Frames of a clip, for video models.")] = None,
    text_tokens: Annotated[int | None, typer.Option(help="Length of an encoded caption.")] = None,
    rank: Annotated[int | None, typer.Option(help="Rank of the adapter.")] = None,
    targets: Annotated[str, typer.Option(help="attention, attention+mlp or all-linear.")] = "attention",
    batch: Annotated[int | None, typer.Option(help="Images per optimizer step (effective batch).")] = None,
    micro_batch_size: Annotated[int, typer.Option(help="Images per forward pass.")] = 1,
    checkpointing: Annotated[str, typer.Option(help="none, all, or how many blocks.")] = "all",
    quantization: Annotated[
        str, typer.Option(help="none, torchao-int8, torchao-fp8, layerwise-fp8, bnb-int8, bnb-nf4.")
    ] = "none",
    attention: Annotated[str, typer.Option(help="Attention backend, under diffusers' names.")] = "native",
    precision: Annotated[str | None, typer.Option(help="bf16 or fp32; by default what the device prefers.")] = None,
    swapped_blocks: Annotated[int, typer.Option(help="Blocks whose weights wait on the host.")] = 0,
    compile_: Annotated[str, typer.Option("--compile", help="off or block.")] = "off",
    allocator: Annotated[str | None, typer.Option(help="default or expandable; by default what suits.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of the job.")] = None,
    price: Annotated[float | None, typer.Option(help="Price of an hour, for the cost of the job.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")] = False,
) -> None:
    """Predict memory, time and cost of one candidate; runs nothing and downloads nothing."""
    from autotune.commands.machine import machine_for
    from autotune.cost.arguments import parse_resolution
    from autotune.cost.estimate import estimate as predict
    from autotune.families.resolve import resolve_model
    from autotune.knobs.allocator import Allocator
    from autotune.knobs.base import Setting
    from autotune.knobs.registry import KNOBS
    from autotune.reporting.estimate import render
    from autotune.schema import Candidate
    from autotune.training.describe import Wishes, describe_workload, given

    machine = machine_for(hardware)
    resolved = resolve_model(model)
    wishes = Wishes(
        size_px=parse_resolution(resolution) if resolution else None,
        num_frames=frames,
        text_tokens=text_tokens,
        rank=rank,
        targets=targets,
        effective_batch_size=given(batch, max(micro_batch_size, resolved.family.defaults.effective_batch_size)),
    )
    workload = describe_workload(resolved, None, wishes)
    setting = Setting(machine, resolved.family, workload)
    usual = "fp32" if machine.device.kind == "cpu" else "bf16"
    candidate = Candidate(
        micro_batch_size=_at_least_one(micro_batch_size),
        checkpointed_blocks=_checkpointed(checkpointing, resolved.spec.num_blocks),
        quantization=quantization,
        attention=attention,
        precision=precision or usual,
        swapped_blocks=_not_negative(swapped_blocks),
        compile=compile_,
        allocator=allocator or str(Allocator().choices(setting).admitted[0]),
    )
    for knob in KNOBS:
        if conflict := knob.conflict(candidate, setting):
            raise InvalidInput(f"{knob.title} cannot be {getattr(candidate, knob.name)} here: {conflict}", hint=HINT)
    answer = predict(
        workload,
        candidate,
        machine,
        family=resolved.family,
        config=resolved.config,
        num_steps=steps,
        price_per_hour=price,
    )
    typer.echo(answer.model_dump_json(indent=1) if as_json else render(answer), nl=as_json)


def _not_negative(blocks: int) -> int:
    if blocks < 0:
        raise InvalidInput(f"{blocks} swapped blocks cannot be", hint="the nearest valid value is 0")
    return blocks


def _at_least_one(size: int) -> int:
    from autotune.cost.arguments import positive

    return positive("micro-batch-size", size)


def _checkpointed(text: str, num_blocks: int) -> int:
    if text in ("none", "all"):
        return num_blocks if text == "all" else 0
    if not (text.isascii() and text.isdigit()):
        raise InvalidInput(f"--checkpointing {text!r} is no number of blocks", hint="give none, all or a number")
    return int(text)
