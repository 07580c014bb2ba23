"""Cast a transformer as loading it does: some modules stay in fp32 whatever the compute dtype."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


def cast_as_loaded(transformer: "nn.Module", dtype: "torch.dtype") -> None:
    """Give parameters the dtypes that diffusers' `from_pretrained(torch_dtype=dtype)` gives them, in place.

    A class lists the modules that must stay in fp32 in `_keep_in_fp32_modules`; diffusers keeps them so for half
    precision dtypes. Buffers are left alone, as `from_pretrained` does.
    """
    import torch

    keep = set(getattr(transformer, "_keep_in_fp32_modules", None) or ())
    for name, parameter in transformer.named_parameters():
        kept = dtype != torch.float32 and keep.intersection(name.split("."))
        parameter.data = parameter.data.to(torch.float32 if kept else dtype)
