"""The trainers whose configurations are read and written: a file of `data/` for each, which import
and export share. What several have in common is in `data/kohya.yaml` and `data/shared.yaml`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from autotune.errors import InvalidInput, suggest_nearest
from autotune.interop import rules, targets
from autotune.interop.documents import Document
from autotune.interop.rules import MIN_SNR_NAMES, Context, Rule, Values, parse_settings
from autotune.models.family import Family, PublishedModel
from autotune.models.registry import find_published
from autotune.plan.overheads import AdapterPractice, KeptPart, Overheads, ProductPractice

NAMES = ("ai-toolkit", "musubi", "simpletuner", "diffusers", "sd-scripts", "onetrainer")
FILL_IN = "FILL-IN"
"""Written for a path that a plan does not hold."""


@dataclass(frozen=True)
class KnownModel:
    """A model by a trainer's keys."""

    name: str
    """What autotune calls it."""
    keys: Values
    """What a file for it holds; None for what it does not."""
    defaults: Values = field(default_factory=dict)
    """The trainer's values for this model, if they are not those for others."""
    fixed: Values = field(default_factory=dict)
    """Other keys that are always written for it."""
    constants: Values = field(default_factory=dict)
    """What is learned with it by our names, whatever a file says."""
    lacks: tuple[str, ...] = ()
    """Keys that do nothing for it, or that its script refuses."""
    prefix: tuple[str, str] | None = None
    """How its keys begin that begin otherwise for other models, and how those do."""
    kept: str = ""
    """What this trainer keeps on the device with this model, as in the trainer's `kept`."""
    assumes: str = ""
    """What is taken for granted of a file that says no more than `keys`."""
    note: str = ""
    """What this trainer computes differently with this model."""

    @property
    def family(self) -> Family:
        """The family that the model belongs to."""
        return self._found[0]

    @property
    def published(self) -> PublishedModel:
        """The model as it is published."""
        return self._found[1]

    @property
    def _found(self) -> tuple[Family, PublishedModel]:
        found = find_published(self.name)
        assert found is not None, f"no published model is called {self.name}"
        return found


@dataclass(frozen=True)
class Trainer:
    """Another trainer's configuration, as data."""

    name: str
    title: str
    version: str
    """Commit that its keys were read at."""
    detect: tuple[Mapping[str, str], ...]
    """Alternatives: keys, in whatever section, and patterns for their values."""
    models: tuple[KnownModel, ...]
    """The first of a model is written; all are read."""
    rules: tuple[Rule, ...]
    defaults: Values
    """The trainer's own values for keys that may be absent and that change learning or memory:
    read if a key is absent, always written."""
    fixed: Values
    """Other keys that are always written."""
    accounts: tuple[tuple[re.Pattern[str], str, str, bool], ...]
    """What keys mean that no rule reads: a pattern for keys, words, the value with which it changes
    nothing besides none, false, 0 and an empty text, and whether it changes learning."""
    overheads: Mapping[str, Any]
    """What it takes of a device otherwise than autotune's executor, by what `overheads_of` reads."""
    root: str = ""
    """Where its settings begin in the file."""
    weights_keys: tuple[str, ...] = ()
    """Keys that name the weights; the first is written."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names for keys."""
    gathered: tuple[str, ...] = ()
    """Keys in a list of sections, whose values are read as one list: `samples[].prompt`."""
    references: Mapping[str, str] = field(default_factory=dict)
    """Keys that name another file, and the prefix of that file's keys."""
    sections_kept: tuple[str, ...] | None = None
    """If sections of the file mean nothing: the beginnings of keys that keep theirs."""
    notes: tuple[str, ...] = ()
    """What this trainer computes differently whatever its settings are."""
    constants: Values = field(default_factory=dict)
    """What is learned by our names, whatever a file says."""

    def detects(self, document: Document) -> bool:
        """Whether a file is this trainer's."""
        return any(
            all(
                any(
                    name in (one.key, one.key.rpartition(".")[2])
                    and one.value is not None
                    and re.fullmatch(pattern, str(one.value))
                    for one in document.settings
                )
                for name, pattern in alternative.items()
            )
            for alternative in self.detect
        )

    def for_model(self, known: KnownModel) -> "Trainer":
        """This table as it is for one model."""
        is_discrete = Context(known.family).is_discrete
        noise = [rule for rule in self.rules if "timestep_sampling" in rule.names]
        if len(noise) > 1:  # one for models of flow matching, and one for discrete schedules
            noise = [one for one in noise if (one.names == MIN_SNR_NAMES) == is_discrete]
        lacks = set(known.lacks)
        usual = {k: v for k, v in self.defaults.items() if v is None or k not in lacks}
        fixed = {key: value for key, value in self.fixed.items() if key not in lacks}
        return replace(
            self,
            rules=tuple(
                one for one in self.rules if one in noise or "timestep_sampling" not in one.names
            ),
            defaults={**usual, **known.defaults},
            fixed={**fixed, **known.fixed},
            constants={**self.constants, **known.constants},
            notes=(*self.notes, *filter(None, [known.note])),
        )

    def account(self, key: str, value: Any) -> tuple[str, str] | None:
        """What becomes of a key that no rule reads, as `ImportedConfig` lists it, and in words;
        None if it is not known."""
        found = [one for one in self.accounts if one[0].fullmatch(key)]
        learned = [one for one in found if one[3]]
        if learned:
            words = learned[0][1]
            off = [one[2] for one in learned if one[1] == words]
            is_on = value not in (None, False, 0, "", []) and str(value).lower() not in off
            return ("not_carried", words) if is_on else ("carried", "as in autotune")
        return ("decided", found[0][1]) if found else None

    def overheads_of(self, written: Values, known: KnownModel) -> Overheads:
        """What it takes of a device with settings by its keys; its defaults count for what these
        lack. A condition is `if KEY` or `unless KEY`, of which several may stand with bars between;
        `KEY=VALUE` asks for a value."""
        data, values = self.overheads, {**self.defaults, **written}

        def is_on(key: str) -> bool:
            name, _, value = key.partition("=")
            own = values.get(name)
            return str(own).lower() == value.lower() if value else bool(own)

        def rows(text: str, count: int) -> list[list[str]]:
            """Words of the rows whose condition, after a bar, holds."""
            found = []
            for line in filter(str.strip, text.splitlines()):
                words, _, condition = line.partition("|")
                word, _, keys = condition.strip().partition(" ")
                if not word or any(map(is_on, keys.strip().split("|"))) == (word == "if"):
                    found.append(words.split()[:count])
            return found

        kept: dict[tuple[str, str], dict[str, Any]] = {}
        for phase, part, precision in rows(f"{data.get('kept', '')}\n{known.kept}".strip(), 3):
            if precision == "fp32" or (phase, part) not in kept:
                kept[phase, part] = {"phase": phase, "part": part, "precision": precision}
        return Overheads(
            program=self.name,
            version=self.version,
            source=data["source"],
            adapter=_adapter(rows(data["adapter"], 4)[0]),
            adapter_by_format={
                name: _adapter(text.split()) for name, text in data.get("by_format", {}).items()
            },
            products={
                name: ProductPractice.model_validate(
                    {"keeps": text.split()[0], "everywhere": "everywhere" in text}
                )
                for name, text in data.get("products", {}).items()
            },
            kept=tuple(map(KeptPart.model_validate, kept.values())),
        )


