"""Frozen Linear layers on quantized weights, made of layers one at a time as weights arrive.

Weights in 8 bits are plain int8 or float8 (e4m3) with one scale per row. float8 is kept as bytes:
peft would round the adapter of a layer whose weight has a floating dtype to that dtype.

`FrozenLinear` keeps nothing but those weights for its backward pass, which casts again. A scale is
applied where that moves fewest bytes: CUDA's kernels convert operands as they read them, so there
int8 is cast and scaled at once. torch multiplies no float8 by element, and a CPU converts
beforehand, so there the product's output is scaled, or the gradient that comes in.

`EightBitLinear` multiplies in 8 bits: both factors, in both passes, from one stored weight. With W
= s * Q, x = a * X and g * s = b * G, an output is a * (X @ Q.T) * s and the gradient of an input b
* (G @ Q). What surrounds a product is as many bytes as a GPU moves in the product's time, so there
it is compiled. Layers whose sides are no multiples of 16, which kernels on CUDA ask for, stay as
they are.

In int8 a few channels that are far larger than the others would set the scale of every row, so W
and x are rotated first: W is stored as W @ R, x becomes x @ R, and the gradient of an input comes
back by R. R is the block-diagonal regular Hadamard matrix of ConvRot (arXiv:2512.03673), which is
its own inverse.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial, reduce
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autotune.knobs.formats import NESTED_BLOCK, NF4_BLOCK, WEIGHT_FORMATS, slice_bytes_of
from autotune.models.family import Family
from autotune.weights.stream import Transform

FLOAT8 = torch.float8_e4m3fn
LARGEST = {torch.int8: 127.0, FLOAT8: 448.0}  # of each dtype
# Of rows of zeros, and of rows whose scale would underflow.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `x` (rows, columns) in `dtype`, and the scale of each row, in fp32 (rows, 1)."""
    scale = row_scales(x, dtype)
    return _in_scale(x, scale, dtype), scale


