"""Sizes that decide how many bytes quantized weights take, and how many more while they are quantized."""

NF4_BLOCK = 64
"""Weights per absolute maximum."""
NESTED_BLOCK = 256
"""Absolute maxima per fp32 scale of theirs, with double quantization."""

SLICE_BYTES = 4 << 20
CPU_SLICE_BYTES = 1 << 20
"""Of a weight, quantized at a time: the smaller stays in a processor's caches; on a GPU it would be launches."""
