"""What one trainer's table must hold."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.trainers.document import Document
from autotune.trainers.rules import Rule, Values

FILL_IN = "FILL-IN"
"""Written for a path that a plan does not hold."""


@dataclass(frozen=True)
class KnownModel:
    """A model by a trainer's keys."""

    family: str
    keys: Values


@dataclass(frozen=True)
class Trainer:
    """Another trainer's configuration, as data: one table that import and export share."""

    name: str
    title: str
    version: str
    """Commit that its keys were read at."""
    detect: Callable[[Document], bool]
    models: tuple[KnownModel, ...]
    """The first of a family is written; all are read."""
    rules: tuple[Rule, ...]
    defaults: Values
    """The trainer's own values for keys that may be absent and that change learning or memory: read if a key is
    absent, always written."""
    fixed: Values
    """Other keys that are always written."""
    decided: Mapping[str, str]
    """What autotune does by itself, in words, and the keys for it in the trainer: words between spaces, with `*` for
    any part of a key."""
    unlearned: Mapping[str, str]
    """What changes learning and is not carried over, in words, and its keys. `key=value` names the value with which it
    changes nothing, besides none, false, 0 and an empty text."""
    files: Callable[[Values, str], Mapping[str, str]]
    """Name and text of each file, from settings by key, and a text in comments for the head of one."""
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

    def find_decided(self, key: str) -> str | None:
        """What autotune does by itself about a key; None if that is not so."""
        return next((words for words, keys in self.decided.items() if _find(keys, key) is not None), None)

    def find_unlearned(self, key: str, value: Any) -> tuple[str, bool] | None:
        """What a key means that autotune cannot learn by, and whether this value switches it on; None if it can."""
        for words, keys in self.unlearned.items():
            if (off := _find(keys, key)) is not None:
                return words, value not in (None, False, 0, "", []) and str(value).lower() not in off
        return None


def _find(keys: str, key: str) -> list[str] | None:
    """The values that are written after `key=` in a list of keys; None if it is not there."""
    parts = [one.partition("=") for one in keys.split()]
    found = [off.lower() for name, _, off in parts if re.fullmatch(re.escape(name).replace(r"\*", ".*"), key)]
    return found or None
