"""Attention by the packages FlashAttention 3 and 4, with their own backward passes.

diffusers runs version 3 inside an operation that it gave no backward pass, and would fetch version
4 from the hub. Both functions here are called as diffusers calls its own backends: query, key and
value of shape (batch, tokens, heads, head dimension) in bf16 or fp16, on a GPU; the result has the
query's shape.

What the packages return was read in their sources: `hopper/flash_attn_interface.py`, whose betas
return log sums too, and `flash_attn/cute/interface.py` of flash-attn-4 4.0.0b36, which always does.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from autotune.system.lazy import lazy_module

if TYPE_CHECKING:
    import torch


def _attend(
    package: Any,
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    attn_mask: "torch.Tensor | None" = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> "torch.Tensor":
    """Attention by the `package`'s function, which torch.compile looks into.

    Raises:
        ValueError: there is a mask, which it does not take.
    """
    if attn_mask is not None:
        raise ValueError("FlashAttention takes no mask")
    out = package.flash_attn_func(query, key, value, softmax_scale=scale, causal=is_causal)
    result: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return result


attend_by_version_3 = partial(_attend, lazy_module("flash_attn_interface"))
"""FlashAttention 3, built from source for Hopper."""
attend_by_version_4 = partial(_attend, lazy_module("flash_attn.cute"))
"""FlashAttention 4, which compiles its kernels when they are first used."""
