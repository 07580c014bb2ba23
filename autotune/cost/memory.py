"""Device memory of every phase of a job, broken down by what it is for; and the host's memory."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autotune.cost.allocator import LARGE_SEGMENT_BYTES, SMALL_REQUEST_BYTES
from autotune.cost.trace import ComposedPass
from autotune.cost.traced_model import ModelBytes, ModulationBytes, PassChoice, TracedModel, VaeCost
from autotune.knobs import formats, modulation
from autotune.knobs.settings import encoder_element_bytes, optimizer_bytes
from autotune.plan import plan, workload
from autotune.plan.hardware import Device, shares_host_memory
from autotune.plan.prediction import MemoryBreakdown, PhaseMemory

FP32_BYTES = 4
# cuBLAS's default (its documentation, CUBLAS_WORKSPACE_CONFIG), from PyTorch's allocator.
WORKSPACE_BYTES = (8 << 20) + (128 << 10)
HOPPER_WORKSPACE_BYTES = 32 << 20
# Threads that multiply: the backward pass runs on autograd's own, with a handle of its own.
WORKSPACES = 2
# Pages of 20 MiB in which little lies when one kind of work ends: 0.03 to 0.27 GB in 24 models.
SCATTERED_BYTES = 7 * LARGE_SEGMENT_BYTES
# Python with torch, diffusers, transformers and CUDA's libraries loaded.
HOST_PROCESS_BYTES = 3 << 29
PHASES = ("load", "cache", "train", "preview", "save")
EMPTY = dict.fromkeys(MemoryBreakdown.model_fields, 0)


@dataclass(frozen=True)
class Resident:
    """Bytes on the device whatever the batch, and those that other phases need."""

    weight_bytes: int  # without swapped blocks
    visiting_bytes: int  # the most of those that are there at once
    visiting_hole_bytes: int  # a smaller one's place does not take a larger one
    buffer_bytes: int
    adapter_bytes: int
    optimizer_bytes: int
    optimizer_transient_bytes: int  # fp32 copies of gradients, and what the optimizer works with
    small_pool_bytes: int  # gradients and those copies, where the allocator keeps them apart
    set_aside_bytes: int  # masters while previews show an average of them
    quantizing_bytes: int
    packing_bytes: int  # the region that a block's weights move into
    encoder_bytes: int  # text encoders on the device in the cache phase
    caption_bytes: tuple[int, int]  # beside these for a caption; and what the allocator leaves free
    encoders_stay: bool  # while images are encoded
    vae: VaeCost
    decoder_bytes: int  # what decodes previews besides the VAE
    room_bytes: int  # of the budget, that of the process itself taken off
    preview_transient_bytes: int  # the transformer's forward pass without gradients
    library_bytes: int  # what matrix libraries take from the allocator
    overhead_bytes: int
    host_memory_bytes: int
    bucket_bytes: int = 0  # where several processes average gradients
    gathered_bytes: int = 0  # weights of other processes, while a pass needs them


def resident_of(
    device: Device,
    model: TracedModel,
    choice: PassChoice,
    *,
    swapped: int,
    overhead_bytes: int,
    encoder_bytes: int,
    caption_bytes: tuple[int, int],
    encoders_stay: bool,
) -> Resident:
    """Add up traced sizes of the weights; `encoder_bytes` by the caching settings."""
    precision, quantization, work = choice.precision, choice.quantization, model.workload
    stored = model.model_bytes(precision, quantization, choice.modulation)
    state_bytes, working_bytes = _optimizer_bytes(model, stored, choice)
    swapped_bytes, visiting_bytes = stored.swapped_bytes(swapped)
    visitors = stored.block_pinned_bytes[:swapped]
    average = stored.adapter_parameters * FP32_BYTES
    vae = model.vae_cost(precision)
    is_cuda = device.kind == "cuda"
    modulation_bytes = _modulation_bytes(stored.modulation, model, is_pinned=is_cuda)
    window_bytes, preview_bytes, computing_bytes = modulation_bytes
    forward_bytes = [
        # A window is computed when nothing but what previews keep is there, too.
        computing_bytes,
        model.forward_bytes(precision, quantization, choice.modulation),
    ]
    if model.family.other_denoisers:  # unquantized: its layers come to the device one by one
        plain = model.forward_bytes(precision, "none")
        forward_bytes.append(plain + stored.largest_layer_bytes)
    is_hopper = (device.compute_capability or (0, 0)) >= (9, 0)  # or newer
    workspace_bytes = HOPPER_WORKSPACE_BYTES if is_hopper else WORKSPACE_BYTES
    shares_host = shares_host_memory(device.memory_kind)
    on_device = stored.weight_bytes + vae.weight_bytes + encoder_bytes if shares_host else 0
    sets_aside = work.ema_decay or work.optimizer.name == "schedule-free"
    return Resident(
        weight_bytes=stored.weight_bytes - swapped_bytes,
        visiting_bytes=visiting_bytes,
        visiting_hole_bytes=max(visitors, default=0) - min(visitors, default=0),
        buffer_bytes=stored.buffer_bytes + (window_bytes if shares_host else 0),
        adapter_bytes=stored.adapter_bytes,
        optimizer_bytes=state_bytes + (average if work.ema_decay else 0),
        optimizer_transient_bytes=working_bytes,
        small_pool_bytes=_small_pool_bytes(device, stored, working_bytes),
        set_aside_bytes=average if sets_aside else 0,
        quantizing_bytes=_quantizing_bytes(device, quantization, stored.largest_layer_bytes),
        packing_bytes=stored.packing_bytes if is_cuda else 0,
        encoder_bytes=encoder_bytes,
        caption_bytes=caption_bytes if encoder_bytes else (0, 0),
        encoders_stay=encoders_stay,
        vae=vae,
        decoder_bytes=model.parts.decoder_parameters * encoder_element_bytes(precision),
        room_bytes=device.budget_bytes - overhead_bytes,
        preview_transient_bytes=max(forward_bytes) + (preview_bytes if shares_host else 0),
        library_bytes=WORKSPACES * workspace_bytes if is_cuda else 0,
        overhead_bytes=overhead_bytes,
        host_memory_bytes=HOST_PROCESS_BYTES
        + stored.largest_block_bytes
        + on_device
        + window_bytes
        + preview_bytes
        + sum(visitors),
    )


def _optimizer_bytes(
    model: TracedModel, model_bytes: ModelBytes, choice: PassChoice
) -> tuple[int, int]:
    """State, and scratch memory of a step; of another program only AdamW's are known."""
    work, parameters = model.workload, model_bytes.adapter_parameters
    is_half = choice.precision != "fp32"
    if model.overheads and is_half and work.optimizer == workload.ADAMW:
        practice = model.overheads.adapter_on(choice.quantization)
        counters = sum(model_bytes.adapter_shapes.values()) * FP32_BYTES
        return parameters * practice.optimizer_bytes + counters, parameters * practice.step_bytes
    state, working = optimizer_bytes(work.optimizer, model_bytes.adapter_shapes)
    copies = parameters * FP32_BYTES if is_half else 0
    return copies + state, copies + working


