"""How captions are encoded before training: where text encoders run, and how their weights are stored. Pure.

The encoder of Qwen-Image alone takes 16 GB in bf16, so on smaller cards it must be smaller, elsewhere, or pass through
piece by piece. No search: the first option that is predicted to fit is taken, exact and fast ones first.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from autotune.backends import WEIGHT_FORMATS
from autotune.errors import InvalidInput
from autotune.families import Parts
from autotune.hardware import process_overhead_bytes
from autotune.knobs.base import TuningContext
from autotune.knobs.precision import encoder_element_bytes
from autotune.schema import CachingSettings, Choice, EncoderGpu, HardwareProfile, OtherGpu, Reason, Rejected

PIN = "caching."
"""What pins of these settings begin with, e.g. `caching.text_encoder_device=cpu`."""
QUANTIZED_SHARE = 0.86
"""Share of an encoder's parameters: embeddings and output layer stay (13% of Qwen2.5-VL-7B, 3% of T5-XXL)."""
PASSING_SHARE = 0.08
"""Largest share of an encoder on the device while it is streamed: its embeddings (7% of Qwen2.5-VL-7B)."""
WORKING_SHARE = 0.06
"""What encoding one caption takes beyond the weights: 1,024 tokens' hidden states of 29 layers, and their logits."""
ROUNDED_SHARE = 0.04
"""What the allocator reserves beyond the weights; with segments that expand 1 to 4% is predicted of transformers."""
HOST_SPARE = 1.1
"""An encoder on the CPU needs this many times its weights of the host's free memory."""


@dataclass(frozen=True)
class EncoderSize:
    """What decides which option fits."""

    num_parameters: int
    """Parameters of all text encoders together."""
    element_bytes: int
    """Bytes of an unquantized parameter."""
    vae_bytes: int
    """Weights of the VAE, which waits beside the encoders."""

    @property
    def plain_bytes(self) -> int:
        """Bytes of the unquantized weights."""
        return self.num_parameters * self.element_bytes

    def device_bytes(self, caching: CachingSettings) -> int:
        """What encoding captions takes of the training device, weights and working memory, the VAE apart."""
        if caching.text_encoder_device != "training":
            return 0
        return round((self._stored_share(caching) + WORKING_SHARE) * self.plain_bytes)

    def weight_bytes(self, caching: CachingSettings) -> int:
        """The part of that which is weights."""
        return round(self._stored_share(caching) * self.plain_bytes) if caching.text_encoder_device == "training" else 0

    def _stored_share(self, caching: CachingSettings) -> float:
        if caching.text_encoder_streamed:
            return PASSING_SHARE
        weight_format = WEIGHT_FORMATS[caching.text_encoder_quantization]
        quantized = QUANTIZED_SHARE if weight_format.quantize else 0.0
        return 1 - quantized + quantized * weight_format.bytes_per_parameter / self.element_bytes

    def host_bytes(self, caching: CachingSettings) -> int:
        """What encoding captions takes of the host's memory beside a GPU's own."""
        return self.plain_bytes if caching.text_encoder_device == "cpu" else 0


def size_of(parts: Parts, precision: str, vae_bytes: int) -> EncoderSize:
    """The size of the models around the transformer."""
    return EncoderSize(sum(parts.text_encoder_parameters), encoder_element_bytes(precision), vae_bytes)


