"""Settings of another program, by the names of pins: as they run on a card, and as pins there."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from autotune.errors import InvalidInput
from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import KNOBS, NAMES, why_not_on
from autotune.knobs.settings import plain_choices
from autotune.plan.candidate import BLOCK_COUNTS, Candidate, count_blocks
from autotune.plan.prediction import Estimate, SettingWorth
from autotune.search.space import SearchSpace

# Settings that files seldom name.
UNNAMED = ("loader", "allocator", "data_workers", "batch_memory", "precision")


def as_written(
    pins: Mapping[str, str], context: TuningContext, made: Candidate | None
) -> tuple[Candidate, tuple[str, ...]]:
    """Return the settings that pins name, and what of them does not work on the card. What they do
    not name, and no other trainer tunes, is as in the plan that was `made`."""
    total, hardware = context.workload.model.num_blocks, context.hardware
    written, breaks = Candidate(micro_batch_size=1, checkpointed_blocks=total), []
    if made is not None:
        written = written.changed(**{name: getattr(made, name) for name in UNNAMED})
    knobs, plain = {knob.name: knob for knob in KNOBS}, plain_choices(context)
    for name, names in NAMES.items():
        if (value := pins.get(name)) is None:
            continue
        choice = (
            count_blocks(value, total) if name in BLOCK_COUNTS else value if names else int(value)
        )
        why = why_not_on(hardware.device.kind, hardware.lacks, name, choice)
        if name in knobs:
            here = knobs[name].choices(context)
            why = why or (here.rejected.get(choice) if len(here.admitted) == 1 else None)
        elif choice not in plain[name]:
            why = why or "it cannot be had here"
        if names and choice not in names:
            why = why or "autotune knows no such value"
        changed = written if why else written.changed(**{name: choice})
        if name in knobs:
            why = why or knobs[name].why_not(changed, context)
        if why:
            breaks.append(f"{name} {choice}: {why}")
        else:
            written = changed
    return written, tuple(breaks)


def possible_pins(
    wanted: Mapping[str, str], num_blocks: int, choices_of: Callable[..., SearchSpace]
) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """Return what of the wanted pins is possible here, and the others with the reason. `choices_of`
    lists the choices, with `pins` if they are given."""
    space = choices_of()
    pins: dict[str, str] = {}
    impossible: dict[str, tuple[str, str]] = {}
    for name, written in wanted.items():
        value, why = str(count_blocks(written, num_blocks)) if name in BLOCK_COUNTS else written, ""
        if name in space.pinnable:
            usable: tuple[Any, ...] = (*space.choices[name], *space.pinnable[name])
            if name in BLOCK_COUNTS:  # the next that needs no more memory
                value = str(min((n for n in usable if n >= int(value)), default=max(usable)))
            elif value not in map(str, usable):
                reasons = {str(one.choice): one.reason for one in space.rejected[name]}
                why = reasons.get(value, "no such value here")
        if why:
            impossible[name] = (value, why)
        else:
            pins[name] = value
    while pins:
        try:
            choices_of(pins=pins)
            break
        except InvalidInput as error:
            name, value = pins.popitem()
            impossible[name] = (value, error.message)
    return pins, impossible


def worth(
    estimate: Callable[[Candidate], Estimate], as_written: Estimate, better: Candidate
) -> tuple[SettingWorth, ...]:
    """Change each setting that differs alone; those that cannot go without another are left out."""
    before, found = as_written.prediction, []
    written = before.candidate
    for name, value in better:
        if (own := getattr(written, name)) == value:
            continue
        with suppress(InvalidInput):
            after = estimate(written.changed(**{name: value})).prediction
            seconds = before.step_seconds - after.step_seconds
            saved = before.run_memory_bytes - after.run_memory_bytes
            pair = {"knob": name, "written": own, "better": value}
            found.append(
                SettingWorth(**pair, step_seconds_saved=seconds, run_memory_saved_bytes=saved)
            )
    return tuple(sorted(found, key=lambda one: -one.step_seconds_saved))