def _small_pool_bytes(device: Device, model_bytes: ModelBytes, working_bytes: int) -> int:
    if device.kind != "cuda":
        return 0
    numels = ((math.prod(shape), count) for shape, count in model_bytes.adapter_shapes.items())
    small = sum(n * count for n, count in numels if n * FP32_BYTES <= SMALL_REQUEST_BYTES)
    share = small / max(1, model_bytes.adapter_parameters)
    return round(share * (model_bytes.adapter_bytes + working_bytes))


def _modulation_bytes(
    layers: ModulationBytes | None, model: TracedModel, *, is_pinned: bool
) -> tuple[int, int, int]:
    """On the host for coming draws and for a preview; on the device while a window is computed."""
    if layers is None:
        return 0, 0, 0
    images, defaults = model.workload.effective_batch_size, model.family.defaults
    draws = images * modulation.window_steps(layers.row_bytes, images)
    window = draws * layers.row_bytes
    num_weights = sum(inputs * outputs + outputs for inputs, outputs in layers.shapes)
    beside = max(2 * inputs + outputs for inputs, outputs in layers.shapes)
    return (
        1 << (window - 1).bit_length() if is_pinned else window,
        defaults.preview_steps * defaults.preview_calls * layers.row_bytes,
        layers.largest_layer_bytes + draws * beside * (layers.weight_bytes // num_weights),
    )


def _quantizing_bytes(device: Device, quantization: str, layer_bytes: int) -> int:
    weight_format = formats.WEIGHT_FORMATS[quantization]
    if not weight_format.quantize:
        return 0
    slice_bytes = formats.CPU_SLICE_BYTES if device.kind == "cpu" else formats.SLICE_BYTES
    return layer_bytes + round(weight_format.quantizing_slices * min(slice_bytes, layer_bytes))


def phases_of(
    resident: Resident, composed: ComposedPass, waste: float, factor: float
) -> tuple[PhaseMemory, ...]:
    """Break down every phase of a job, in order, from what stays and one micro-batch.

    `waste` is reserved beyond the micro-batch's own peak, `factor` calibrates allocated memory.
    """
    r = resident
    earlier, later = _around_training(r)
    weights = r.weight_bytes + composed.visiting_bytes + r.buffer_bytes
    step = {
        "saved_activation_bytes": composed.saved_bytes,
        "transient_bytes": composed.transient_bytes + r.library_bytes + r.gathered_bytes,
        "attention_workspace_bytes": composed.workspace_bytes,
        "gradient_bytes": composed.gradient_bytes + r.bucket_bytes,
    }
    # Activations cannot use what the optimizer's step left in the pool of small tensors.
    waste += max(0.0, r.small_pool_bytes - step["gradient_bytes"]) + r.visiting_hole_bytes
    resting = weights + r.adapter_bytes + r.optimizer_bytes
    optimizing = r.adapter_bytes + r.optimizer_transient_bytes
    if optimizing > sum(step.values()):
        step = {
            "gradient_bytes": r.adapter_bytes,
            "transient_bytes": r.optimizer_transient_bytes + r.library_bytes,
        }
    correction = (factor - 1) * (resting + sum(step.values()))
    # Weights, adapter and gradients are counted: only what comes and goes can take less.
    for part in ("transient_bytes", "saved_activation_bytes"):
        before = step.get(part, 0.0)
        step[part] = max(0.0, before + correction)
        correction -= step[part] - before
    kept = {"adapter_bytes": r.adapter_bytes, "optimizer_bytes": r.optimizer_bytes}
    train = _phase(r, "train", waste, weight_bytes=weights, **kept, **step)
    return (*earlier, train, *later)


@lru_cache(maxsize=1024)
def _around_training(r: Resident) -> tuple[tuple[PhaseMemory, ...], tuple[PhaseMemory, ...]]:
    kept = {"adapter_bytes": r.adapter_bytes, "optimizer_bytes": r.optimizer_bytes}
    weights = r.weight_bytes + r.visiting_bytes + r.buffer_bytes
    arriving = max(r.quantizing_bytes, r.packing_bytes, r.adapter_bytes) + r.gathered_bytes
    # What a library has taken for a thread stays; another comes with the first backward pass.
    library = r.library_bytes // WORKSPACES if r.encoder_bytes else 0
    beside = r.encoder_bytes if r.encoders_stay else 0
    captions, images = (r.encoder_bytes, *r.caption_bytes), (beside, *r.vae.encode_bytes)
    stored, encoding, caching_holes = max(captions, images, key=sum)
    decoders = r.vae.weight_bytes + r.decoder_bytes
    # The saved adapter is shown at last, beside the one that learned.
    beside = r.set_aside_bytes + r.library_bytes + r.adapter_bytes
    others = weights + sum(kept.values()) + decoders + beside
    has_room = others + sum(r.vae.whole_decode_bytes) <= r.room_bytes
    decode = r.vae.whole_decode_bytes if has_room else r.vae.tiled_decode_bytes
    denoise = r.preview_transient_bytes + r.gathered_bytes, 0
    forward, holes = max(denoise, decode, key=sum)
    stored += r.vae.weight_bytes
    shown = {**kept, "weight_bytes": weights + decoders, "transient_bytes": forward + beside}
    saving = r.library_bytes + r.adapter_bytes  # a copy in the file's dtype
    scattered = min(SCATTERED_BYTES, weights) if r.library_bytes else 0  # of a GPU
    return (
        _phase(r, "load", scattered, weight_bytes=weights, transient_bytes=arriving + library),
        _phase(r, "cache", caching_holes, weight_bytes=stored, transient_bytes=encoding + library),
    ), (
        _phase(r, "preview", holes + scattered, **shown),
        _phase(r, "save", scattered, weight_bytes=weights, **kept, transient_bytes=saving),
    )


def _phase(r: Resident, name: str, waste: float = 0.0, **parts: float) -> PhaseMemory:
    whole = {key: round(value) for key, value in parts.items()}
    num_bytes, rounding = sum(whole.values()), round(waste)
    reserved = {"process_overhead_bytes": r.overhead_bytes, "allocator_rounding_bytes": rounding}
    breakdown = MemoryBreakdown.model_construct(None, **{**EMPTY, **whole, **reserved})
    return PhaseMemory.model_construct(
        name=name,
        run_memory_bytes=num_bytes + r.overhead_bytes + rounding,
        allocated_memory_bytes=num_bytes,
        breakdown=breakdown,
    )


def with_kept(phases: Sequence[PhaseMemory], kept: Mapping[str, int]) -> tuple[PhaseMemory, ...]:
    """Return the phases of a job with so many bytes more of weights."""

    def changed(phase: PhaseMemory, more: int) -> PhaseMemory:
        weight_bytes = phase.breakdown.weight_bytes + more
        sizes = {
            "run_memory_bytes": phase.run_memory_bytes + more,
            "allocated_memory_bytes": phase.allocated_memory_bytes + more,
            "breakdown": phase.breakdown.model_copy(update={"weight_bytes": weight_bytes}),
        }
        return phase.model_copy(update=sizes)

    return tuple(changed(each, kept[each.name]) if each.name in kept else each for each in phases)


GATHERED_BLOCKS = 2  # the one that runs and the next, which FSDP2 gathers meanwhile
PASSES = 2  # weights are gathered for the forward and again for the backward pass

# Bytes per second and direction in a collective: about half of what third-generation NVLink and
# PCIe 4.0 x16 carry. Round figures, not measured here.
LINK_BANDWIDTH = {"nvlink": 150e9}
PCIE_BANDWIDTH = 12e9


@dataclass(frozen=True)
class Parallel:
    """Number of processes that train together, and their strategy."""

    strategy: plan.Strategy = "single"
    num_processes: int = 1

    @property
    def num_shards(self) -> int:
        """Processes that hold the frozen weights together: 1 if each has them all."""
        return self.num_processes if self.strategy == "fsdp2" else 1

    def budget_bytes(self, device: Device) -> int:
        """Return what one process may take: on a CPU they share it."""
        return device.budget_bytes // (self.num_processes if device.kind == "cpu" else 1)

    def weight_bytes(self, model_bytes: ModelBytes) -> int:
        return -(-model_bytes.weight_bytes // self.num_shards)

    def resident(self, whole: Resident, model_bytes: ModelBytes) -> Resident:
        """Return what one device keeps of a model that alone would take `whole`."""
        if self.strategy == "single":
            return whole
        # DDP's buckets hold each gradient once more, beside the one that accumulates.
        one = replace(whole, bucket_bytes=whole.adapter_bytes)
        if self.num_shards == 1:
            return one
        # What no block holds is gathered as one, for the whole pass.
        gathered = GATHERED_BLOCKS * model_bytes.largest_block_bytes + model_bytes.outside_bytes
        weight_bytes = self.weight_bytes(model_bytes)
        return replace(one, weight_bytes=weight_bytes, gathered_bytes=gathered)

    def exchange_seconds(
        self, device: Device, model_bytes: ModelBytes, accumulation: float
    ) -> float:
        """Return the time in which one step's gradients and weights are sent, besides computing.

        Each collective is a ring, through which every byte but a process's own passes.
        """
        if self.strategy == "single":
            return 0.0
        rates = [LINK_BANDWIDTH.get(link.path, PCIE_BANDWIDTH) for link in device.links]
        within = min(rates, default=PCIE_BANDWIDTH)
        others = (self.num_processes - 1) / self.num_processes
        # Reduce, then gather: an all-reduce.
        seconds = 2 * model_bytes.adapter_bytes * others / within
        if self.num_shards > 1:
            gathered = PASSES * accumulation * model_bytes.weight_bytes
            seconds += gathered * others / within
        return seconds


ONE_PROCESS = Parallel()
