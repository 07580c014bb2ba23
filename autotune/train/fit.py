"""The fit of a plan to a machine, a model and data: a reason for each misfit."""

from autotune.errors import DoesNotFit
from autotune.knobs.caching import why_not_cast
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import KNOBS, NAMES, why_not_on
from autotune.machine.capabilities import limit_device
from autotune.machine.probe import probe
from autotune.models import registry, resolve
from autotune.plan.hardware import KEY_NAMES, Device, HardwareProfile
from autotune.plan.plan import TrainingPlan
from autotune.plan.workload import Bucket
from autotune.system.lazy import torch

# A predicted plan assumes the other keys until trials run on the machine.
PREDICTED_KEYS = ("device_kind", "compute_capability", "memory_kind")
# How much longer than planned a caption may be, as a share of the largest image's tokens:
# activations grow by less than that, and a plan leaves 2% of a GPU's memory free.
CAPTION_TOLERANCE = 0.01


def hardware_misfits(
    plan: TrainingPlan, hardware: HardwareProfile, num_processes: int | None = None
) -> tuple[str, ...]:
    """List why the plan cannot be trusted on this machine."""
    if foreign := _foreign_gpu(plan, hardware):
        return foreign
    local = num_processes or plan.frozen.hardware.num_processes
    memory = *_host_misfits(plan, hardware, local), *memory_misfits(plan, hardware, local)
    return (*key_misfits(plan, hardware), *_settings_misfits(plan, hardware), *memory)


def _foreign_gpu(plan: TrainingPlan, hardware: HardwareProfile) -> tuple[str, ...]:
    # All else that differs follows from it.
    planned, name, here = plan.frozen.hardware, hardware.device.name, hardware.match_keys
    is_same_kind = all(planned.match_keys.get(key) == here.get(key) for key in PREDICTED_KEYS)
    if is_same_kind or planned.device_name == name:
        return ()
    if here.get("device_kind") == "cpu":
        made_for = f"the plan was made for {planned.device_name}"
        return (f"{made_for}, and this machine has no GPU that torch can use",)
    return (f"it was made for {planned.device_name}, not for {name}",)


def key_misfits(plan: TrainingPlan, hardware: HardwareProfile) -> tuple[str, ...]:
    """List why the machine is of another kind than the plan's, whatever its memory."""
    if foreign := _foreign_gpu(plan, hardware):
        return foreign
    planned = plan.frozen.hardware
    here = hardware.match_keys
    measured = plan.frozen.expected.evidence == "measured"
    formats = [plan.frozen.settings.quantization, plan.frozen.caching.text_encoder_quantization]
    formats += [fallback.quantization for fallback in plan.frozen.fallbacks]
    # The version of a library that no format needs is nothing.
    used = {WEIGHT_FORMATS[name].needs.library for name in formats if name in WEIGHT_FORMATS}
    idle = {each.needs.library for each in WEIGHT_FORMATS.values()} - used
    misfits = []
    for key, value in planned.match_keys.items():
        counts = key not in idle and (measured or key in PREDICTED_KEYS)
        if counts and here.get(key) != value:
            made, now = value or "none", here.get(key) or "none"
            name = KEY_NAMES.get(key, key)
            misfits.append(f"{name}: the plan was made with {made}, here it is {now}")
    return (*misfits, *_encoder_misfits(plan, hardware.device))


def _encoder_misfits(plan: TrainingPlan, device: Device) -> tuple[str, ...]:
    caching, planned = plan.frozen.caching, plan.frozen.hardware.encoder_gpu
    encoder, what = caching.other_gpu, caching.parts_on_other_gpu
    if encoder is None:
        return ()
    there = next((gpu for gpu in device.others if f"cuda:{gpu.index}" == encoder), None)
    if there is None:
        own = encoder == device.torch_name
        why = "which trains here" if own else f"this machine has {device.count} GPU(s)"
        return (f"GPUs: the plan encodes {what} on {encoder}, {why}",)
    if planned is None or planned.needed_bytes <= there.budget_bytes:
        return ()
    sizes = f"needs {_gib(planned.needed_bytes)}, {_gib(there.budget_bytes)} may be taken"
    return (f"GPUs: encoding {what} on {encoder}, {there.name}, {sizes}",)


def _settings_misfits(plan: TrainingPlan, hardware: HardwareProfile) -> tuple[str, ...]:
    settings, encoder_format = plan.frozen.settings, plan.frozen.caching.text_encoder_quantization
    used = [(name, name, value) for name, value in settings if NAMES[name]]
    used.append(("text encoder quantization", "quantization", encoder_format))
    misfits = []
    for title, name, value in used:
        if reason := why_not_on(hardware.device.kind, hardware.lacks, name, value):
            misfits.append(f"{title}: {value} does not work on this machine: {reason}")
        elif value not in NAMES[name]:
            misfits.append(f"{title}: this version of autotune does not know {value!r}")
    family = registry.FAMILIES.get(plan.frozen.workload.model.family)
    if family and (reason := why_not_cast(encoder_format, family)):
        unused = f"{encoder_format} is no longer used for {family.name}"
        misfits.append(f"text encoder quantization: {unused}: {reason}")
    return tuple(misfits)


