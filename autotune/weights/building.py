"""Build a model without weights, and decide which dtypes and names its weights shall have."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from autotune.weights.errors import BadWeights

Model = TypeVar("Model", bound=nn.Module)

MAX_TENSORS = 100_000
"""Far above any model; building so many takes some seconds, and constructors build whatever
number a file says.
"""

MAX_COMPUTED_TENSOR_BYTES = 1 << 31
"""Limit for one tensor that a constructor computes: Stable Diffusion 3.5 Medium's table of
positions takes 1.8 GB.
"""
MAX_COMPUTED_BYTES = 1 << 33
"""Limit for all of them, one after the other: the same model computes 7.2 GB."""

DtypePolicy = Callable[[str, torch.dtype], torch.dtype]
"""Returns the dtype that a tensor should have in the model, from its name and its dtype as
stored.
"""


def attribute_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Tensors that modules hold as plain attributes, as Qwen-Image its rotary frequencies."""
    values = (value for module in model.modules() for value in vars(module).values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def build_empty(factory: Callable[[], Model], *, dtype: torch.dtype | None = None) -> Model:
    """Build what `factory` returns, with every parameter on the meta device and everything else
    real.

    Buffers and tensors held as plain attributes (rotary tables) are computed by constructors and
    are in no file, so they must be real from the beginning. `dtype` is the default dtype while
    building, as in `from_pretrained`.

    Unlike with `accelerate.init_empty_weights`, tied parameters stay tied. Raises BadWeights before
    a constructor computes far more than any model's does.
    """
    previous = torch.get_default_dtype()
    handle = register_module_parameter_registration_hook(_move_to_meta)  # type: ignore[arg-type]  # torch's annotation forgets the result
    try:
        torch.set_default_dtype(dtype or previous)
        with limit_tensors(), _LimitComputed():  # type: ignore[no-untyped-call]
            return factory()
    finally:
        torch.set_default_dtype(previous)
        handle.remove()


@contextmanager
def limit_tensors() -> Iterator[None]:
    """Raise BadWeights if what is built meanwhile gets over `MAX_TENSORS` parameters, whatever
    asks for them.
    """
    numbers = count(1)

    def check(_module: nn.Module, _name: str, _parameter: nn.Parameter | None) -> None:
        if next(numbers) > MAX_TENSORS:
            raise _too_much(f"over {MAX_TENSORS:,} tensors")

    handle = register_module_parameter_registration_hook(check)
    try:
        yield
    finally:
        handle.remove()


class _LimitComputed(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Refuses what would compute too large tensors. Memory that `torch.empty` reserves costs
    nothing until it is written, and parameters leave it for the meta device before that."""

    _seen_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        writes = not (func.is_view or func is torch.ops.aten.empty.memory_format)
        if writes and kwargs.get("device") != torch.device("meta"):
            computed_bytes = _result_bytes(func, args, kwargs)
            self._seen_bytes += computed_bytes
            if computed_bytes > MAX_COMPUTED_TENSOR_BYTES or self._seen_bytes > MAX_COMPUTED_BYTES:
                raise _too_much("larger tables")
        return func(*args, **kwargs)


def _result_bytes(func: Any, args: Any, kwargs: Any) -> int:
    """Size of the tensor that an operation on real tensors would make; 0 for others, and where
    only values decide.
    """
    on_meta: list[bool] = []

    def as_meta(tensor: torch.Tensor) -> torch.Tensor:
        on_meta.append(tensor.is_meta)
        return tensor.to("meta")

    args, kwargs = tree_map_only(torch.Tensor, as_meta, (args, kwargs))
    if any(on_meta):
        return 0
    try:
        result = func(*args, **(kwargs if on_meta else kwargs | {"device": torch.device("meta")}))
    except (RuntimeError, NotImplementedError):  # what is wrong with it, the real call tells
        return 0
    return result.nbytes if isinstance(result, torch.Tensor) else 0


def _too_much(what: str) -> BadWeights:
    message = f"the configuration asks for {what}, more than any model has"
    return BadWeights(message, hint="use the published configuration")


def _move_to_meta(
    _module: nn.Module, _name: str, parameter: nn.Parameter | None
) -> nn.Parameter | None:
    if parameter is None or parameter.is_meta:  # a tied parameter must stay the same object
        return None
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


def from_pretrained_dtypes(model: nn.Module, dtype: torch.dtype) -> DtypePolicy:
    """The dtypes that `from_pretrained` gives: `dtype` for floating-point tensors that the class
    does not keep in fp32.

    diffusers always keeps `_keep_in_fp32_modules`; transformers keeps those for float16 only, and
    the strict ones for bfloat16 too.
    """

    def names(attribute: str) -> set[str]:
        return set(getattr(model, attribute, None) or ())

    fp32_modules = names("_keep_in_fp32_modules")
    if hasattr(model, "_keep_in_fp32_modules_strict"):
        fp32_modules = names("_keep_in_fp32_modules_strict") | (
            fp32_modules if dtype == torch.float16 else set()
        )

    def policy(name: str, stored: torch.dtype) -> torch.dtype:
        if not stored.is_floating_point:
            return stored
        return torch.float32 if fp32_modules.intersection(name.split(".")) else dtype

    return policy


def cast_as_loaded(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the parameters of a model that was not loaded the dtypes that loading gives them, in
    place.

    Buffers are left alone, as `from_pretrained` does.
    """
    policy = from_pretrained_dtypes(model, dtype)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(policy(name, parameter.dtype))


def transformers_renaming(model: nn.Module) -> Callable[[str], str]:
    """A function from the name of a tensor in published checkpoints to its name in a transformers
    model of today.

    It raises BadWeights for a tensor that transformers also splits, merges or transposes.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping  # takes seconds
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    steps = get_model_conversion_mapping(model)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if not isinstance(step, WeightRenaming)]
    state = model.state_dict()

    def rename(name: str) -> str:
        renamed, converter = rename_source_key(
            name, renamings, converters, model.base_model_prefix, state
        )
        if converter is not None:
            message = f"transformers does not only rename {name}, it converts it"
            raise BadWeights(message, hint="load this component with from_pretrained")
        return str(renamed)

    return rename
