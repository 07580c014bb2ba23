"""Plain settings: fields of `Candidate` that a rule fills in and a user may pin.

Which optimizer learns is the user's choice, by name or as `package:Class`. A class that only a plan
names is not loaded: importing it runs its code.
"""

import contextlib
import importlib
import inspect
import io
import math
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

from autotune.errors import InvalidInput, first_line, suggest_nearest
from autotune.knobs.knob import GradientTolerance, TuningContext
from autotune.plan.candidate import Choice
from autotune.plan.workload import ADAMW, OptimizerChoice, OptionValue
from autotune.system.lazy import nn, torch
from autotune.system.process import reveal_packages
from autotune.weights.tensors import LOADERS

OPTIMIZERS: Mapping[str, str] = {
    "adamw": "torch.optim:AdamW",
    "adamw-8bit": "bitsandbytes.optim:AdamW8bit",
    "adafactor": "torch.optim:Adafactor",
    "lion": "lion_pytorch:Lion",
    "prodigy": "prodigyopt:Prodigy",
    "schedule-free": "schedulefree:AdamWScheduleFree",
}
CUSTOM = "custom"  # of a `package:Class`
ALLOWED = "AUTOTUNE_ALLOW_OPTIMIZER"  # the only `package:Class` that may be loaded
# Of AdamW's: Lion's updates are signs, so larger (Chen et al. 2023, section 5: a third to a tenth).
LION_RATE = 1 / 3
# Values that any machine may have; none if they are numbers.
PLAIN_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "precision": ("bf16", "fp16", "fp32"),
    "optimizer": (*OPTIMIZERS, CUSTOM),
    "loader": tuple(LOADERS),
    "allocator": ("default", "expandable"),
    "data_workers": (),
    "batch_memory": ("pageable", "pinned"),
}
# Relative error of gradients in a precision, against fp32, and where it comes from.
ROUNDING = {
    "bf16": (0.1, "8 bits of mantissa: each rounding is wrong by up to 0.4%"),
    "fp16": (0.03, "11 bits of mantissa: each rounding is wrong by up to 0.05%"),
}
# Threads that collate batches that can be pinned: they pay on a slow network disk.
MAX_WORKERS = (2, 4)
STORED_BYTES = 2  # of a parameter in published files
AS_FAST = 0.9  # Of the fastest rate from disk: within it the page cache decides between loaders.
# Torch reads the first that is set, once.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def plain_choices(context: TuningContext) -> dict[str, tuple[Choice, ...]]:
    """List what each plain setting can be here: what the rule chooses, then what may be pinned."""
    hardware, optimizer = context.hardware, context.workload.optimizer.name
    device, host = hardware.device, hardware.host
    # Expandable segments leave no holes between segments that nothing else fits into. On shared
    # memory reports about them contradict each other.
    allocators: tuple[str, ...] = ("default", "expandable")
    if device.kind != "cuda" or host.system.startswith("Windows"):
        allocators = allocators[:1]
    elif device.memory_kind == "discrete":
        allocators = allocators[::-1]
    # Copies from pageable memory go through a second buffer. On shared memory locked pages are lost
    # to both the device and the host, and the copy is no faster.
    crosses_bus = device.kind == "cuda" and device.memory_kind != "integrated"
    # A thread that works a batch ahead left 0.04% of a step waiting; on a CPU that trains, it cost
    # 3% of a step.
    usual = 0 if device.kind == "cpu" else 1
    more = (number for number in MAX_WORKERS if number <= host.logical_cores)
    best = _fastest_loader(context)
    return {
        "precision": _precisions(context),
        "optimizer": (optimizer if optimizer in OPTIMIZERS else CUSTOM,),
        "loader": (best, *(name for name in LOADERS if name != best)),
        "allocator": allocators,
        "data_workers": (usual, 1 - usual, *more),
        "batch_memory": ("pinned", "pageable") if crosses_bus else ("pageable",),
    }


def _precisions(context: TuningContext) -> tuple[str, ...]:
    """bf16 has fp32's range; a CPU has fp32 unless its bf16 products were measured as faster."""
    hardware = context.hardware
    bf16, fp16 = (hardware.capability(f"precision.{name}").available for name in ("bf16", "fp16"))
    if hardware.device.kind == "cpu":
        names = "matmul.bf16.", "matmul.fp32."
        half, full = (max(hardware.rates_under(name).values(), default=0.0) for name in names)
        return ("bf16", "fp32", "fp16") if half > full else ("fp32", "bf16", "fp16")
    if bf16:
        return ("bf16", "fp16") if fp16 else ("bf16",)
    if not fp16:
        return ("fp32",)
    return ("fp32", "fp16") if context.family.fp16_overflow else ("fp16", "fp32")