def _host_misfits(plan: TrainingPlan, hardware: HardwareProfile, number: int) -> tuple[str, ...]:
    needed = number * (plan.frozen.expected.host_memory_bytes or 0)
    there = hardware.host.available_memory_bytes
    if needed <= there:
        return ()
    together = f" for {number} processes here" if number > 1 else ""
    have = f"{_gib(there)} are available"
    return (f"system RAM: the plan needs {_gib(needed)}{together}, {have}",)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def memory_misfits(
    plan: TrainingPlan, hardware: HardwareProfile, num_processes: int
) -> tuple[str, ...]:
    """List why this device has too little memory; a CPU's is shared by `num_processes`."""
    needed, reserve = plan.frozen.expected.run_memory_bytes, plan.frozen.reserve_memory_bytes
    if plan.frozen.hardware.device_kind == "cpu":
        needed *= num_processes
    budget = limit_device(hardware.device, reserve_bytes=reserve).budget_bytes
    if needed <= budget:
        return ()
    where = f"on cuda:{hardware.device.index}" if hardware.device.index else "here"
    sizes = f"the plan needs {_gib(needed)}, a run may take {_gib(budget)} {where}"
    if needed <= (hardware.device.total_memory_bytes or 0):
        sizes += "; where other programs hold memory, close them"
    return (f"run memory: {sizes}",)


def require_model(plan: TrainingPlan, model: resolve.ResolvedModel) -> None:
    """Raise DoesNotFit if the plan is not for a model of this architecture."""
    planned, given = plan.frozen.workload.model, model.spec
    if planned.architecture != given.architecture:
        what = f"the plan is for the architecture of {planned.name}, {given.name} has another"
        require_fit((f"model: {what}",))


def data_misfits(plan: TrainingPlan, context: TuningContext) -> tuple[str, ...]:
    """List why data with `context.workload` is outside the planned class."""
    planned, actual = plan.frozen.workload, context.workload
    misfits = []
    largest, allowed = actual.largest_bucket, planned.largest_bucket
    if largest.num_pixels > allowed.num_pixels:
        misfits.append(f"a bucket of {_size(largest)} is larger than the planned {_size(allowed)}")
    tolerance = int(CAPTION_TOLERANCE * context.family.tokens_per_frame(allowed))
    tokens, max_tokens = actual.max_text_tokens, planned.max_text_tokens
    if tokens > max_tokens + tolerance:
        misfits.append(f"a caption of {tokens} tokens is longer than the planned {max_tokens}")
    controls, max_controls = actual.num_control_images, planned.num_control_images
    if controls > max_controls:
        misfits.append(f"{controls} control images for an item, the plan is for {max_controls}")
    conflicts = (knob.why_not(plan.frozen.settings, context) for knob in KNOBS)
    misfits = [f"data: {misfit}" for misfit in (*misfits, *filter(None, conflicts))]
    share = plan.frozen.process_workload.effective_batch_size
    if plan.frozen.settings.micro_batch_size > share:
        misfits.append(f"processes: each gets {share} image(s) per step, less than a micro-batch")
    return tuple(misfits)


def require_fit(misfits: tuple[str, ...], options: str = "") -> None:
    """Raise DoesNotFit, naming all, if there are misfits; the hint names `options`, too."""
    if misfits:
        hint = f"make one for this machine and data: `autotune plan --from PLAN{options}`"
        raise DoesNotFit(f"the plan does not fit: {'; '.join(misfits)}", hint=hint)


def _size(bucket: Bucket) -> str:
    frames = f" x {bucket.num_frames} frames" if bucket.num_frames > 1 else ""
    return f"{bucket.width_px} x {bucket.height_px} px{frames}"


def device_misfits(num_processes: int, hardware: HardwareProfile) -> tuple[str, ...]:
    """List why so many processes cannot have an equal GPU each; on a CPU they share it."""
    kind = hardware.device.kind
    if num_processes == 1 or kind == "cpu":
        return ()
    if kind != "cuda":
        return (f"processes: {num_processes} need a GPU each, {kind} has one",)
    if (count := hardware.device.count) < num_processes:
        return (f"processes: {num_processes} need a GPU each, {count} can be seen here",)
    cards = [torch.cuda.get_device_properties(index) for index in range(num_processes)]
    kinds = {(card.name, card.total_memory // 2**30) for card in cards}
    if len(kinds) == 1:
        return ()
    names = ", ".join(sorted(f"{name} ({size} GiB)" for name, size in kinds))
    return (f"processes: they need equal GPUs, the first {num_processes} are {names}",)


def card_misfits(
    plan: TrainingPlan, hardware: HardwareProfile, num_processes: int | None = None
) -> tuple[str, ...]:
    """List why any process but the first cannot have a GPU with enough memory."""
    planned = plan.frozen.hardware
    num_processes = num_processes or planned.num_processes
    if misfits := device_misfits(num_processes, hardware):
        return misfits
    if num_processes == 1 or hardware.device.kind != "cuda":
        return ()
    others = [index for index in range(num_processes) if index != hardware.device.index]
    found = [memory_misfits(plan, probe(index=index), planned.num_processes) for index in others]
    return tuple(misfit for misfits in found for misfit in misfits)
