"""Rules that relate keys of another trainer to names of autotune's, each read in both directions.

A name is an option of `autotune.plan` (of the workload or the job), a field of `Candidate`, or `caching.FIELD`. One
table of rules per trainer serves import and export, so that what is exported is read back as it was.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.families import Family
from autotune.schema import Candidate
from autotune.trainers.layers import Selects, find_target_set, linear_layers

Values = Mapping[str, Any]
"""Values by the trainer's keys, or by autotune's names."""
LOST = "lost"
"""Name under which `read` tells, in a sentence's words, what autotune would do differently."""
KNOBS = frozenset(Candidate.model_fields)


def is_knob(name: str) -> bool:
    """Whether a name is one of the settings that autotune tunes, so that a value for it is a pin."""
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
    """From the keys that are present, or have a default, to names. May raise for a value that makes no sense."""
    write: Callable[[Values, Context], Values]
    """From all names to keys; None leaves a key out. Raises CannotExpress."""
    synonyms: tuple[str, ...] = ()
    """Those of the keys that mean the same: the first that is present wins, and none has its default beside another."""


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
    **dict.fromkeys(("lora_alpha", "lora_dropout", "learning_rate", "weight_decay", "max_grad_norm"), number),
    **dict.fromkeys(("guidance_scale", "caption_dropout"), number),
    "swapped_blocks": block_number,
    "caching.text_encoder_streamed": boolean,
    "preview_prompts": texts,
}
"""What kind of value a name takes; a whole number unless it is here."""


def equal(written: str) -> tuple[Rule, ...]:
    """Rules for names whose values are the same in both: words `ours=theirs|another`, the first key being written."""
    return tuple(_same(name, *keys.split("|")) for name, _, keys in (word.partition("=") for word in written.split()))


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


def one_of_list(
    key: str, name: str, kind: Callable[[Any], Any], pick: Callable[[list[Any]], Any], otherwise: str
) -> Rule:
    """A value, or a list of which autotune takes the one that `pick` picks, and says `otherwise` of the rest."""

    def read(values: Values, context: Context) -> Values:
        given = values[key] if isinstance(values[key], list) else [values[key]]
        items = [kind(item) for item in given]
        return {name: pick(items), **({LOST: otherwise} if len(set(items)) > 1 else {})}

    return Rule((key,), (name,), read, lambda ours, _: {key: ours.get(name)})


Row = tuple[tuple[Any, ...], tuple[Any, ...]] | tuple[tuple[Any, ...], tuple[Any, ...], str]
"""Values of their keys, values of our names, and how they differ if they do. `ANY` stands for any value of theirs, a
text that ends with `*` for any that begins so; None among ours: nothing is said about that name."""


def table(
    keys: Sequence[str],
    names: Sequence[str],
    rows: Sequence[Row],
    near: Sequence[tuple[tuple[Any, ...], tuple[Any, ...]]] = (),
    *,
    instead: str = "",
) -> Rule:
    """Values of several keys that belong together, as rows. The first row that fits is read, and the first without a
    difference written.

    Args:
        keys: theirs.
        names: ours.
        rows: pairs of values that mean the same, or nearly so.
        near: ours to theirs, for values of ours that no row has: what needs no more memory. Without one it cannot be
            expressed.
        instead: what autotune does in place of values that no row has.
    """

    def read(values: Values, context: Context) -> Values:
        theirs = tuple(values.get(key) for key in keys)
        row = next((row for row in rows if _fits(row[0], theirs)), None)
        if row is None:
            return {LOST: f"autotune {instead or 'has no equivalent'}"}
        lost = {LOST: row[2]} if len(row) > 2 and row[2] else {}
        return {**{name: own for name, own in zip(names, row[1], strict=True) if own is not None}, **lost}

    def write(ours: Values, context: Context) -> Values:
        wanted = tuple(ours.get(name) for name in names)
        exact = (row[0] for row in rows if len(row) < 3 and _fits(row[1], wanted))
        theirs = next(exact, None) or next((to for of, to in near if _fits(of, wanted)), None)
        if theirs is None:
            said = ", ".join(f"{name} {own}" for name, own in zip(names, wanted, strict=True))
            raise CannotExpress(f"it has nothing like {said} that needs no more memory")
        return {key: None if value is ANY else value for key, value in zip(keys, theirs, strict=True)}

    return Rule(tuple(keys), tuple(names), read, write)


ANY: Any = object()


def _fits(pattern: tuple[Any, ...], values: tuple[Any, ...]) -> bool:
    return all(map(_value_fits, pattern, values))


def _value_fits(wanted: Any, value: Any) -> bool:
    if wanted is ANY:
        return True
    if isinstance(wanted, str) and isinstance(value, str):
        own, theirs = wanted.lower(), value.lower()
        return theirs.startswith(own[:-1]) if own.endswith("*") else theirs == own
    return bool(value == wanted and isinstance(value, bool) == isinstance(wanted, bool))


def choice(key: str, name: str, values: Mapping[Any, Any], *, instead: str = "") -> Rule:
    """A value from a table, theirs to ours; of several that are read alike the first is written. A value of ours that
    they lack is left out: comparing what is read back tells so."""
    rows = [((theirs,), (ours,)) for theirs, ours in values.items()]
    return table([key], [name], rows, [((ANY,), (None,))], instead=instead)


ALLOCATOR = choice("env.PYTORCH_ALLOC_CONF", "allocator", {"expandable_segments:True": "expandable"})
"""Of every trainer on PyTorch."""

