"""Device memory of every phase of a job, broken down by what it is for; and the host's memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.cost.composition import ComposedPass
from autotune.schema import HardwareProfile, MemoryBreakdown, PhaseMemory

if TYPE_CHECKING:
    from autotune.cost.model import Storage, TracedModel

FP32_BYTES = 4
CUDA_CONTEXT_BYTES = 500 << 20
"""Context, loaded kernels and library handles of a PyTorch process: 400 to 600 MiB on recent cards."""
WORKSPACE_BYTES = (8 << 20) + (128 << 10)
HOPPER_WORKSPACE_BYTES = 32 << 20
"""cuBLAS's default workspace (its documentation, CUBLAS_WORKSPACE_CONFIG), which PyTorch takes from its allocator."""
HOST_PROCESS_BYTES = 3 << 29
"""Resident memory of Python with torch, diffusers and transformers imported, with CUDA's libraries loaded."""
QUANTIZING_LAYERS = 7
"""torchao needs about seven times one layer's size for a moment."""


def process_overhead_bytes(hardware: HardwareProfile) -> int:
    """What a process takes of the device before its first tensor: measured, else a GPU's usual context."""
    measured = hardware.rate("process.overhead")
    if hardware.device.kind != "cuda":
        return 0  # the host's memory is counted on its own
    return int(measured) if measured is not None else CUDA_CONTEXT_BYTES


@dataclass(frozen=True)
class Resident:
    """What stays on the device whatever the candidate's batch and checkpointing."""

    weight_bytes: int
    buffer_bytes: int
    adapter_bytes: int
    optimizer_bytes: int
    optimizer_transient_bytes: int
    """fp32 copies of the gradients while the optimizer steps."""
    quantizing_bytes: int
    encoder_bytes: int
    """Text encoders, as the cache phase holds them."""
    decoder_bytes: int
    """The VAE."""
    preview_transient_bytes: int
    workspace_bytes: int
    overhead_bytes: int
    waste_share: float
    host_memory_bytes: int

    @staticmethod
    def of(
        storage: "Storage",
        *,
        precision: str,
        quantized: bool,
        model: "TracedModel",
        overhead_bytes: int,
        shares_host: bool,
    ) -> "Resident":
        """From the traced storage of one precision and quantisation."""
        half = precision != "fp32"
        element = 2 if half else 4
        masters = storage.adapter_parameters * FP32_BYTES if half else 0
        moments = 2 * storage.adapter_parameters * FP32_BYTES + storage.adapter_tensors * FP32_BYTES
        encoder = sum(model.family.text_encoder_parameters) * element
        device_bytes = storage.weight_bytes + encoder if shares_host else 0
        streaming = max(storage.largest_block_bytes, 0 if shares_host else model.family.largest_encoder_tensor_bytes)
        return Resident(
            weight_bytes=storage.weight_bytes,
            buffer_bytes=storage.buffer_bytes,
            adapter_bytes=storage.adapter_bytes,
            optimizer_bytes=masters + moments,
            optimizer_transient_bytes=storage.adapter_parameters * FP32_BYTES if half else 0,
            quantizing_bytes=storage.largest_block_bytes if quantized else 0,
            encoder_bytes=encoder,
            decoder_bytes=model.family.vae_parameters * element,
            preview_transient_bytes=0,
            workspace_bytes=0,
            overhead_bytes=overhead_bytes,
            waste_share=storage.waste_share,
            host_memory_bytes=HOST_PROCESS_BYTES + streaming + device_bytes,
        )
