"""Options and arguments that several commands have, and how a command takes many of them.

@dataclass(frozen=True, kw_only=True)
class Options:
    rank: Rank = None

@takes(Options, JobOptions)
def command(asked: Options, job: JobOptions) -> None: ...
"""

import ast
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

import autotune

T = TypeVar("T")

Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
PlanFile = Annotated[Path, typer.Argument(help="A plan made by `autotune plan`.", metavar="PLAN")]
Variant = Annotated[
    str | None, typer.Option("--hardware", help="Of a file with variants for several machines, whose to take.")
]
Data = Annotated[
    list[str] | None,
    typer.Option(help="Folder of images with same-stem .txt captions, or a data.yaml; repeat for several."),
]
PlansOptimizer = Annotated[
    str | None,
    typer.Option(
        "--optimizer", help="The plan's own package:Class, which is loaded on your word alone.", metavar="OPTIMIZER"
    ),
]
Control = Annotated[Path | None, typer.Option(help="Folder of control images, for edit models.")]
Caption = Annotated[str | None, typer.Option(help="Caption of images that have none.")]
Trigger = Annotated[str | None, typer.Option(help="Word put in front of every caption that lacks it.")]
Resolution = Annotated[str | None, typer.Option(help="Side of a square in pixels, or WIDTHxHEIGHT.")]
Frames = Annotated[int | None, typer.Option("--frames", min=1, help="Frames of a clip, for video models.")]
Assume = Annotated[
    list[str] | None, typer.Option(help="A package that GPU is taken to have: flash-attn, xformers.", metavar="PACKAGE")
]
HostMemory = Annotated[str | None, typer.Option(help="Memory of that GPU's host; 64GiB by default.")]
Rank = Annotated[int | None, typer.Option(min=1, max=4096, help="Rank of the adapter.")]
Targets = Annotated[
    str | None,
    typer.Option(help="attention (default), attention+mlp, all-linear (SDXL: attention+mlp+proj); or names: to_q,ff.*"),
]
ADAPTERS = ("lora", "rslora", "dora")
Blocks = Annotated[
    str | None, typer.Option("--blocks", help="Adapt layers of these blocks alone: 10-30 or 0-4,18.", metavar="RANGES")
]
Adapter = Annotated[str | None, typer.Option(help="lora (default), rslora or dora.")]
Ema = Annotated[
    float | None, typer.Option("--ema", min=0, max=0.99999, help="Save an average of steps with this decay: 0.999.")
]
Optimizer = Annotated[
    str | None,
    typer.Option(help="adamw (default), adamw-8bit, adafactor, lion, prodigy, schedule-free or package:Class."),
]
OptimizerOptions = Annotated[
    list[str] | None,
    typer.Option("--optimizer-option", help="Of the optimizer; repeat for more.", metavar="NAME=VALUE"),
]
Batch = Annotated[
    int | None, typer.Option("--batch", min=1, max=65536, help="Images per optimizer step (effective batch).")
]
Steps = Annotated[int | None, typer.Option("--steps", min=1, help="Optimizer steps of the job.")]
Price = Annotated[
    float | None, typer.Option("--price", min=0, max=1e6, help="Price of an hour of one GPU, for the cost of the job.")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How a job's data is read, by the names of `Job`. None, empty: not given."""

    control: Control = None
    caption: Caption = None
    trigger: Trigger = None
    clips: Annotated[
        str | None, typer.Option(help="Clips of a video: head (default), all, or a number of them, evenly spread.")
    ] = None
    shuffle_tags: Annotated[
        int | None, typer.Option(min=0, help="Orders of a caption's tags that are seen; default 0: as written.")
    ] = None
    keep_tags: Annotated[int | None, typer.Option(min=0, help="First tags that stay in front; default 0.")] = None
    flip: Annotated[bool | None, typer.Option("--flip/--no-flip", help="Mirror images half of the time.")] = None
    crop: Annotated[str | None, typer.Option(help="What stays of a cropped image: center (default) or top.")] = None
    loss_mask: Annotated[
        str | None, typer.Option(help="What the loss counts: none (default: all), files (NAME.mask.png) or alpha.")
    ] = None

    def values(self) -> dict[str, Any]:
        """The fields of a job that the user gave.

        Raises:
            BadParameter: a job cannot have a value.
        """
        values = given(self)
        values |= {name: str(value) for name, value in values.items() if isinstance(value, Path)}
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        values |= {name: _parsed(values[name], kind) for name, kind in NUMBER_OR_NAME.items() if name in values}
        for name, value in values.items():
            _require_valid(name, value)
        return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOptions(DataOptions):
    """How a job trains, by the names of `Job`: what a plan starts with and a run may change. None, empty: not given."""

    base: Annotated[
        str | None, typer.Option(help="For a --model in one file: folder or hub id that its other parts come from.")
    ] = None
    vae: Annotated[str | None, typer.Option(help="For a --model in one file: its VAE.", metavar="FILE|FOLDER")] = None
    text_encoders: Annotated[
        list[str] | None,
        typer.Option("--text-encoder", help="And its text encoder; repeat for several.", metavar="FILE|FOLDER"),
    ] = None
    expert: Annotated[
        str | None, typer.Option(help="Of a model with two transformers, the one to train: high-noise or low-noise.")
    ] = None
    caption_dropout: Annotated[float | None, typer.Option(help="Share of captions left out; default 0.")] = None
    from_adapter: Annotated[
        Path | None, typer.Option(help="Go on with this adapter: diffusers', ComfyUI's or kohya's.", metavar="FILE")
    ] = None
    save_dtype: Annotated[str | None, typer.Option(help="Of the adapter: bf16 (default), fp16 or fp32.")] = None
    adapter_format: Annotated[
        str | None, typer.Option(help="Who else shall load the adapter: diffusers alone (default), comfyui or kohya.")
    ] = None
    mask_floor: Annotated[
        float | None, typer.Option(min=0, max=1, help="Weight of the loss where a mask is black; default 0.")
    ] = None
    cache: Annotated[
        str | None, typer.Option(help="Where encoded data is kept: disk (default) or memory, until the run ends.")
    ] = None
    num_steps: Steps = None
    num_train_epochs: Annotated[int | None, typer.Option("--epochs", min=1, help="Epochs, instead of steps.")] = None
    learning_rate: Annotated[float | None, typer.Option(help="Learning rate of the job.")] = None
    lr_scheduler: Annotated[
        str | None, typer.Option(help="constant (default), constant_with_warmup, linear, cosine or plateau.")
    ] = None
    lr_warmup_steps: Annotated[int | None, typer.Option(min=0, help="Steps over which the rate rises.")] = None
    timestep_sampling: Annotated[str | None, typer.Option(help="Noise levels: logit_normal (default) or uniform.")] = (
        None
    )
    timestep_shift: Annotated[str | None, typer.Option(help="Of the noise levels: a number, or by_resolution.")] = None
    guidance_scale: Annotated[
        float | None, typer.Option("--guidance", min=0, help="Of guidance-distilled models, in training.")
    ] = None
    preview_prompts: Annotated[
        list[str] | None,
        typer.Option("--preview-prompt", help="What previews show; repeat for more, up to 4.", metavar="TEXT"),
    ] = None
    preview_every: Annotated[
        int | None, typer.Option(min=0, help="Steps between previews (default 250); 0: only at the end.")
    ] = None
    validation: Annotated[
        str | None, typer.Option(help="Images to hold out for the loss: a share or a folder.", metavar="10%|FOLDER")
    ] = None
    validation_every: Annotated[
        int | None, typer.Option(min=0, help="Steps between its measurements (default 250); 0: only at the end.")
    ] = None
    keep_best: Annotated[
        bool | None, typer.Option("--keep-best", help="Keep the adapter that was best on held-out images.")
    ] = None
    weighting_scheme: Annotated[
        str | None,
        typer.Option("--loss-weighting", help="By noise: none (default), sigma_sqrt, cosmap; of SDXL none or min_snr."),
    ] = None
    checkpointing_epochs: Annotated[int | None, typer.Option(min=1, help="Epochs between checkpoints.")] = None
    checkpoints_total_limit: Annotated[
        int | None, typer.Option("--keep-last", min=1, help="Newest checkpoints that are kept; default 2.")
    ] = None
    checkpoints_keep_every: Annotated[
        int | None,
        typer.Option("--keep-every", min=0, help="Of so many checkpoints keep one for good; default 0."),
    ] = None
    checkpointing_steps: Annotated[int | None, typer.Option(min=0, help="Steps between checkpoints; default 250.")] = (
        None
    )
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Of initial weights, order and noise; default 0.")
    ] = None

    def values(self) -> dict[str, Any]:
        """The fields of a job that the user gave.

        Raises:
            BadParameter: both steps and epochs were given, or a job cannot have a value.
        """
        if self.num_steps and self.num_train_epochs:
            raise typer.BadParameter("epochs take the place of steps", param_hint=option_of("num_train_epochs"))
        if self.checkpointing_steps is not None and self.checkpointing_epochs:
            raise typer.BadParameter("epochs take the place of steps", param_hint=option_of("checkpointing_epochs"))
        return DataOptions.values(self)


