"""Whether a valid plan fits this machine, this model and this data. Pure; each misfit is one
sentence."""

from collections.abc import Mapping

from autotune.errors import DoesNotFit
from autotune.knobs.caching import cast_refusal
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import KNOBS, NAMES, unusable_reason
from autotune.models.registry import FAMILIES
from autotune.plan.hardware import Device, HardwareProfile
from autotune.plan.plan import TrainingPlan
from autotune.plan.workload import Bucket, ModelSpec

KEY_NAMES: Mapping[str, str] = {
    "device_kind": "kind of device",
    "compute_capability": "compute capability",
    "memory_kind": "memory kind",
    "memory_model": "operating system's memory model",
    "torch": "torch version",
    "cuda": "CUDA major version",
    "torchao": "torchao version",
    "bitsandbytes": "bitsandbytes version",
    "trial_protocol": "autotune's trial protocol",
}

PREDICTED_KEYS = ("device_kind", "compute_capability", "memory_kind")
"""Keys that a predicted plan must match; it assumes the others until trials run on the machine."""

CAPTION_TOLERANCE = 0.01
"""By how much a caption may be longer than planned, as a share of the largest image's tokens.
Activations grow by less than that share, and a plan leaves 2% of a GPU's memory free
(`autotune.machine.memory`)."""


def hardware_misfits(
    plan: TrainingPlan, hardware: HardwareProfile, num_processes: int | None = None
) -> tuple[str, ...]:
    """Why the plan cannot be trusted on this machine; empty when it can. `num_processes` as in
    `memory_misfits`."""
    memory = (
        *_host_misfits(plan, hardware, num_processes),
        *memory_misfits(plan, hardware, num_processes),
    )
    return (*key_misfits(plan, hardware), *_settings_misfits(plan, hardware), *memory)


def key_misfits(plan: TrainingPlan, hardware: HardwareProfile) -> tuple[str, ...]:
    """Why the machine is of another kind than the plan's, whatever its memory."""
    planned = plan.frozen.hardware
    here = hardware.match_keys
    measured = plan.frozen.expected.evidence == "measured"
    used = (plan.frozen.settings.quantization, plan.frozen.caching.text_encoder_quantization)
    stored = (*used, *(fallback.quantization for fallback in plan.frozen.fallbacks))
    libraries = {
        name: each.needs.library for name, each in WEIGHT_FORMATS.items() if each.needs.library
    }
    idle = {*libraries.values()} - {
        libraries.get(name) for name in stored
    }  # their versions are nothing
    misfits = [
        (
            f"{KEY_NAMES.get(key, key)}: the plan was made with {value or 'none'}, here it is "
            f"{here.get(key) or 'none'}"
        )
        for key, value in planned.match_keys.items()
        if key not in idle and here.get(key) != value and (measured or key in PREDICTED_KEYS)
    ]
    return (*misfits, *_encoder_misfits(plan, hardware.device))


def _encoder_misfits(plan: TrainingPlan, device: Device) -> tuple[str, ...]:
    """Why another GPU cannot encode here what the plan says."""
    caching, planned = plan.frozen.caching, plan.frozen.hardware.encoder_gpu
    encoder, what = caching.other_gpu, caching.parts_on_other_gpu
    if encoder is None:
        return ()
    there = next((gpu for gpu in device.others if f"cuda:{gpu.index}" == encoder), None)
    if there is None:
        why = (
            "which trains here"
            if encoder == device.torch_name
            else f"this machine has {device.count} GPU(s)"
        )
        return (f"GPUs: the plan encodes {what} on {encoder}, {why}",)
    if planned is None or planned.needed_bytes <= there.budget_bytes:
        return ()
    needed, left = planned.needed_bytes / 2**30, there.budget_bytes / 2**30
    return (
        f"GPUs: encoding {what} on {encoder}, {there.name}, needs {needed:.2f} GiB, {left:.2f} GiB "
        "may be taken",
    )


