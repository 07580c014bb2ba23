"""Device memory of every phase of a job, broken down by what it is for; and the host's memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autotune.cost.model import ModelBytes, ModulationBytes, TracedModel
from autotune.cost.trace import ComposedPass
from autotune.knobs.formats import CPU_SLICE_BYTES, SLICE_BYTES, WEIGHT_FORMATS
from autotune.knobs.modulation import window_steps
from autotune.knobs.settings import encoder_element_bytes, optimizer_bytes
from autotune.plan.candidate import Candidate
from autotune.plan.hardware import (
    Device,
    HardwareProfile,
    process_overhead_bytes,
    shares_host_memory,
)
from autotune.plan.plan import Strategy
from autotune.plan.prediction import MemoryBreakdown, Overheads, PhaseMemory
from autotune.plan.workload import ADAMW

FP32_BYTES = 4
WORKSPACE_BYTES = (8 << 20) + (128 << 10)
HOPPER_WORKSPACE_BYTES = 32 << 20
"""cuBLAS's default workspace (its documentation, CUBLAS_WORKSPACE_CONFIG), which PyTorch takes
from its allocator."""
WORKSPACES = 2
"""One for each thread that multiplies: the backward pass runs on autograd's own, with a handle
of its own."""
HOST_PROCESS_BYTES = 3 << 29
"""Resident memory of Python with torch, diffusers and transformers imported, with CUDA's
libraries loaded."""
VISITING_BLOCKS = 2
"""Swapped blocks on the device at once: the one that runs and the next."""
WHOLE_LAYERS = 4
"""Times a layer's weight that quantizing it whole is taken to need for a moment: the weight in
fp32, and a copy."""
PHASES = ("load", "cache", "train", "preview", "save")
MOVING = (
    "saved_activation_bytes",
    "transient_bytes",
    "attention_workspace_bytes",
    "gradient_bytes",
)
EMPTY = dict.fromkeys((*MOVING, "weight_bytes", "adapter_bytes", "optimizer_bytes"), 0)


@dataclass(frozen=True)
class Resident:
    """What stays on the device whatever the candidate's batch and checkpointing, and what other
    phases need."""

    weight_bytes: int
    buffer_bytes: int
    adapter_bytes: int
    optimizer_bytes: int
    optimizer_transient_bytes: int
    """fp32 copies of the gradients while the optimizer steps, and what it works with."""
    set_aside_bytes: int
    """Masters while previews show an average of them."""
    quantizing_bytes: int
    encoder_bytes: int
    """Text encoders and what they work with, as the cache phase holds them on the device."""
    encoders_stay: bool
    """Whether they are kept while images are encoded; else they leave as soon as captions are
    done."""
    vae_bytes: int
    decoder_bytes: int
    """What decodes previews besides the VAE."""
    encode_transient_bytes: int
    decode_transient_bytes: int
    preview_transient_bytes: int
    """The transformer's forward pass without gradients."""
    library_bytes: int
    """What matrix libraries take from the allocator."""
    overhead_bytes: int
    waste_share: float
    host_memory_bytes: int
    bucket_bytes: int = 0
    """Where several processes average gradients."""
    gathered_bytes: int = 0
    """Weights of other processes that are here while a pass needs them."""


