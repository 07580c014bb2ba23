"""Rules that relate keys of another trainer to names of autotune's, each read in both directions.

A name is an option of `autotune.plan` (of the workload or the job), a field of `Candidate`, or
`caching.FIELD`. One table of rules per trainer serves import and export, so that what is exported
is read back as it was.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.families import MIN_SNR_GAMMA, DiscreteDiffusion, Family
from autotune.schema import Candidate
from autotune.trainers.layers import Selects, convolutions, find_target_set, linear_layers

Values = Mapping[str, Any]
"""Values by the trainer's keys, or by autotune's names."""
LOST = "lost"
"""Name under which `read` tells, in a sentence's words, what autotune would do differently."""
KNOBS = frozenset(Candidate.model_fields)


def is_knob(name: str) -> bool:
    """Whether a name is one of the settings that autotune tunes, so that a value for it is a
    pin.
    """
    return name in KNOBS or name.startswith("caching.")


class CannotExpress(Exception):
    """A trainer has no equivalent of a value, and no neighbor of it that needs no more memory."""


@dataclass(frozen=True)
class Context:
    """What conversions depend on."""

    family: Family
    num_blocks: int | None = None
    """Number of blocks of the model; None when a file is read without building it."""


@dataclass(frozen=True)
class Rule:
    """One relation between keys of theirs and names of ours."""

    keys: tuple[str, ...]
    names: tuple[str, ...]
    read: Callable[[Values, Context], Values]
    """From the keys that are present, or have a default, to names. May raise for a value that
    makes no sense.
    """
    write: Callable[[Values, Context], Values]
    """From all names to keys; None leaves a key out. Raises CannotExpress."""
    synonyms: tuple[str, ...] = ()
    """Those of the keys that mean the same: the first that is present wins, and none has its
    default beside another.
    """


def whole(value: Any) -> int:
    """A whole number, also if it is written as text or as a float."""
    number = float(value)
    if isinstance(value, bool) or number != int(number):
        raise ValueError(f"{value!r} is not a whole number")
    return int(number)


def number(value: Any) -> float:
    """A number, also if it is written as text: YAML 1.1 reads 1e-4 so."""
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def text(value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    return value


def boolean(value: Any) -> bool:
    """A truth value."""
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def block_number(value: Any) -> str:
    """A number of blocks, as pins name it."""
    return str(whole(value))


def texts(value: Any) -> tuple[str, ...]:
    """Several texts, or one."""
    return tuple(map(str, value)) if isinstance(value, list | tuple) else (str(value),)


KINDS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("data", "control", "caption", "trigger", "attention"), text),
    **dict.fromkeys(
        ("lora_alpha", "lora_dropout", "learning_rate", "weight_decay", "max_grad_norm"), number
    ),
    **dict.fromkeys(("guidance_scale", "caption_dropout"), number),
    "swapped_blocks": block_number,
    **dict.fromkeys(("caching.text_encoder_streamed", "flip"), boolean),
    "preview_prompts": texts,
}
"""What kind of value a name takes; a whole number unless it is here."""


def equal(written: str) -> tuple[Rule, ...]:
    """Rules for names whose values are the same in both: words `ours=theirs|another`, the first
    key being written.
    """
    return tuple(
        _same(name, *keys.split("|"))
        for name, _, keys in (word.partition("=") for word in written.split())
    )


def _same(name: str, *keys: str) -> Rule:
    kind: Callable[[Any], Any] = KINDS.get(name, whole)

    def read(values: Values, context: Context) -> Values:
        value = next((values[one] for one in keys if values.get(one) is not None), None)
        return {} if value is None else {name: kind(value)}

    def write(ours: Values, context: Context) -> Values:
        value: Any = ours.get(name)
        if name == "lora_alpha" and value == int(value):
            value = int(value)  # some parsers take no other
        return {keys[0]: None if name == "num_frames" and value == 1 else value}

    return Rule(keys, (name,), read, write, synonyms=keys)


def one_of_list(key: str, name: str, otherwise: str) -> Rule:
    """A value, or a list of which autotune takes the largest number, or the first text, and says
    `otherwise`.
    """
    kind: Callable[[Any], Any] = KINDS.get(name, whole)

    def read(values: Values, context: Context) -> Values:
        given = values[key] if isinstance(values[key], list) else [values[key]]
        items = [kind(item) for item in given]
        chosen = items[0] if kind is text else max(items)
        return {name: chosen, **({LOST: otherwise} if len(set(items)) > 1 else {})}

    return Rule((key,), (name,), read, lambda ours, _: {key: ours.get(name)})


