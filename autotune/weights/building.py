"""Build a model without weights, and say which dtypes and names its weights shall have."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from autotune.weights.errors import BadWeights

if TYPE_CHECKING:
    import torch
    from torch import nn

Model = TypeVar("Model", bound="nn.Module")

DtypePolicy = Callable[[str, "torch.dtype"], "torch.dtype"]
"""The dtype that a tensor should have in the model, from its name and its dtype as stored."""


def attribute_tensors(model: "nn.Module") -> "list[torch.Tensor]":
    """Tensors that modules keep as plain attributes, as Qwen-Image its rotary frequencies."""
    import torch

    values = (value for module in model.modules() for value in vars(module).values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def build_empty(factory: Callable[[], Model], *, dtype: "torch.dtype | None" = None) -> Model:
    """What `factory` builds, with every parameter on the meta device and everything else real.

    Buffers and tensors kept as plain attributes (rotary tables) are computed by constructors and are in no file, so
    they must be real from the beginning. `dtype` is the default dtype while building, as in `from_pretrained`.
    """
    import torch
    from torch.nn.modules.module import register_module_parameter_registration_hook

    previous = torch.get_default_dtype()
    handle = register_module_parameter_registration_hook(_on_meta)  # type: ignore[arg-type]  # torch's annotation forgets the result
    try:
        torch.set_default_dtype(dtype or previous)
        return factory()
    finally:
        torch.set_default_dtype(previous)
        handle.remove()


def _on_meta(_module: "nn.Module", _name: str, parameter: "nn.Parameter | None") -> "nn.Parameter | None":
    from torch import nn

    if parameter is None or parameter.is_meta:  # a tied parameter must stay the same object
        return None
    return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)


def dtype_of_from_pretrained(model: "nn.Module", dtype: "torch.dtype") -> DtypePolicy:
    """Real numbers become `dtype`, except where the model's class keeps float32; whole numbers stay.

    diffusers keeps `_keep_in_fp32_modules` always; transformers keeps those for float16 only, and the strict ones for
    bfloat16 too.
    """
    import torch

    kept: set[str] = set(_names(model, "_keep_in_fp32_modules"))
    if hasattr(model, "_keep_in_fp32_modules_strict"):
        kept = kept if dtype == torch.float16 else set()
        kept |= set(_names(model, "_keep_in_fp32_modules_strict"))

    def policy(name: str, stored: torch.dtype) -> torch.dtype:
        if not stored.is_floating_point:
            return stored
        return torch.float32 if kept.intersection(name.split(".")) else dtype

    return policy


def cast_as_loaded(model: "nn.Module", dtype: "torch.dtype") -> None:
    """Give the parameters of a model that was not loaded the dtypes that loading gives them, in place.

    Buffers are left alone, as `from_pretrained` does.
    """
    policy = dtype_of_from_pretrained(model, dtype)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(policy(name, parameter.dtype))


def _names(model: "nn.Module", attribute: str) -> Iterable[str]:
    names: Iterable[str] | None = getattr(model, attribute, None)
    return names or ()


def names_in_transformers(model: "nn.Module") -> Callable[[str], str]:
    """How a transformers model calls the tensors that its published checkpoints still store under older names.

    Raises, when called: BadWeights, for a tensor that transformers also splits, merges or transposes.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    steps = get_model_conversion_mapping(model)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if not isinstance(step, WeightRenaming)]
    places = model.state_dict()

    def rename(name: str) -> str:
        renamed, converter = rename_source_key(name, renamings, converters, model.base_model_prefix, places)
        if converter is not None:
            message = f"transformers converts {name}, it does not only rename it"
            raise BadWeights(message, hint="load this component with from_pretrained")
        return str(renamed)

    return rename
