"""Plain settings: fields of `Candidate` that a rule fills in and a user may pin, but no search turns."""

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from autotune.knobs.knob import GradientTolerance, TuningContext, why_not
from autotune.plan.candidate import Choice
from autotune.plan.hardware import HardwareProfile
from autotune.plan.workload import OptimizerChoice
from autotune.system.process import lazy_module
from autotune.weights.tensors import LOADERS

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

OPTIMIZERS: Mapping[str, str] = {
    "adamw": "torch.optim:AdamW",
    "adamw-8bit": "bitsandbytes.optim:AdamW8bit",
    "adafactor": "torch.optim:Adafactor",
    "lion": "lion_pytorch:Lion",
    "prodigy": "prodigyopt:Prodigy",
    "schedule-free": "schedulefree:AdamWScheduleFree",
}
"""Where each that has a name lies."""
CUSTOM = "custom"
"""The setting's value for a `package:Class`."""
ALLOWED = "AUTOTUNE_ALLOW_OPTIMIZER"
"""Environment variable with the only `package:Class` that may be loaded; processes of a run
inherit it."""
LION_RATE = 1 / 3
"""Lion's learning rate as a share of AdamW's: its updates are signs, so they are larger (Chen et
al. 2023, section 5, advise a third to a tenth)."""
PLAIN_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "precision": ("bf16", "fp16", "fp32"),
    "optimizer": (*OPTIMIZERS, CUSTOM),
    "loader": tuple(LOADERS),
    "allocator": ("default", "expandable"),
    "data_workers": (),
    "batch_memory": ("pageable", "pinned"),
}
"""By name the values that any machine may have; none if they are numbers."""
ROUNDING = {
    "bf16": (0.1, "8 bits of mantissa: each rounding is wrong by up to 0.4%"),
    "fp16": (0.03, "11 bits of mantissa: each rounding is wrong by up to 0.05%"),
}
"""Relative error of gradients in a precision, against fp32, and where it comes from."""
MAX_WORKERS = (2, 4)
"""Numbers of threads that collate batches, beyond none and one, that can be pinned: they pay if
the cache lies on a slow network disk."""
STORED_BYTES = 2
"""Bytes of a parameter in published files."""
AS_FAST = 0.9
"""Share of the fastest rate from disk from which noise decides between loaders, so that the page
cache does instead."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch reads the first that is set, once; the second is the older name."""


def plain_choices(context: TuningContext) -> dict[str, tuple[Choice, ...]]:
    """What each plain setting can be here: what the rule chooses, then what may be pinned."""
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
    """bf16 if the device has it, since it has the range of fp32; else fp16 where the model does
    not overflow it; on CPUs fp32, unless bf16 matmuls were measured to be faster."""
    hardware = context.hardware
    bf16, fp16 = (hardware.capability(f"precision.{name}").available for name in ("bf16", "fp16"))
    if hardware.device.kind == "cpu":
        speed = {
            dtype: max(
                (r.value for r in hardware.rates if r.name.startswith(f"matmul.{dtype}.")),
                default=0.0,
            )
            for dtype in ("bf16", "fp32")
        }
        return (*(("bf16", "fp32") if speed["bf16"] > speed["fp32"] else ("fp32", "bf16")), "fp16")
    if bf16:
        return ("bf16", "fp16") if fp16 else ("bf16",)
    if not fp16:
        return ("fp32",)
    return ("fp32", "fp16") if context.family.fp16_overflow else ("fp16", "fp32")


def _fastest_loader(context: TuningContext) -> str:
    """The one that the probe measured to be fastest among those whose own memory fits beside the
    model; safetensors, as `from_pretrained`, if none was measured."""
    hardware, budget = context.hardware, context.budget_bytes
    model = STORED_BYTES * context.workload.model.num_parameters
    shared = hardware.device.memory_kind == "integrated"
    held = {
        name: loader.overhead_bytes(model, shares_memory=shared) for name, loader in LOADERS.items()
    }
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


def setting_why_not_on(name: str, value: Choice, hardware: HardwareProfile) -> str | None:
    """Why a plain setting's value does not work on this machine at all; None if it may."""
    kind = hardware.device.kind
    if name == "batch_memory" and value == "pinned" and kind != "cuda":
        return f"only CUDA copies from page-locked memory by itself, this is {kind}"
    if name != "precision" or (value == "fp16" and kind == "cpu"):  # which works, for tests
        return None
    return why_not(hardware, f"precision.{value}")


def precision_tolerance(precision: Choice) -> GradientTolerance | None:
    """How gradients in a precision are compared with those in fp32."""
    tolerance, reason = ROUNDING.get(str(precision), (0.0, ""))
    if not tolerance:
        return None
    return GradientTolerance(precision, tolerance, f"{reason}, and errors add up over layers")


def optimizer_tolerance(optimizer: Choice) -> GradientTolerance | None:
    """How an optimizer's updates are compared with those of plain operations."""
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
    """Precision of text encoders and the VAE beside a transformer in `precision`: fp32 beside one
    in fp16.

    In fp16 activations overflow in T5 (huggingface/transformers#9295) and SDXL's VAE
    (madebyollin/sdxl-vae-fp16-fix).
    """
    return "fp32" if precision == "fp16" else precision


def encoder_element_bytes(precision: str) -> int:
    """Bytes of one of their weights that is not quantized."""
    return 4 if encoder_precision(precision) == "fp32" else 2


def allow_optimizer(name: str) -> None:
    """Let this process and those that it starts load that `package:Class`: the user has named
    it."""
    os.environ[ALLOWED] = name


def usual_learning_rate(choice: OptimizerChoice, adamw_rate: float) -> float:
    """The learning rate if the user names none. Prodigy finds its own, which this one
    multiplies."""
    return {"prodigy": 1.0, "lion": adamw_rate * LION_RATE}.get(choice.name, adamw_rate)
