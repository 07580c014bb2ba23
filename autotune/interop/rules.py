"""Rules that relate keys of another trainer to names of autotune's, each read in both directions.

A name is an option of `autotune.plan`, a field of `Candidate`, or `caching.FIELD`.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from autotune.models.family import Family
from autotune.models.noise import DiscreteDiffusion
from autotune.plan.candidate import Candidate, count_blocks
from autotune.weights.names import expand

Values = Mapping[str, Any]  # by the trainer's keys, or by autotune's names
LOST = "lost"  # under which `read` reports, in a sentence's words, what autotune does differently
MAX_STRIDE = 8
MIN_SNR_NAMES = ("timestep_sampling", "timestep_shift", "weighting_scheme")
NO_ARGUMENT = "autotune has no such argument"
NO_OPTION = "not carried; if autotune's optimizer has it, give it as --optimizer-option NAME=VALUE"
NO_EQUIVALENT = "autotune has no equivalent"


class CannotExpress(Exception):
    """A trainer has no equivalent of a value, and no neighbor of it that needs no more memory."""


@dataclass(frozen=True)
class Context:
    """Facts that conversions depend on; the number of blocks is None if the model is not built."""

    family: Family
    num_blocks: int | None = None

    @property
    def is_discrete(self) -> bool:
        """Tell if the model learns noise on a discrete schedule."""
        return isinstance(self.family.noise, DiscreteDiffusion)

    def blocks(self, value: str | int) -> int:
        """Count the blocks that are meant, as if there were one if the number is unknown."""
        return count_blocks(value, self.num_blocks or 1)


@dataclass(frozen=True)
class Rule:
    """One relation between keys of theirs and names of ours."""

    keys: tuple[str, ...]
    names: tuple[str, ...]
    read: Callable[[Values, Context], Values]  # from keys that are present, or have a default
    write: Callable[[Values, Context], Values]  # from all names; a key is left out if it is None
    synonyms: tuple[str, ...] = ()  # of which one counts: the first present, else the first default


def is_knob(name: str, value: Any = None) -> bool:
    """Tell if autotune tunes the setting of this name, so that a value for it is a pin."""
    if name == "optimizer" and value != "adamw":
        return False  # it decides what is learned
    return name in Candidate.model_fields or name.startswith("caching.")


def number(value: Any, kind: str = "number") -> float:
    """Convert to a number, also if it is written as text: YAML 1.1 reads 1e-4 so."""
    found = math.nan if isinstance(value, bool | list) else float(value)
    if not abs(found) < 2**63 or (kind == "whole number" and found % 1):
        raise ValueError(f"{value!r} is no {kind} that fits into 64 bits")
    return found


def whole(value: Any) -> int:
    """Convert to a whole number, also if it is written as text or as a float."""
    return int(number(value, "whole number"))


def require(kind: type, value: Any) -> Any:
    """Refuse a value of another type."""
    if not isinstance(value, kind):
        raise ValueError(f"{value!r} is not {'a text' if kind is str else 'true or false'}")
    return value


text, boolean = partial(require, str), partial(require, bool)


def listed(value: Any) -> list[Any]:
    """Return a list as it is, anything else as its only item."""
    return value if isinstance(value, list) else [value]


def side(value: Any) -> int:
    """Convert the side of images in pixels, or of a square of so many megapixels."""
    found = number(value)
    return whole(value) if found > 16 else 64 * round(math.sqrt(found * 1e6) / 64)


# A name takes a whole number unless it is here.
VALUE_KINDS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("data", "control", "caption", "trigger", "attention"), text),
    **dict.fromkeys(("lora_alpha", "lora_dropout", "learning_rate", "weight_decay"), number),
    **dict.fromkeys(("max_grad_norm", "guidance_scale", "caption_dropout"), number),
    **dict.fromkeys(("caching.text_encoder_streamed", "flip"), boolean),
    "swapped_blocks": lambda value: str(whole(value)),
    "resolution": side,
    "preview_prompts": lambda value: tuple(map(str, listed(value))),
}


def value_table(keys_and_names: str, rows: str) -> Rule:
    """Relate values of several keys that belong together: `keys -> names`, and a row in each line.

    A row has their values, one of `=`, `>` (only read) and `<` (only written), our values, and
    after a bar how they differ. Values are JSON or words, with alternatives between bars; `*` is
    any value, or none is written; `-` is none, `#` any number, `?` too, with 0 for none and -1, and
    `$` any text, in the same order on both sides; a word that ends with `*` is any that begins so.
    `@family` among the keys is a condition, and `!KEY` is only written. The first row that fits
    counts.
    """
    keys, names = (list(dict.fromkeys(expand(side))) for side in keys_and_names.split("->"))
    table = []
    for line in rows.strip().splitlines():
        found = re.fullmatch(r"(.*?) +([=<>])(?: +(.*?))??(?: *\| (.*))?", line)
        assert found, line
        table.append((found[1].split(), found[2], (found[3] or "").split(), found[4]))

    def read(values: Values, context: Context) -> Values:
        known = {"@family": context.family.name, **values}
        theirs = [ANY if key[0] == "!" else known.get(key) for key in keys]
        for patterns, way, own, difference in table:
            if way != "<" and (bound := _fit(patterns, theirs)) is not None:
                found = {n: _fill(v, bound) for n, v in zip(names, own, strict=False) if v != "-"}
                return {**found, LOST: difference}
        for column, value in zip(zip(*(row[0] for row in table), strict=True), theirs, strict=True):
            if "#" in column and {*column} <= {*BOUND, "*", "-"} and value not in (None, ANY):
                number(value)  # else no row fits for what another column holds
        return {LOST: NO_EQUIVALENT}

    def write(ours: Values, context: Context) -> Values:
        wanted = [ours.get(name) for name in names]
        given = [context.family.name if key == "@family" else ANY for key in keys]
        for theirs, way, patterns, difference in table:
            if way == ">" or difference or _fit(theirs, given) is None:
                continue
            if (bound := _fit(patterns, wanted)) is not None:
                found = zip(keys, theirs, strict=True)
                return {key.lstrip("!"): _fill(v, bound) for key, v in found if key != "@family"}
        planned = ", ".join(f"{name} {own}" for name, own in zip(names, wanted, strict=True))
        raise CannotExpress(f"it has nothing like {planned} that needs no more memory")

    return Rule(tuple(key for key in keys if key[0] not in "@!"), tuple(names), read, write)


ANY: Any = object()
BOUND = ("#", "?", "$")  # patterns of what is the same on both sides


def _fit(patterns: list[str], values: list[Any]) -> list[Any] | None:
    bound: list[Any] = []
    for pattern, value in zip(patterns, values, strict=True):
        if value is ANY or pattern == "*":
            continue
        if pattern == "?" and str(value) in ("None", "-1"):
            bound.append(0)
        elif pattern in BOUND and value is not None:
            try:
                made = text(value) if pattern == "$" else number(value)
                bound.append(value if made == value else int(made) if made % 1 == 0 else made)
            except (TypeError, ValueError):
                return None
        elif not fits(pattern, value):
            return None
    return bound


def fits(pattern: str, value: Any) -> bool:
    """Tell if a value is one of those that a pattern names, with bars between."""
    return any(_is_same(_parse(one), value) for one in pattern.split("|"))


def _is_same(wanted: Any, value: Any) -> bool:
    if isinstance(wanted, str) and isinstance(value, str):
        own, theirs = wanted.lower(), value.lower()
        return theirs.startswith(own[:-1]) if own.endswith("*") else theirs == own
    if isinstance(value, str) and isinstance(wanted, int | float) and value[:1].isdigit():
        value = _parse(value)  # a number written as text
    return bool(value == wanted and isinstance(value, bool) == isinstance(wanted, bool))


def _parse(word: str) -> Any:
    try:
        return None if word == "-" else json.loads(word)
    except ValueError:
        return word


def _fill(pattern: str, bound: list[Any]) -> Any:
    if pattern in BOUND:
        return bound.pop(0) if len(bound) > 1 else bound[0]
    value = _parse(pattern.split("|", maxsplit=1)[0])
    return None if value == "*" else value.rstrip("*") if isinstance(value, str) else value


def choice(name: str, key: str, pairs: str, otherwise: str = NO_EQUIVALENT) -> Rule:
    """Relate a name to a key by words `theirs=ours`, or the same, and `theirs>ours` for what is
    only read, as computed otherwise; any other is `otherwise`."""
    table = []
    for word in pairs.split():
        sign, remark = (">", " | autotune computes its own otherwise") if ">" in word else ("=", "")
        theirs, _, own = word.partition(sign)
        table.append(f"{theirs} {sign} {own or theirs}{remark}")
    return value_table(f"{key} -> {name}", "\n".join([*table, "- < *", f"* > - | {otherwise}"]))


def same(word: str) -> Rule:
    """Relate a name to keys with the same values, of which the first is written: `ours=a|b`; one
    that begins with `^` is read before the others."""
    name, _, written = word.partition("=")
    keys = tuple(key.lstrip("^") for key in written.split("|"))
    first = tuple(key[1:] for key in written.split("|") if key[0] == "^")
    kind: Callable[[Any], Any] = VALUE_KINDS.get(name, whole)

    def read(values: Values, context: Context) -> Values:
        given = (values.get(one) for one in (*first, *keys))
        value = next((one for one in given if one is not None), None)
        return {} if value is None else {name: kind(value)}

    return Rule(keys, (name,), read, lambda ours, _: {keys[0]: ours.get(name)}, synonyms=keys)


def one_of_list(key: str, name: str, otherwise: str = "", is_list: bool = False) -> Rule:
    """Relate a value, of a list its largest number or first text, and of several prompts the first;
    and say what differs."""
    kind: Callable[[Any], Any] = VALUE_KINDS.get(name, whole)

    def read(values: Values, context: Context) -> Values:
        items = [*map(kind, listed(values[key]))]
        lost = otherwise if len(set(items)) > 1 else ""
        return {name: items[0] if kind is text else max(items), LOST: lost}

    def write(ours: Values, context: Context) -> Values:
        value = ours.get(name)
        if name == "preview_prompts":
            value = value[0] if value else None
        return {key: [value] if is_list and value is not None else value}

    return Rule((key,), (name,), read, write)


def resolution(written: str, *others: str) -> Rule:
    """Relate one side of images, or two, in a list or with a comma between; two are written."""
    keys = (*others, written)

    def read(values: Values, context: Context) -> Values:
        own = next(values[key] for key in keys if values.get(key) is not None)
        sides = [*map(whole, own.split(",") if isinstance(own, str) else listed(own))]
        return {"resolution": sides[0] if len(set(sides)) == 1 else (sides[0], sides[-1])}

    return Rule(keys, ("resolution",), read, lambda x, _: {written: [x["resolution"]] * 2}, keys)


def batch(sizes: str, accumulation: str, processes: str, written: str = "") -> Rule:
    """Relate micro-batch size, the first of `sizes` that is there, accumulation and processes."""
    keys = tuple(sizes.split())

    def read(values: Values, context: Context) -> Values:
        micro = whole(next(values[key] for key in keys if values.get(key) is not None))
        steps, gpus = (whole(values.get(key) or 1) for key in (accumulation, processes))
        found = {"micro_batch_size": micro, "effective_batch_size": micro * steps * gpus}
        return {**found, "num_gpus": gpus} if gpus > 1 else found

    def write(ours: Values, context: Context) -> Values:
        micro, gpus = ours["micro_batch_size"], ours.get("num_gpus", 1)
        steps = max(1, ours["effective_batch_size"] // (micro * gpus))
        several = gpus if gpus > 1 else None
        return {written or keys[0]: micro, accumulation: steps, processes: several}

    names = ("micro_batch_size", "effective_batch_size", "num_gpus")
    return Rule((*keys, accumulation, processes), names, read, write, synonyms=keys)


def duration(
    steps: str | None,
    epochs: str,
    epochs_win: bool = False,
    no_epochs: int | None = None,
    otherwise: str = "",
    repeats: str = "",
    once: int = 1,
) -> Rule:
    """Relate steps or epochs, which a key `otherwise` may give if neither does; without a key for
    steps, the epochs that they take. Epochs are longer by `repeats`, of which `once` is none."""
    keys = tuple(key for key in (steps, epochs, otherwise) if key)
    times = tuple(repeats.split())

    def read(values: Values, context: Context) -> Values:
        num_steps, num_epochs, others = (
            whole(values.get(key) or 0) for key in (steps or "", epochs, otherwise)
        )
        num_epochs = num_epochs or (0 if num_steps else others)
        if num_epochs and (epochs_win or not num_steps):
            given = (whole(values[key]) for key in times if values.get(key) is not None)
            return {"num_train_epochs": num_epochs * max(1, max(given, default=once) + 1 - once)}
        return {"num_steps": num_steps} if num_steps else {}

    def write(ours: Values, context: Context) -> Values:
        if num_epochs := ours.get("num_train_epochs"):
            return {**dict.fromkeys(keys[:2]), epochs: num_epochs}
        if steps:
            return {epochs: no_epochs, steps: ours["num_steps"]}
        images = max(1, ours.get("num_images", 1))
        return {epochs: -(-ours["num_steps"] * ours["effective_batch_size"] // images)}

    names = ("num_steps", "num_train_epochs")
    return Rule((*keys, *times), names, read, write, synonyms=keys)


def schedule(key: str, warmup: str, names: str, always: bool = True) -> Rule:
    """Relate the rate's schedule, by `names` that begin with `constant`, and its warm-up in steps;
    unless `always`, only schedules with "warmup" in their name have one."""
    pairs = (word.partition("=") for word in names.split())
    own_names = {theirs: own or theirs for theirs, _, own in pairs}
    constant = next(iter(own_names))

    def read(values: Values, context: Context) -> Values:
        given = str(values[key])
        name = own_names.get(given)
        if name is None:
            return {LOST: "autotune has no such schedule; the rate stays constant"}
        steps = number(values.get(warmup) or 0) if always or "warmup" in name else 0
        if 0 < steps < 1:
            return {"lr_scheduler": name, LOST: "a warm-up by share of the steps is not carried"}
        if steps and given == constant and "constant_with_warmup" not in own_names.values():
            name = "constant_with_warmup"
        return {"lr_scheduler": name, "lr_warmup_steps": 0 if name == "constant" else whole(steps)}

    def write(ours: Values, context: Context) -> Values:
        found = (theirs for theirs, own in own_names.items() if own == ours["lr_scheduler"])
        theirs, steps = next(found, constant), ours.get("lr_warmup_steps", 0)
        return {key: theirs, warmup: steps if always or "warmup" in theirs else None}

    return Rule((key, warmup), ("lr_scheduler", "lr_warmup_steps"), read, write)


def min_snr(key: str, off: str = "-") -> Rule:
    """Relate the limit of the signal-to-noise ratio in a discrete schedule's loss."""

    rows = f"""5 = uniform 1.0 min_snr
        {off}|-|0 > uniform 1.0 none
        {off}     < * * *
        #   > uniform 1.0 min_snr | autotune's limit is 5"""
    return value_table(f"{key} -> {' '.join(MIN_SNR_NAMES)}", rows)


