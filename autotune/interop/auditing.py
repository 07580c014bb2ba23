"""Costs of a configuration's settings on a card, compared with the fastest there, and as pins."""

from collections.abc import Callable
from contextlib import suppress

from autotune.errors import InvalidInput
from autotune.interop.exporting import caching_in
from autotune.interop.importing import ImportedConfig
from autotune.knobs.caching import describe_caching
from autotune.plan.base import Frozen
from autotune.plan.candidate import CachingSettings, Candidate, Choice, TrialResult
from autotune.plan.plan import Reason
from autotune.plan.prediction import Estimate


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