def row_scales(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale of each row of `x` in `dtype`, in fp32 (rows, 1)."""
    # abs() would take a copy.
    largest = torch.maximum(x.amax(-1, keepdim=True), x.amin(-1, keepdim=True).neg_())
    return largest.float().div_(LARGEST[dtype]).clamp_(min=SMALLEST_SCALE)


def _in_scale(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    scaled = x / scale
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype)


def hadamard(like: Tensor) -> Tensor:
    """Return a block of the rotation for the columns of `like`: 64 of them, or 16.

    Larger blocks spread outliers hardly better, and take more time.
    """
    four = (1 - 2 * torch.eye(4, dtype=like.dtype, device=like.device).flip(0)) / 2
    number = 3 if like.shape[-1] % 64 == 0 else 2
    return reduce(torch.kron, [four] * number)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the columns of `x` (rows, columns) in blocks."""
    return (x.reshape(-1, len(rotation)) @ rotation.to(x.dtype)).view(x.shape)


def store_rows(
    layer: nn.Linear,
    dtype: torch.dtype,
    scales_as: torch.dtype = torch.float32,
    rotation: Tensor | None = None,
) -> None:
    """Store the weight of `layer`, perhaps rotated, in `dtype`, with fp32 `scale` (outputs,)."""
    weight = layer.weight.data
    stored = weight.new_empty(weight.shape, dtype=dtype)
    scale = weight.new_empty(len(weight), dtype=torch.float32)
    step = max(1, slice_bytes_of(weight) // (weight.shape[1] * weight.element_size()))
    # In slices: a whole takes several times itself.
    for start in range(0, 0 if weight.is_meta else len(weight), step):
        rows = slice(start, start + step)
        some = weight[rows] if rotation is None else rotate(weight[rows], rotation)
        scales = row_scales(some, dtype).to(scales_as).float()
        stored[rows], scale[rows] = _in_scale(some, scales, dtype), scales.flatten()
    stored = stored.view(torch.uint8) if dtype == FLOAT8 else stored
    layer.weight = nn.Parameter(stored, requires_grad=False)
    layer.register_parameter("scale", nn.Parameter(scale, requires_grad=False))


def as_stored(weight: Tensor) -> Tensor:
    """View a stored weight as int8 or float8."""
    return weight.view(FLOAT8) if weight.dtype == torch.uint8 else weight


# If kernels take operands of several dtypes without copies of them.
CONVERTS_AS_IT_READS = {"cpu": False, "cuda": True, "meta": False}


def _as_output(changed: Tensor) -> Tensor:
    # Compiled by torch before 2.13, what was changed in place has no gradient unless it is a view.
    return changed.view_as(changed) if torch.compiler.is_compiling() else changed


class FrozenProduct(torch.autograd.Function):
    """`linear(x, scale * stored, bias)`: x (..., inputs), fp32 scale (outputs,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stored: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(stored, scale)
        if _scales_weight(stored, x):
            return nn.functional.linear(x, _weight(stored, scale, x.dtype), bias)
        out = nn.functional.linear(x, _weight(stored, None, x.dtype))
        scale = scale.to(out.dtype)
        out = out.mul_(scale) if bias is None else torch.addcmul(bias, out, scale, out=out)
        return _as_output(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        stored, scale = ctx.saved_tensors
        if not _scales_weight(stored, gradient):
            gradient, scale = gradient * scale.to(gradient.dtype), None
        return gradient.matmul(_weight(stored, scale, gradient.dtype)), None, None, None


def _scales_weight(stored: Tensor, factor: Tensor) -> bool:
    """In fp16 products with unscaled numbers overflow."""
    is_one_kernel = stored.dtype == torch.int8 and CONVERTS_AS_IT_READS[stored.device.type]
    return is_one_kernel or factor.dtype == torch.float16


def _weight(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scale is not None and stored.dtype == torch.int8:
        out = torch.empty(stored.shape, dtype=dtype, device=stored.device)
        return torch.mul(stored, scale.unsqueeze(1), out=out)
    weight = as_stored(stored).to(dtype)
    return weight if scale is None else weight.mul_(scale.unsqueeze(1))


class FrozenLinear(nn.Linear):
    """A Linear whose weight is quantized; a layer becomes one in place, by its class."""

    scale: Tensor

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = FrozenProduct.apply(input, self.weight, self.scale, self.bias)  # type: ignore[no-untyped-call]
        return product


def _freeze(dtype: torch.dtype, layer: nn.Linear) -> None:
    store_rows(layer, dtype, torch.bfloat16)
    layer.__class__ = FrozenLinear


quantize_int8, quantize_float8 = partial(_freeze, torch.int8), partial(_freeze, FLOAT8)


# Asked for by torch on CUDA: `_int_mm` sides that 8 divides and more than 16 rows (some cards
# refuse fewer than 32), `_scaled_mm` sides that 16 divides.
SIDE_MULTIPLE, MIN_ROWS = 16, 32


def quantize_folded(gradient: Tensor, columns: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `quantize_rows` of `gradient` (rows, columns) times fp32 `columns`."""
    folded = gradient * columns
    scale = row_scales(folded, dtype)
    folded.div_(scale)
    return (folded.round_() if dtype == torch.int8 else folded).to(dtype), scale


def unscale(
    sums: Tensor, rows: Tensor, columns: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return `sums * rows * columns + bias`: (m, n), (m, 1), (n,) and (n,)."""
    out = sums.float().mul_(rows)
    out = out if columns is None else out.mul_(columns)
    return (out if bias is None else out.add_(bias)).to(dtype)


class Kernels(NamedTuple):
    """Functions that run around products, and if these have to meet what CUDA's kernels ask for."""

    quantize_rows: Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]
    quantize_folded: Callable[[Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]]
    unscale: Callable[[Tensor, Tensor, Tensor | None, Tensor | None, torch.dtype], Tensor]
    has_cuda_limits: bool


PLAIN = Kernels(quantize_rows, quantize_folded, unscale, False)
# By kind of device.
PRODUCT_KERNELS = {"cpu": PLAIN, "meta": PLAIN, "cuda": PLAIN._replace(has_cuda_limits=True)}


@cache  # when it is needed: torch's compiler takes seconds to import
def _compiled() -> Kernels:
    quantize, fold, scale = (torch.compile(function, dynamic=True) for function in PLAIN[:3])
    return Kernels(quantize, fold, scale, True)  # type: ignore[arg-type]


def kernels_for(tensor: Tensor) -> Kernels:
    """Return the kernels that run on the tensor's device."""
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
    """Return `(rows * left) @ (right * columns) + bias`: left (m, k) and right (k, n) in 8 bits."""
    kernels, num_rows = kernels_for(left), len(left)
    missing = MIN_ROWS - num_rows if kernels.has_cuda_limits else 0
    if missing > 0:
        left = nn.functional.pad(left, (0, 0, 0, missing))
        rows = nn.functional.pad(rows, (0, 0, 0, missing))
    if right.stride(0) != 1 and (kernels.has_cuda_limits or right.dtype == FLOAT8):
        right = right.t().contiguous().t()  # kernels read the second factor by columns alone
    left = left.contiguous()  # what is rounded keeps the order in memory of what it was made of
    if left.dtype == torch.int8:
        out = kernels.unscale(torch._int_mm(left, right), rows, columns, bias, dtype)
    else:
        columns = rows.new_ones(right.shape[1]) if columns is None else columns
        # All that kernels with scales per row write there.
        made = torch.bfloat16 if kernels.has_cuda_limits else dtype
        scales: Any = {"scale_a": rows, "scale_b": columns.unsqueeze(0)}
        out = torch._scaled_mm(left, right, **scales, out_dtype=made).to(dtype)
        out = out if bias is None else out.add_(bias)
    return out[:num_rows] if missing > 0 else out


class EightBitProduct(torch.autograd.Function):
    """As `FrozenProduct`, multiplied in 8 bits: x (rows, inputs)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        stored: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        rotation: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(stored, scale, rotation)
        weight = as_stored(stored)
        factor = x if rotation is None else rotate(x, rotation)
        left, rows = kernels_for(x).quantize_rows(factor, weight.dtype)
        return _as_output(multiply(left, rows, weight.t(), scale, bias, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        stored, scale, rotation = ctx.saved_tensors
        weight = as_stored(stored)
        left, rows = kernels_for(gradient).quantize_folded(gradient, scale, weight.dtype)
        back = multiply(left, rows, weight, None, None, gradient.dtype)
        return back if rotation is None else rotate(back, rotation), None, None, None, None


class EightBitLinear(nn.Linear):
    """A Linear that multiplies in 8 bits; a layer becomes one in place, by its class."""

    scale: Tensor
    rotation: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        # For parameters torch's compiler would make code for each size.
        others = (each if each is None else each.detach() for each in (self.bias, self.rotation))
        out: Tensor = EightBitProduct.apply(rows, self.weight, self.scale.detach(), *others)  # type: ignore[no-untyped-call]
        return out if input.ndim == 2 else out.view(*input.shape[:-1], out.shape[-1])


def _multiply_in(dtype: torch.dtype, layer: nn.Linear) -> None:
    if all(side % SIDE_MULTIPLE == 0 for side in layer.weight.shape):
        rotation = hadamard(layer.weight) if dtype == torch.int8 else None
        store_rows(layer, dtype, rotation=rotation)
        kept = None if rotation is None else nn.Parameter(rotation, requires_grad=False)
        layer.register_parameter("rotation", kept)
        layer.__class__ = EightBitLinear


multiply_in_int8 = partial(_multiply_in, torch.int8)
multiply_in_float8 = partial(_multiply_in, FLOAT8)


def quantize_nf4(layer: nn.Linear) -> nn.Module:
    """Return the layer that takes the place of `layer`: 4-bit NormalFloat, doubly quantized."""
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
    # for good: in bf16, without a backward pass.
    made.support_avx512bf16_for_cpu = False
    made.bias = layer.bias
    return made.train(layer.training)  # type: ignore[no-any-return]


def pack_nf4(weight: Tensor, slice_bytes: int) -> Any:
    """Return bitsandbytes' 4-bit parameter, quantized in slices to the bits of the whole. On a CPU
    it takes seven times what it is given for a moment."""
    from bitsandbytes import functional as bits, nn as bnb

    flat = weight.reshape(-1)
    step = max(NF4_BLOCK, slice_bytes // weight.element_size() // NF4_BLOCK * NF4_BLOCK)
    stored = torch.empty(-(-len(flat) // 2), 1, dtype=torch.uint8, device=weight.device)
    maxima = torch.empty(-(-len(flat) // NF4_BLOCK), dtype=torch.float32, device=weight.device)
    for start in range(0, len(flat), step):
        some = flat[start : start + step]
        part, state = bits.quantize_4bit(some, blocksize=NF4_BLOCK, quant_type="nf4")
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
        if (replacement := quantize(name, module)) is not None:
            transformer.set_submodule(name, replacement)


def quantize_inside(blocks: Iterable[nn.Module], weight_format: str) -> Transform | None:
    """Return what quantizes each Linear inside `blocks` as it arrives; None for nothing."""
    if not (function := WEIGHT_FORMATS[weight_format].quantize):
        return None
    quantize_layer = resolve_name(function)
    layers = (layer for block in blocks for layer in block.modules())
    linears = {id(layer) for layer in layers if isinstance(layer, nn.Linear)}

    def quantize(name: str, module: nn.Module) -> nn.Module | None:
        return quantize_layer(module) if id(module) in linears else None

    return quantize


def torch_dtype(precision: str) -> "torch.dtype":
    """Return the dtype that a precision names."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
