"""bitsandbytes' layer around a weight that has just arrived: NF4 with double quantization.

The weight is quantized in slices: on a CPU bitsandbytes takes seven times what it is given (bf16)
for a moment. Slices end where a scale's values end, so the bits are those of the whole.
"""

from typing import Any

import torch
from bitsandbytes import functional
from bitsandbytes import nn as bnb
from torch import Tensor, nn

from autotune.quantization.sizes import NESTED_BLOCK, NF4_BLOCK, slice_bytes_of


def quantize_nf4(layer: nn.Linear) -> nn.Module:
    """The layer that takes the place of `layer`: 4-bit NormalFloat with double quantization, on
    its device.
    """
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
    """bitsandbytes' 4-bit parameter of `weight`."""
    flat = weight.reshape(-1)
    step = max(NF4_BLOCK, slice_bytes // weight.element_size() // NF4_BLOCK * NF4_BLOCK)
    stored = torch.empty(-(-len(flat) // 2), 1, dtype=torch.uint8, device=weight.device)
    maxima = torch.empty(-(-len(flat) // NF4_BLOCK), dtype=torch.float32, device=weight.device)
    for start in range(0, len(flat), step):
        part, state = functional.quantize_4bit(
            flat[start : start + step], blocksize=NF4_BLOCK, quant_type="nf4"
        )
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
