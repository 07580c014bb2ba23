"""Builds models without weights, within limits on what a configuration may ask for."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from autotune.errors import first_line
from autotune.weights import files

Model = TypeVar("Model", bound=nn.Module)

MAX_TENSORS = 100_000  # constructors build whatever number a file says, so many within seconds
MAX_COMPUTED_TENSOR_BYTES = 1 << 31  # Stable Diffusion 3.5 Medium computes positions of 1.8 GB
MAX_COMPUTED_BYTES = 1 << 33  # for all tensors, one after the other: the same computes 7.2 GB


def build_empty(factory: Callable[[], Model], *, dtype: torch.dtype | None = None) -> Model:
    """Build a model with (tied) parameters on the meta device, and everything else real.

    Buffers and plain attributes (rotary tables) are computed by constructors and are in no file.
    `dtype` is the default dtype while building. Raises BadWeights before a constructor computes far
    more than any model's does.
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
    """Raise BadWeights if what is built meanwhile gets over `MAX_TENSORS` parameters."""
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
    # Memory that `torch.empty` reserves costs nothing until it is written, and parameters leave
    # it for the meta device before that.

    _seen_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        writes = not (func.is_view or func is torch.ops.aten.empty.memory_format)
        if writes and kwargs.get("device") != torch.device("meta"):
            size_bytes = _result_bytes(func, args, kwargs)
            self._seen_bytes += size_bytes
            if size_bytes > MAX_COMPUTED_TENSOR_BYTES or self._seen_bytes > MAX_COMPUTED_BYTES:
                raise _too_much("larger tables")
        return func(*args, **kwargs)


def _result_bytes(func: Any, args: Any, kwargs: Any) -> int:
    on_meta: list[bool] = []

    def as_meta(tensor: torch.Tensor) -> torch.Tensor:
        on_meta.append(tensor.is_meta)
        return tensor.to("meta")

    args, kwargs = tree_map_only(torch.Tensor, as_meta, (args, kwargs))
    if any(on_meta):
        return 0
    try:
        result = func(*args, **(kwargs if on_meta else kwargs | {"device": torch.device("meta")}))
    except (RuntimeError, NotImplementedError):  # the real call tells what is wrong with it
        return 0
    return result.nbytes if isinstance(result, torch.Tensor) else 0


def _too_much(what: str) -> files.BadWeights:
    message = f"the configuration asks for {what}, more than any model has"
    return files.BadWeights(message, hint="use the published configuration")


def _move_to_meta(
    _module: nn.Module, _name: str, parameter: nn.Parameter | None
) -> nn.Parameter | None:
    if parameter is None or parameter.is_meta:  # a tied parameter must stay the same object
        return None
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


def build_empty_component(folder: Path, name: str, *, dtype: torch.dtype) -> nn.Module:
    """Build a pipeline's component without weights, else raise InvalidInput."""
    library, class_name = files.component_class(folder, name)
    files.read_config(folder / name / "config.json")
    try:
        cls: Any = getattr(importlib.import_module(library), class_name)
        if not issubclass(cls, nn.Module):
            raise TypeError("it is no model")
        if library != "transformers":
            config, build = cls.load_config(folder / name), cls.from_config
        else:
            config, build = cls.config_class.from_pretrained(folder / name), cls
        model: nn.Module = build_empty(lambda: build(config), dtype=dtype)
    except Exception as error:  # classes raise anything for a configuration that makes no sense
        reason = first_line(error)
        if isinstance(error, MemoryError) or "allocate memory" in reason:
            raise
        raise files.BadWeights(
            f"the configuration in {folder / name} does not build a {class_name}: {reason}",
            hint=files.DOWNLOAD_AGAIN,
        ) from error
    return model