def one_of(option: str, value: str | None, known: Sequence[str]) -> str | None:
    """`value`, where it is `known` or there is none. Raises BadParameter for another."""
    if value is not None and value not in known:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(known)}", param_hint=option)
    return value


def given(options: Any, *, but: Sequence[str] = ()) -> dict[str, Any]:
    """The options that the user gave, by name, without those in `but`."""
    values = options if isinstance(options, dict) else vars(options)
    return {name: value for name, value in values.items() if name not in but and value not in (None, [])}


def named_values(texts: Sequence[str] | None) -> dict[str, Any] | None:
    """Values by name of texts such as `betas=(0.9, 0.99)`; None if there are none. Raises BadParameter for others."""
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
            values[name] = tuple(float(one) if isinstance(one, int) else one for one in values[name])
    return values or None


def option_of(name: str) -> str:
    """What the option for that field of a job is called."""
    hint = get_type_hints(JobOptions, include_extras=True)[name]
    (option,) = (one for one in hint.__metadata__ if isinstance(one, typer.models.OptionInfo))
    declared = (option.default, *(option.param_decls or ()))  # annotated, the first name stands where defaults do
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


def takes(*options: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command whose options are the fields of dataclasses, each annotated with its `typer.Option`."""
    hints = {name: hint for one in options for name, hint in get_type_hints(one, include_extras=True).items()}
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for one in options
        for field in dataclasses.fields(one)
    ]
    signature = inspect.Signature(parameters)

    def command_of(run: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(run)
        def command(**values: Any) -> None:
            bound = signature.bind(**values).arguments
            run(
                *(one(**{f.name: bound[f.name] for f in dataclasses.fields(one) if f.name in bound}) for one in options)
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