def choose_caching(
    context: TuningContext,
    size: EncoderSize,
    pins: Mapping[str, str] | None = None,
    num_processes: int = 1,
    *,
    exclusions: Sequence[tuple[str, str]] = (),
) -> tuple[CachingSettings, Reason]:
    """The settings, and why. `pins` fix fields by name, `exclusions` take values of fields away.

    With several processes each GPU has one that trains on it, so none is free for encoders.

    Raises:
        InvalidInput: a pin names no field or a value that cannot be used on this machine, or that is excluded, or
            another GPU that has too little memory.
    """
    pinned = parse_pins(pins or {}, context)
    is_pinned = bool(set(pins or {}) - {"residency"})
    excluded = _pairs(exclusions)
    if conflict := next(iter(_pairs((pins or {}).items()) & excluded), None):
        raise InvalidInput(f"{PIN}{'='.join(conflict)} is both pinned and excluded", hint="leave one of them out")
    options = [one for one in _options(context, num_processes) if not _pairs(one) & excluded]
    others = (option.model_copy(update={"residency": pinned.residency}) for option in options)
    refusals = {option: _refusal(option, size, context) for option in ([pinned] if is_pinned else others)}
    chosen = next((option for option, why in refusals.items() if why is None), [*refusals][-1])
    if is_pinned and refusals[chosen] and _other_gpu(chosen, context.hardware):
        what = f"captions cannot be encoded on {chosen.text_encoder_device}: it {refusals[chosen]}"
        raise InvalidInput(what, hint="leave the pin out, and the first place that fits is taken")
    rejected = ((option, why) for option, why in refusals.items() if why and option != chosen)
    return chosen, Reason(
        knob="caching",
        chosen=describe_caching(chosen),
        why="pinned by the user" if is_pinned else "the first that fits: exact before quantized, streamed last",
        rejected=tuple(Rejected(choice=describe_caching(option), reason=why) for option, why in rejected),
    )


def encoder_gpu_of(hardware: HardwareProfile, caching: CachingSettings, size: EncoderSize) -> EncoderGpu | None:
    """The GPU beside the one that trains on which captions are encoded, and what they take of it; None if none does."""
    other = _other_gpu(caching, hardware)
    if other is None:
        return None
    return EncoderGpu(
        name=other.name,
        total_memory_bytes=other.total_memory_bytes,
        budget_bytes=other.budget_bytes,
        needed_bytes=round((1 + WORKING_SHARE) * size.plain_bytes) + process_overhead_bytes(hardware),
    )


def caching_choices(context: TuningContext) -> dict[str, tuple[Choice, ...]]:
    """The values of each field that may be chosen on this machine, by the names that pins have for fields."""
    options = [dict(option) for option in _options(context, 1)]
    return {PIN + name: tuple({one[name]: None for one in options}) for name in CachingSettings.model_fields}


def _pairs(values: Iterable[tuple[str, object]]) -> set[tuple[str, str]]:
    return {(name, str(value).lower()) for name, value in values}


def parse_pins(pins: Mapping[str, str], context: TuningContext) -> CachingSettings:
    """The defaults with `pins`, as text. Raises InvalidInput for what is unknown or cannot be used on this machine."""
    values: dict[str, object] = dict(pins)
    if "text_encoder_streamed" in pins:
        values["text_encoder_streamed"] = {"true": True, "false": False}.get(pins["text_encoder_streamed"].lower())
    try:
        settings = CachingSettings.model_validate(values)
    except ValidationError as error:
        known = ", ".join(PIN + name for name in CachingSettings.model_fields)
        field = ".".join(map(str, error.errors()[0]["loc"]))
        if field == "text_encoder_device":
            what = f"{pins[field]!r} is no device for text encoders"
            raise InvalidInput(what, hint="training, cpu, or cuda:1") from error
        raise InvalidInput(f"{PIN}{field}: {error.errors()[0]['msg'].lower()}", hint=f"settings: {known}") from error
    device, weight_format = settings.text_encoder_device, settings.text_encoder_quantization
    if device.startswith("cuda:") and _other_gpu(settings, context.hardware) is None:
        others = ", ".join(f"cuda:{gpu.index}" for gpu in context.hardware.device.others)
        hint = (
            f"beside the GPU that trains there are {others}"
            if others
            else "there is no other GPU than that which trains"
        )
        raise InvalidInput(f"captions cannot be encoded on {device} here", hint=hint)
    if reason := _unusable_reason(weight_format, context):
        what = f"text encoders cannot be stored as {weight_format} here: {reason}"
        raise InvalidInput(what, hint="none always works")
    if settings.text_encoder_streamed and (weight_format, device) != ("none", "training"):
        what = "only unquantized encoders are streamed, and only to the training device"
        raise InvalidInput(what, hint="pin caching.text_encoder_streamed=true alone")
    return settings


