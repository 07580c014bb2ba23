"""Options and arguments that several commands have, and how a command takes many of them.

@dataclass(frozen=True, kw_only=True)
class Options:
    rank: int | None = option("Rank of the adapter.", min=1, max=4096)

@takes(Options, JobOptions)
def command(asked: Options, job: JobOptions) -> None: ...
"""

import ast
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

import autotune

REQUIRED: Any = dataclasses.MISSING
"""Default of what must be given."""


def option(text: str, *names: str, default: Any = None, **how: Any) -> Any:
    """A field of a class of options.

    Args:
        text: what `--help` says of it.
        names: what it is called, if that is not the field's name.
        default: its value if it is not given; `REQUIRED` if it must be.
        how: what `typer.Option` takes besides, such as `min` and `metavar`.
    """
    return dataclasses.field(
        default=default, metadata={"typer": typer.Option(*names, help=text, **how)}
    )


def argument(text: str, metavar: str, default: Any = REQUIRED) -> Any:
    """The same without a name: its place tells what it is."""
    return dataclasses.field(
        default=default, metadata={"typer": typer.Argument(help=text, metavar=metavar)}
    )


Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
PlanFile = Annotated[Path, typer.Argument(help="A plan made by `autotune plan`.", metavar="PLAN")]
Data = Annotated[
    list[str] | None,
    typer.Option(
        help="Folder of images with same-stem .txt captions, or a data.yaml; repeat for several."
    ),
]
PlansOptimizer = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        help="The plan's package:Class, which is loaded only if you name it.",
        metavar="OPTIMIZER",
    ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    """What is trained, as far as all predictions ask, by the names of
    `autotune.WorkloadOptions`."""

    resolution: str | None = option("Side of a square in pixels, or WIDTHxHEIGHT.")
    num_frames: int | None = option("Frames of a clip, for video models.", "--frames", min=1)
    rank: int | None = option("Rank of the adapter.", min=1, max=4096)
    targets: str | None = option(
        "attention (default), attention+mlp, all-linear (SDXL: attention+mlp+proj); or names: "
        "to_q,ff.*"
    )
    effective_batch_size: int | None = option(
        "Images per optimizer step (effective batch).", "--batch-size", min=1, max=65536
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkloadOptions(ShapeOptions):
    """What is trained and on what, by the names of `autotune.WorkloadOptions`. None, empty: not
    given."""

    host_memory: str | None = option("Memory of that GPU's host; 64GiB by default.")
    assume: list[str] | None = option(
        "A package to assume on that GPU: flash-attn(-3, -4), xformers.", metavar="PACKAGE"
    )
    adapted_blocks: str | None = option(
        "Adapt only layers of these blocks: 10-30 or 0-4,18.", "--blocks", metavar="RANGES"
    )
    adapter: str | None = option("lora (default), rslora or dora.")
    ema_decay: float | None = option(
        "Save an average of steps with this decay: 0.999.", "--ema", min=0, max=0.99999
    )
    optimizer: str | None = option(
        "adamw (default), adamw-8bit, adafactor, lion, prodigy, schedule-free or package:Class."
    )
    optimizer_options: list[str] | None = option(
        "An option of the optimizer; repeat for more.", "--optimizer-option", metavar="NAME=VALUE"
    )
    price_per_hour: float | None = option(
        "Price of an hour of one GPU, for the cost of the job.", "--price", min=0, max=1e6
    )

    def values(self) -> dict[str, Any]:
        """The arguments that the user gave. Raises BadParameter for values that there are not."""
        one_of("--adapter", self.adapter, ("lora", "rslora", "dora"))
        return given(self) | given({"optimizer_options": named_values(self.optimizer_options)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How a job's data is read, by the names of `Job`. None, empty: not given."""

    control: Path | None = option("Folder of control images, for edit models.")
    caption: str | None = option("Caption of images that have none.")
    trigger: str | None = option("Word put in front of every caption that lacks it.")
    clips: str | None = option(
        "Clips of a video: head (default), all, or a number of them, evenly spread."
    )
    shuffle_tags: int | None = option(
        "Orders of a caption's tags that are seen; default 0: as written.", min=0
    )
    keep_tags: int | None = option("First tags that stay in front; default 0.", min=0)
    flip: bool | None = option("Mirror images half of the time.", "--flip/--no-flip")
    crop: str | None = option("What stays of a cropped image: center (default) or top.")
    loss_mask: str | None = option(
        "What the loss counts: none (default: all), files (NAME.mask.png) or alpha."
    )

    def values(self) -> dict[str, Any]:
        """The fields of a job that the user gave.

        Raises:
            BadParameter: a job cannot have a value.
        """
        values = given(self)
        values |= {name: str(value) for name, value in values.items() if isinstance(value, Path)}
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        values |= {
            name: _parsed(values[name], kind)
            for name, kind in NUMBER_OR_NAME.items()
            if name in values
        }
        for name, value in values.items():
            _require_valid(name, value)
        return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOptions(DataOptions):
    """How a job trains, by the names of `Job`: what a plan starts with and a run may change.
    None, empty: not given."""

    base: str | None = option(
        "For a --model in one file: folder or hub id that its other parts come from."
    )
    vae: str | None = option("For a --model in one file: its VAE.", metavar="FILE|FOLDER")
    text_encoders: list[str] | None = option(
        "For a --model in one file: a text encoder; repeat for several.",
        "--text-encoder",
        metavar="FILE|FOLDER",
    )
    expert: str | None = option(
        "Which transformer to train, if a model has two: high-noise or low-noise."
    )
    caption_dropout: float | None = option("Share of captions left out; default 0.")
    from_adapter: Path | None = option(
        "Start from this adapter of diffusers, ComfyUI or kohya.", metavar="FILE"
    )
    save_dtype: str | None = option("Dtype of the adapter's file: bf16 (default), fp16 or fp32.")
    adapter_format: str | None = option(
        "Write the adapter for diffusers (default), or also for comfyui or kohya."
    )
    cache: str | None = option(
        "Where encoded data is kept: disk (default) or memory, until the run ends."
    )
    num_steps: int | None = option("Optimizer steps of the job.", "--steps", min=1)
    num_train_epochs: int | None = option("Epochs, instead of steps.", "--epochs", min=1)
    learning_rate: float | None = option("Learning rate of the job.")
    lr_scheduler: str | None = option(
        "constant (default), constant_with_warmup, linear, cosine or plateau."
    )
    lr_warmup_steps: int | None = option("Steps over which the rate rises.", min=0)
    timestep_sampling: str | None = option("Noise levels: logit_normal (default) or uniform.")
    timestep_shift: str | None = option("Shift of the noise levels: a number, or by_resolution.")
    guidance_scale: float | None = option(
        "Guidance scale in training, for distilled models.", "--guidance", min=0
    )
    preview_prompts: list[str] | None = option(
        "What previews show; repeat for more, up to 4.", "--preview-prompt", metavar="TEXT"
    )
    preview_every: int | None = option(
        "Steps between previews (default 250); 0: only at the end.", min=0
    )
    validation: str | None = option(
        "Images to hold out and measure: a share, or a folder.", metavar="10%|FOLDER"
    )
    validation_every: int | None = option(
        "Steps between validations (default 250); 0: only at the end.", min=0
    )
    keep_best: bool | None = option(
        "Keep the adapter that was best on held-out images.", "--keep-best"
    )
    weighting_scheme: str | None = option(
        "Weight by noise level: none (default), sigma_sqrt, cosmap; SDXL: none, min_snr.",
        "--loss-weighting",
    )
    checkpointing_epochs: int | None = option("Epochs between checkpoints.", min=1)
    checkpoints_total_limit: int | None = option(
        "Newest checkpoints to keep; default 2.", "--keep-last", min=1
    )
    checkpoints_keep_every: int | None = option(
        "Keep every Nth checkpoint for good; default 0: none.", "--keep-every", min=0
    )
    checkpointing_steps: int | None = option("Steps between checkpoints; default 250.", min=0)
    seed: int | None = option(
        "Seed of initial weights, order and noise; default 0.", min=0, max=2**63 - 1
    )

    def values(self) -> dict[str, Any]:
        """The fields of a job that the user gave.

        Raises:
            BadParameter: both steps and epochs were given, or a job cannot have a value.
        """
        if self.num_steps and self.num_train_epochs:
            raise typer.BadParameter(
                "epochs take the place of steps", param_hint=option_of("num_train_epochs")
            )
        if self.checkpointing_steps is not None and self.checkpointing_epochs:
            raise typer.BadParameter(
                "epochs take the place of steps", param_hint=option_of("checkpointing_epochs")
            )
        return DataOptions.values(self)


def one_of(option: str, value: str | None, known: Sequence[str]) -> str | None:
    """`value`, where it is `known` or there is none. Raises BadParameter for another."""
    if value is not None and value not in known:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}", param_hint=option)
    return value


def given(options: Any, *, but: Sequence[str] = ()) -> dict[str, Any]:
    """The options that the user gave, by name, without those in `but`."""
    values = options if isinstance(options, dict) else vars(options)
    return {
        name: value for name, value in values.items() if name not in but and value not in (None, [])
    }


def named_values(texts: Sequence[str] | None) -> dict[str, Any] | None:
    """Values by name of texts such as `betas=(0.9, 0.99)`; None if there are none. Raises
    BadParameter for others."""
    values: dict[str, Any] = {}
    for text in texts or ():
        name, sign, value = text.partition("=")
        if not (name.isidentifier() and sign and value):
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--optimizer-option")
        try:
            values[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            values[name] = {"true": True, "false": False}.get(value, value)
        if isinstance(values[name], list):
            values[name] = tuple(values[name])
        if isinstance(values[name], tuple):
            values[name] = tuple(
                float(one) if isinstance(one, int) else one for one in values[name]
            )
    return values or None


def option_of(name: str) -> str:
    """What the option for that field of a job is called."""
    (metadata,) = (field.metadata for field in dataclasses.fields(JobOptions) if field.name == name)
    info = metadata["typer"]
    declared = (
        info.default,
        *(info.param_decls or ()),
    )  # annotated, the first name stands where defaults do
    return next((one for one in declared if isinstance(one, str)), "--" + name.replace("_", "-"))


def _require_valid(name: str, value: object) -> None:
    from pydantic import TypeAdapter, ValidationError

    field = autotune.Job.model_fields[name]
    kind: Any = Annotated[field.annotation, field]
    try:
        TypeAdapter(kind, config=autotune.Job.model_config).validate_python(value)
    except ValidationError as error:
        wrong = " or ".join(one["msg"].lower() for one in error.errors())
        raise typer.BadParameter(wrong, param_hint=option_of(name)) from error


def _annotated(options: type) -> dict[str, Any]:
    """What typer needs to know of each field."""
    hints, fields = get_type_hints(options, include_extras=True), dataclasses.fields(options)
    infos = {field.name: field.metadata.get("typer") for field in fields}
    return {
        name: Annotated[hints[name], info] if info else hints[name] for name, info in infos.items()
    }


def takes(*options: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command whose options are the fields of dataclasses, each an `option`, an
    `argument`, or annotated."""
    hints = {name: hint for one in options for name, hint in _annotated(one).items()}
    defaults = {field.name: field.default for one in options for field in dataclasses.fields(one)}
    signature = inspect.Signature(
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if default is REQUIRED else default,
                annotation=hints[name],
            )
            for name, default in defaults.items()
        ]
    )

    def command_of(run: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(run)
        def command(**values: Any) -> None:
            run(
                *(
                    one(**{field.name: values[field.name] for field in dataclasses.fields(one)})
                    for one in options
                )
            )

        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = hints
        return command

    return command_of


NUMBER_OR_NAME: dict[str, type[int] | type[float]] = {"timestep_shift": float, "clips": int}
"""Options that take a number or a name."""


def _parsed(text: str, kind: type[int] | type[float]) -> float | str:
    try:
        return kind(text)
    except ValueError:
        return text
