"""bitsandbytes' layers around a weight that has just arrived: NF4 with double quantization, and LLM.int8.

The weight is quantized in slices: on a processor bitsandbytes takes seven times what it is given (bf16) for a moment.
Slices end where a scale's values end, so the bits are those of the whole.
"""

from typing import TYPE_CHECKING, Any

import torch
from bitsandbytes import functional
from bitsandbytes import nn as bnb

from autotune.quantization.sizes import NESTED_BLOCK, NF4_BLOCK

if TYPE_CHECKING:
    from torch import Tensor, nn


def layer_of(layer: "nn.Linear", choice: str, slice_bytes: int) -> "nn.Module":
    """The layer that takes the place of `layer`, with its weight quantized, on its device.

    Built on the meta device: its constructor would draw initial weights on the host, a minute for 20B of them.
    """
    weight, bias = layer.weight.data, layer.bias
    shape = (layer.in_features, layer.out_features, bias is not None)
    replacement: Any
    if choice == "bnb-nf4":
        replacement = bnb.Linear4bit(
            *shape, compute_dtype=weight.dtype, compress_statistics=True, quant_type="nf4", device="meta"
        )
        replacement.weight = _nf4(weight, slice_bytes)
        # With AVX512-bf16 an input that needs no gradient would have the weight repacked for inference, for good: in
        # bf16, without a backward pass, and only where the number of rows is a multiple of 32.
        replacement.support_avx512bf16_for_cpu = False
    else:
        replacement = bnb.Linear8bitLt(*shape, has_fp16_weights=False, device="meta")
        replacement.weight = _int8(weight, slice_bytes)
    replacement.bias = bias
    return replacement.train(layer.training)  # type: ignore[no-any-return]  # int8's differ on a processor


def _nf4(weight: "Tensor", slice_bytes: int) -> Any:
    flat = weight.reshape(-1)
    step = max(NF4_BLOCK, slice_bytes // weight.element_size() // NF4_BLOCK * NF4_BLOCK)
    stored = torch.empty(-(-len(flat) // 2), 1, dtype=torch.uint8, device=weight.device)
    maxima = torch.empty(-(-len(flat) // NF4_BLOCK), dtype=torch.float32, device=weight.device)
    for start in range(0, len(flat), step):
        part, state = functional.quantize_4bit(flat[start : start + step], blocksize=NF4_BLOCK, quant_type="nf4")
        stored[start // 2 : start // 2 + len(part)] = part
        maxima[start // NF4_BLOCK : start // NF4_BLOCK + len(state.absmax)] = state.absmax
    offset = maxima.mean()
    scales, nested = functional.quantize_blockwise(maxima - offset, blocksize=NESTED_BLOCK)
    state = functional.QuantState(
        absmax=scales,
        shape=weight.shape,
        dtype=weight.dtype,
        blocksize=NF4_BLOCK,
        code=functional.get_4bit_type("nf4", device=weight.device),
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


def _int8(weight: "Tensor", slice_bytes: int) -> Any:
    # Int8Params quantize by themselves only on their way from the host; these weights may be on the device already.
    stored = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    step = max(1, slice_bytes // max(1, weight.shape[1] * weight.element_size()))
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        stored[rows], scales[rows], _ = functional.int8_vectorwise_quant(weight[rows].to(torch.float16))
    return bnb.Int8Params(stored, requires_grad=False, has_fp16_weights=False, CB=stored, SCB=scales)