def resident_of(
    hardware: HardwareProfile,
    model: TracedModel,
    candidate: Candidate,
    *,
    encoder_bytes: int,
    encoders_stay: bool,
) -> Resident:
    """From the traced sizes of the candidate's weights; `encoder_bytes` as the caching settings
    have it."""
    precision = candidate.precision
    quantization = candidate.quantization
    swapped = candidate.swapped_blocks
    model_bytes = model.model_bytes(precision, quantization, candidate.modulation)
    state_bytes, working_bytes = _optimizer_bytes(model, model_bytes, candidate)
    average = model_bytes.adapter_parameters * FP32_BYTES
    vae = model.vae_cost(precision)
    shares_host = shares_host_memory(hardware.device.memory_kind)
    ahead = _modulation_memory(
        model_bytes.modulation, model, is_pinned=hardware.device.kind == "cuda"
    )
    on_device = model_bytes.weight_bytes + vae.weight_bytes + encoder_bytes if shares_host else 0
    return Resident(
        weight_bytes=model_bytes.weight_bytes - away_bytes(model_bytes, swapped),
        buffer_bytes=model_bytes.buffer_bytes + (ahead.window_bytes if shares_host else 0),
        adapter_bytes=model_bytes.adapter_bytes,
        optimizer_bytes=state_bytes + (average if model.workload.ema_decay else 0),
        optimizer_transient_bytes=working_bytes,
        set_aside_bytes=average
        if model.workload.ema_decay or model.workload.optimizer.name == "schedule-free"
        else 0,
        quantizing_bytes=_quantizing_bytes(hardware, quantization, model_bytes.largest_layer_bytes),
        encoder_bytes=encoder_bytes,
        encoders_stay=encoders_stay,
        vae_bytes=vae.weight_bytes,
        decoder_bytes=model.parts.decoder_parameters * encoder_element_bytes(precision),
        encode_transient_bytes=vae.encode_transient_bytes,
        decode_transient_bytes=vae.decode_transient_bytes,
        preview_transient_bytes=max(
            # A window is computed when nothing but what previews keep is there, too.
            ahead.computing_bytes,
            model.forward_bytes(precision, quantization, candidate.modulation),
            # Another transformer denoises too, unquantized: its layers come to the device one by
            # one.
            model.forward_bytes(precision, "none") + model_bytes.largest_layer_bytes
            if model.family.other_denoisers
            else 0,
        )
        + (ahead.preview_bytes if shares_host else 0),
        library_bytes=library_bytes(hardware),
        overhead_bytes=process_overhead_bytes(hardware),
        waste_share=model_bytes.waste_share[candidate.allocator],
        host_memory_bytes=HOST_PROCESS_BYTES
        + model_bytes.largest_block_bytes
        + on_device
        + ahead.window_bytes
        + ahead.preview_bytes
        + sum(model_bytes.block_pinned_bytes[:swapped]),
    )


def _optimizer_bytes(
    model: TracedModel, model_bytes: ModelBytes, candidate: Candidate
) -> tuple[int, int]:
    """What the optimizer keeps, and what it works with while it steps: copies of the adapter in
    fp32 beside its state.

    Another program's practice is known of AdamW alone.
    """
    work, parameters = model.workload, model_bytes.adapter_parameters
    is_half = candidate.precision != "fp32"
    if model.overheads and is_half and work.optimizer == ADAMW:
        practice = model.overheads.adapter_on(candidate.quantization)
        counters = sum(model_bytes.adapter_shapes.values()) * FP32_BYTES
        return parameters * practice.optimizer_bytes + counters, parameters * practice.step_bytes
    state, working = optimizer_bytes(work.optimizer, model_bytes.adapter_shapes)
    copies = parameters * FP32_BYTES if is_half else 0
    return copies + state, copies + working


@dataclass(frozen=True)
class ModulationMemory:
    """What modulations that are computed ahead take."""

    window_bytes: int = 0
    """On the host, for the coming draws."""
    preview_bytes: int = 0
    """On the host, while a preview is sampled."""
    computing_bytes: int = 0
    """On the device, while a window is computed: the largest layer with its inputs and outputs."""


def _modulation_memory(
    layers: ModulationBytes | None, model: TracedModel, *, is_pinned: bool
) -> ModulationMemory:
    if layers is None:
        return ModulationMemory()
    images, defaults = model.workload.effective_batch_size, model.family.defaults
    draws = images * window_steps(layers.row_bytes, images)
    window = draws * layers.row_bytes
    size = layers.weight_bytes // sum(
        inputs * outputs + outputs for inputs, outputs in layers.shapes
    )
    beside = max(2 * inputs + outputs for inputs, outputs in layers.shapes)
    return ModulationMemory(
        1 << (window - 1).bit_length() if is_pinned else window,
        defaults.preview_steps * defaults.preview_calls * layers.row_bytes,
        layers.largest_layer_bytes + draws * beside * size,
    )


def _quantizing_bytes(
    hardware: HardwareProfile, quantization: str, largest_layer_bytes: int
) -> int:
    weight_format = WEIGHT_FORMATS[quantization]
    if not weight_format.quantize:
        return 0
    if weight_format.quantizing_slices is None:
        return WHOLE_LAYERS * largest_layer_bytes
    slice_bytes = CPU_SLICE_BYTES if hardware.device.kind == "cpu" else SLICE_BYTES
    return largest_layer_bytes + round(
        weight_format.quantizing_slices * min(slice_bytes, largest_layer_bytes)
    )


def away_bytes(model_bytes: ModelBytes, swapped: int) -> int:
    """Frozen weights that wait on the host: those of the swapped blocks but for the two that
    visit the device."""
    blocks = model_bytes.block_weight_bytes[:swapped]
    return sum(blocks) - sum(sorted(blocks)[-VISITING_BLOCKS:])