def _fastest_loader(context: TuningContext) -> str:
    """By the probe, of those whose memory fits next to the model; else as `from_pretrained`."""
    hardware, budget = context.hardware, context.budget_bytes
    model = STORED_BYTES * context.workload.model.num_parameters
    shared = hardware.device.memory_kind == "integrated"
    loaders = LOADERS.items()
    held = {name: each.overhead_bytes(model, shares_memory=shared) for name, each in loaders}
    # A model that is too large by itself speaks against no loader.
    fits = {name: model + held[name] <= budget or model > budget for name in LOADERS}
    measured = {name: rate for name in LOADERS if (rate := hardware.rate(f"disk.{name}"))}
    if not measured:
        return min(("safetensors", *LOADERS), key=lambda name: not fits[name])
    fitting = {name: rate for name, rate in measured.items() if fits[name]}
    if not fitting:
        return min(measured, key=held.__getitem__)
    close = [name for name, rate in fitting.items() if rate >= AS_FAST * max(fitting.values())]
    return max(close, key=lambda name: (hardware.rate(f"page_cache.{name}") or 0.0, fitting[name]))


def precision_tolerance(precision: Choice) -> GradientTolerance | None:
    """Return how gradients in a precision are compared with those in fp32."""
    tolerance, reason = ROUNDING.get(str(precision), (0.0, ""))
    reason += ", and errors add up over layers"
    return GradientTolerance(precision, tolerance, reason) if tolerance else None


def optimizer_tolerance(optimizer: Choice) -> GradientTolerance | None:
    """Return how an optimizer's updates are compared with those of plain operations."""
    reason = "one fused kernel in fp32, where single operations round at each"
    return GradientTolerance(optimizer, 1e-3, reason) if optimizer == "adamw" else None


def configure_allocator(choice: Choice) -> None:
    """Have torch's allocator grow as chosen in this process; what the user has set stays."""
    if choice != "expandable" or any(name in os.environ for name in ALLOCATOR_VARIABLES):
        return
    os.environ.update(dict.fromkeys(ALLOCATOR_VARIABLES, "expandable_segments:True"))
    # It may have read the variables already: at the latest as CUDA starts.
    if loaded := sys.modules.get("torch"):
        loaded._C._accelerator_setAllocatorSettings("expandable_segments:True")


def encoder_precision(precision: str) -> str:
    """Return the precision of text encoders and the VAE: fp32 with a transformer in fp16. There
    activations overflow in T5 (huggingface/transformers#9295) and SDXL's VAE
    (madebyollin/sdxl-vae-fp16-fix)."""
    return "fp32" if precision == "fp16" else precision


def encoder_element_bytes(precision: str) -> int:
    """Return the bytes of one of their weights that is not quantized."""
    return 4 if encoder_precision(precision) == "fp32" else 2


def allow_optimizer(name: str) -> None:
    """Let this process and those that it starts load that `package:Class`."""
    os.environ[ALLOWED] = name


def usual_learning_rate(choice: OptimizerChoice, adamw_rate: float) -> float:
    """Return the learning rate if the user names none; Prodigy finds its own, and multiplies it."""
    return {"prodigy": 1.0, "lion": adamw_rate * LION_RATE}.get(choice.name, adamw_rate)


# Keyword arguments that are not the user's, or are fields of the job.
OURS = frozenset(
    {"params", "lr", "weight_decay", "fused", "foreach", "capturable", "differentiable", "maximize"}
)


def optimizer_class(name: str) -> "type[torch.optim.Optimizer]":
    """Load the class of a name, or of the user's `package:Class`, or raise InvalidInput."""
    if ":" not in name and name not in OPTIMIZERS:
        hint = f"{suggest_nearest(name, OPTIMIZERS)}; or name a class: --optimizer package:Class"
        raise InvalidInput(f"there is no optimizer called {name!r}", hint=hint)
    if name not in OPTIMIZERS and os.environ.get(ALLOWED) != name:
        raise InvalidInput(
            f"the plan's optimizer, {name}, runs another package's code, which needs your consent",
            hint=f"if you trust that package, name it yourself: --optimizer {name}",
        )
    module, _, attribute = OPTIMIZERS.get(name, name).partition(":")
    reveal_packages()
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:  # anybody's code
        what = f"the optimizer {name} needs {module}: {type(error).__name__}: {first_line(error)}"
        extra = "pip install 'lora-autotune[optimizers]'"
        hint = extra if name in OPTIMIZERS else f"see where: python -c 'import {module}'"
        raise InvalidInput(what, hint=hint) from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        hint = f"name one of {', '.join(OPTIMIZERS)}"
        raise InvalidInput(f"{name} is no torch.optim.Optimizer", hint=hint)
    return found


