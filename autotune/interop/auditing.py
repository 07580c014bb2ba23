"""What a configuration's settings cost on a card, compared with those that are predicted to be
fastest there."""

from autotune.interop.importing import ImportedConfig
from autotune.plan.base import Frozen
from autotune.plan.candidate import Choice, TrialResult
from autotune.plan.prediction import Estimate


class SettingWorth(Frozen):
    """What it would change to give one setting of a file the other value, all else as written."""

    knob: str
    written: Choice
    better: Choice
    step_seconds_saved: float
    run_memory_saved_bytes: int


class Audit(Frozen):
    """A configuration on a card, as written and as it could be: predicted and, on this machine,
    perhaps measured.

    Example:
        >>> found = autotune.audit("train_lora.yaml", hardware="4090")
        >>> found.as_written.fits, found.breaks, [(one.knob, one.better) for one in found.worth]
    """

    config: ImportedConfig
    as_written: Estimate
    """With autotune's executor: memory by phase, time and whether it fits."""
    breaks: tuple[str, ...]
    """What of the file this card cannot do, one sentence each; the estimate then has the usual
    value."""
    fastest: Estimate | None
    """The fastest settings that learn the same; None if nothing fits."""
    worth: tuple[SettingWorth, ...]
    """Worth of each setting that differs, those that save most first."""
    in_trainer: Estimate | None = None
    """The same with what the trainer's own program takes of the card; None if nobody has looked
    at that."""
    measured_as_written: TrialResult | None = None
    """A few steps with the file's settings; None if they were not asked for."""
    measured_fastest: TrialResult | None = None
    """The same with the fastest settings."""

    @property
    def step_seconds_saved(self) -> float:
        """What all differences together save of a step."""
        return (
            0.0
            if self.fastest is None
            else self.as_written.step_seconds - self.fastest.step_seconds
        )

    @property
    def sum_of_step_seconds_saved(self) -> float:
        """The sum of what each difference saves alone; settings that need each other make it
        differ from the whole."""
        return sum(one.step_seconds_saved for one in self.worth)
