"""Costs of a configuration's settings on a card, compared with the fastest there, and as pins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from autotune.errors import InvalidInput
from autotune.interop.exporting import BLOCKS, caching_in
from autotune.interop.importing import ImportedConfig
from autotune.interop.rules import count_blocks
from autotune.knobs.caching import describe_caching
from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import KNOBS, NAMES, why_not_on
from autotune.knobs.settings import plain_choices
from autotune.models.resolve import resolve_model
from autotune.plan.base import Frozen
from autotune.plan.candidate import CachingSettings, Candidate, Choice, TrialResult
from autotune.plan.job import ModelRef
from autotune.plan.plan import Reason
from autotune.plan.prediction import Estimate

if TYPE_CHECKING:
    from autotune.cost.predict import CostModel
    from autotune.search.space import SearchSpace

# Settings that files seldom name.
UNNAMED = ("loader", "allocator", "data_workers", "batch_memory", "precision")


class SettingWorth(Frozen):
    """Change by giving one setting of a file the other value, all else as written."""

    knob: str
    written: Choice
    better: Choice
    step_seconds_saved: float
    run_memory_saved_bytes: int


class Audit(Frozen):
    """A configuration on a card, as written and as it could be: predicted and perhaps measured."""

    config: ImportedConfig
    as_written: Estimate  # with autotune's executor
    # what of the file this card cannot do, one sentence each; the estimate has the usual value
    breaks: tuple[str, ...]
    fastest: Estimate | None  # of settings that learn the same; None if nothing fits
    worth: tuple[SettingWorth, ...]  # of each setting that differs, those that save most first
    in_trainer: Estimate | None = None  # with what the trainer's own program takes of the card
    measured_as_written: TrialResult | None = None
    measured_fastest: TrialResult | None = None

    @property
    def step_seconds_saved(self) -> float:
        """Seconds that all differences together save of a step."""
        fastest = self.fastest or self.as_written
        return self.as_written.step_seconds - fastest.step_seconds

    @property
    def sum_of_step_seconds_saved(self) -> float:
        """Sum what each difference saves alone: not the whole if settings need each other."""
        return sum(one.step_seconds_saved for one in self.worth)


def caching_of(config: ImportedConfig) -> tuple[CachingSettings, Reason]:
    """Return how the trainer encodes captions: as the file says, else as they are."""
    caching = caching_in(config.pins)
    return caching, Reason(knob="caching", chosen=describe_caching(caching), why="as in the file")


def as_written(
    config: ImportedConfig, context: TuningContext, made: Candidate | None
) -> tuple[Candidate, tuple[str, ...]]:
    """Return the settings of a file, and what of them does not work on the card. What the file does
    not name, and no other trainer tunes, is as in the plan that was `made`."""
    total, hardware = context.workload.model.num_blocks, context.hardware
    written, breaks = Candidate(micro_batch_size=1, checkpointed_blocks=total), []
    if made is not None:
        written = written.changed(**{name: getattr(made, name) for name in UNNAMED})
    knobs, plain = {knob.name: knob for knob in KNOBS}, plain_choices(context)
    for name, names in NAMES.items():
        if (value := config.pins.get(name)) is None:
            continue
        choice = count_blocks(value, total) if name in BLOCKS else value if names else int(value)
        why = why_not_on(name, choice, hardware)
        if name in knobs:
            here = knobs[name].choices(context)
            why = why or (here.rejected.get(choice) if len(here.admitted) == 1 else None)
        elif choice not in plain[name]:
            why = why or "it cannot be had here"
        if why is None and names and choice not in names:
            why = "autotune knows no such value"
        changed = written if why else written.changed(**{name: choice})
        if why is None and name in knobs:
            why = knobs[name].why_not(changed, context)
        if why:
            breaks.append(f"{name} {choice}: {why}")
        else:
            written = changed
    return written, tuple(breaks)


def worth(cost: CostModel, as_written: Estimate, better: Candidate) -> tuple[SettingWorth, ...]:
    """Change each setting that differs alone; those that cannot go without another are left out."""
    from autotune.cost.estimate import estimate as estimate_candidate

    before, steps, found = as_written.prediction, as_written.num_steps, []
    written = before.candidate
    for name, value in better:
        own = getattr(written, name)
        if own == value:
            continue
        with suppress(InvalidInput):
            changed = written.changed(**{name: value})
            after = estimate_candidate(cost, changed, num_steps=steps).prediction
            one = SettingWorth(
                knob=name,
                written=own,
                better=value,
                step_seconds_saved=before.step_seconds - after.step_seconds,
                run_memory_saved_bytes=before.run_memory_bytes - after.run_memory_bytes,
            )
            found.append(one)
    return tuple(sorted(found, key=lambda one: -one.step_seconds_saved))


def possible_pins(
    config: ImportedConfig, asked: Mapping[str, Any], choices_of: Callable[..., SearchSpace]
) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """Return the settings of a configuration that can be pinned here, and the others with the
    reason. `choices_of` is `list_choices`; `asked` are its arguments."""
    num_blocks = resolve_model(ModelRef.of(config.model)).spec.num_blocks
    space = choices_of(config.model, None, **asked)
    pins: dict[str, str] = {}
    impossible: dict[str, tuple[str, str]] = {}
    for name, written in config.pins.items():
        value = str(count_blocks(written, num_blocks)) if name in BLOCKS else written
        value, why = _nearest(space, name, value) if name in space.pinnable else (value, "")
        if why:
            impossible[name] = (value, why)
        else:
            pins[name] = value
    while pins:
        try:
            choices_of(config.model, None, **{**asked, "pins": pins})
            break
        except InvalidInput as error:
            name, value = pins.popitem()
            impossible[name] = (value, error.message)
    return pins, impossible


def _nearest(space: SearchSpace, name: str, value: str) -> tuple[str, str]:
    """A value that can be pinned, and why there is none; of blocks the next that needs no more
    memory."""
    usable: tuple[Any, ...] = (*space.choices[name], *space.pinnable[name])
    if value in map(str, usable):
        return value, ""
    if name in BLOCKS:
        return str(min((one for one in usable if one >= int(value)), default=max(usable))), ""
    reasons = {str(one.choice): one.reason for one in space.rejected[name]}
    return value, reasons.get(value, "no such value here")
