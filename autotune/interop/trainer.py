"""The trainers whose configurations are read and written: for each a file of `data/`."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

from autotune.errors import InvalidInput, suggest_nearest
from autotune.interop import rules, targets
from autotune.interop.rules import MIN_SNR_NAMES, ConfigValue, Context, Rule, Values
from autotune.models import facts, registry
from autotune.models.family import Family
from autotune.plan.prediction import Overheads
from autotune.system.files import read_table
from autotune.weights.names import expand

NAMES = ("ai-toolkit", "musubi", "simpletuner", "diffusers", "sd-scripts", "onetrainer")


@dataclass(frozen=True)
class KnownModel:
    """A model by a trainer's keys; other fields have what differs between a trainer's models."""

    name: str
    family: Family
    published: facts.PublishedModel
    keys: Values  # held by a file for it; None for what is not
    defaults: Values = field(default_factory=dict)
    fixed: Values = field(default_factory=dict)
    constants: Values = field(default_factory=dict)
    lacks: tuple[str, ...] = ()  # keys that do nothing for it, or that its script refuses
    prefix: tuple[str, str] | None = None  # how its keys begin, and how other models' do
    overheads: str = ""  # before the trainer's
    assumes: str = ""  # taken for granted of a file that says no more than `keys`
    note: str = ""  # a difference in what this trainer computes with this model


@dataclass(frozen=True)
class Trainer:
    """Another trainer's configuration, as data."""

    name: str
    title: str
    version: str  # the commit that its keys were read at
    detect: tuple[Mapping[str, str], ...]  # alternatives: keys of any section, patterns of values
    models: tuple[KnownModel, ...]  # the first of a model is written; all are read
    rules: tuple[Rule, ...]
    defaults: Values  # of keys that change learning or memory: read if absent, always written
    fixed: Values  # other keys that are always written
    # of keys without a rule: a pattern, words, a value without effect, whether it changes learning
    accounts: tuple[tuple[re.Pattern[str], str, str, bool], ...]
    overheads: str  # rows that `overheads_of` reads
    source: str  # where they were read
    root: str = ""  # where its settings begin in the file
    weights_keys: tuple[str, ...] = ()  # they name the weights; the first is written
    aliases: Mapping[str, str] = field(default_factory=dict)
    follows: Mapping[str, str] = field(default_factory=dict)  # as another key, unless written
    gathered: tuple[str, ...] = ()  # keys in lists of sections, read as one: `samples[].prompt`
    # keys that name another file, and the prefix of that file's keys
    references: Mapping[str, str] = field(default_factory=dict)
    sections_kept: tuple[str, ...] | None = None  # beginnings of keys, if others mean nothing
    # what it computes differently; with conditions as in `overheads_of`, with such settings alone
    notes: tuple[str, ...] = ()
    # images of a folder that it reads otherwise, by what `export_config` counts, and how
    unread: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    trigger_marks: tuple[str, ...] = ()  # which it replaces by the trigger in captions and prompts
    constants: Values = field(default_factory=dict)  # learned so, by our names
    # By what a file is if no plan can be made of it: `KEY=PATTERN|PATTERN`, with `!=` for any other
    # value that is there, or `!KEY` for a file without such a key.
    refuses: Mapping[str, str] = field(default_factory=dict)

    def find_refusal(self, settings: Mapping[str, ConfigValue]) -> str | None:
        """Return what a file is if no plan can be made of it, and the setting that says so."""
        for why, words in self.refuses.items():
            for key, _, values in (word.partition("=") for word in words.split()):
                if key[0] == "!" and not any(fnmatchcase(one, key[1:]) for one in settings):
                    return f"{why} (no {key[1:]})"
                found = settings.get(key.removesuffix("!"))
                if key[-1] == "!" and found and not isinstance(found.value, str | None):
                    shown = str(found.value)[:200]
                    return f"{found.key} cannot be {shown}, line {found.line}: it is not a text"
                text = "" if found is None or found.value is None else str(found.value).lower()
                fits = any(fnmatchcase(text, one.lower()) for one in values.split("|"))
                if found is not None and text and fits != key.endswith("!"):
                    return f"{why} ({found.key} {text[:200]}, line {found.line})"
        return None

    def detects(self, settings: Iterable[ConfigValue]) -> bool:
        """Tell if a file is this trainer's."""

        def has(name: str, pattern: str) -> bool:
            named = (one for one in settings if f".{one.key}".endswith(f".{name}"))
            values = (str(one.value) for one in named if one.value is not None)
            return any(re.fullmatch(pattern, value) for value in values)

        return any(all(has(*one) for one in keys.items()) for keys in self.detect)

    def for_model(self, known: KnownModel) -> "Trainer":
        """Return this table as it is for one model."""
        noise = [rule for rule in self.rules if "timestep_sampling" in rule.names]
        is_discrete = Context(known.family).is_discrete
        # if it has a rule for flow matching and one for discrete schedules, the other goes
        others = [one for one in noise if (one.names == MIN_SNR_NAMES) != is_discrete]
        own = (one for one in self.rules if len(noise) == 1 or one not in others)
        usual = {k: v for k, v in self.defaults.items() if v is None or k not in known.lacks}
        fixed = {key: value for key, value in self.fixed.items() if key not in known.lacks}
        return replace(
            self,
            rules=tuple(own),
            defaults={**usual, **known.defaults},
            fixed={**fixed, **known.fixed},
            constants={**self.constants, **known.constants},
            notes=(*self.notes, *filter(None, [known.note])),
        )

    def account(self, key: str, value: Any) -> tuple[str, str] | None:
        """Return the list of `ImportedConfig` for a key that no rule reads, and words, if known."""
        found = [one[1:] for one in self.accounts if one[0].fullmatch(key)]
        if not found or not found[0][2]:
            return ("decided", found[0][0]) if found else None
        words = found[0][0]
        off = [one[1] for one in found if one[0] == words]
        is_on = value not in (None, False, 0, "", []) and not rules.fits("|".join(off), value)
        return ("not_carried", words) if is_on else ("carried", "as in autotune")

    def holding(self, lines: Iterable[str], written: Values) -> Iterator[str]:
        """Yield lines whose conditions hold with settings by its keys, else its defaults."""
        values = {**self.defaults, **written}

        def is_on(key: str) -> bool:
            name, _, value = key.partition("=")
            own = values.get(name)
            return str(own).lower() == value.lower() if value else bool(own)

        for line in lines:
            text, *conditions = line.split(" | ")
            parts = map(expand, conditions)
            if all(any(map(is_on, keys)) == (how == "if") for how, *keys in parts):
                yield text

    def overheads_of(self, written: Values, known: KnownModel) -> Overheads:
        """Return what it takes of a device with settings by its keys, else its defaults. Of rows
        that begin alike the first counts; they may end with conditions, `| if KEY=VALUE` or
        `| unless KEY KEY`, which all must hold."""
        rows: dict[str, dict[str, list[str]]] = {}
        lines = [*known.overheads.splitlines(), *self.overheads.splitlines()]
        for kind, name, *words in map(str.split, self.holding(lines, written)):
            rows.setdefault(kind, {}).setdefault(name, words)

        def adapter(precision: str, way: str, *sizes: str) -> dict[str, Any]:
            """`precision autocast|plain bytes-of-AdamW bytes-of-its-step`, for each parameter;
            operations of a step for each tensor, if it is not fused."""
            names = ("optimizer_bytes", "step_bytes", "step_operations")
            known = dict(zip(names, map(int, sizes), strict=False))
            return {"precision": precision, "autocasts": way == "autocast", **known}

        adapters = {name: adapter(*words) for name, words in rows["adapter"].items()}
        swap = rows.get("swap", {"*": ["pinned", "two"]})["*"]
        kept = ((*name.split("."), *words) for name, words in rows.get("keep", {}).items())
        fields = {
            **{"program": self.name, "version": self.version, "source": self.source},
            "adapter": adapters.pop("*"),
            "adapter_by_format": adapters,
            "products": {
                name: {"keeps": keeps, **dict.fromkeys(more, True)}
                for name, (keeps, *more) in rows.get("product", {}).items()
            },
            "kept": tuple({"phase": a, "part": b, "precision": c} for a, b, c in kept),
            "swap": {
                "from_pinned": "pinned" in swap,
                "copies_back": "back" in swap,
                "slots": next(word for word in swap if word in ("one", "two", "resident")),
                "by_layer": "layers" in swap,
            },
        }
        return Overheads.model_validate(fields)