# Options of Prodigy that other trainers name alike, with what it takes without them.
PRODIGY: Values = {"d_coef": 1.0, "decouple": True} | dict.fromkeys(
    ("use_bias_correction", "safeguard_warmup"), False
)


def optimizer_arguments(key: str, optimizer: str, none_in: str, form: str = "number") -> Rule:
    """Relate the weight decay and Prodigy's options: keys that begin alike, or an optimizer's
    arguments in a `list` or a `text`. Without a weight decay, optimizers that begin as the words of
    `none_in` have none, others 0.01."""
    start, has_keys = key.removesuffix("weight_decay"), form == "number"
    keys = tuple(start + one for one in PRODIGY if has_keys)

    def read(values: Values, context: Context) -> Values:
        kind = str(values.get(optimizer)).lower()
        found = {one.removeprefix(start): values[one] for one in (key, *keys) if one in values}
        found = found if has_keys else named_arguments(values.get(key))
        decay = found.pop("weight_decay", None)
        usual = PRODIGY if kind == "prodigy" else {}
        given = {one: _parse(str(found.pop(one, x)).lower()) for one, x in usual.items()}
        others = ", ".join(f"{one}={value}" for one, value in found.items() if not has_keys)
        options = {one: x for one, x in given.items() if x != usual[one]}
        least = 0.0 if kind.startswith(tuple(none_in.split())) else 0.01
        return {
            "weight_decay": least if decay is None else number(decay),
            **({"optimizer_options": options} if options else {}),
            LOST: f"{others}: {NO_OPTION}" if others else "",
        }

    def write(ours: Values, context: Context) -> Values:
        is_prodigy = ours.get("optimizer") == "prodigy" and form != "text"
        options = {**PRODIGY, **ours.get("optimizer_options", {})} if is_prodigy else {}
        written = {"weight_decay": ours["weight_decay"], **options}
        if has_keys:
            return {start + one: value for one, value in written.items()}
        arguments = [f"{one}={value}" for one, value in written.items()]
        return {key: arguments if form == "list" else arguments[0]}

    return Rule((key, optimizer, *keys), ("weight_decay", "optimizer_options"), read, write)