def _adapter(words: list[str]) -> AdapterPractice:
    """`precision autocast|plain bytes-of-AdamW bytes-of-its-step`, the bytes for each parameter."""
    precision, how, optimizer, step = words
    return AdapterPractice.model_validate(
        {
            **{"precision": precision, "autocasts": how == "autocast"},
            **{"optimizer_bytes": int(optimizer), "step_bytes": int(step)},
        }
    )


@cache
def trainers() -> Mapping[str, Trainer]:
    """All trainers by name."""
    return {name: _load(name) for name in NAMES}


def get_trainer(name: str) -> Trainer:
    """The trainer called `name`. Raises InvalidInput if there is none."""
    if name not in trainers():
        raise InvalidInput(
            f"there is no trainer called {name!r}", hint=suggest_nearest(name, trainers())
        )
    return trainers()[name]


def _load(name: str) -> Trainer:
    data = _merged(targets.read_data("shared"), targets.read_data(name))
    if base := data.get("extends"):
        data = _merged(targets.read_data(base), data)
    shared = data["words"]
    accounts = [
        (
            re.compile(re.escape(key).replace(r"\*", ".*")),
            shared.get(words, words),
            off.lower(),
            learned,
        )
        for kind, learned in (("changes_learning", True), ("ignored_keys", False))
        for words, keys in data[kind].items()
        for key, _, off in (word.partition("=") for word in keys.split())
    ]
    made = [rules.value_table(keys, rows) for keys, rows in data["value_tables"].items()]
    for kind, arguments in data["key_rules"].items():
        make = {**rules.KINDS, **targets.KINDS}[kind]
        several = isinstance(arguments, list) and isinstance(arguments[0], list)
        for one in arguments if several else [arguments]:
            is_text = isinstance(one, str)
            made.append(
                make(one) if is_text else make(**one) if isinstance(one, dict) else make(*one)
            )
    plain = {one.name for one in fields(Trainer)} & data.keys()
    read = {key: _as_read(key, data[key]) for key in plain}
    same = rules.same(data["same"])
    return Trainer(
        **{**read, "name": name, "models": _models(data), "rules": (*made, *same)},
        accounts=tuple(accounts),
    )


def _merged(base: Any, own: Any) -> Any:
    """Mappings by key, lists and texts one after the other."""
    if isinstance(base, dict):
        both = {key: _merged(base[key], own[key]) for key in base.keys() & own.keys()}
        return {**base, **own, **both}
    return f"{base} {own}" if isinstance(base, str) else [*base, *own]


def _as_read(key: str, value: Any) -> Any:
    if key in ("defaults", "fixed") and isinstance(value, str):
        return parse_settings(value)
    if key in ("lacks", "sections_kept", "weights_keys", "gathered"):
        return tuple(value.split())
    return tuple(value) if isinstance(value, list) else value


def _models(data: Mapping[str, Any]) -> tuple[KnownModel, ...]:
    """Under each set of keys words `name=value,value`, a value for each key; none if it is
    empty."""
    found = []
    for keys, words in data["models"].items():
        for name, _, values in (word.partition("=") for word in words.split()):
            written = [_value(one) for one in values.split(",")]
            special: dict[str, Any] = {}
            for names, more in data.get("special", {}).items():
                if any(fnmatchcase(name, pattern) for pattern in names.split()):
                    special |= {key: _as_read(key, value) for key, value in more.items()}
            found.append(KnownModel(name, dict(zip(keys.split(), written, strict=True)), **special))
    return tuple(found)


def _value(word: str) -> Any:
    return {"": None, "true": True}.get(word, word)