def _settings_misfits(plan: TrainingPlan, hardware: HardwareProfile) -> tuple[str, ...]:
    """Which settings this version of autotune does not know, or do not work on this machine."""
    settings, encoder_format = plan.frozen.settings, plan.frozen.caching.text_encoder_quantization
    used = [(name, name, value) for name, value in settings if NAMES[name]]
    used.append(("text encoder quantization", "quantization", encoder_format))
    misfits = []
    for title, name, value in used:
        if reason := unusable_reason(name, value, hardware):
            misfits.append(f"{title}: {value} does not work on this machine: {reason}")
        elif value not in NAMES[name]:
            misfits.append(f"{title}: this version of autotune does not know {value!r}")
    family = FAMILIES.get(plan.frozen.workload.model.family)
    if family and (reason := cast_refusal(encoder_format, family)):
        misfits.append(
            f"text encoder quantization: {encoder_format} is no longer used for {family.name}: "
            f"{reason}"
        )
    return tuple(misfits)


def _host_misfits(
    plan: TrainingPlan, hardware: HardwareProfile, num_processes: int | None
) -> tuple[str, ...]:
    number = num_processes or plan.frozen.hardware.num_processes
    needed, there = (
        number * (plan.frozen.expected.host_memory_bytes or 0),
        hardware.host.available_memory_bytes,
    )
    if needed <= there:
        return ()
    together = f" for {number} processes here" if number > 1 else ""
    have = f"{there / 2**30:.2f} GiB are available"
    return (f"host memory: the plan needs {needed / 2**30:.2f} GiB{together}, {have}",)


def memory_misfits(
    plan: TrainingPlan, hardware: HardwareProfile, num_processes: int | None = None
) -> tuple[str, ...]:
    """Why this device has too little memory for one of the plan's processes; empty when it has
    enough.

    On a CPU it must have enough for the `num_processes` that run on this machine, by default its
    share of the plan's.
    """
    planned = plan.frozen.hardware
    needed = plan.frozen.expected.run_memory_bytes
    if planned.device_kind == "cpu":
        needed *= num_processes or planned.num_processes  # they share it
    budget = hardware.device.budget_bytes
    if needed <= budget:
        return ()
    where = f"on cuda:{hardware.device.index}" if hardware.device.index else "here"
    return (
        f"run memory: the plan needs {needed / 2**30:.2f} GiB, a run may take {budget / 2**30:.2f} "
        f"GiB {where}",
    )


def model_misfits(plan: TrainingPlan, model: ModelSpec) -> tuple[str, ...]:
    """Why the plan is not for this model; empty when it is. Only the architecture matters, not
    name or path."""
    planned = plan.frozen.workload.model
    if planned.architecture == model.architecture:
        return ()
    return (f"model: the plan is for the architecture of {planned.name}, {model.name} has another",)


def data_misfits(plan: TrainingPlan, context: TuningContext) -> tuple[str, ...]:
    """Why this data is outside the class that the plan was made for; `context.workload`
    describes the data."""
    planned, actual = plan.frozen.workload, context.workload
    misfits = []
    largest, allowed = actual.largest_bucket, planned.largest_bucket
    if largest.num_pixels > allowed.num_pixels:
        misfits.append(
            f"data: a bucket of {_size(largest)} is larger than the planned {_size(allowed)}"
        )
    tolerance = int(CAPTION_TOLERANCE * context.family.tokens_per_frame(allowed))
    if actual.max_text_tokens > planned.max_text_tokens + tolerance:
        misfits.append(
            f"data: a caption of {actual.max_text_tokens} tokens is longer than the planned "
            f"{planned.max_text_tokens}"
        )
    controls = actual.num_control_images
    if controls > planned.num_control_images:
        misfits.append(
            f"data: {controls} control images for an item, the plan is for "
            f"{planned.num_control_images}"
        )
    conflicts = (knob.conflict(plan.frozen.settings, context) for knob in KNOBS)
    misfits += [f"data: {conflict}" for conflict in conflicts if conflict]
    share = planned.share(plan.frozen.hardware.num_processes).effective_batch_size
    if plan.frozen.settings.micro_batch_size > share:
        misfits.append(f"processes: each gets {share} image(s) per step, less than a micro-batch")
    return tuple(misfits)


def require_fit(misfits: tuple[str, ...]) -> None:
    """Raise DoesNotFit, naming all, when there is any misfit."""
    if misfits:
        raise DoesNotFit(
            f"the plan does not fit: {'; '.join(misfits)}",
            hint="make one for this machine and data: autotune plan --from PLAN",
        )


def _size(bucket: Bucket) -> str:
    frames = f" x {bucket.num_frames} frames" if bucket.num_frames > 1 else ""
    return f"{bucket.width_px} x {bucket.height_px} px{frames}"