def learning_rate(keys: str, optimizer: str) -> Rule:
    """Relate the rate, which for Prodigy is 1 if it is below 0.1."""
    rate = same(f"learning_rate={keys}")

    def read(values: Values, context: Context) -> Values:
        found = rate.read(values, context)
        is_prodigy = str(values.get(optimizer)).lower().startswith("prodigy")
        return {name: 1.0 if is_prodigy and own < 0.1 else own for name, own in found.items()}

    return replace(rate, keys=(*rate.keys, optimizer), read=read)


def named_arguments(value: Any) -> dict[str, str]:
    """Read `["a=1", "b=2"]`, or the same in one text with commas between."""
    parts = value if isinstance(value, list) else (value or "").split(",")
    pairs = (str(part).partition("=") for part in parts)
    return {name.strip(): given.strip() for name, _, given in pairs if name}


def checkpointing(
    key: str, on: str = "", off: str = "", interval: str = "", stride: str = "", families: str = ""
) -> Rule:
    """Relate checkpointing of all blocks, none, or the first `interval` of every `stride`; without
    a stride every `interval`th. Of other `families` an interval makes several blocks one."""
    words = {**dict.fromkeys(on.split(), True), **dict.fromkeys(off.split(), False)}
    beginnings = tuple(families.split())

    def read(values: Values, context: Context) -> Values:
        if not boolean(words.get(str(values[key]), values[key])):
            return {"checkpointed_blocks": "0"}
        every, of = (whole(values[name]) if values.get(name) else 0 for name in (interval, stride))
        if every <= 1 or 0 < of <= every:
            return {"checkpointed_blocks": "all"}
        if not context.family.name.startswith(beginnings):
            lost = "several blocks are recomputed as one; autotune recomputes each by itself"
            return {"checkpointed_blocks": "all", LOST: lost}
        return {"checkpointed_blocks": f"{every}/{of}" if of else f"1/{every}"}

    def write(ours: Values, context: Context) -> Values:
        total, blocks = context.num_blocks or 1, context.blocks(ours["checkpointed_blocks"])
        if not interval:
            return {key: blocks > 0}
        pairs = ((every, of) for of in range(2, MAX_STRIDE + 1) for every in range(1, of))
        counts = {pair: count_blocks(f"{pair[0]}/{pair[1]}", total) for pair in pairs}
        enough = {pair: count for pair, count in counts.items() if count >= blocks}
        has_patterns = context.family.name.startswith(beginnings)
        if blocks in (0, total, total - 1) or not enough or not has_patterns:
            return {key: blocks > 0, interval: None, stride: None}
        every, of = min(enough, key=lambda one: (enough[one], one[1]))
        first, second = (every, of) if every > 1 else (of, None)
        return {key: True, interval: first, stride: second}

    keys = (key, *filter(None, (interval, stride)))
    return Rule(keys, ("checkpointed_blocks",), read, write)


