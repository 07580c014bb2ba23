"""Choose how captions and images are encoded before training: where, and how weights are stored.

Qwen-Image's text encoder alone takes 16 GB in bf16, a video model's VAE tens of them for a clip. No
search: the first option that is predicted to fit is taken, exact and fast ones first; for
`--objective memory` the one that takes least of the device that trains.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from pydantic import ValidationError

from autotune.errors import InvalidInput
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.knob import TuningContext
from autotune.knobs.settings import encoder_element_bytes
from autotune.models.facts import Parts
from autotune.models.family import Family
from autotune.plan import base, words
from autotune.plan.candidate import CachingSettings, Choice
from autotune.plan.hardware import OtherGpu, shares_host_memory
from autotune.plan.plan import EncoderGpu, Reason, Rejected

PIN = "caching."  # what pins of these settings begin with, e.g. `caching.text_encoder_device=cpu`
# Of an encoder's parameters: embeddings and output layer stay (13% of Qwen2.5-VL-7B).
QUANTIZED_SHARE = 0.86
# Largest share on the device while it is streamed: its embeddings (7% of Qwen2.5-VL-7B).
PASSING_SHARE = 0.08
# Beyond the weights, for one caption of encoders that nobody measured.
WORKING_SHARE = 0.06
CAPTION_TOKENS = 512  # of those that were measured
# Reserved by an allocator beyond what is used; 1 to 4% is predicted of transformers.
ROUNDED_SHARE = 0.04
RESIDENCIES = get_args(CachingSettings.model_fields["residency"].annotation)
# Settings that are chosen together, or pinned together.
TEXT_FIELDS = ("text_encoder_device", "text_encoder_quantization", "text_encoder_streamed")


@dataclass(frozen=True)
class EncoderSize:
    """Bytes of the models around the transformer, which decide how they fit."""

    num_parameters: int  # of all text encoders together
    element_bytes: int  # of an unquantized parameter
    vae_bytes: int  # weights
    vae_working_bytes: int = 0  # most that encoding one image or clip takes beyond these
    caption_bytes: int = 0  # most that encoding one caption takes beyond the encoders' weights

    @property
    def plain_bytes(self) -> int:
        return self.num_parameters * self.element_bytes

    def device_bytes(self, caching: CachingSettings) -> int:
        """Count what text encoders take of the training device."""
        return self._encoder_bytes(caching) if caching.text_encoder_device == "training" else 0

    def captions_bytes(self, caching: CachingSettings) -> int:
        """Count what is held where text encoders run; on the training device with the VAE."""
        beside = self.vae_bytes if caching.text_encoder_device == "training" else 0
        return self._encoder_bytes(caching) + self.caption_bytes + beside

    def images_bytes(self, caching: CachingSettings) -> int:
        """Count what is held where the VAE runs; text encoders have left, unless they are kept."""
        stay = caching.residency == "keep" and caching.text_encoder_device == caching.vae_device
        beside = self._encoder_bytes(caching) if stay else 0
        return self.vae_bytes + self.vae_working_bytes + beside

    def bytes_at(self, place: str, caching: CachingSettings) -> int:
        """Count the larger of both at one place, in the words of `CachingSettings`."""
        captions = self.captions_bytes(caching) if caching.text_encoder_device == place else 0
        return max(captions, self.images_bytes(caching) if caching.vae_device == place else 0)

    def _encoder_bytes(self, caching: CachingSettings) -> int:
        if caching.text_encoder_streamed:
            return round(PASSING_SHARE * self.plain_bytes)
        weight_format = WEIGHT_FORMATS[caching.text_encoder_quantization]
        quantized = QUANTIZED_SHARE if weight_format.quantize else 0.0
        share = 1 - quantized + quantized * weight_format.bytes_per_parameter / self.element_bytes
        return round(share * self.plain_bytes)


def size_of(
    parts: Parts,
    precision: str,
    vae_bytes: int,
    vae_working_bytes: int = 0,
    *,
    text_tokens: int = CAPTION_TOKENS,
    picture_bytes: int = 0,
) -> EncoderSize:
    """Return the size of the models around the transformer. If prompts come with pictures, the VAE
    takes `picture_bytes` for these while text encoders are there."""
    parameters = sum(parts.text_encoder_parameters)
    element_bytes = encoder_element_bytes(precision)
    longer = max(1, text_tokens / CAPTION_TOKENS)
    working = round(longer * parts.caption_bytes * element_bytes / 2)  # measured in bf16
    working = working or round(WORKING_SHARE * parameters * element_bytes)
    working = max(working, picture_bytes)
    return EncoderSize(parameters, element_bytes, vae_bytes, vae_working_bytes, working)


def caching_in(values: Mapping[str, Any]) -> CachingSettings:
    """Return what values, or pins, say of how captions are encoded."""
    own = {name.removeprefix(PIN): value for name, value in values.items() if PIN in name}
    own["text_encoder_streamed"] = str(own.get("text_encoder_streamed")) == "True"
    return CachingSettings.model_validate(own)


def choose_caching(
    context: TuningContext,
    size: EncoderSize,
    pins: Mapping[str, str] | None = None,
    num_processes: int = 1,
    *,
    exclusions: Sequence[tuple[str, str]] = (),
) -> tuple[CachingSettings, Reason]:
    """Choose the settings, and say why; the VAE's place after the text encoders' way.

    `pins` fix fields by name, `exclusions` take values away. With several processes no GPU is free
    for encoders. Raises InvalidInput for a pin that is unknown, excluded, or impossible here, and
    if exclusions leave nothing.
    """
    pins = pins or {}
    pinned, excluded = parse_pins(pins, context), _pairs(exclusions)
    for name, value in exclusions:
        _read_fields({name: value})
    if conflict := next(iter(_pairs(pins.items()) & excluded), None):
        what = f"{PIN}{'='.join(conflict)} is both pinned and excluded"
        raise InvalidInput(what, hint="leave one of them out")
    allowed = [value for value in RESIDENCIES if ("residency", value) not in excluded]
    if not allowed:
        raise _nothing_left("no residency of encoders")
    pinned = pinned if pinned.residency in allowed else pinned.changed(residency=allowed[0])
    places = _places(context, num_processes, pinned)
    ways = [way for way in _text_ways(places) if not _pairs(way.items()) & excluded]
    pins_text, pins_vae = not pins.keys().isdisjoint(TEXT_FIELDS), "vae_device" in pins
    options = [pinned] if pins_text else [pinned.changed(**way) for way in ways]
    rule = "the first that fits: exact before quantized, streamed last"
    if context.workload.objective == "memory":  # a CPU, which is slow, comes last here, too
        here = partial(size.bytes_at, "training")
        options.sort(key=lambda one: (one.text_encoder_device == "cpu", here(one)))
        rule = "the smallest that fits, a CPU last"
    captions = {
        one: _unusable_reason(one.text_encoder_quantization, context)
        or _shortage(one.text_encoder_device, size.captions_bytes(one), context)
        for one in options
    }
    _require_choice(captions, pins_text, "captions")
    way = next((option for option, why in captions.items() if why is None), [*captions][-1])
    there = [place for place in places if ("vae_device", place) not in excluded]
    options = [way] if pins_vae else [way.changed(vae_device=place) for place in there]
    images = {one: _shortage(one.vae_device, size.images_bytes(one), context) for one in options}
    _require_choice(images, pins_vae, "images")
    chosen = next((option for option, why in images.items() if why is None), next(iter(images)))
    refused = {words.caching_text(one): why for one, why in captions.items() if one != way}
    others = {one.vae_device: why for one, why in images.items() if one != chosen}
    refused |= {f"VAE on {place}": why for place, why in others.items()}
    return chosen, Reason(
        knob="caching",
        chosen=words.caching_text(chosen),
        why="pinned by the user" if pins_text or pins_vae else rule,
        rejected=tuple(Rejected(choice=each, reason=why) for each, why in refused.items() if why),
    )


def _nothing_left(what: str) -> InvalidInput:
    return InvalidInput(f"exclusions leave {what}", hint="leave one of --exclude caching... out")


def encoder_gpu_of(
    context: TuningContext, caching: CachingSettings, size: EncoderSize
) -> EncoderGpu | None:
    """Describe the other GPU that encodes, and the memory that encoding takes there."""
    other = _find_gpu(caching.other_gpu, context)
    if caching.other_gpu is None or other is None:
        return None
    needed = _reserved(size.bytes_at(caching.other_gpu, caching))
    needed += context.hardware.process_overhead_bytes
    return EncoderGpu(
        name=other.name,
        total_memory_bytes=other.total_memory_bytes,
        budget_bytes=other.budget_bytes,
        needed_bytes=needed,
    )


def caching_choices(context: TuningContext) -> dict[str, tuple[Choice, ...]]:
    """List the values of each field that may be chosen on this machine, by the names of pins."""
    places = _places(context, 1, CachingSettings())
    options = [CachingSettings(**way) for way in _text_ways(places)]
    options += [CachingSettings(vae_device=place) for place in places]
    return {
        PIN + name: tuple({getattr(one, name): None for one in options})
        for name in CachingSettings.model_fields
    }


def _pairs(values: Iterable[tuple[str, object]]) -> set[tuple[str, str]]:
    return {(name, str(value).lower()) for name, value in values}


def parse_pins(pins: Mapping[str, str], context: TuningContext) -> CachingSettings:
    """Return the defaults with `pins`, or raise InvalidInput."""
    settings = _read_fields(pins)
    device, weight_format = settings.text_encoder_device, settings.text_encoder_quantization
    if settings.other_gpu and _find_gpu(settings.other_gpu, context) is None:
        others = ", ".join(f"cuda:{gpu.index}" for gpu in context.hardware.device.others)
        what = f"{settings.parts_on_other_gpu} cannot be encoded on {settings.other_gpu} here"
        hint = f"GPUs besides the training one: {others or 'none'}"
        raise InvalidInput(what, hint=hint)
    if reason := _unusable_reason(weight_format, context):
        what = f"text encoders cannot be stored as {weight_format} here: {reason}"
        raise InvalidInput(what, hint="none always works")
    if settings.text_encoder_streamed and (weight_format, device) != ("none", "training"):
        what = "only unquantized encoders are streamed, and only to the training device"
        raise InvalidInput(what, hint="pin caching.text_encoder_streamed=true alone")
    shares = shares_host_memory(context.hardware.device.memory_kind)
    if shares and "cpu" in (device, settings.vae_device):
        what = "the CPU and the training device share their memory here"
        part = "text_encoder_device" if device == "cpu" else "vae_device"
        raise InvalidInput(what, hint=f"leave out --pin caching.{part}=cpu")
    return settings


def _read_fields(pins: Mapping[str, str]) -> CachingSettings:
    values: dict[str, object] = dict(pins)
    if streamed := pins.get("text_encoder_streamed"):
        values["text_encoder_streamed"] = {"true": True, "false": False}.get(streamed.lower())
    try:
        return CachingSettings.model_validate(values)
    except ValidationError as error:
        known = ", ".join(PIN + name for name in CachingSettings.model_fields)
        field, message = base.first_problem(error)
        if field in ("text_encoder_device", "vae_device"):
            part = "the VAE" if field == "vae_device" else "text encoders"
            what = f"{pins[field]!r} is no device for {part}"
            raise InvalidInput(what, hint="training, cpu, or cuda:1") from error
        if not field:
            what, hint = message.removeprefix("Value error, "), "pin one of them, or both alike"
            raise InvalidInput(what, hint=hint) from error
        raise InvalidInput(f"{PIN}{field}: {message}", hint=f"settings: {known}") from error


def _require_choice(
    refusals: Mapping[CachingSettings, str | None], is_pinned: bool, what: str
) -> None:
    if not refusals:
        raise _nothing_left(f"no way to encode {what}")
    # No trial would tell that another GPU that is pinned has no room.
    option, why = next(iter(refusals.items()))
    place = option.vae_device if what == "images" else option.text_encoder_device
    if is_pinned and why and place == option.other_gpu:
        hint = "leave the pin out, and the first place that fits is taken"
        raise InvalidInput(f"{what} cannot be encoded on {place}: it {why}", hint=hint)


def _find_gpu(name: str | None, context: TuningContext) -> OtherGpu | None:
    others = context.hardware.device.others
    return next((gpu for gpu in others if f"cuda:{gpu.index}" == name), None)


def _places(context: TuningContext, num_processes: int, pinned: CachingSettings) -> list[str]:
    device, places = context.hardware.device, ["training"]
    if device.others and num_processes == 1:
        roomiest = max(device.others, key=lambda gpu: gpu.budget_bytes)
        places.append(pinned.other_gpu or f"cuda:{roomiest.index}")
    return [*places, "cpu"] if device.memory_kind in ("discrete", "coherent") else places


def _text_ways(places: Sequence[str]) -> list[dict[str, Any]]:
    tried = [each for each in WEIGHT_FORMATS.values() if each.is_tried_for_encoders]
    by_exactness = sorted(tried, key=lambda each: each.bytes_per_parameter, reverse=True)
    on = {place: {"text_encoder_device": place} for place in places}
    last = [on.pop("cpu")] if "cpu" in on else []
    stored = [{"text_encoder_quantization": each.name} for each in by_exactness]
    ways: list[dict[str, Any]] = [*on.values(), *stored, *last]
    usual = {name: CachingSettings.model_fields[name].default for name in TEXT_FIELDS}
    return [{**usual, **way} for way in (*ways, {"text_encoder_streamed": True})]


def _shortage(place: str, num_bytes: int, context: TuningContext) -> str | None:
    hardware, needed = context.hardware, _reserved(num_bytes)
    if place == "cpu":
        budget, room = hardware.host.available_memory_bytes, "of system RAM are free"
    else:
        gpu, budget, room = _find_gpu(place, context), context.budget_bytes, "may be taken"
        needed += hardware.process_overhead_bytes
        if gpu is None and place != "training":
            return f"there is no {place} here"
        if gpu is not None:  # if a smaller GPU is rehearsed, both are
            is_limited = hardware.device.budget_set_by_user
            budget = min(gpu.budget_bytes, budget) if is_limited else gpu.budget_bytes
    shortage = f"needs {needed / 2**30:.1f} GiB, {budget / 2**30:.1f} GiB {room}"
    return None if needed <= budget else shortage


def _reserved(num_bytes: int) -> int:
    return round((1 + ROUNDED_SHARE) * num_bytes)


def why_not_cast(name: str, family: Family) -> str | None:
    """Tell why a family's text encoders would compute nonsense in a weight format."""
    weight_format = WEIGHT_FORMATS.get(name)
    if family.casts_to_weight_dtype and weight_format and weight_format.hides_dtype:
        return "T5 casts its activations to the dtype of its weights"
    return None


def _unusable_reason(name: str, context: TuningContext) -> str | None:
    weight_format = WEIGHT_FORMATS.get(name)
    if weight_format is None:
        return f"it is unknown; known: {', '.join(WEIGHT_FORMATS)}"
    capability = context.hardware.capability(weight_format.capability)
    if weight_format.quantize and not capability.available:
        return capability.reason
    if refusal := why_not_cast(name, context.family):
        return refusal
    floor = context.workload.quality
    if not weight_format.meets(floor):
        return f"the quality floor is {floor}; this needs --quality {weight_format.quality}"
    return None
