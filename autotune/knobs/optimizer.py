"""Optimizer of the adapter, on fp32 masters: the user's choice, by name or as `package:Class`, and
what it takes.

Which one learns is the user's; a rule settles how it runs, no search. A class that only a plan
names is not loaded: importing it runs its code, so that the user has to name it, too
(`allow_optimizer`).
"""

import contextlib
import importlib
import inspect
import io
import itertools
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from autotune.errors import InvalidInput, first_line, suggest_nearest
from autotune.knobs.settings import ALLOWED, OPTIMIZERS
from autotune.plan.workload import ADAMW, OptimizerChoice, OptionValue
from autotune.system.process import lazy_module, reveal_packages

if TYPE_CHECKING:
    import torch
    from torch import nn
else:
    torch = lazy_module("torch")
    nn = lazy_module("torch.nn")

OURS = frozenset(
    {"params", "lr", "weight_decay", "fused", "foreach", "capturable", "differentiable", "maximize"}
)
"""Keyword arguments that are not the user's, or are fields of the job."""


def require_allowed(name: str) -> None:
    """Raise InvalidInput unless the user has named that `package:Class`."""
    if os.environ.get(ALLOWED) != name:
        raise InvalidInput(
            f"the plan's optimizer, {name}, is code to run, and loading it takes your consent",
            hint=f"if you trust that package, name it yourself: --optimizer {name}",
        )


def optimizer_class(name: str) -> "type[torch.optim.Optimizer]":
    """The class of a name, or of a `package:Class` that is allowed.

    Raises:
        InvalidInput: there is none, its package is not installed, or the user has not named it.
    """
    if ":" not in name and name not in OPTIMIZERS:
        hint = f"{suggest_nearest(name, OPTIMIZERS)}; or name a class: --optimizer package:Class"
        raise InvalidInput(f"there is no optimizer called {name!r}", hint=hint)
    if name not in OPTIMIZERS:
        require_allowed(name)
    module, _, attribute = OPTIMIZERS.get(name, name).partition(":")
    reveal_packages()
    try:
        package = importlib.import_module(module)
    except ImportError as error:
        extra = (
            "pip install 'lora-autotune[optimizers]'"
            if name in OPTIMIZERS
            else f"install what has {module}"
        )
        raise InvalidInput(
            f"the optimizer {name} needs {module}: {first_line(error)}", hint=extra
        ) from error
    except Exception as error:  # anybody's code
        what = f"{module} cannot be imported: {type(error).__name__}: {first_line(error)}"
        raise InvalidInput(what, hint=f"see where: python -c 'import {module}'") from error
    if not hasattr(package, attribute):
        raise InvalidInput(f"{module} has no {attribute}", hint="name a class of it: package:Class")
    found = getattr(package, attribute)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise InvalidInput(
            f"{name} is no torch.optim.Optimizer", hint=f"name one of {', '.join(OPTIMIZERS)}"
        )
    return found


def check_options(choice: OptimizerChoice) -> None:
    """Raise InvalidInput if the optimizer cannot be loaded, or does not take the options."""
    if choice == ADAMW:
        return
    takes = inspect.signature(optimizer_class(choice.name)).parameters
    open_ended = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
    for name, _ in choice.options:
        if name in OURS:
            hint = (
                "the job has --learning-rate, and weight_decay in the plan's file; leave the "
                "others out"
            )
            raise InvalidInput(f"{name} is not an option of an optimizer here", hint=hint)
        if name not in takes and not open_ended:
            known = sorted(takes.keys() - OURS)
            raise InvalidInput(
                f"{choice.name} takes no {name!r}", hint=suggest_nearest(name, known)
            )


def build_optimizer(
    choice: OptimizerChoice,
    parameters: "Sequence[torch.Tensor]",
    *,
    learning_rate: float,
    weight_decay: float,
) -> "torch.optim.Optimizer":
    """The optimizer of these fp32 parameters.

    Raises:
        InvalidInput: as `optimizer_class`, or its constructor does not take the options.
    """
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
    """What the optimizer of so many fp32 parameters of each shape takes beside them and their
    gradients.

    Returns:
        bytes of its state, measured by a step on two parameters of each shape on the CPU; and bytes
        that a step works with at most, one copy of all parameters: what lists of tensors that are
        updated together need.

    Raises:
        InvalidInput: as `optimizer_class`, or it cannot take a step.
    """
    numel = sum(math.prod(shape) * count for shape, count in shapes.items())
    # Two moments and a counter in one fused kernel: measuring would say the same.
    if choice == ADAMW:
        return 8 * numel + 4 * sum(shapes.values()), 0
    return _state_bytes(choice, tuple(sorted(shapes.items()))), 4 * numel


@cache
def _state_bytes(choice: OptimizerChoice, shapes: tuple[tuple[tuple[int, ...], int], ...]) -> int:
    generator = torch.Generator().manual_seed(0)
    parameters = [
        nn.Parameter(torch.randn(shape, generator=generator))
        for shape, _ in shapes
        for _ in range(2)
    ]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer: Any = build_optimizer(choice, parameters, learning_rate=1e-4, weight_decay=1e-2)
    try:
        getattr(optimizer, "train", lambda: None)()
        optimizer.step()
    except Exception as error:  # anybody's code
        message = f"the optimizer {choice.name} cannot take a step: {first_line(error)}"
        raise InvalidInput(message, hint="name one whose step takes no closure") from error
    held = [
        [v for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)] for p in parameters
    ]
    sizes = [
        {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in state}
        for state in held
    ]
    holders = Counter(itertools.chain(*sizes))
    # Such as a table of 8 bits.
    shared = {at: size for state in sizes for at, size in state.items() if holders[at] > 1}
    own = [sum(size for at, size in state.items() if at not in shared) for state in sizes]
    return sum(shared.values()) + sum(
        own[2 * number] * count for number, (_, count) in enumerate(shapes)
    )
