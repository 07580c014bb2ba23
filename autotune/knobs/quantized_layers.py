"""Frozen Linear layers on quantized weights, made of layers one at a time as weights arrive.

Weights in 8 bits are plain int8 or float8 (e4m3) with one scale per row. float8 is kept as bytes:
peft would round the adapter of a layer whose weight has a floating dtype to that dtype. Weights get
no gradient: they are frozen.

`FrozenLinear` keeps nothing but those weights for its backward pass. Left to autograd, the
converted copy of each product would be kept, too, and without checkpointing an int8 model would
need more memory than a bf16 one. Here the backward pass casts again: one more read. A scale is
applied where that moves fewest bytes. CUDA's kernels convert operands as they read them, so there
int8 is cast and scaled at once: 3 bytes a weight in bf16. torch multiplies no float8 by element,
and a CPU converts beforehand, so there a weight is only cast, and the product's output is scaled,
together with its bias, or the gradient that comes in.

`EightBitLinear` multiplies in 8 bits: both factors, in both passes, from one stored weight.
Activations get a scale per row on the fly, and so does the incoming gradient once the weight's
scales are folded into it. So with W = s * Q, x = a * X and g * s = b * G, an output is
a * (X @ Q.T) * s and the gradient of an input b * (G @ Q): the same Q serves both. What surrounds a
product is about as many bytes as a GPU moves in the product's time, so there it is compiled, with
shapes left open. Layers whose sides are no multiples of 16, which kernels on CUDA ask for, stay as
they are.
"""

from collections.abc import Callable, Iterable
from functools import cache
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from autotune.knobs.formats import NESTED_BLOCK, NF4_BLOCK, WEIGHT_FORMATS, slice_bytes_of
from autotune.models.family import Family
from autotune.weights.stream import Transform

