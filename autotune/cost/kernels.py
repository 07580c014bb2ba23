"""The one table of what a device's kernels do that operations on the meta device do not show.

Tracing runs the model's own code without data, so allocations follow PyTorch's reference
decompositions. Where a real device runs a fused kernel, converts operands of mixed dtypes
(aten/src/ATen/TensorIterator.cpp, `compute_types`) or takes scratch memory, the difference is here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, reduce
from pkgutil import resolve_name
from typing import Any, Literal
from unittest.mock import patch

import torch
from diffusers.models import attention_dispatch
from torch import nn
from torch.nn import functional

from autotune.knobs import quantized_layers
from autotune.knobs.attention import ATTENTION_BACKENDS, cuda_kernel
from autotune.knobs.formats import NESTED_BLOCK, NF4_BLOCK, WEIGHT_FORMATS
from autotune.knobs.norm_rope import KERNELS
from autotune.models.family import Family
from autotune.plan.prediction import ProductPractice

DeviceRules = Literal["cpu", "cuda"]

Work = tuple[str, tuple[int, ...], int, int]
"""(kind, shape, FLOPs, bytes moved) of an operation. A dot may tell its kernel apart:
`attention.backward`, `elementwise.gelu`, `matmul.fp8`. Shapes: (m, k, n) of a matmul, (batch,
heads, queries, keys, dimension) of attention."""


# Seconds are broken down into these. `adapter`: matmuls with the rank as a dimension.
CLASSES = ("matmul", "adapter", "attention", "elementwise", "dequantization", "convolution")

# Elementwise kernels at a quarter to a thirtieth of a copy's rate, which the probe measures.
# `narrow`: broadcasts and sums over a last dimension of `NARROW` at most, as Kandinsky turns pairs
# of channels; nothing of that is vectorized.
SLOW_ON_CPU = ("gelu", "gelu_backward", "narrow")
NARROW = 4

# Backward passes that sum the query's gradient in fp32 scratch memory
# (aten/src/ATen/native/transformers/cuda: flash_attn, `mha_bwd`;
# mem_eff_attention/kernel_backward.h, `workspace_elements_gq`). That cuDNN, whose sources are
# closed, takes as much is assumed from its last kernel, which converts the query's gradient.
ACCUMULATES = tuple(
    f"_scaled_dot_product_{kind}_attention_backward" for kind in ("flash", "efficient", "cudnn")
)


def kernel_for(
    attention: str,
    rules: DeviceRules,
    masked: bool,
    precision: str = "bf16",
    *,
    capability: tuple[int, int] | None = None,
    cudnn: str | None = None,
) -> str:
    """Name the kernel that `attention` runs: `cpu`, or as `cuda_kernel` does."""
    kernel = cuda_kernel(
        attention, masked=masked, precision=precision, capability=capability, cudnn=cudnn
    )
    return "cpu" if rules == "cpu" and kernel != "math" else kernel


@contextmanager
def substitutes(kernel: str, rules: DeviceRules, *, dense: bool = False) -> Iterator[None]:
    """Trace functions that the device fuses as the device runs them, within this context; with
    `dense` gradients for cuDNN, as autotune's executor makes them.

    They are replaced by name, so not thread-safe: `backward` would suspend a torch function mode
    while it recomputes a checkpoint.
    """
    functions: dict[str, Any] = {}
    if kernel != "math":
        functions["scaled_dot_product_attention"] = _attention_of(kernel)
    if rules == "cuda":
        functions["rms_norm"] = _rms_norm_on_cuda(functional.rms_norm)
        functions["dropout"] = _fused_dropout
    fused = KERNELS["compiled"]._replace(forward=_joined_norm_rope, backward=_norm_rope_backward)
    converts = quantized_layers.CONVERTS_AS_IT_READS
    native, copies = ATTENTION_BACKENDS["native"], dense and kernel == "cudnn"
    with (
        patch.multiple(functional, **functions) if functions else nullcontext(),
        patch.object(torch, "autocast", _autocast_of(torch.autocast)),
        patch.dict(KERNELS, compiled=fused),
        patch.dict(quantized_layers.PRODUCT_KERNELS, meta=_products_of(rules)),
        patch.dict(converts, meta=converts[rules]),
        patch.dict(attention_dispatch._AttentionBackendRegistry._backends),  # restored after it
        attention_dispatch.attention_backend(native.diffusers_name(runs_cudnn=copies)),
    ):
        yield


def _autocast_of(stock: Any) -> Callable[..., Any]:
    # torch has none on meta, where Ideogram 4 turns it off.
    return lambda device_type, **how: (
        nullcontext() if device_type == "meta" else stock(device_type, **how)
    )


def _attention_of(kernel: str) -> Callable[..., torch.Tensor]:
    aten = torch.ops.aten

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        mask = attn_mask
        if mask is not None and mask.dtype == torch.bool:
            # torch turns boolean masks into additive ones.
            mask = torch.zeros_like(mask, dtype=query.dtype)
        keeps = query.requires_grad or key.requires_grad or value.requires_grad
        if kernel == "cpu":
            return aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
            )[0]
        if kernel.startswith("flash") and mask is None:  # the packages' keep and accumulate as much
            return aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, scale=scale
            )[0]
        if mask is not None:
            mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        if kernel != "cudnn":  # flash takes no mask
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, keeps, dropout_p, is_causal, scale=scale
            )[0]
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, keeps, dropout_p, is_causal, False, scale=scale
        )[0]

    return attend


def _rms_norm_on_cuda(decomposed: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
            rows = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
            ctx.save_for_backward(x, weight, rows)
            return torch.empty_like(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            x, weight, _ = ctx.saved_tensors
            learns = weight is not None and weight.requires_grad
            # Reads both and writes one, as the kernel does.
            return gradient * x, torch.empty_like(weight) if learns else None

    def normalized(
        input: torch.Tensor,
        normalized_shape: list[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        if weight is not None and weight.dtype != input.dtype:
            return (decomposed(input, normalized_shape, None, eps) * weight).type_as(input)
        result: torch.Tensor = Fused.apply(input, weight)  # type: ignore[no-untyped-call]
        return result

    return normalized


def _joined_norm_rope(streams: Sequence[torch.Tensor], *_: object) -> torch.Tensor:
    lengths, first = [stream.shape[1] for stream in streams], streams[0]
    shape = first.shape[0], sum(lengths), *first.shape[2:]
    out = torch.empty(shape, dtype=first.dtype, device=first.device)  # which is charged no launch
    for stream, target in zip(streams, torch.split(out, lengths, dim=1), strict=True):
        target.copy_(stream)
    return out


def _norm_rope_backward(
    gradient: torch.Tensor, streams: Sequence[torch.Tensor], *_: object
) -> list[torch.Tensor]:
    parts = torch.split(gradient, [stream.shape[1] for stream in streams], dim=1)
    # Reads both and writes one.
    return [part * stream for part, stream in zip(parts, streams, strict=True)]


def _products_of(rules: DeviceRules) -> quantized_layers.Kernels:
    def quantized(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return x.to(dtype), torch.empty(len(x), 1, dtype=torch.float32, device=x.device)

    plain = quantized_layers.PRODUCT_KERNELS["cpu"]
    if rules == "cpu":
        return plain
    return plain._replace(
        quantize_rows=quantized,
        quantize_folded=lambda gradient, columns, dtype: quantized(gradient, dtype),
        unscale=lambda sums, rows, columns, bias, dtype: sums.to(dtype),
        has_cuda_limits=True,
    )


def _fused_dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


def conversion_bytes(operation: Any, inputs: list[torch.Tensor]) -> int:
    """Return what a CPU takes for a moment to convert operands to their common dtype."""
    # Emulated: copies in fp32, of the second factor two.
    if operation is torch.ops.aten._scaled_mm.default:
        return 4 * (inputs[0].numel() + 2 * inputs[1].numel())
    operands = [tensor for tensor in inputs if tensor.ndim]
    if torch.Tag.pointwise not in operation.tags or len({tensor.dtype for tensor in operands}) < 2:
        return 0
    common = reduce(torch.promote_types, (tensor.dtype for tensor in operands))
    in_place = operands[:1] if operation._schema.is_mutable else []
    return sum(t.numel() * common.itemsize for t in (*operands, *in_place) if t.dtype != common)


def workspace_bytes(operation: str, query_shape: tuple[int, ...]) -> int:
    """Return an operation's scratch memory; (batch, heads, tokens, head dimension) of a query."""
    if operation not in ACCUMULATES:
        return 0
    batch, heads, tokens, dimension = query_shape
    rows = -(-tokens // 128) * 128
    columns = -(-dimension // 32) * 32
    return batch * heads * rows * (columns + 1) * 4  # dq and the row sums of dO * O, both fp32


PRODUCTS = ("linear", "conv2d", "conv3d", "scaled_dot_product_attention")
# Of aten/src/ATen/autocast_mode.h what models call: AT_FORALL_LOWER_PRECISION_FP and
# AT_FORALL_FP32, with `rms_norm` since torch 2.12 (pytorch/pytorch#174824).
IN_FP32 = ("layer_norm", "group_norm", "mse_loss", "rms_norm")


@contextmanager
def under_autocast(dtype: torch.dtype) -> Iterator[None]:
    """Cast arguments of functions as autocast does, which knows no meta device. Not thread-safe."""
    table = {**dict.fromkeys(PRODUCTS, dtype), **dict.fromkeys(IN_FP32, torch.float32)}
    functions: dict[str, Any] = {
        name: _casting(getattr(functional, name), to) for name, to in table.items()
    }
    with patch.multiple(functional, **functions):
        yield


def _casting(function: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    def cast(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    def call(*arguments: Any, **options: Any) -> Any:
        options = {name: cast(value) for name, value in options.items()}
        return function(*map(cast, arguments), **options)

    return call


# Up to so many rows every CUDA card multiplies by the stored weight, if its columns fill whole
# blocks (bitsandbytes/backends/cuda/ops.py, `_GEMM_4BIT_CUSTOM_FLOOR_M`); above, that depends on
# card and shape.
FUSED_4_BIT_ROWS = 4

NF4_TABLE_BYTES = 16 * 4 + 256 * 4 + 4  # code table, nested code table and offset of every layer


def nf4_bytes(num_weights: int) -> int:
    """Return the bytes of one NF4 tensor: 4 bits each, one byte per 64, one fp32 per 64 x 256."""
    maxima = -(-num_weights // NF4_BLOCK)
    return -(-num_weights // 2) + maxima + 4 * -(-maxima // NESTED_BLOCK) + NF4_TABLE_BYTES


def quantize_for_tracing(
    family: Family,
    transformer: nn.Module,
    quantization: str,
    rules: DeviceRules,
    practice: ProductPractice | None = None,
) -> None:
    """Store weights as the knob does, as a stand-in, or as another program does."""
    weight_format, stored = WEIGHT_FORMATS[quantization], family.blocks(transformer)
    if practice:
        stand_in = partial(_stand_in_for_practice, resolve_name(weight_format.quantize), practice)
        stored = [transformer] if practice.everywhere else stored
    elif weight_format.stand_in:
        stand_in = partial(resolve_name(weight_format.stand_in), rules=rules)
    else:
        quantized_layers.quantize_blocks(transformer, family, quantization)
        return
    layers = [layer for module in stored for layer in module.modules()]
    for layer in layers:
        if isinstance(layer, nn.Linear):
            stand_in(layer)


def stand_in_for_nf4(layer: Any, rules: DeviceRules) -> None:
    """Let a layer on the meta device take and do what bitsandbytes' `Linear4bit` would."""
    shape, dtype = layer.weight.shape, layer.weight.dtype
    stored = torch.empty(nf4_bytes(layer.weight.numel()), dtype=torch.uint8, device="meta")
    layer.weight = nn.Parameter(stored, requires_grad=False)
    multiply: Callable[..., torch.Tensor] = MatMul4Bit.apply
    # It computes in its own precision, and answers in the input's.
    layer.forward = lambda x: multiply(x.to(dtype), layer, shape, rules).to(x.dtype)


def _stand_in_for_practice(
    quantize: Callable[[nn.Linear], None], practice: ProductPractice, layer: nn.Linear
) -> None:
    dtype = layer.weight.dtype
    quantize(layer)
    multiply: Any = partial(KeepingInput.apply, practice.gradients)
    if practice.keeps == "weights":
        multiply = _keeping_weight
    layer.forward = lambda x: multiply(x, layer, dtype)  # type: ignore[assignment,method-assign]


def _keeping_weight(x: torch.Tensor, layer: nn.Linear, dtype: torch.dtype) -> torch.Tensor:
    scale: Any = layer.scale  # autograd keeps the converted weight for the input's gradient
    weight = quantized_layers.as_stored(layer.weight).to(dtype) * scale.to(dtype)[:, None]
    # A model that casts to the precision of a weight may have made bytes of it.
    return nn.functional.linear(x if x.is_floating_point() else x.to(dtype), weight, layer.bias)


class KeepingInput(torch.autograd.Function):
    """A product with 8-bit weights that converts them for each pass, and may compute their
    gradient.

    Sources: torchao/prototype/quantized_training/int8.py, _Int8WeightOnlyLinear, which does;
    optimum/quanto/tensor/function.py, QuantizedLinearFunction.
    """

    @staticmethod
    def forward(ctx: Any, gradients: bool, x: torch.Tensor, layer: Any, dtype: torch.dtype) -> Any:
        x = x if x.is_floating_point() else x.to(dtype)
        ctx.save_for_backward(x)
        ctx.layer, ctx.gradients = layer, gradients
        weight = quantized_layers.as_stored(layer.weight).to(dtype)
        out = nn.functional.linear(x, weight) * layer.scale.to(dtype)
        return out if layer.bias is None else out + layer.bias

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,), (x,), layer = gradients, ctx.saved_tensors, ctx.layer
        weight = quantized_layers.as_stored(layer.weight).to(gradient.dtype)
        of_input = (gradient * layer.scale.to(gradient.dtype)).matmul(weight)
        if ctx.gradients:
            flat = gradient.reshape(-1, len(layer.weight))
            flat.t().matmul(x.to(gradient.dtype).reshape(-1, x.shape[-1]))  # which nobody uses
        return None, of_input.to(x.dtype), None, None


class MatMul4Bit(torch.autograd.Function):
    """Dequantizes the stored weight for each product, except of a few rows on CUDA."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Linear, shape: Any, rules: DeviceRules) -> Any:
        ctx.stored, ctx.shape = layer.weight, shape
        is_few = x.numel() // shape[1] <= FUSED_4_BIT_ROWS
        if rules == "cuda" and is_few and shape[1] % NF4_BLOCK == 0:
            # Reads what is stored.
            return layer.weight.new_empty((*x.shape[:-1], shape[0]), dtype=x.dtype)
        return nn.functional.linear(x, _from_4_bits(layer.weight, shape, x.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        weight = _from_4_bits(ctx.stored, ctx.shape, gradient.dtype)
        return gradient.matmul(weight), None, None, None


def _from_4_bits(stored: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Reads what is stored, after one kernel for the absolute maxima."""
    maxima = stored[: -(-shape[0] * shape[1] // NF4_BLOCK)]
    maxima = maxima.new_empty(maxima.shape, dtype=torch.float32) + 1.0  # alive with the copy
    return stored.new_empty(shape, dtype=dtype)