def library_bytes(hardware: HardwareProfile) -> int:
    """What matrix libraries take from the allocator of a process that trains."""
    if hardware.device.kind != "cuda":
        return 0
    major = (hardware.device.compute_capability or (0, 0))[0]
    return WORKSPACES * (HOPPER_WORKSPACE_BYTES if major >= 9 else WORKSPACE_BYTES)


def phases_of(
    resident: Resident, composed: ComposedPass, waste: float, factor: float
) -> tuple[PhaseMemory, ...]:
    """Every phase of a job, in order.

    Args:
        resident: what stays.
        composed: one micro-batch.
        waste: bytes that the allocator reserves beyond the micro-batch's own peak.
        factor: calibration of the training step's allocated memory.
    """
    r = resident
    earlier, later = _around_training(r)
    weights = r.weight_bytes + r.buffer_bytes
    step = {
        "saved_activation_bytes": composed.saved_bytes,
        "transient_bytes": composed.transient_bytes + r.library_bytes + r.gathered_bytes,
        "attention_workspace_bytes": composed.workspace_bytes,
        "gradient_bytes": composed.gradient_bytes + r.bucket_bytes,
    }
    resting = weights + r.adapter_bytes + r.optimizer_bytes
    optimizing = r.adapter_bytes + r.optimizer_transient_bytes
    if optimizing > sum(step.values()):
        step = {
            "gradient_bytes": r.adapter_bytes,
            "transient_bytes": r.optimizer_transient_bytes + r.library_bytes,
        }
    correction = (factor - 1) * (resting + sum(step.values()))
    # Weights, adapter and gradients are counted, so that only what comes and goes can be less than
    # was predicted.
    for part in ("transient_bytes", "saved_activation_bytes"):
        before = step.get(part, 0.0)
        step[part] = max(0.0, before + correction)
        correction -= step[part] - before
    train = _phase(
        r,
        "train",
        waste=waste,
        weight_bytes=weights,
        adapter_bytes=r.adapter_bytes,
        optimizer_bytes=r.optimizer_bytes,
        **step,
    )
    return (*earlier, train, *later)


@lru_cache(maxsize=1024)
def _around_training(r: Resident) -> tuple[tuple[PhaseMemory, ...], tuple[PhaseMemory, ...]]:
    """The phases before training and those after it, which thousands of candidates have in
    common."""
    kept = {"adapter_bytes": r.adapter_bytes, "optimizer_bytes": r.optimizer_bytes}
    weights = r.weight_bytes + r.buffer_bytes
    forward = (
        max(r.preview_transient_bytes + r.gathered_bytes, r.decode_transient_bytes)
        + r.set_aside_bytes
    )
    decoders = r.vae_bytes + r.decoder_bytes
    beside = r.encoder_bytes if r.encoders_stay else 0
    # Captions, then images.
    encoding = max((r.encoder_bytes, 0), (beside, r.encode_transient_bytes), key=sum)
    return (
        _phase(
            r, "load", weight_bytes=weights, transient_bytes=r.quantizing_bytes + r.gathered_bytes
        ),
        _phase(r, "cache", weight_bytes=encoding[0] + r.vae_bytes, transient_bytes=encoding[1]),
    ), (
        _phase(
            r,
            "preview",
            weight_bytes=weights + decoders,
            **kept,
            transient_bytes=forward + r.library_bytes,
        ),
        _phase(r, "save", weight_bytes=weights, **kept),
    )


def _phase(r: Resident, name: str, *, waste: float = 0.0, **parts: float) -> PhaseMemory:
    whole = {key: round(value) for key, value in parts.items()}
    allocated = sum(whole.values())
    rounding = round(r.waste_share * whole["weight_bytes"] + waste)
    breakdown = MemoryBreakdown.model_construct(
        None,
        **{**EMPTY, **whole},
        process_overhead_bytes=r.overhead_bytes,
        allocator_rounding_bytes=rounding,
    )
    return PhaseMemory.model_construct(
        name=name,
        run_memory_bytes=allocated + r.overhead_bytes + rounding,
        allocated_memory_bytes=allocated,
        breakdown=breakdown,
    )


ELEMENT_BYTES = {"bf16": 2, "fp32": 4}
KEEP_ON = ("train", "preview", "save")
"""What training keeps is there to the end."""
VAE_IS_THERE = ("cache", "preview")


