"""What one trainer's table must hold."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.families import Family, PublishedModel, find_published
from autotune.schema import Overheads
from autotune.trainers.document import Document
from autotune.trainers.overheads import OverheadTable
from autotune.trainers.rules import Rule, Values

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
    lacks: tuple[str, ...] = ()
    """Keys that do nothing for it, or that its script refuses."""
    part: tuple[str, str] | None = None
    """How its keys begin that begin otherwise for other models, and how those do."""
    kept: str = ""
    """What this trainer keeps on the device with this model, beside `Trainer.overheads`: lines as
    in a table of those.
    """
    assumes: str = ""
    """What is taken for granted of a file that says no more than `keys`."""
    note: str = ""
    """What this trainer computes differently with this model."""

    def renamed(self, written: Values) -> Values:
        """Settings by the keys that they have for this model."""
        own, usual = self.part or ("", "")
        return {
            own + key.removeprefix(usual) if own and key.startswith(usual) else key: written[key]
            for key in written
        }

    @property
    def family(self) -> str:
        """The family that the model belongs to."""
        return self._found[0].name

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
    """Another trainer's configuration, as data: one table that import and export share."""

    name: str
    title: str
    version: str
    """Commit that its keys were read at."""
    detect: Callable[[Document], bool]
    models: tuple[KnownModel, ...]
    """The first of a model is written; all are read."""
    rules: tuple[Rule, ...]
    defaults: Values
    """The trainer's own values for keys that may be absent and that change learning or memory:
    read if a key is absent, always written."""
    fixed: Values
    """Other keys that are always written."""
    decided: Mapping[str, str]
    """What autotune does by itself, in words, and the keys for it in the trainer: with spaces
    between, and `*` for any part of a key."""
    unlearned: Mapping[str, str]
    """What changes learning and is not carried over, in words, and its keys. `key=value` names
    the value with which it changes nothing, besides none, false, 0 and an empty text."""
    files: Callable[[Values, str], Mapping[str, str]]
    """Name and text of each file, from settings by key, and a text in comments for the head of
    one.
    """
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
    overheads: OverheadTable | None = None
    """What it takes of a device otherwise than autotune's executor; None if nobody has looked."""

    def for_model(self, known: KnownModel) -> "Trainer":
        """This table as it is for one model."""
        usual = {
            key: value
            for key, value in self.defaults.items()
            if value is None or key not in known.lacks
        }
        fixed = {key: value for key, value in self.fixed.items() if key not in known.lacks}
        return replace(
            self,
            defaults={**usual, **known.defaults},
            fixed={**fixed, **known.fixed},
            notes=(*self.notes, *filter(None, [known.note])),
        )

    def overheads_of(self, written: Values, known: KnownModel) -> Overheads | None:
        """What it takes of a device with settings by its keys; its defaults count for what these
        lack.
        """
        if self.overheads is None:
            return None
        return self.overheads.resolve(
            self.name, self.version, {**self.defaults, **written}, known.kept
        )

    def find_decided(self, key: str) -> str | None:
        """What autotune does by itself about a key; None if that is not so."""
        return next(
            (words for words, keys in self.decided.items() if _find(keys, key) is not None), None
        )

    def find_unlearned(self, key: str, value: Any) -> tuple[str, bool] | None:
        """What a key means that autotune cannot learn by, and whether this value switches it on;
        None if it can.
        """
        for words, keys in self.unlearned.items():
            if (off := _find(keys, key)) is not None:
                return words, value not in (None, False, 0, "", []) and str(
                    value
                ).lower() not in off
        return None


def _find(keys: str, key: str) -> list[str] | None:
    """The values that are written after `key=` in a list of keys; None if it is not there."""
    parts = [one.partition("=") for one in keys.split()]
    found = [
        off.lower()
        for name, _, off in parts
        if re.fullmatch(re.escape(name).replace(r"\*", ".*"), key)
    ]
    return found or None


def models(key: str, written: str) -> tuple[KnownModel, ...]:
    """Models that one key tells apart, as words `name=value`."""
    pairs = (word.partition("=") for word in written.split())
    return tuple(KnownModel(name, {key: value}) for name, _, value in pairs)