FLOAT8 = torch.float8_e4m3fn
LARGEST = {torch.int8: 127.0, FLOAT8: 448.0}
"""Of each dtype."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Of rows of zeros, and of rows whose scale would underflow."""


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x` (rows, columns) in `dtype`, and the scale of each row, in fp32 (rows, 1)."""
    scale = row_scales(x, dtype)
    return _in_scale(x, scale, dtype), scale


def row_scales(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of each row of `x` in `dtype`, in fp32 (rows, 1)."""
    # abs() would take a copy.
    largest = torch.maximum(x.amax(-1, keepdim=True), x.amin(-1, keepdim=True).neg_())
    return largest.float().div_(LARGEST[dtype]).clamp_(min=SMALLEST_SCALE)


def _in_scale(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    scaled = x / scale
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype)


def store_rows(
    layer: nn.Linear, dtype: torch.dtype, scales_as: torch.dtype = torch.float32
) -> None:
    """Store the weight of `layer` in `dtype`, and its scales (outputs,) in fp32 beside it, as
    `scale`.

    Scales are numbers that `scales_as` has: what is scaled in that dtype then rounds no scale.
    """
    weight = layer.weight.data
    stored = weight.new_empty(weight.shape, dtype=dtype)
    scale = weight.new_empty(len(weight), dtype=torch.float32)
    step = max(1, slice_bytes_of(weight) // (weight.shape[1] * weight.element_size()))
    # In slices: a whole takes several times itself.
    for start in range(0, 0 if weight.is_meta else len(weight), step):
        rows = slice(start, start + step)
        scales = row_scales(weight[rows], dtype).to(scales_as).float()
        stored[rows], scale[rows] = _in_scale(weight[rows], scales, dtype), scales.flatten()
    stored = stored.view(torch.uint8) if dtype == FLOAT8 else stored
    layer.weight = nn.Parameter(stored, requires_grad=False)
    layer.register_parameter("scale", nn.Parameter(scale, requires_grad=False))


def as_stored(weight: Tensor) -> Tensor:
    """A stored weight as int8 or float8."""
    return weight.view(FLOAT8) if weight.dtype == torch.uint8 else weight


CONVERTS_AS_IT_READS = {"cpu": False, "cuda": True, "meta": False}
"""By kind of device, whether a kernel takes operands of several dtypes without copies of them."""


class FrozenProduct(torch.autograd.Function):
    """`linear(x, scale * stored, bias)`. Shapes: x (..., inputs), stored (outputs, inputs),
    scale (outputs,), in fp32; bytes of float8 come as uint8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stored: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(stored, scale)
        if _scales_weight(stored, x):
            return functional.linear(x, _weight(stored, scale, x.dtype), bias)
        out = functional.linear(x, _weight(stored, None, x.dtype))
        scale = scale.to(out.dtype)
        return out.mul_(scale) if bias is None else torch.addcmul(bias, out, scale, out=out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        stored, scale = ctx.saved_tensors
        if not _scales_weight(stored, gradient):
            gradient, scale = gradient * scale.to(gradient.dtype), None
        return gradient.matmul(_weight(stored, scale, gradient.dtype)), None, None, None


def _scales_weight(stored: Tensor, factor: Tensor) -> bool:
    """Whether the weight is scaled, not what it is multiplied with. In fp16 products with
    unscaled numbers overflow."""
    is_one_kernel = stored.dtype == torch.int8 and CONVERTS_AS_IT_READS[stored.device.type]
    return is_one_kernel or factor.dtype == torch.float16


def _weight(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scale is None:
        return as_stored(stored).to(dtype)
    if stored.dtype == torch.int8:
        return torch.mul(
            stored,
            scale.unsqueeze(1),
            out=torch.empty(stored.shape, dtype=dtype, device=stored.device),
        )
    return as_stored(stored).to(dtype).mul_(scale.unsqueeze(1))


class FrozenLinear(nn.Linear):
    """A Linear whose weight is quantized. Made of a layer in place, by its class: to all others
    it stays a Linear."""

    scale: Tensor

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = FrozenProduct.apply(input, self.weight, self.scale, self.bias)  # type: ignore[no-untyped-call]
        return product


def quantize_int8(layer: nn.Linear) -> None:
    """Store the weight of `layer` as int8 with a scale per row."""
    store_rows(layer, torch.int8, torch.bfloat16)
    layer.__class__ = FrozenLinear


def quantize_float8(layer: nn.Linear) -> None:
    """Store the weight of `layer` as float8 (e4m3) with a scale per row."""
    store_rows(layer, FLOAT8, torch.bfloat16)
    layer.__class__ = FrozenLinear


SIDE_MULTIPLE, MIN_ROWS = 16, 32
"""What torch's products on CUDA ask for: `_int_mm` sides that 8 divides and more than 16 rows
(some cards refuse fewer than 32), `_scaled_mm` sides that 16 divides."""


def quantize_folded(gradient: Tensor, columns: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of `gradient` (rows, columns) times fp32 `columns`."""
    folded = gradient * columns
    scale = row_scales(folded, dtype)
    folded.div_(scale)
    return (folded.round_() if dtype == torch.int8 else folded).to(dtype), scale


def unscale(
    sums: Tensor, rows: Tensor, columns: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`sums * rows * columns + bias` in `dtype`: sums int32 (m, n), rows (m, 1), columns and
    bias (n,)."""
    out = sums.float().mul_(rows)
    out = out if columns is None else out.mul_(columns)
    return (out if bias is None else out.add_(bias)).to(dtype)


class Kernels(NamedTuple):
    """What runs around products, and whether these have to meet what CUDA's kernels ask for."""

    quantize_rows: Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]
    quantize_folded: Callable[[Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]]
    unscale: Callable[[Tensor, Tensor, Tensor | None, Tensor | None, torch.dtype], Tensor]
    has_cuda_limits: bool


PLAIN = Kernels(quantize_rows, quantize_folded, unscale, False)
PRODUCT_KERNELS = {"cpu": PLAIN, "meta": PLAIN, "cuda": PLAIN._replace(has_cuda_limits=True)}
"""By kind of device."""


@cache
def _compiled() -> Kernels:
    """When they are needed: torch's compiler takes seconds to import."""
    quantize, fold, scale = (torch.compile(function, dynamic=True) for function in PLAIN[:3])
    return Kernels(quantize, fold, scale, True)  # type: ignore[arg-type]


def kernels_for(tensor: Tensor) -> Kernels:
    """The kernels that run on the tensor's device."""
    if tensor.is_cuda and not torch.compiler.is_compiling():
        return _compiled()
    return PRODUCT_KERNELS[tensor.device.type]


def multiply(
    left: Tensor,
    rows: Tensor,
    right: Tensor,
    columns: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`(rows * left) @ (right * columns) + bias` in `dtype`: the one place that calls the products'
    kernels.

    Args:
        left: 8 bits, (m, k).
        rows: fp32 (m, 1).
        right: 8 bits, (k, n).
        columns: fp32 (n,); None for ones.
        bias: (n,), or None.
        dtype: of the result.
    """
    kernels, num_rows = kernels_for(left), len(left)
    missing = MIN_ROWS - num_rows if kernels.has_cuda_limits else 0
    if missing > 0:
        left = functional.pad(left, (0, 0, 0, missing))
        rows = functional.pad(rows, (0, 0, 0, missing))
    if right.stride(0) != 1 and (kernels.has_cuda_limits or right.dtype == FLOAT8):
        right = right.t().contiguous().t()  # kernels read the second factor by columns alone
    left = left.contiguous()  # what is rounded keeps the order in memory of what it was made of
    if left.dtype == torch.int8:
        out = kernels.unscale(torch._int_mm(left, right), rows, columns, bias, dtype)
    else:
        columns = rows.new_ones(right.shape[1]) if columns is None else columns
        # All that kernels with scales per row write there.
        made = torch.bfloat16 if kernels.has_cuda_limits else dtype
        out = torch._scaled_mm(
            left, right, scale_a=rows, scale_b=columns.unsqueeze(0), out_dtype=made
        ).to(dtype)
        out = out if bias is None else out.add_(bias)
    return out[:num_rows] if missing > 0 else out


class EightBitProduct(torch.autograd.Function):
    """`linear(x, scale * stored, bias)`. Shapes: x (rows, inputs), stored (outputs, inputs),
    scale (outputs,), in fp32; bytes of float8 come as uint8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stored: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(stored, scale)
        weight = as_stored(stored)
        left, rows = kernels_for(x).quantize_rows(x, weight.dtype)
        return multiply(left, rows, weight.t(), scale, bias, x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        stored, scale = ctx.saved_tensors
        weight = as_stored(stored)
        left, rows = kernels_for(gradient).quantize_folded(gradient, scale, weight.dtype)
        return multiply(left, rows, weight, None, None, gradient.dtype), None, None, None


class EightBitLinear(nn.Linear):
    """Made of a layer in place, by its class: to all others it stays a Linear."""

    scale: Tensor

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        # For parameters torch's compiler would make code for each size.
        scale, bias = self.scale.detach(), None if self.bias is None else self.bias.detach()
        out: Tensor = EightBitProduct.apply(rows, self.weight, scale, bias)  # type: ignore[no-untyped-call]
        return out if input.ndim == 2 else out.view(*input.shape[:-1], out.shape[-1])


def multiply_in_int8(layer: nn.Linear) -> None:
    """Let `layer` multiply in int8."""
    _store_for_products(layer, torch.int8)


def multiply_in_float8(layer: nn.Linear) -> None:
    """Let `layer` multiply in float8, e4m3."""
    _store_for_products(layer, FLOAT8)


def _store_for_products(layer: nn.Linear, dtype: torch.dtype) -> None:
    if not any(side % SIDE_MULTIPLE for side in layer.weight.shape):
        store_rows(layer, dtype)
        layer.__class__ = EightBitLinear


def quantize_nf4(layer: nn.Linear) -> nn.Module:
    """The layer that takes the place of `layer`: 4-bit NormalFloat with double quantization, on
    its device."""
    from bitsandbytes import nn as bnb

    made = bnb.Linear4bit(
        layer.in_features,
        layer.out_features,
        layer.bias is not None,
        compute_dtype=layer.weight.dtype,
        compress_statistics=True,
        quant_type="nf4",
        device="meta",  # else it would draw initial weights on the host, for a minute
    )
    made.weight = pack_nf4(layer.weight.data, slice_bytes_of(layer.weight))
    # With AVX512-bf16 an input that needs no gradient would have the weight repacked for inference,
    # for good: in bf16, without a backward pass, and only if the number of rows is a multiple of
    # 32.
    made.support_avx512bf16_for_cpu = False
    made.bias = layer.bias
    return made.train(layer.training)  # type: ignore[no-any-return]


def pack_nf4(weight: Tensor, slice_bytes: int) -> Any:
    """bitsandbytes' 4-bit parameter of `weight`, quantized in slices: on a CPU bitsandbytes takes
    seven times what it is given (bf16) for a moment. Slices end where a scale's values end, so the
    bits are those of the whole."""
    from bitsandbytes import functional as bits
    from bitsandbytes import nn as bnb

    flat = weight.reshape(-1)
    step = max(NF4_BLOCK, slice_bytes // weight.element_size() // NF4_BLOCK * NF4_BLOCK)
    stored = torch.empty(-(-len(flat) // 2), 1, dtype=torch.uint8, device=weight.device)
    maxima = torch.empty(-(-len(flat) // NF4_BLOCK), dtype=torch.float32, device=weight.device)
    for start in range(0, len(flat), step):
        part, state = bits.quantize_4bit(
            flat[start : start + step], blocksize=NF4_BLOCK, quant_type="nf4"
        )
        stored[start // 2 : start // 2 + len(part)] = part
        maxima[start // NF4_BLOCK : start // NF4_BLOCK + len(state.absmax)] = state.absmax
    offset = maxima.mean()
    scales, nested = bits.quantize_blockwise(maxima - offset, blocksize=NESTED_BLOCK)
    state = bits.QuantState(
        absmax=scales,
        shape=weight.shape,
        dtype=weight.dtype,
        blocksize=NF4_BLOCK,
        code=bits.get_4bit_type("nf4", device=weight.device),
        quant_type="nf4",
        offset=offset,
        state2=nested,
    )
    return bnb.Params4bit(
        stored,
        requires_grad=False,
        quant_state=state,
        blocksize=NF4_BLOCK,
        compress_statistics=True,
        quant_type="nf4",
        bnb_quantized=True,
    )


def quantize_blocks(transformer: nn.Module, family: Family, weight_format: str) -> None:
    """Quantize the Linear layers inside the blocks of a loaded transformer."""
    quantize = quantize_inside(family.blocks(transformer), weight_format)
    if quantize is None:
        return
    for name, module in list(transformer.named_modules()):
        replacement = quantize(name, module)
        if replacement is not None:
            transformer.set_submodule(name, replacement)


def quantize_inside(blocks: Iterable[nn.Module], weight_format: str) -> Transform | None:
    """What to do with each module as its weights arrive: quantize it if it is a Linear inside
    `blocks`.

    One layer at a time, because quantizing needs several times its input's size for a moment. None
    for a format in which weights stay as they are.
    """
    name = WEIGHT_FORMATS[weight_format].quantize
    if not name:
        return None
    quantize_layer = resolve_name(name)
    linears = {
        id(layer) for block in blocks for layer in block.modules() if isinstance(layer, nn.Linear)
    }

    def quantize(name: str, module: nn.Module) -> nn.Module | None:
        return quantize_layer(module) if id(module) in linears else None

    return quantize


def torch_dtype(precision: str) -> "torch.dtype":
    """The dtype that a precision names."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