VALIDATION_PROMPT = Rule(
    ("validation_prompt",),
    ("preview_prompts",),
    lambda values, _: {"preview_prompts": (str(values["validation_prompt"]),)},
    lambda ours, _: {"validation_prompt": next(iter(ours.get("preview_prompts") or ()), None)},
)
"""Of trainers that sample a single prompt."""


def accelerate_compile(prefix: str = "") -> Rule:
    """Compilation by accelerate, whose options are called `prefix` and `dynamo_...`."""
    return table(
        [f"{prefix}dynamo_backend", f"{prefix}dynamo_use_regional_compilation"],
        ["compile"],
        [
            (("inductor", True), ("block",)),
            (("no", ANY), ("off",)),
            (("inductor", ANY), ("block",), "autotune compiles each block, not the whole model"),
        ],
    )


def batch(sizes: Sequence[str], accumulation: str, processes: str, *, written: str = "") -> Rule:
    """Micro-batch size, accumulated steps and processes: together they are the effective batch size.

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
        return {written or sizes[0]: micro, accumulation: steps, processes: gpus if gpus > 1 else None}

    names = ("micro_batch_size", "effective_batch_size", "num_gpus")
    return Rule((*sizes, accumulation, processes), names, read, write, synonyms=tuple(sizes))


def duration(steps: str, epochs: str, *, epochs_win: bool = False) -> Rule:
    """Optimizer steps, or epochs; if a file names both, what wins."""

    def read(values: Values, context: Context) -> Values:
        num_steps, num_epochs = (whole(values.get(key) or 0) for key in (steps, epochs))
        if num_epochs and (epochs_win or not num_steps):
            return {"num_train_epochs": num_epochs}
        return {"num_steps": num_steps} if num_steps else {}

    def write(ours: Values, context: Context) -> Values:
        num_epochs = ours.get("num_train_epochs")
        return {epochs: num_epochs or None, steps: None if num_epochs else ours["num_steps"]}

    return Rule((steps, epochs), ("num_steps", "num_train_epochs"), read, write, synonyms=(steps, epochs))


def schedule(key: str, warmup: str, names: Mapping[str, str], *, always: bool = True) -> Rule:
    """The schedule of the learning rate, by name, and its warm-up in steps.

    Args:
        key: their key for the schedule.
        warmup: their key for the warm-up.
        names: theirs to ours, the first being `constant`.
        always: whether every schedule of theirs has a warm-up; else only those that have the word in their name.
    """
    constant = next(iter(names))

    def read(values: Values, context: Context) -> Values:
        written = str(values[key])
        name = names.get(written)
        if name is None:
            return {LOST: "autotune has no such schedule; the rate stays constant"}
        steps = number(values.get(warmup) or 0) if always or "warmup" in name else 0
        if 0 < steps < 1:
            return {"lr_scheduler": name, LOST: "a warm-up by share of the steps is not carried"}
        if steps and written == constant and "constant_with_warmup" not in names.values():
            name = "constant_with_warmup"
        return {"lr_scheduler": name, "lr_warmup_steps": 0 if name == "constant" else whole(steps)}

    def write(ours: Values, context: Context) -> Values:
        theirs = next((one for one, own in names.items() if own == ours["lr_scheduler"]), constant)
        has_warmup = always or "warmup" in theirs
        return {key: theirs, warmup: ours.get("lr_warmup_steps", 0) if has_warmup else None}

    return Rule((key, warmup), ("lr_scheduler", "lr_warmup_steps"), read, write)


def checkpointing(key: str) -> Rule:
    """All blocks or none: a part of them becomes all, which needs less memory."""
    return Rule(
        (key,),
        ("checkpointed_blocks",),
        lambda values, _: {"checkpointed_blocks": "all" if boolean(values[key]) else "0"},
        lambda ours, context: {key: count_blocks(ours["checkpointed_blocks"], context.num_blocks or 1) > 0},
    )


def targets(
    keys: Sequence[str],
    selects: Callable[[Values, Context], Selects],
    write: Callable[[Values, Context], Values],
    *,
    in_blocks: bool = True,
) -> Rule:
    """The adapted layers. `selects` makes of the keys what the trainer matches names with; without `in_blocks` it also
    reaches layers outside the blocks."""

    def read(values: Values, context: Context) -> Values:
        layers = linear_layers(context.family, in_blocks=in_blocks)
        name, difference = find_target_set(context.family, frozenset(filter(selects(values, context), layers)))
        return {"targets": name, **({LOST: f"the nearest set of layers {difference}"} if difference else {})}

    return Rule(tuple(keys), ("targets",), read, write)


def count_blocks(value: str | int, num_blocks: int) -> int:
    """How many blocks are meant: a number, `all`, `25%` of them, or `2/4`, the first two of every four."""
    written = str(value)
    if written == "all":
        return num_blocks
    if written.endswith("%"):
        return round(float(written[:-1]) * num_blocks / 100)
    first, of, every = written.partition("/")
    if not of:
        return int(first)
    whole_groups, rest = divmod(num_blocks, int(every))
    return whole_groups * int(first) + min(rest, int(first))


def named_arguments(value: Any) -> dict[str, str]:
    """`["a=1", "b=2"]`, or the same in one text with commas between, as a dictionary."""
    parts = value if isinstance(value, list) else (value or "").split(",")
    return {name.strip(): given.strip() for name, _, given in (str(part).partition("=") for part in parts) if name}


def settings(written: str) -> dict[str, Any]:
    """`a=1 b.c="x" d=["y","z"]` as keys and values, the values in JSON without spaces."""
    pairs = (one.partition("=") for one in written.split())
    return {key: json.loads(value) for key, _, value in pairs}
