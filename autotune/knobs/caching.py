"""How captions are encoded before training: where the text encoders run and how they are stored. Pure.

The encoder of Qwen-Image alone takes 16 GB in bf16, so on smaller cards it must be smaller, elsewhere, or pass through
piece by piece. No search: the first way that is predicted to fit is taken, exact and fast ones first.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from autotune.backends import WEIGHT_FORMATS
from autotune.errors import InvalidInput
from autotune.families import Parts
from autotune.hardware import process_overhead_bytes
from autotune.knobs.base import TuningContext
from autotune.knobs.quantization import STRICTNESS
from autotune.schema import CachingSettings, Reason, Rejected

PIN = "caching."
"""What pins of these settings begin with, e.g. `caching.text_encoder_device=cpu`."""

FOR_ENCODERS = ("torchao-int8", "torchao-fp8", "bnb-int8", "bnb-nf4")
"""What can be pinned. Not layerwise-fp8: T5 casts its activations to the dtype in which a weight lies."""
OFFERED = ("torchao-int8", "bnb-nf4")
"""Storages that are tried, the more exact first."""
QUANTIZED_SHARE = 0.86
"""Of an encoder's parameters: embeddings and output layer stay (13% of Qwen2.5-VL-7B, 3% of T5-XXL)."""
PASSING_SHARE = 0.08
"""The most of an encoder that is on the device at once while it is streamed: its embeddings (7% of Qwen2.5-VL-7B)."""
WORKING_SHARE = 0.06
"""What encoding one caption takes beyond the weights: 1,024 tokens' hidden states of 29 layers, and their logits."""
ROUNDED_SHARE = 0.04
"""Of weights, what the allocator reserves on top; with segments that expand 1 to 4% is predicted of transformers."""
HOST_SPARE = 1.1
"""An encoder on the CPU needs this many times its weights of the host's free memory."""


@dataclass(frozen=True)
class EncoderSize:
    """What decides which way fits."""

    parameters: int
    """Of all text encoders."""
    element_bytes: int
    """Of an unquantized parameter."""
    vae_bytes: int
    """Weights of the VAE, which waits beside the encoders."""

    def device_bytes(self, caching: CachingSettings) -> int:
        """What encoding captions takes of the training device, weights and working memory, the VAE apart."""
        plain = self.parameters * self.element_bytes
        if caching.text_encoder_device != "training":
            return 0
        if caching.text_encoder_streamed:
            return round((PASSING_SHARE + WORKING_SHARE) * plain)
        if caching.text_encoder_quantization == "none":
            return round((1 + WORKING_SHARE) * plain)
        small = WEIGHT_FORMATS[caching.text_encoder_quantization].bytes_per_parameter / self.element_bytes
        return round((QUANTIZED_SHARE * small + 1 - QUANTIZED_SHARE + WORKING_SHARE) * plain)


def size_of(parts: Parts, precision: str, vae_bytes: int) -> EncoderSize:
    """From the models around the transformer."""
    return EncoderSize(sum(parts.text_encoder_parameters), 4 if precision == "fp32" else 2, vae_bytes)


def choose_caching(
    context: TuningContext, size: EncoderSize, pins: Mapping[str, str] | None = None, num_processes: int = 1
) -> tuple[CachingSettings, Reason]:
    """The settings, and why. `pins` fix fields by name.

    With several processes each GPU has one that trains on it, so none is free for encoders.

    Raises:
        InvalidInput: a pin names no field or a value that cannot be used here.
    """
    kept = pinned(pins or {}, context)
    fixed = set(pins or {}) - {"residency"}
    ways = (
        [kept]
        if fixed
        else [way.model_copy(update={"residency": kept.residency}) for way in _ways(context, num_processes)]
    )
    against = {way: _against(way, size, context) for way in ways}
    chosen = next((way for way, why in against.items() if why is None), ways[-1])
    rejected = tuple(Rejected(choice=shown(way), reason=why) for way, why in against.items() if why and way != chosen)
    why = "pinned by the user" if fixed else "the first that fits: exact before quantized, streamed last"
    return chosen, Reason(knob="caching", chosen=shown(chosen), why=why, rejected=rejected)