def check_options(choice: OptimizerChoice) -> None:
    """Raise InvalidInput if the optimizer cannot be loaded, or does not take the options."""
    if choice == ADAMW:
        return
    takes = inspect.signature(optimizer_class(choice.name)).parameters
    open_ended = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
    for name, _ in choice.options:
        if name in OURS:
            hint = "the job has --learning-rate, and weight_decay in the plan's file"
            raise InvalidInput(f"{name} is not an option of an optimizer here", hint=hint)
        if name not in takes and not open_ended:
            hint = suggest_nearest(name, sorted(takes.keys() - OURS))
            raise InvalidInput(f"{choice.name} takes no {name!r}", hint=hint)


def build_optimizer(
    choice: OptimizerChoice,
    parameters: "Sequence[torch.Tensor]",
    *,
    learning_rate: float,
    weight_decay: float,
) -> "torch.optim.Optimizer":
    """Build the optimizer of these fp32 parameters, or raise InvalidInput."""
    kind: Any = optimizer_class(choice.name)
    takes = inspect.signature(kind).parameters
    given: dict[str, OptionValue] = {"lr": learning_rate, "weight_decay": weight_decay}
    if choice.name == "adamw":
        given["fused"] = parameters[0].device.type != "mps"
    elif "foreach" in takes:  # on a CPU as on a GPU, so that what it takes can be measured anywhere
        given["foreach"] = True
    known = {name: value for name, value in given.items() if name in takes}
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # Prodigy's prints
            made: torch.optim.Optimizer = kind(list(parameters), **known, **dict(choice.options))
    except (TypeError, ValueError, AssertionError, LookupError, AttributeError) as error:
        message = f"{choice.name} does not accept its options: {first_line(error)}"
        raise InvalidInput(message, hint="correct --optimizer-option") from error
    return made


def optimizer_bytes(
    choice: OptimizerChoice, shapes: Mapping[tuple[int, ...], int]
) -> tuple[int, int]:
    """Return bytes of the optimizer's state, for so many parameters of each shape, and of a step.
    State is measured by a step on two of each shape on the CPU. A step takes one copy of all: what
    lists of tensors that are updated together need."""
    numel = sum(math.prod(shape) * count for shape, count in shapes.items())
    # Two moments and a counter in one fused kernel: measuring would say the same.
    if choice == ADAMW:
        return 8 * numel + 4 * sum(shapes.values()), 0
    return _state_bytes(choice, tuple(sorted(shapes.items()))), 4 * numel


@cache
def _state_bytes(choice: OptimizerChoice, shapes: tuple[tuple[tuple[int, ...], int], ...]) -> int:
    random = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    parameters = [nn.Parameter(random(shape)) for shape, _ in shapes for _ in range(2)]
    for parameter in parameters:
        parameter.grad = random(parameter.shape)
    optimizer: Any = build_optimizer(choice, parameters, learning_rate=1e-4, weight_decay=1e-2)
    try:
        getattr(optimizer, "train", lambda: None)()
        optimizer.step()
    except Exception as error:  # anybody's code
        message = f"the optimizer {choice.name} cannot take a step: {first_line(error)}"
        raise InvalidInput(message, hint="name one whose step takes no closure") from error

    def sizes_of(parameter: Any) -> dict[int, int]:
        values = optimizer.state[parameter].values()
        storages = [v.untyped_storage() for v in values if isinstance(v, torch.Tensor)]
        return {storage.data_ptr(): storage.nbytes() for storage in storages}

    sizes = [sizes_of(parameter) for parameter in parameters]
    holders = Counter(each for of_one in sizes for each in of_one)
    # Such as a table of 8 bits.
    shared = {at: size for state in sizes for at, size in state.items() if holders[at] > 1}
    own = [sum(size for at, size in state.items() if at not in shared) for state in sizes]
    pairs = zip(own[::2], shapes, strict=True)
    return sum(shared.values()) + sum(size * count for size, (_, count) in pairs)