def swapping(key: str, limits: Mapping[str, int] | None = None) -> Rule:
    """Relate swapped blocks by number; more than a family's limit are refused."""

    def write(ours: Values, context: Context) -> Values:
        blocks, name = context.blocks(ours["swapped_blocks"]), context.family.name
        if limits and blocks > limits.get(name, blocks):
            raise CannotExpress(f"it swaps no more than {limits[name]} blocks of {name}")
        return {key: blocks}

    return replace(same(f"swapped_blocks={key}"), write=write)


# Of a family's models the blocks of two streams and of one, and what one of two weighs in those.
TWO_STREAMS: Mapping[str, tuple[float, tuple[tuple[int, int], ...]]] = {
    "flux1": (2.4, ((19, 38),)),
    "chroma": (2.0, ((19, 38),)),
    "flux2-dev": (2.0, ((8, 48),)),
    "flux2-klein": (2.0, ((5, 20), (8, 24))),
}


def block_weights(context: Context) -> list[float]:
    """Return what each block of a model with two kinds weighs, in the order that they run."""
    for name, (weight, sizes) in TWO_STREAMS.items():
        if context.family.name.startswith(name):
            own = (size for size in sizes if sum(size) == context.num_blocks)
            first, others = next(own, sizes[0])
            return [weight] * first + [1.0] * others
    return []