def describe_caching(caching: CachingSettings) -> str:
    """The settings in words for people."""
    stored = "as they are" if caching.text_encoder_quantization == "none" else caching.text_encoder_quantization
    if caching.text_encoder_streamed:
        stored = "streamed"
    device = "training device" if caching.text_encoder_device == "training" else caching.text_encoder_device
    return f"{device}, {stored}" + (", kept" if caching.residency == "keep" else "")


def _other_gpu(caching: CachingSettings, hardware: HardwareProfile) -> OtherGpu | None:
    """The GPU beside the one that trains that the settings name, if this machine has it."""
    others = hardware.device.others
    return next((gpu for gpu in others if f"cuda:{gpu.index}" == caching.text_encoder_device), None)


def _options(context: TuningContext, num_processes: int) -> list[CachingSettings]:
    """All options on this machine, in the order they are preferred."""
    device = context.hardware.device
    options = [CachingSettings()]
    if device.others and num_processes == 1:
        roomiest = max(device.others, key=lambda gpu: gpu.budget_bytes)
        options.append(CachingSettings(text_encoder_device=f"cuda:{roomiest.index}"))
    tried = [each for each in WEIGHT_FORMATS.values() if each.is_tried_for_encoders]
    by_exactness = sorted(tried, key=lambda each: each.bytes_per_parameter, reverse=True)
    options += [CachingSettings(text_encoder_quantization=each.name) for each in by_exactness]
    if device.memory_kind in ("discrete", "coherent"):
        options.append(CachingSettings(text_encoder_device="cpu"))
    return [*options, CachingSettings(text_encoder_streamed=True)]


def _refusal(option: CachingSettings, size: EncoderSize, context: TuningContext) -> str | None:
    """Why an option cannot be taken, or None."""
    if reason := _unusable_reason(option.text_encoder_quantization, context):
        return reason
    hardware, place = context.hardware, "may be taken"
    if option.text_encoder_device == "training":
        held = size.device_bytes(option) + size.vae_bytes
        needed = round((1 + ROUNDED_SHARE) * held) + process_overhead_bytes(hardware)
        budget = context.budget.num_bytes
    elif option.text_encoder_device == "cpu":
        budget, needed = hardware.host.available_memory_bytes, round(HOST_SPARE * size.plain_bytes)
        place = "of the host's memory are free"
    elif gpu := encoder_gpu_of(hardware, option, size):
        limit = context.budget.num_bytes if context.budget.is_set_by_user else gpu.budget_bytes
        budget, needed = min(gpu.budget_bytes, limit), gpu.needed_bytes  # if a smaller GPU is rehearsed, both are
    else:
        return f"there is no {option.text_encoder_device} here"
    return None if needed <= budget else f"needs {needed / 2**30:.1f} GiB, {budget / 2**30:.1f} GiB {place}"


def _unusable_reason(name: str, context: TuningContext) -> str | None:
    """Why text encoders cannot be stored in a weight format on this machine, or None."""
    weight_format = WEIGHT_FORMATS.get(name)
    if weight_format is None:
        return f"it is unknown; known: {', '.join(WEIGHT_FORMATS)}"
    capability = context.hardware.capability(weight_format.capability)
    if weight_format.quantize and not capability.available:
        return capability.reason
    if context.family.casts_to_weight_dtype and weight_format.hides_dtype:
        return "T5 casts its activations to the dtype in which a weight lies"
    if not weight_format.meets(context.workload.quality):
        return f"the quality floor is {context.workload.quality}; this needs --quality {weight_format.quality}"
    return None
