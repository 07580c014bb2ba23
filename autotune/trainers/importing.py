"""From another trainer's configuration to what `autotune.plan` takes, with an account of every
key.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.backends import WEIGHT_FORMATS
from autotune.errors import InvalidInput
from autotune.families import FAMILIES
from autotune.schema import Frozen, Overheads
from autotune.trainers.document import ConfigValue, Document, read_document, with_references
from autotune.trainers.registry import get_trainer, trainers
from autotune.trainers.rules import LOST, Context, Rule, Values, is_knob
from autotune.trainers.trainer import FILL_IN, KnownModel, Trainer


class ConfigLine(Frozen):
    """One setting of a configuration, and what becomes of it.

    Example:
        >>> [(line.key, line.line) for line in autotune.import_config("train_lora.yaml").not_carried]
    """

    key: str
    value: str
    line: int
    """Number of the line, from 1; 0 for a default of the trainer that is not in the file."""
    file: str
    meaning: str


class ImportedConfig(Frozen):
    """Another trainer's configuration, understood. `autotune.plan(config.model, config.data,
    **config.options)` plans the same training; with `pins=config.pins` the same settings too, where
    this machine has them.

    Example:
        >>> config = autotune.import_config("train_lora.yaml")
        >>> config.trainer, config.pins, config.options["num_steps"]
    """

    path: str
    trainer: str
    version: str
    """Commit of the trainer that its keys were read at."""
    family: str
    model: str
    data: str | None
    options: dict[str, Any]
    """Arguments of `autotune.plan`: what is learned, by the names of the workload and the job."""
    pins: dict[str, str]
    """The settings as written, by knob. Numbers of blocks may be `all`, `25%`, or `2/4`: the first
    two of every four.
    """
    carried: tuple[ConfigLine, ...]
    pinned: tuple[ConfigLine, ...]
    decided: tuple[ConfigLine, ...]
    """What autotune decides by itself."""
    not_carried: tuple[ConfigLine, ...]
    """What changes learning or is not understood, and is not in `options` or `pins`."""
    notes: tuple[str, ...]
    """What this trainer computes differently whatever its settings are."""
    overheads: Overheads | None = None
    """What it takes of a device otherwise than autotune's executor, with these settings; None if
    nobody has looked.
    """


@dataclass(frozen=True)
class Reading:
    """What rules make of settings."""

    values: Values
    """By autotune's names."""
    lines: tuple[tuple[str, ConfigLine], ...]
    """Each with its list: carried, pinned or not_carried."""


def read_config(path: Path, trainer: str | None = None) -> ImportedConfig:
    """Read a configuration file of any known trainer, found out by what the file holds unless
    `trainer` names it.

    Raises:
        InvalidInput: it cannot be read, belongs to no known trainer, trains a model that autotune
            does not know, or has a value that its trainer would refuse.
    """
    document = read_document(path)
    table = detect_trainer(document) if trainer is None else get_trainer(trainer)
    document, missing = with_references(document.below(table.root), table.references)
    document = _gathered(_without_sections(document, table), table.gathered)
    settings = {
        table.aliases.get(setting.key, setting.key): setting for setting in document.settings
    }
    known = _find_model(table, settings, path)
    table = table.for_model(known)
    pointless = _without_pointless(settings, known)
    reading = read_settings(table, settings, Context(FAMILIES[known.family]))
    model, model_lines = _model_of(table, known, settings)
    lines = [*model_lines, *reading.lines, *_other_lines(table, known, settings, missing)]
    lines += [
        ("decided", line_for(one, f"{table.title} ignores it with this model")) for one in pointless
    ]
    lines.sort(key=lambda one: (one[1].line == 0, one[1].file, one[1].line))
    values = dict(reading.values)
    data = values.pop("data", None)
    pins = {name: str(value) for name, value in values.items() if is_knob(name)}
    options = {name: value for name, value in values.items() if not is_knob(name)}
    chosen = pins.get("quantization", "none")
    if chosen in WEIGHT_FORMATS and WEIGHT_FORMATS[chosen].quality == "compact":
        options["quality"] = "compact"
    listed = {kind: tuple(line for its, line in lines if its == kind) for kind in KINDS}
    return ImportedConfig(
        path=str(path),
        trainer=table.name,
        version=table.version,
        family=known.family,
        model=model,
        data=None if data == FILL_IN else data,
        options=options,
        pins=pins,
        notes=table.notes,
        overheads=table.overheads_of({key: one.value for key, one in settings.items()}, known),
        **listed,
    )


KINDS = ("carried", "pinned", "decided", "not_carried")


def detect_trainer(document: Document) -> Trainer:
    """The trainer that a file belongs to. Raises InvalidInput if none knows it."""
    found = next((one for one in trainers().values() if one.detect(document)), None)
    if found is None:
        names = ", ".join(one.title for one in trainers().values())
        raise InvalidInput(
            f"{document.path} is not a configuration of a known trainer", hint=f"known: {names}"
        )
    return found


def read_settings(
    trainer: Trainer, settings: Mapping[str, ConfigValue], context: Context
) -> Reading:
    """Apply a trainer's rules to settings, with its defaults for those that are absent.

    Raises:
        InvalidInput: the trainer would refuse a value.
    """
    values: dict[str, Any] = {}
    lines: list[tuple[str, ConfigLine]] = []
    for rule in trainer.rules:
        by_key = _with_defaults(rule, settings, trainer.defaults)
        present = tuple(by_key.values())
        if not present:
            continue
        try:
            found = dict(rule.read({key: one.value for key, one in by_key.items()}, context))
        except (
            ValueError,
            TypeError,
            ArithmeticError,
            AttributeError,
            LookupError,
            re.error,
        ) as error:
            where = next((one for one in present if one.line), present[0])
            value = _value_text(where.value)
            raise InvalidInput(
                f"{where.file}, line {where.line}: {trainer.title}'s {where.key} cannot be "
                f"{value}: {error}",
                hint="correct it in that file",
            ) from error
        lost = found.pop(LOST, None)
        if (
            found.get("timestep_shift") == "by_resolution"
            and context.family.defaults.shift_by_tokens is None
        ):
            del found["timestep_shift"]
            lost = "the shift follows the resolution there; autotune takes the family's usual"
        values |= found
        told = [one for one in present if one.line] or present[:1]
        if lost:
            lines.append(("not_carried", line_for(told[-1], lost)))
        if not lost and not rule.names:
            lines += [("carried", line_for(one, "as in autotune")) for one in told if one.line]
        for setting in told:
            for kind, is_wanted in (("carried", False), ("pinned", True)):
                named = [
                    f"{name} {_value_text(own)}"
                    for name, own in found.items()
                    if is_knob(name) is is_wanted
                ]
                if named and setting.value is not None:
                    lines.append((kind, line_for(setting, ", ".join(named))))
    return Reading(values, tuple(lines))


def _with_defaults(
    rule: Rule, settings: Mapping[str, ConfigValue], defaults: Values
) -> dict[str, ConfigValue]:
    present = {
        key: settings[key]
        for key in rule.keys
        if key in settings and settings[key].value is not None
    }
    settled = set(rule.synonyms) if present.keys() & set(rule.synonyms) else present.keys()
    absent = [
        key for key in rule.keys if key in defaults and key not in settled and key not in present
    ]
    return present | {key: ConfigValue(key, defaults[key]) for key in absent}


def line_for(setting: ConfigValue, meaning: str) -> ConfigLine:
    """The account of one setting."""
    value = _value_text(setting.value)
    return ConfigLine(
        key=setting.key, value=value, line=setting.line, file=setting.file, meaning=meaning
    )


def _value_text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value_text, value))}]"
    return str(value)


def _without_sections(document: Document, trainer: Trainer) -> Document:
    """The document with the names of sections taken away, if they mean nothing to this trainer."""
    kept = trainer.sections_kept
    if kept is None:
        return document
    flat = (
        s if s.key.startswith(kept) else replace(s, key=s.key.rpartition(".")[2])
        for s in document.settings
    )
    return replace(document, settings=tuple(flat))


def _gathered(document: Document, keys: tuple[str, ...]) -> Document:
    """The document with each of the keys once, with the list of what all of its sections say."""
    settings: list[ConfigValue] = []
    for setting in document.settings:
        general = "[]".join(
            part.partition("]")[2] if i else part for i, part in enumerate(setting.key.split("["))
        )
        if general not in keys:
            settings.append(setting)
        elif first := next((one for one in settings if one.key == general), None):
            settings[settings.index(first)] = replace(first, value=[*first.value, setting.value])
        else:
            settings.append(replace(setting, key=general, value=[setting.value]))
    return replace(document, settings=tuple(settings))


def _find_model(trainer: Trainer, settings: Mapping[str, ConfigValue], path: Path) -> KnownModel:
    """The known model whose keys are all as written, that with most keys first."""
    for known in sorted(trainer.models, key=lambda one: -len(one.keys)):
        if all(
            (settings[key].value if key in settings else None) == value
            for key, value in known.keys.items()
        ):
            return known
    keys = dict.fromkeys(key for known in trainer.models for key in known.keys)
    written = [
        f"{key} {_value_text(settings[key].value)}, line {settings[key].line}"
        for key in keys
        if key in settings
    ]
    names = ", ".join(dict.fromkeys(known.name for known in trainer.models))
    what = (
        f"trains a model that autotune does not know ({'; '.join(written)})"
        if written
        else "names no known model"
    )
    raise InvalidInput(f"{path} {what}", hint=f"of {trainer.title}, autotune knows {names}")


def _without_pointless(settings: dict[str, ConfigValue], known: KnownModel) -> list[ConfigValue]:
    """Take from the settings what does nothing for a model, and call the others as the rules do."""
    own, usual = known.part or ("", "")
    of_others = [key for key, one in settings.items() if own and one.key.startswith(usual)]
    found = [settings.pop(key) for key in (*settings,) if key in known.lacks or key in of_others]
    for key in (*settings,):
        if own and key.startswith(own):
            settings[usual + key.removeprefix(own)] = settings.pop(key)
    return found


def _model_of(
    trainer: Trainer, known: KnownModel, settings: Mapping[str, ConfigValue]
) -> tuple[str, list[tuple[str, ConfigLine]]]:
    """What to plan for, and the lines that say so: the weights as written if `plan` can take
    them, else the model.
    """
    meaning = f"model {known.name}" + f", {known.assumes}" * bool(known.assumes)
    lines = [("carried", line_for(settings[key], meaning)) for key in known.keys if key in settings]
    weights = next(
        (settings[key] for key in trainer.weights_keys if key in settings and settings[key].value),
        None,
    )
    if weights is None or weights.value == FILL_IN:
        return known.name, lines
    name = str(weights.value)
    hub_id = next(
        (m.hub_id for m in FAMILIES[known.family].models if m.hub_id.lower() == name.lower()), None
    )
    if hub_id or (Path(name).expanduser() / "model_index.json").is_file():
        return hub_id or name, [*lines, ("carried", line_for(weights, f"model {hub_id or name}"))]
    meaning = (
        f"planned as {known.name}; to train these weights, name their diffusers folder as "
        "the "
        "job's model"
    )
    return known.name, [*lines, ("not_carried", line_for(weights, meaning))]


def _other_lines(
    trainer: Trainer,
    known: KnownModel,
    settings: Mapping[str, ConfigValue],
    missing: tuple[ConfigValue, ...],
) -> list[tuple[str, ConfigLine]]:
    """The account of the keys that no rule reads."""
    read = {key for rule in trainer.rules for key in rule.keys} | {
        *known.keys,
        *trainer.weights_keys,
    }
    absent = {one.key for one in missing}
    lines = [
        ("not_carried", line_for(one, "that file is not here, so what it says is not known"))
        for one in missing
    ]
    for key, setting in settings.items():
        if key in read or key in absent or setting.value in (None, ""):
            continue
        lines.append(_other_line(trainer, setting))
    return lines


def _other_line(trainer: Trainer, setting: ConfigValue) -> tuple[str, ConfigLine]:
    if (unlearned := trainer.find_unlearned(setting.key, setting.value)) is not None:
        words, is_on = unlearned
        return (
            ("not_carried", line_for(setting, words))
            if is_on
            else ("carried", line_for(setting, "as in autotune"))
        )
    if (decided := trainer.find_decided(setting.key)) is not None:
        return "decided", line_for(setting, decided)
    if trainer.fixed.get(setting.key) == setting.value or setting.key in trainer.references:
        return "decided", line_for(setting, "as autotune does it")
    if "[" in setting.key and "[]" not in setting.key:
        return "not_carried", line_for(setting, "of several sections autotune reads the first")
    return "not_carried", line_for(setting, "not understood")