@cache
def trainers() -> Mapping[str, Trainer]:
    """Return all trainers by name."""
    return {name: _load(name) for name in NAMES}


def get_trainer(name: str) -> Trainer:
    """Return the trainer called `name`. Raises InvalidInput if there is none."""
    if name not in trainers():
        message = f"there is no trainer called {name!r}"
        raise InvalidInput(message, hint=suggest_nearest(name, trainers()))
    return trainers()[name]


def _load(name: str) -> Trainer:
    data = _merged(*(read_table(f"interop/data/{each}.yaml") for each in ("shared", name)))
    if base := data.get("extends"):
        data = _merged(read_table(f"interop/data/{base}.yaml"), data)
    accounts = [
        # `*` is anything, `*.` at the beginning any section or none
        (re.compile(re.sub(r"^\.\*\\\.", r"(.*\\.)?", key)), why, off, learned)
        for kind, learned in (("changes_learning", True), ("ignored_keys", False))
        for why, keys in data[kind].items()
        for word, _, off in (word.partition("=") for word in expand(keys))
        for key in (re.escape(word).replace(r"\*", ".*"),)
    ]
    tables = data["value_tables"].items()
    made = [rules.value_table(one, rows) for heads, rows in tables for one in heads.split(", ")]
    for kind, arguments in data["key_rules"].items():
        make = getattr(targets if kind.startswith("targets_") else rules, kind)
        several = isinstance(arguments, list) and isinstance(arguments[0], list)
        for one in arguments if several else [arguments]:
            named = one if isinstance(one, dict) else {}
            listed = one if isinstance(one, list) else [] if named else [one]
            made.append(make(*listed, **named))
    if takes := data.get("swap_takes"):
        by_weight = partial(rules.by_weight, takes=takes)
        made = [by_weight(rule) if "swapped_blocks" in rule.names else rule for rule in made]
    made += map(rules.same, data["same"].split())
    known = data.keys() & {field.name for field in fields(Trainer)}
    read = {key: _as_read(key, data[key]) for key in known}
    read |= {"models": tuple(_known_models(data)), "rules": tuple(made)}
    return Trainer(**read, name=name, accounts=tuple(accounts))


