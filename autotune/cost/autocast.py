"""What programs trace that compute under torch's autocast: norms return fp32, products take bf16.

That matters most with bitsandbytes' layers, which answer in the precision of their input, where a
Linear layer answers in bf16: behind a norm all activations of a block, and then the stream between
blocks, are in fp32 (bitsandbytes' nn/modules.py, `Linear4bit.forward`: `.to(inp_dtype)`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from autotune.runtime import lazy_module

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

PRODUCTS = ("linear", "conv2d", "conv3d", "scaled_dot_product_attention")
IN_FP32 = ("layer_norm", "group_norm", "mse_loss", "rms_norm")
"""Of aten/src/ATen/autocast_mode.h what models call: AT_FORALL_LOWER_PRECISION_FP and
AT_FORALL_FP32, with `rms_norm` since torch 2.12 (pytorch/pytorch#174824)."""


@contextmanager
def under_autocast(dtype: "torch.dtype") -> Iterator[None]:
    """Within this context, functions cast their arguments as autocast to `dtype` makes them. Not
    thread-safe.

    They are replaced by name, for autocast knows no meta device, and a function mode would be
    suspended while `backward` recomputes a checkpoint.
    """
    functional = torch.nn.functional

    table = {**dict.fromkeys(PRODUCTS, dtype), **dict.fromkeys(IN_FP32, torch.float32)}
    originals = {name: getattr(functional, name) for name in table}
    try:
        for name, target in table.items():
            setattr(functional, name, _casting(originals[name], target))
        yield
    finally:
        for name, original in originals.items():
            setattr(functional, name, original)


def _casting(function: Callable[..., Any], dtype: "torch.dtype") -> Callable[..., Any]:
    def cast(value: Any) -> Any:
        is_other = (
            isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != dtype
        )
        return value.to(dtype) if is_other else value

    def call(*arguments: Any, **options: Any) -> Any:
        return function(
            *map(cast, arguments), **{name: cast(value) for name, value in options.items()}
        )

    return call