def pinned(pins: Mapping[str, str], context: TuningContext) -> CachingSettings:
    """The defaults with `pins`, as text. Raises InvalidInput for what is unknown or cannot be used here."""
    values: dict[str, object] = dict(pins)
    if "text_encoder_streamed" in pins:
        values["text_encoder_streamed"] = {"true": True, "false": False}.get(pins["text_encoder_streamed"].lower())
    try:
        settings = CachingSettings.model_validate(values)
    except ValidationError as error:
        known = ", ".join(PIN + name for name in CachingSettings.model_fields)
        field = ".".join(map(str, error.errors()[0]["loc"]))
        if field == "text_encoder_device":
            wrong = pins[field]
            raise InvalidInput(f"{wrong!r} is no device for text encoders", hint="training, cpu, or cuda:1") from error
        raise InvalidInput(f"{PIN}{field}: {error.errors()[0]['msg'].lower()}", hint=f"settings: {known}") from error
    device, storage = settings.text_encoder_device, settings.text_encoder_quantization
    if device.startswith("cuda:") and int(device[5:]) >= _num_gpus(context):
        raise InvalidInput(f"there is no {device} here", hint=f"this machine has {_num_gpus(context)} GPU(s)")
    if storage != "none" and (reason := _unusable(storage, context)):
        raise InvalidInput(f"text encoders cannot be stored as {storage} here: {reason}", hint="none always works")
    if settings.text_encoder_streamed and (storage, device) != ("none", "training"):
        raise InvalidInput(
            "only unquantized encoders are streamed, and only to the training device",
            hint="pin caching.text_encoder_streamed=true alone",
        )
    return settings


def shown(caching: CachingSettings) -> str:
    """In words for people."""
    storage = "as they are" if caching.text_encoder_quantization == "none" else caching.text_encoder_quantization
    if caching.text_encoder_streamed:
        storage = "streamed"
    place = "training device" if caching.text_encoder_device == "training" else caching.text_encoder_device
    return f"{place}, {storage}" + (", kept" if caching.residency == "keep" else "")


def _num_gpus(context: TuningContext) -> int:
    device = context.hardware.device
    return device.count if device.kind == "cuda" else 0


def _ways(context: TuningContext, num_processes: int) -> list[CachingSettings]:
    """All ways on this machine, in the order they are preferred."""
    device = context.hardware.device
    ways = [CachingSettings()]
    if _num_gpus(context) > 1 and num_processes == 1:
        ways.append(CachingSettings(text_encoder_device="cuda:1" if device.index == 0 else "cuda:0"))
    ways += [CachingSettings(text_encoder_quantization=storage) for storage in OFFERED]
    if device.memory_kind in ("discrete", "coherent"):
        ways.append(CachingSettings(text_encoder_device="cpu"))
    return [*ways, CachingSettings(text_encoder_streamed=True)]


def _against(way: CachingSettings, size: EncoderSize, context: TuningContext) -> str | None:
    """Why a way cannot be taken, or None."""
    hardware = context.hardware
    if way.text_encoder_quantization != "none" and (reason := _unusable(way.text_encoder_quantization, context)):
        return reason
    overhead = process_overhead_bytes(hardware)
    held = size.device_bytes(way) + size.vae_bytes
    budget, needed = hardware.device.budget_bytes, round((1 + ROUNDED_SHARE) * held) + overhead
    plain = size.parameters * size.element_bytes
    if way.text_encoder_device == "cpu":
        budget, needed = hardware.host.available_memory_bytes, round(HOST_SPARE * plain)
    elif way.text_encoder_device != "training":
        # The other GPU is taken to be like this one, and free; where a smaller one is rehearsed, both are.
        whole = None if hardware.device.budget_set_by_user else hardware.device.total_memory_bytes
        budget, needed = whole or budget, round((1 + WORKING_SHARE) * plain)
    if needed <= budget:
        return None
    place = "of the host's memory are free" if way.text_encoder_device == "cpu" else "may be taken"
    return f"needs {needed / 2**30:.1f} GiB, {budget / 2**30:.1f} GiB {place}"


def _unusable(storage: str, context: TuningContext) -> str | None:
    if storage not in FOR_ENCODERS:
        return f"unknown to text encoders; known: none, {', '.join(FOR_ENCODERS)}"
    capability = context.hardware.capability(f"quantization.{storage}")
    if not capability.available:
        return capability.reason
    if context.family.casts_to_weight_dtype and WEIGHT_FORMATS[storage].library == "bitsandbytes":
        return "T5 casts its activations to the dtype in which a weight lies"
    quality = WEIGHT_FORMATS[storage].quality
    if STRICTNESS.index(quality) < STRICTNESS.index(context.workload.quality):
        return f"the quality floor is {context.workload.quality}; this needs --quality {quality}"
    return None