def _merged(base: Any, own: Any) -> Any:
    if isinstance(base, dict):
        both = {key: _merged(base[key], own[key]) for key in base.keys() & own.keys()}
        return {**base, **own, **both}
    return f"{base} {own}" if isinstance(base, str) else [*base, *own]


def _as_read(key: str, value: Any) -> Any:
    if key in ("defaults", "fixed"):  # `a=1 b.c="x" d=["y","z"]`, in JSON without spaces
        pairs = (one.partition("=") for one in expand(value))
        return {name: json.loads(written) for name, _, written in pairs}
    if key in ("lacks", "sections_kept", "weights_keys", "gathered"):
        return tuple(expand(value))
    return tuple(value) if isinstance(value, list) else value


def _known_models(data: Mapping[str, Any]) -> list[KnownModel]:
    models = []  # under each set of keys words `name=value,value`, a value for each key, or none
    for keys, words in data["models"].items():
        for name, _, values in (word.partition("=") for word in words.split()):
            written = [{"": None, "true": True}.get(one, one) for one in values.split(",")]
            special: dict[str, Any] = {}
            for names, more in data.get("special", {}).items():
                if any(fnmatchcase(name, pattern) for pattern in names.split()):
                    special |= {key: _as_read(key, value) for key, value in more.items()}
            found = registry.find_published(name.partition("@")[0])
            assert found is not None, f"no published model is called {name}"
            by_key = dict(zip(keys.split(), written, strict=True))
            models.append(KnownModel(name.partition("@")[0], *found, by_key, **special))
    return models
