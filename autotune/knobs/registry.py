"""The knobs that the search turns. Adding one: its class and its field in `Candidate`.

Choices and exclusions need no torch; what applies a choice to a model is in modules of their own.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

from autotune.errors import InvalidInput, suggest_nearest
from autotune.knobs import settings
from autotune.knobs.attention import ATTENTION_BACKENDS, AttentionBackend, why_not_faster
from autotune.knobs.formats import WEIGHT_FORMATS, WeightFormat
from autotune.knobs.knob import Choices, GradientTolerance, Knob, TuningContext, gradient_capability
from autotune.models.adapter import target_matcher
from autotune.models.family import Family, build_on_meta
from autotune.plan.candidate import Candidate, Choice
from autotune.plan.hardware import DeviceKind, is_at_least

WHOLE_WEIGHTS = (
    "DoRA takes the norms of whole weights: it needs them on the device, in 16 bits or more"
)
CHECKED_BLOCKS = 2  # the fewest of which one is fetched while another runs


class MicroBatchSize(Knob):
    """The divisors of the effective batch size, as far as the family takes several samples."""

    name = "micro_batch_size"

    def choices(self, context: TuningContext) -> Choices:
        effective = context.workload.effective_batch_size
        max_size = context.family.max_micro_batch_size
        sizes = [size for size in range(1, effective + 1) if effective % size == 0]
        admitted = tuple(size for size in sizes if max_size is None or size <= max_size)
        why = f"{context.family.name} takes {max_size} at once, because captions differ in length"
        return Choices(admitted, dict.fromkeys(sizes[len(admitted) :], why))


class _RecomputationKnob(Knob):
    is_composed = True

    def gradient_tolerance(self, choice: Choice) -> GradientTolerance | None:
        reason = "the same operations on the same values, run twice"
        return GradientTolerance(1, 1e-5, reason) if choice else None


class Checkpointing(_RecomputationKnob):
    """Number of blocks that recompute; never the last, whose activations are needed at once."""

    name = "checkpointed_blocks"

    def choices(self, context: TuningContext) -> Choices:
        num_blocks = context.workload.model.num_blocks
        dominated = (
            f"checkpointing all {num_blocks} blocks needs more memory and time than "
            f"{num_blocks - 1}: the last block's activations are used at once"
        )
        return Choices(tuple(range(num_blocks - 1, -1, -1)), rejected={num_blocks: dominated})


class Selective(_RecomputationKnob):
    """Number of blocks that recompute all but attention, after those that recompute all."""

    name = "selective_blocks"

    def choices(self, context: TuningContext) -> Choices:
        return Choices(tuple(range(context.workload.model.num_blocks)))

    def why_not(self, candidate: Candidate, context: TuningContext) -> str | None:
        if not candidate.selective_blocks:
            return None
        if candidate.recomputed_blocks > context.workload.model.num_blocks:
            return f"{candidate.recomputed_blocks} recomputing blocks are more than the model has"
        backend = ATTENTION_BACKENDS.get(candidate.attention)
        if backend is not None and (backend.needs.library or backend.kernel == "math"):
            computed = f"what {candidate.attention} computes"
            return f"{computed} cannot be kept by itself: it is not one of torch's fused operations"
        return "compiled blocks hide their attention" if candidate.compile != "off" else None


class _TableKnob(Knob):
    table: ClassVar[Mapping[str, Any]]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.table)

    def choices(self, context: TuningContext) -> Choices:
        admitted: list[Choice] = []
        rejected: dict[Choice, str] = {}
        pinnable: dict[Choice, str] = {}
        for name in self.names:
            if why := self._why_rejected(self.table[name], context):
                rejected[name] = why
            elif why := self._why_not_searched(self.table[name], context):
                pinnable[name] = why
            else:
                admitted.append(name)
        return Choices(tuple(admitted), rejected, pinnable)

    def gradient_tolerance(self, choice: Choice) -> GradientTolerance | None:
        entry = self.table.get(str(choice))
        if entry is None or not entry.tolerance:
            return None
        return GradientTolerance(choice, entry.tolerance, entry.tolerance_reason)

    @abstractmethod
    def _why_rejected(self, entry: Any, context: TuningContext) -> str | None: ...

    def _why_not_searched(self, entry: Any, context: TuningContext) -> str | None:
        return entry.slow_on_cpu if context.hardware.device.kind == "cpu" else None


class Quantization(_TableKnob):
    """Weights stored in fewer bits, and dequantized for each product."""

    name = "quantization"
    needs_reload = True
    table: ClassVar = WEIGHT_FORMATS

    def choices(self, context: TuningContext) -> Choices:
        found = super().choices(context)
        size = {name: each.bytes_per_parameter for name, each in WEIGHT_FORMATS.items()}
        by_size = sorted(found.admitted, key=lambda name: size[str(name)])
        return replace(found, admitted=tuple(by_size))

    def _why_rejected(self, entry: WeightFormat, context: TuningContext) -> str | None:
        capability, work = context.hardware.capability(entry.capability), context.workload
        if entry.quantize and work.adapter == "dora":
            return WHOLE_WEIGHTS
        if not entry.meets(work.quality):
            return f"the quality floor is {work.quality}; this needs --quality {entry.quality}"
        return capability.reason if entry.quantize and not capability.available else None


class Swapping(Knob):
    """Number of blocks on the host; they must recompute. The cost model tells if they pay."""

    name = "swapped_blocks"
    is_composed = True
    needs_reload = True

    def choices(self, context: TuningContext) -> Choices:
        device = context.hardware.device
        numbers = range(context.workload.model.num_blocks - 1, -1, -1)
        refusal = WHOLE_WEIGHTS if context.workload.adapter == "dora" else None
        if device.kind != "cuda" or device.memory_kind == "integrated":
            refusal = "device and host share one memory: swapping frees nothing"
        if refusal:
            return Choices((0,), dict.fromkeys(numbers[:-1], refusal))
        return Choices(tuple(numbers))

    def why_not(self, candidate: Candidate, context: TuningContext) -> str | None:
        if candidate.swapped_blocks > candidate.recomputed_blocks:
            why = "autograd would keep their weights on the device"
            return f"block swap needs blocks that recompute: {why}"
        weight_format = WEIGHT_FORMATS.get(candidate.quantization)
        if candidate.swapped_blocks and weight_format is not None and not weight_format.can_offload:
            return f"{weight_format.name} keeps what belongs to its weights on the GPU"
        if candidate.swapped_blocks and candidate.compile != "off":
            return "compiled blocks hold on to their weights"
        return None

    def gradient_tolerance(self, choice: Choice) -> GradientTolerance | None:
        number, reason = CHECKED_BLOCKS, "the same operations on copies of the same weights"
        others = {"checkpointed_blocks": number}
        return GradientTolerance(number, 1e-5, reason, other_choices=others) if choice else None


class Modulation(Knob):
    """Modulation layers, `resident` as the model has them, or `ahead`."""

    name = "modulation"
    names = ("resident", "ahead")
    needs_reload = True

    def choices(self, context: TuningContext) -> Choices:
        reason = _unsuited_reason(context)
        return Choices(("resident",), {"ahead": reason}) if reason else Choices(self.names[::-1])

    def why_not(self, candidate: Candidate, context: TuningContext) -> str | None:
        if candidate.modulation != "ahead":
            return None
        if candidate.compile != "off":
            return "each block takes another part of the modulations, and would be compiled anew"
        return _unsuited_reason(context)

    def gradient_tolerance(self, choice: Choice) -> GradientTolerance | None:
        reason = "the same products, for several draws at a time"
        return GradientTolerance(choice, 1e-5, reason) if choice == "ahead" else None


def _unsuited_reason(context: TuningContext) -> str | None:
    family, layers = context.family, context.family.modulation
    if layers is None:
        return family.excluded.get("modulation", "the family names no modulation layers")
    adapted = _find_adapted_layer(family, context.workload.targets)
    return f"the adapter changes modulation layers, such as {adapted}" if adapted else None


@cache
def _find_adapted_layer(family: Family, targets: str) -> str | None:
    assert family.modulation is not None
    is_adapted = target_matcher(family, targets)
    model = build_on_meta(family, {**family.transformer_config, **family.tiny_config})
    return next((layer for _, layer in family.modulation.find(model) if is_adapted(layer)), None)


class Attention(_TableKnob):
    """The backends that this machine has, and has measured to be faster than the default."""

    name = "attention"
    table: ClassVar = {name: each for name, each in ATTENTION_BACKENDS.items() if not each.why_not}

    def why_not(self, candidate: Candidate, context: TuningContext) -> str | None:
        name, family = candidate.attention, context.family
        backend = ATTENTION_BACKENDS.get(name)
        if backend is None or not backend.refuses_masks:
            return None
        size, padding = candidate.micro_batch_size, context.workload.text_padding
        if not family.has_attention_mask(size, padding):
            return None
        if family.has_attention_mask(1, "exact"):
            return f"{name} refuses masks, and the text of {family.name} always has one"
        captions = "captions of different lengths in one batch, dropped ones too, need one"
        return f"{name} refuses masks, and {captions}"

    def _why_rejected(self, entry: AttentionBackend, context: TuningContext) -> str | None:
        capability, family = context.hardware.capability(entry.capability), context.family
        if not capability.available:
            return capability.reason
        if entry.refuses_masks and family.has_attention_mask(1, "exact"):
            return f"it takes no masks, and the text of {family.name} always has one"
        return None

    def _why_not_searched(self, entry: AttentionBackend, context: TuningContext) -> str | None:
        return super()._why_not_searched(entry, context) or why_not_faster(entry, context)


# To compile one kind of block for one shape, by the device's kind, until a trial has measured it.
# Round figures: on an H200's host ten settings of FLUX.1 and Qwen-Image took 10 to 32 s; Qwen-Image
# with 8-bit products 34 s of a CPU's time, and 43 more at the second shape.
STARTUP_SECONDS = {"cuda": 20.0, "mps": 60.0, "cpu": 60.0}
# For a model's kinds of attention: 11 for FLUX.1 on that host; 57 to 73 for three mid-size families
# on two busy CPU cores.
NORM_ROPE_STARTUP_SECONDS = {"cuda": 10.0, "mps": 60.0, "cpu": 60.0}


def startup_seconds(candidate: Candidate, context: TuningContext) -> float:
    """Return the seconds it takes to compile what a candidate compiles."""
    if candidate.compile == "block":
        # One list of blocks has some that recompute and some that do not.
        is_mixed = 0 < candidate.checkpointed_blocks < context.workload.model.num_blocks
        return _seconds_of_blocks(len(context.family.block_lists) + is_mixed, context)
    if candidate.norm_rope == "compiled":
        return NORM_ROPE_STARTUP_SECONDS[context.hardware.device.kind]
    return 0.0


def _seconds_of_blocks(num_kinds: int, context: TuningContext) -> float:
    # Once for the first shape and once for all others.
    work, seconds = context.workload, STARTUP_SECONDS[context.hardware.device.kind]
    has_one_shape = len(work.buckets) == 1 and work.text_padding == "exact"
    return seconds * num_kinds * (1 if has_one_shape else 2)


class NormRope(Knob):
    """Kernels of norm and RoPE: `stock`, `fused`, or `compiled` where torch.compile works."""

    name = "norm_rope"
    names = ("stock", "fused", "compiled")
    compared_with = "stock"

    def capability(self, choice: Choice) -> str:
        return "compile" if choice == "compiled" else super().capability(choice)

    def choices(self, context: TuningContext) -> Choices:
        if not context.family.attention_layouts:
            reason = f"{context.family.name} does not say how its attention is built"
            return Choices(("stock",), dict.fromkeys(("fused", "compiled"), reason))
        hardware = context.hardware
        compiles, kind = hardware.capability("compile"), hardware.device.kind
        orders = {"cpu": ["fused", "stock"], "cuda": ["compiled", "fused", "stock"]}
        rejected: dict[Choice, str] = {} if compiles.available else {"compiled": compiles.reason}
        usable = [one for one in orders.get(kind, ["stock", "fused"]) if one not in rejected]
        right = (one for one in usable if gradient_capability(self.name, one) not in hardware.lacks)
        best = next(right, "stock")
        slower = {"cpu": "it was no faster than fused", "cuda": "it moves more bytes"}
        why = slower.get(kind, "it was never measured here")
        others = (one for one in self.names if one != best and one not in rejected)
        return Choices((best,), rejected, dict.fromkeys(others, f"{why}: pin it to compare"))

    def why_not(self, candidate: Candidate, context: TuningContext) -> str | None:
        if candidate.norm_rope != "stock" and candidate.compile != "off":
            return "compiled blocks fuse diffusers' own operations"
        return None

    def gradient_tolerance(self, choice: Choice) -> GradientTolerance | None:
        reason = "fp32 between the projections and attention, where diffusers' operations round"
        return GradientTolerance(choice, 0.01, reason) if choice != "stock" else None


class Compile(Knob):
    """Compiled blocks: `off`; `block` for the winner of a search if a trial shows that it pays."""

    name = "compile"
    names = ("off", "block")

    def capability(self, choice: Choice) -> str:
        return "compile" if choice == "block" else super().capability(choice)

    def choices(self, context: TuningContext) -> Choices:
        capability = context.hardware.capability("compile")
        if not capability.available:
            return Choices(("off",), rejected={"block": capability.reason})
        startup = _seconds_of_blocks(len(context.family.block_lists), context)
        payback = f"the steps may pay back a start-up of some {startup:.0f} s"
        return Choices(("off",), pinnable={"block": f"the winner is tried compiled if {payback}"})

    def why_not(self, candidate: Candidate, context: TuningContext) -> str | None:
        weight_format = WEIGHT_FORMATS.get(candidate.quantization)
        if candidate.compile != "off" and weight_format and weight_format.stand_in:
            return "this weight format has kernels of its own, which torch.compile cannot trace"
        recomputes = candidate.recomputed_blocks and candidate.quantization != "none"
        is_old = not is_at_least(context.hardware.versions.torch or "2.13", "2.13")
        if candidate.compile != "off" and recomputes and is_old:
            # FLUX.1 with int8 and four images at a time took 62.6 GiB of an H200 instead of 20.
            return "before torch 2.13 checkpoints save little in compiled, quantized blocks"
        return None

    def gradient_tolerance(self, choice: Choice) -> GradientTolerance | None:
        reason = "fused kernels keep intermediate results in fp32 where single ones round them"
        # Two that recompute, of which the second is compiled: its code has all that others' has.
        others = {"checkpointed_blocks": 2}
        compiled = GradientTolerance(choice, 0.05, reason, other_choices=others)
        return compiled if choice == "block" else None


KNOBS: tuple[Knob, ...] = (
    MicroBatchSize(),
    Checkpointing(),
    Selective(),
    Quantization(),
    Swapping(),
    Modulation(),
    Attention(),
    NormRope(),
    Compile(),
)


# By field of a candidate.
GRADIENT_TOLERANCES: Mapping[str, Callable[[Choice], GradientTolerance | None]] = {
    "precision": settings.precision_tolerance,
    **{knob.name: knob.gradient_tolerance for knob in KNOBS},
    "optimizer": settings.optimizer_tolerance,
}


# Values on any machine, by field of a candidate; none if they are numbers.
NAMES: Mapping[str, tuple[str, ...]] = {
    **{knob.name: knob.names for knob in KNOBS},
    **settings.PLAIN_SETTINGS,
}


def require_choice(name: str, value: Choice) -> None:
    """Raise InvalidInput if there is no such knob or plain setting, or it never has this value."""
    if name not in NAMES:
        raise InvalidInput(f"there is no knob called {name!r}", hint=suggest_nearest(name, NAMES))
    if NAMES[name] and value not in NAMES[name]:
        hint = suggest_nearest(str(value), NAMES[name])
        raise InvalidInput(f"there is no {name.replace('_', ' ')} called {value!r}", hint=hint)


def why_not_on(kind: DeviceKind, lacks: Mapping[str, str], name: str, value: Choice) -> str | None:
    """Tell why a value does not work at all on a machine that `lacks` such capabilities."""
    if value == "pinned" and kind != "cuda":
        return f"only CUDA copies from page-locked memory by itself, this is {kind}"
    if value == "fp16" and kind == "cpu":  # which works, for tests
        return None
    knob = next((each for each in KNOBS if each.name == name), None)
    return lacks.get(knob.capability(value) if knob else f"{name}.{value}")


def reload_key(candidate: Candidate) -> tuple[Choice, ...]:
    """Return the candidate's values for which a model is loaded anew."""
    names = ("precision", "allocator", *(knob.name for knob in KNOBS if knob.needs_reload))
    return tuple(getattr(candidate, name) for name in names)