def _leading(weights: list[float], weight: float) -> int:
    fitting = (n for n in range(len(weights), 0, -1) if sum(weights[:n]) <= weight + 1e-3)
    return next(fitting, 0)


def _taken(count: int, takes: str, weights: list[float]) -> float:
    """Return the weight of blocks that a trainer swaps, infinite if it refuses: `last` as
    SimpleTuner, `halves` as sd-scripts, `balanced` as musubi-tuner."""
    if takes == "last":
        return sum(weights[len(weights) - count :])
    first = sum(weight > 1 for weight in weights)
    others = len(weights) - first
    two, one = count // 2, 2 * (count - count // 2)
    if takes == "balanced":
        two = round(count / (1 + others / first / 2))
        one = round(two * others / first) or count
        while first * 2 < others and two > first - 2:
            two, one = two - 1, one + 2
        while first * 2 >= others and one > others - 2:
            two, one = two + 1, one - 2
    return two * weights[0] + one if two <= first - 2 and one <= others - 2 else math.inf


def by_weight(rule: Rule, takes: str) -> Rule:
    """Relate swapped blocks by what they weigh where those of a model have two kinds."""

    def read(values: Values, context: Context) -> Values:
        found = dict(rule.read(values, context))
        weights, count = block_weights(context), str(found.get("swapped_blocks"))
        if weights and count.isdigit():
            taken = _taken(min(int(count), len(weights)), takes, weights)
            found["swapped_blocks"] = str(_leading(weights, taken))
        return found

    def write(ours: Values, context: Context) -> Values:
        count, weights = context.blocks(ours["swapped_blocks"]), block_weights(context)
        if weights and count:
            wanted = sum(weights[:count])
            enough = (n for n in range(len(weights)) if wanted <= _taken(n, takes, weights))
            counts = (n for n in enough if _taken(n, takes, weights) < math.inf)
            if (found := next(counts, None)) is None:
                raise CannotExpress(f"it cannot swap as much as {count} blocks in autotune")
            ours = {**ours, "swapped_blocks": str(found)}
        return rule.write(ours, context)

    return replace(rule, read=read, write=write)


def share_of_blocks(key: str, switch: str = "") -> Rule:
    """Relate swapped blocks as a share of all weights, which a second key may switch off."""

    def read(values: Values, context: Context) -> Values:
        share = number(values[key]) if not switch or boolean(values[switch]) else 0
        if share and (weights := block_weights(context)):
            return {"swapped_blocks": str(_leading(weights, share * sum(weights)))}
        return {"swapped_blocks": f"{100 * share:g}%" if share else "0"}

    def write(ours: Values, context: Context) -> Values:
        blocks = context.blocks(ours["swapped_blocks"])
        weights = block_weights(context) or [1.0] * (context.num_blocks or 1)
        share = round(sum(weights[:blocks]) / sum(weights), 5)
        return {switch: share > 0, key: share or None} if switch else {key: share}

    return Rule((key, switch) if switch else (key,), ("swapped_blocks",), read, write)


@dataclass(frozen=True)
class ConfigValue:
    """One value of a configuration, and where it is written."""

    key: str
    value: Any  # a boolean, number or text, a list of them, or None
    line: int = 0  # from 1; 0 for a trainer's default, which is written nowhere
    file: str = ""