VALIDATION_PROMPT = Rule(
    ("validation_prompt",),
    ("preview_prompts",),
    lambda values, _: {"preview_prompts": (str(values["validation_prompt"]),)},
    lambda ours, _: {"validation_prompt": next(iter(ours.get("preview_prompts") or ()), None)},
)
"""Rules of trainers that sample a single prompt."""


def batch(sizes: Sequence[str], accumulation: str, processes: str, *, written: str = "") -> Rule:
    """Micro-batch size, accumulated steps and processes: together they are the effective batch
    size.

    Args:
        sizes: their keys for the micro-batch size; the first that is present wins.
        accumulation: their key for the number of micro-batches between optimizer steps.
        processes: their key for the number of processes.
        written: the key of `sizes` that is written, if it is not the first.
    """

    def read(values: Values, context: Context) -> Values:
        micro = whole(next(values[key] for key in sizes if values.get(key) is not None))
        steps, gpus = whole(values.get(accumulation) or 1), whole(values.get(processes) or 1)
        several = {"num_gpus": gpus} if gpus > 1 else {}
        return {"micro_batch_size": micro, "effective_batch_size": micro * steps * gpus, **several}

    def write(ours: Values, context: Context) -> Values:
        micro, gpus = ours["micro_batch_size"], ours.get("num_gpus", 1)
        steps = max(1, ours["effective_batch_size"] // (micro * gpus))
        return {
            written or sizes[0]: micro,
            accumulation: steps,
            processes: gpus if gpus > 1 else None,
        }

    names = ("micro_batch_size", "effective_batch_size", "num_gpus")
    return Rule((*sizes, accumulation, processes), names, read, write, synonyms=tuple(sizes))


def duration(
    steps: str, epochs: str, *, epochs_win: bool = False, no_epochs: int | None = None
) -> Rule:
    """Optimizer steps, or epochs; if a file names both, what wins. Beside steps `no_epochs` is
    written.
    """

    def read(values: Values, context: Context) -> Values:
        num_steps, num_epochs = (whole(values.get(key) or 0) for key in (steps, epochs))
        if num_epochs and (epochs_win or not num_steps):
            return {"num_train_epochs": num_epochs}
        return {"num_steps": num_steps} if num_steps else {}

    def write(ours: Values, context: Context) -> Values:
        num_epochs = ours.get("num_train_epochs")
        return {epochs: num_epochs or no_epochs, steps: None if num_epochs else ours["num_steps"]}

    return Rule(
        (steps, epochs), ("num_steps", "num_train_epochs"), read, write, synonyms=(steps, epochs)
    )


def epochs_only(key: str) -> Rule:
    """Epochs, if a trainer has no other measure: as many as the steps take."""

    def write(ours: Values, context: Context) -> Values:
        images = max(1, ours.get("num_images", 1))
        return {
            key: ours.get("num_train_epochs")
            or -(-ours["num_steps"] * ours["effective_batch_size"] // images)
        }

    names = ("num_steps", "num_train_epochs")
    return Rule((key,), names, lambda values, _: {"num_train_epochs": whole(values[key])}, write)


def schedule(key: str, warmup: str, written: str, *, always: bool = True) -> Rule:
    """The schedule of the learning rate, by name, and its warm-up in steps.

    Args:
        key: their key for the schedule.
        warmup: their key for the warm-up.
        written: names, the first being `constant`, or words `theirs=ours`.
        always: whether every schedule of theirs has a warm-up; else only those that have the word
            in their name.
    """
    names = {
        theirs: own or theirs
        for theirs, _, own in (word.partition("=") for word in written.split())
    }
    constant = next(iter(names))

    def read(values: Values, context: Context) -> Values:
        given = str(values[key])
        name = names.get(given)
        if name is None:
            return {LOST: "autotune has no such schedule; the rate stays constant"}
        steps = number(values.get(warmup) or 0) if always or "warmup" in name else 0
        if 0 < steps < 1:
            return {"lr_scheduler": name, LOST: "a warm-up by share of the steps is not carried"}
        if steps and given == constant and "constant_with_warmup" not in names.values():
            name = "constant_with_warmup"
        return {"lr_scheduler": name, "lr_warmup_steps": 0 if name == "constant" else whole(steps)}

    def write(ours: Values, context: Context) -> Values:
        theirs = next((one for one, own in names.items() if own == ours["lr_scheduler"]), constant)
        has_warmup = always or "warmup" in theirs
        return {key: theirs, warmup: ours.get("lr_warmup_steps", 0) if has_warmup else None}

    return Rule((key, warmup), ("lr_scheduler", "lr_warmup_steps"), read, write)


def by_noise(flow: Rule, discrete: Rule) -> Rule:
    """One rule for models of flow matching, and another for those that learn noise on a discrete
    schedule.
    """

    def read(values: Values, context: Context) -> Values:
        if is_discrete(context):
            return discrete.read(values, context)
        pointless = [key for key in discrete.keys if key not in flow.keys and values.get(key)]
        lost = {LOST: "autotune knows no such weights of this model's loss"} if pointless else {}
        return {**flow.read(values, context), **lost}

    def write(ours: Values, context: Context) -> Values:
        return (discrete if is_discrete(context) else flow).write(ours, context)

    keys, names = (
        dict.fromkeys((*flow.keys, *discrete.keys)),
        dict.fromkeys((*flow.names, *discrete.names)),
    )
    return Rule(tuple(keys), tuple(names), read, write)


def is_discrete(context: Context) -> bool:
    """Whether the model learns noise on a discrete schedule."""
    return isinstance(context.family.noise, DiscreteDiffusion)


def min_snr(key: str, off: float | None = None) -> Rule:
    """The weights of a discrete schedule's loss: the limit of the signal-to-noise ratio, under
    one key that is `off` without it. Noise levels are drawn alike."""

    def read(values: Values, context: Context) -> Values:
        limit = number(values.get(key) or 0)
        lost = (
            {LOST: f"autotune's limit is {MIN_SNR_GAMMA:g}"}
            if limit not in (0, MIN_SNR_GAMMA)
            else {}
        )
        weighting = "min_snr" if limit else "none"
        return {
            "timestep_sampling": "uniform",
            "timestep_shift": 1.0,
            "weighting_scheme": weighting,
            **lost,
        }

    def write(ours: Values, context: Context) -> Values:
        return {key: MIN_SNR_GAMMA if ours.get("weighting_scheme") == "min_snr" else off}

    return Rule((key,), ("timestep_sampling", "timestep_shift", "weighting_scheme"), read, write)


def targets(
    keys: Sequence[str],
    selects: Callable[[Values, Context], Selects],
    write: Callable[[Values, Context], Values],
    *,
    in_blocks: bool = True,
) -> Rule:
    """The adapted layers. `selects` makes of the keys what the trainer matches names with;
    without `in_blocks` it also reaches layers outside the blocks."""

    def read(values: Values, context: Context) -> Values:
        layers = linear_layers(context.family, in_blocks=in_blocks) | convolutions(context.family)
        name, difference = find_target_set(
            context.family, frozenset(filter(selects(values, context), layers))
        )
        return {
            "targets": name,
            **({LOST: f"the nearest set of layers {difference}"} if difference else {}),
        }

    return Rule(tuple(keys), ("targets",), read, write)


def required(key: str, value: Any, words: str) -> Rule:
    """A key that must have one value, and in words what it means if it has another."""
    return Rule(
        (key,),
        (),
        lambda values, _: {} if values[key] == value else {LOST: words},
        lambda ours, context: {key: value},
    )


def alpha(key: str, rank: str) -> Rule:
    """The alpha of an adapter, which is the rank if it is not there."""
    return Rule(
        (key, rank),
        ("lora_alpha",),
        lambda values, _: {"lora_alpha": number(values.get(key) or values[rank])},
        lambda ours, _: {
            key: int(ours["lora_alpha"]) if ours["lora_alpha"] % 1 == 0 else ours["lora_alpha"]
        },
    )


def weight_decay_among(key: str, *, as_list: bool) -> Rule:
    """The weight decay among arguments `name=value` of an optimizer, in a list or in one text."""

    def read(values: Values, context: Context) -> Values:
        found = named_arguments(values.get(key))
        rest = [name for name in found if name != "weight_decay"]
        lost = {LOST: f"{', '.join(rest)}: autotune has no such argument"} if rest else {}
        return {"weight_decay": number(found.get("weight_decay", 0.01)), **lost}

    def write(ours: Values, context: Context) -> Values:
        written = f"weight_decay={ours['weight_decay']}"
        return {key: [written] if as_list else written}

    return Rule((key,), ("weight_decay",), read, write)


def named_arguments(value: Any) -> dict[str, str]:
    """`["a=1", "b=2"]`, or the same in one text with commas between, as a dictionary."""
    parts = value if isinstance(value, list) else (value or "").split(",")
    return {
        name.strip(): given.strip()
        for name, _, given in (str(part).partition("=") for part in parts)
        if name
    }


def settings(written: str) -> dict[str, Any]:
    """`a=1 b.c="x" d=["y","z"]` as keys and values, the values in JSON without spaces."""
    pairs = (one.partition("=") for one in written.split())
    return {key: json.loads(value) for key, _, value in pairs}