def kept_part_bytes(
    overheads: Overheads, resident: "Resident", *, vae_parameters: int, encoder_bytes: int
) -> Mapping[str, int]:
    """Bytes that each phase needs beyond what autotune's executor needs there.

    Args:
        overheads: of the program.
        resident: what stays on the device anyway.
        vae_parameters: of the VAE.
        encoder_bytes: of the text encoders' weights in bf16, as they are stored on the device; 0 if
            they are not there. While captions are encoded they are there anyway.
    """
    found: dict[str, int] = {}
    for one in overheads.kept:
        size = ELEMENT_BYTES[one.precision]
        for phase in KEEP_ON if one.phase == "train" else (one.phase,):
            num_bytes = {
                "transformer": resident.weight_bytes + resident.buffer_bytes
                if phase == "cache"
                else 0,
                "text_encoders": 0
                if phase == "cache"
                else encoder_bytes * size // ELEMENT_BYTES["bf16"],
                "vae": vae_parameters * size - (resident.vae_bytes if phase in VAE_IS_THERE else 0),
            }[one.part]
            found[phase] = found.get(phase, 0) + max(0, num_bytes)
    return found


def with_kept(phases: Sequence[PhaseMemory], kept: Mapping[str, int]) -> tuple[PhaseMemory, ...]:
    """The phases of a job with so many bytes more of weights."""

    def changed(phase: PhaseMemory) -> PhaseMemory:
        more = kept.get(phase.name, 0)
        breakdown = phase.breakdown.model_copy(
            update={"weight_bytes": phase.breakdown.weight_bytes + more}
        )
        sizes = {
            name: getattr(phase, name) + more
            for name in ("run_memory_bytes", "allocated_memory_bytes")
        }
        return phase.model_copy(update={**sizes, "breakdown": breakdown})

    return tuple(changed(phase) if phase.name in kept else phase for phase in phases)


GATHERED_BLOCKS = 2
"""The block that runs and the next one, which FSDP2 gathers meanwhile."""
PASSES = 2
"""Weights are gathered for the forward and again for the backward pass."""

LINK_BANDWIDTH = {"nvlink": 150e9}
PCIE_BANDWIDTH = 12e9
"""Bytes per second and direction in a collective: about half of what third-generation NVLink and
PCIe 4.0 x16 carry. Round figures, not measured here."""


@dataclass(frozen=True)
class Parallel:
    """How many processes train together, and by which strategy."""

    strategy: Strategy = "single"
    num_processes: int = 1

    @property
    def num_shards(self) -> int:
        """Processes that hold the frozen weights together: 1 if each has them all."""
        return self.num_processes if self.strategy == "fsdp2" else 1

    def budget_bytes(self, device: Device) -> int:
        """What one process may take: each has a device of its own, but on a CPU they share it."""
        return device.budget_bytes // (self.num_processes if device.kind == "cpu" else 1)

    def weight_bytes(self, model_bytes: ModelBytes) -> int:
        """Frozen weights that one device keeps."""
        return -(-model_bytes.weight_bytes // self.num_shards)

    def resident(self, whole: Resident, model_bytes: ModelBytes) -> Resident:
        """What one device keeps of a model that alone would take `whole`.

        DDP's buckets hold each gradient once more, beside the one that accumulates without
        synchronization.
        """
        if self.strategy == "single":
            return whole
        gathered = 0
        if self.num_shards > 1:  # what no block holds is gathered as one, for the whole pass
            gathered = GATHERED_BLOCKS * model_bytes.largest_block_bytes + model_bytes.outside_bytes
        return replace(
            whole,
            weight_bytes=self.weight_bytes(model_bytes)
            if self.num_shards > 1
            else whole.weight_bytes,
            bucket_bytes=whole.adapter_bytes,
            gathered_bytes=gathered,
        )

    def exchange_seconds(
        self, hardware: HardwareProfile, model_bytes: ModelBytes, accumulation: int
    ) -> float:
        """What one step sends; it overlaps with computing.

        Each collective is a ring, through which every byte but a process's own passes: its slowest
        link decides.
        """
        if self.strategy == "single":
            return 0.0
        paths = {link.path for link in hardware.device.links}
        within = min(
            (LINK_BANDWIDTH.get(path, PCIE_BANDWIDTH) for path in paths), default=PCIE_BANDWIDTH
        )
        others = (self.num_processes - 1) / self.num_processes
        # Reduce, then gather: an all-reduce.
        seconds = 2 * model_bytes.adapter_bytes * others / within
        if self.num_shards > 1:
            gathered = (
                PASSES
                * accumulation
                * model_bytes.weight_bytes
                * (self.num_shards - 1)
                / self.num_shards
            )
            seconds += gathered / within
        return seconds


ONE_PROCESS = Parallel()
