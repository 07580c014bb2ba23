"""From another trainer's configuration to what `autotune.plan` takes, every key accounted for."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from autotune.errors import InvalidInput
from autotune.interop import files
from autotune.interop.rules import LOST, ConfigValue, Context, Rule, Values, is_knob
from autotune.interop.trainer import KnownModel, Trainer, get_trainer, trainers
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.models.single_file import SUFFIXES
from autotune.plan import base, candidate
from autotune.plan.prediction import Estimate, Overheads, SettingWorth
from autotune.plan.request import PlanRequest


class ConfigLine(base.Frozen):
    """One setting of a configuration, and what becomes of it."""

    key: str
    value: str
    line: int  # from 1; 0 for a default of the trainer that is not in the file
    file: str
    meaning: str


class ImportedConfig(base.Frozen):
    """Another trainer's configuration: `autotune.plan(config.model, config.data, **config.options)`
    plans the same training, and with `pins=config.pins` the same settings if possible."""

    path: str
    trainer: str
    version: str  # the commit of the trainer that its keys were read at
    family: str
    model: str
    data: str | None
    options: dict[str, Any]  # what is learned, by the names of the workload and the job
    pins: dict[str, str]  # by knob; numbers of blocks may be `all`, `25%` or `2/4`
    carried: tuple[ConfigLine, ...]
    pinned: tuple[ConfigLine, ...]
    decided: tuple[ConfigLine, ...]  # by autotune itself
    not_carried: tuple[ConfigLine, ...]  # changes learning or is not understood
    notes: tuple[str, ...]  # what this trainer computes differently whatever its settings are
    overheads: Overheads  # with these settings


class Audit(base.Frozen):
    """A configuration on a card, as written and as it could be: predicted and perhaps measured."""

    config: ImportedConfig
    as_written: Estimate  # with autotune's executor
    breaks: tuple[str, ...]  # what this card cannot do; the estimate has the usual value
    fastest: Estimate | None  # of settings that learn the same; None if nothing fits
    worth: tuple[SettingWorth, ...]  # of each setting that differs, those that save most first
    in_trainer: Estimate | None = None  # with what the trainer's own program takes of the card
    measured_as_written: candidate.TrialResult | None = None
    measured_fastest: candidate.TrialResult | None = None


Settings = Mapping[str, ConfigValue]
Line = tuple[str, ConfigLine]  # carried, pinned, decided or not_carried, and the account
MAX_ADAMW_RATE = 0.01  # above it a rate is a factor of what an optimizer finds by itself
# What rules raise for a value that makes no sense.
WRONG = (ValueError, TypeError, ArithmeticError, AttributeError, LookupError, RecursionError)


def import_config(
    path: str | Path,
    *,
    trainer: str | None = None,
    allow: Callable[[Path], object] = lambda path: None,
) -> ImportedConfig:
    """Read another trainer's configuration: what carries over, becomes a pin, or does neither.

    Knows ai-toolkit, musubi-tuner, SimpleTuner, sd-scripts and the JSON of its GUI, OneTrainer, and
    command lines of diffusers' scripts; `trainer` says which, if the content does not tell, and
    `allow` may refuse further files that it names.

    Raises:
        InvalidInput: it cannot be read, is no known trainer's, or is for an unknown model.

    Examples:
        >>> config = autotune.import_config("train_lora.yaml")
        >>> [line.meaning for line in config.not_carried]
    """
    path = Path(path)
    written = files.read_document(path)
    found = (one for one in trainers().values() if one.detects(written))
    table = next(found, None) if trainer is None else get_trainer(trainer)
    if table is None:
        message = f"{path} is not a configuration of a known trainer"
        names = ", ".join(one.title for one in trainers().values())
        raise InvalidInput(message, hint=f"known: {names}")
    written = [replace(one, key=one.key.removeprefix(table.root)) for one in written]
    written, missing = files.with_references(written, path.parent, table.references, allow)
    kept, settings = table.sections_kept, dict[str, ConfigValue]()
    for one in written:
        key = one.key if kept is None or one.key.startswith(kept) else one.key.rpartition(".")[2]
        settings[table.aliases.get(key, key)] = replace(one, key=key)
    for key in settings.keys() & set(table.gathered):
        texts = [x.value for x in settings.values() if re.sub(r"\[\d+\]", "[]", x.key) == key]
        settings[key] = replace(settings[key], value=texts)
    if what := table.find_refusal(settings):
        message = f"{path}, which is for {table.title}, cannot be taken over: {what}"
        raise InvalidInput(message, hint="take one for a LoRA of a model in `autotune models`")
    known = _find_model(table, settings, path)
    table = table.for_model(known)
    for key, other in table.follows.items():
        if key not in settings and other in settings:
            settings[key] = ConfigValue(key, settings[other].value)
    pointless = _take_pointless(settings, known)
    lines = [line_for("decided", x, f"{table.title} ignores it with this model") for x in pointless]
    values, read = read_settings(table, settings, Context(known.family))
    if "optimizer" not in values and values.get("learning_rate", 0) > MAX_ADAMW_RATE:
        del values["learning_rate"]
        told = "a rate for that optimizer alone; autotune takes the family's usual"
        of_rate = [line for _, line in read if line.meaning.startswith("learning_rate ")]
        read = [one for one in read if one[1] not in of_rate]
        read += [("not_carried", line.changed(meaning=told)) for line in of_rate]
    model, named = _model_of(table, known, settings)
    lines += [*named, *read, *_other_lines(table, known, settings, missing)]
    lines.sort(key=lambda one: (one[1].line == 0, one[1].file, one[1].line))
    for mark in table.trigger_marks if "trigger" in values else ():
        fill = partial(re.sub, re.escape(mark), lambda _: values["trigger"])
        for name in values.keys() & {"caption", "preview_prompts"}:
            own = values[name]
            values[name] = fill(own) if isinstance(own, str) else tuple(map(fill, own))
    data = values.pop("data", None)
    pins = {name: str(value) for name, value in values.items() if is_knob(name, value)}
    options = {name: value for name, value in values.items() if name not in pins}
    chosen = WEIGHT_FORMATS.get(pins.get("quantization", "none"))
    if chosen and chosen.quality == "compact":
        options["quality"] = "compact"
    kinds = ("carried", "pinned", "decided", "not_carried")
    written_values = {key: one.value for key, one in settings.items()}
    return ImportedConfig(
        path=str(path),
        trainer=table.name,
        version=table.version,
        family=known.family.name,
        model=model,
        data=None if data == files.FILL_IN else data,
        options=options,
        pins=pins,
        notes=tuple(table.holding(table.notes, written_values)),
        overheads=table.overheads_of(written_values, known),
        **{kind: tuple(line for its, line in lines if its == kind) for kind in kinds},
    )


def read_settings(
    trainer: Trainer, settings: Settings, context: Context
) -> tuple[dict[str, Any], list[Line]]:
    """Apply a trainer's rules and defaults: values by our names, and an account of each setting."""
    values: dict[str, Any] = dict(trainer.constants)
    lines: list[Line] = []
    for rule in trainer.rules:
        given = {key: settings[key] for key in rule.keys if key in settings}
        by_key = {key: one for key, one in given.items() if one.value is not None}
        settled = {*by_key, *(rule.synonyms if by_key.keys() & set(rule.synonyms) else ())}
        usual = [key for key in rule.keys if key in trainer.defaults and key not in settled]
        by_key |= {key: ConfigValue(key, trainer.defaults[key]) for key in usual}
        present = tuple(by_key.values())
        if not present:
            continue
        try:
            found = _apply(rule, {key: one.value for key, one in by_key.items()}, context)
        except WRONG as error:
            reason = str(error)
            if isinstance(error, ValidationError):
                reason = base.first_problem(error)[1]
            given_here = [one for one in present if one.line] or [present[0]]
            one = next((one for one in given_here if repr(one.value) in str(error)), given_here[0])
            value, why = (x[: files.MAX_SHOWN] for x in (value_text(one.value), reason))
            what = f"{trainer.title}'s {one.key} cannot be {value}: {why}"
            message = f"{one.file}, line {one.line}: {what}"
            raise InvalidInput(message, hint="correct it in that file") from error
        lost = found.pop(LOST, None)
        by_resolution = found.get("timestep_shift") == "by_resolution"
        if by_resolution and context.family.defaults.shift_by_tokens is None:
            del found["timestep_shift"]
            lost = "the shift follows the resolution there; autotune takes the family's usual"
        step, size = context.family.size_multiple_px, found.get("resolution", 0)
        sides = size if isinstance(size, tuple) else (size,)
        if any(side > step and side % step for side in sides):
            rounded = tuple(max(step, side // step * step) for side in sides)
            found["resolution"] = rounded if isinstance(size, tuple) else rounded[0]
            lost = lost or f"sides of its images are multiples of {step} px"
        frames = found.get("num_frames", 1)
        if context.family.can_train_clips and context.family.whole_frames(frames) != frames:
            found["num_frames"] = context.family.whole_frames(frames)
            lost = lost or f"whole latents have {found['num_frames']} frames"
        values |= found
        reported = [one for one in present if one.line] or list(present[:1])
        if lost:
            named = (one for one in reported if not isinstance(one.value, bool))
            lines.append(line_for("not_carried", next(named, reported[0]), lost))
        elif not rule.names:
            lines += [line_for("carried", one, "as in autotune") for one in reported if one.line]
        for kind, is_wanted in (("carried", False), ("pinned", True)):
            own = [(name, x) for name, x in found.items() if is_knob(name, x) is is_wanted]
            meaning = ", ".join(f"{name} {value_text(value)}" for name, value in own)
            told = [one for one in reported if meaning and one.value is not None]
            lines += [line_for(kind, one, meaning) for one in told]
    return values, lines


def _apply(rule: Rule, values: Values, context: Context) -> dict[str, Any]:
    found = dict(rule.read(values, context))
    asked = {name: x for name, x in found.items() if name in PlanRequest.model_fields}
    if asked.get("learning_rate", 0) > 1:  # some optimizers take a factor
        del asked["learning_rate"]
    sides = PlanRequest.model_validate(asked).size_px or ()
    if not all(0 < side <= context.family.max_side_px for side in sides):
        raise ValueError(f"sides of images are 1 to {context.family.max_side_px} px")
    return found


def line_for(kind: str, setting: ConfigValue, meaning: str) -> Line:
    """Account for one setting."""
    value, line, file = value_text(setting.value), setting.line, setting.file
    return kind, ConfigLine(key=setting.key, value=value, line=line, file=file, meaning=meaning)


def value_text(value: Any, none: str = "null") -> str:
    """Write a value as configurations do."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: none}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={value_text(own)}" for name, own in value.items()) or none
    return f"{value:g}" if isinstance(value, float) else str(value)


def _find_model(trainer: Trainer, settings: Settings, path: Path) -> KnownModel:
    written = {key: one.value for key, one in settings.items()}
    for known in sorted(trainer.models, key=lambda one: -len(one.keys)):
        if all(written.get(key) == value for key, value in known.keys.items()):
            return known
    keys = dict.fromkeys(key for known in trainer.models for key in known.keys if key in settings)
    shown = {key: value_text(written[key])[: files.MAX_SHOWN] for key in keys}
    given = [f"{key} {value}, line {settings[key].line}" for key, value in shown.items()]
    is_named = f"trains a model that autotune does not know ({'; '.join(given)})"
    what = is_named if given else "names no known model"
    names = ", ".join(dict.fromkeys(known.name for known in trainer.models))
    raise InvalidInput(f"{path} {what}", hint=f"of {trainer.title}, autotune knows {names}")


def _take_pointless(settings: dict[str, ConfigValue], known: KnownModel) -> list[ConfigValue]:
    own, usual = known.prefix or ("\0", "\0")  # which begins no key
    of_others = [key for key, one in settings.items() if one.key.startswith(usual)]
    found = [settings.pop(key) for key in (*settings,) if key in known.lacks or key in of_others]
    for key in (*settings,):
        if key.startswith(own):
            settings[usual + key.removeprefix(own)] = settings.pop(key)
    return found


def _model_of(trainer: Trainer, known: KnownModel, settings: Settings) -> tuple[str, list[Line]]:
    # the weights as written if `plan` can take them
    meaning = f"model {known.name}" + f", {known.assumes}" * bool(known.assumes)
    lines = [line_for("carried", settings[key], meaning) for key in known.keys if key in settings]
    named = (settings[key] for key in trainer.weights_keys if key in settings)
    usual = (ConfigValue(key, known.defaults.get(key)) for key in trainer.weights_keys)
    weights = next((one for one in (*named, *usual) if one.value), None)
    if weights is None or weights.value == files.FILL_IN:
        return known.name, lines
    name = str(weights.value)
    hub_ids = {one.hub_id.lower(): one.hub_id for one in known.family.models}
    is_folder = files.is_file(Path(name) / "model_index.json")
    if (own := hub_ids.get(name.lower(), name if is_folder else None)) is not None:
        return own, [*lines, line_for("carried", weights, f"model {own}")]
    advice = "name their diffusers folder as the job's model"
    if name.lower().endswith(SUFFIXES):
        advice = f"plan with --model FILE --base {known.published.hub_id}"
    meaning = f"planned as {known.name}; to train these weights, {advice}"
    return known.name, [*lines, line_for("not_carried", weights, meaning)]


def _other_lines(
    trainer: Trainer, known: KnownModel, settings: Settings, missing: Iterable[ConfigValue]
) -> list[Line]:
    read = {*(key for rule in trainer.rules for key in rule.keys), *known.keys}
    read |= {*trainer.weights_keys, *(one.key for one in missing)}
    words = "that file is not here, so what it says is not known"
    lines = [line_for("not_carried", one, words) for one in missing]
    for key, setting in settings.items():
        if key in read or setting.value in (None, ""):
            continue
        account = trainer.account(setting.key, setting.value)
        if account is None:
            is_further = "[" in key and "[]" not in key
            words = "autotune reads the first of several sections"
            account = "not_carried", words if is_further else "not understood"
            if trainer.fixed.get(key) == setting.value or key in trainer.references:
                account = "decided", "as autotune does it"
        lines.append(line_for(account[0], setting, account[1]))
    return lines
