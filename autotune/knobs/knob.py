"""What a knob, one field of `Candidate`, must answer: its choices on a machine, and why others are
excluded."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from autotune.models.family import Family
from autotune.plan.candidate import Candidate, Choice
from autotune.plan.hardware import HardwareProfile
from autotune.plan.workload import Workload

WHOLE_WEIGHTS = (
    "DoRA takes the norms of whole weights: it needs them on the device, in 16 bits or more"
)


@dataclass(frozen=True)
class TuningContext:
    """What choices depend on: the machine, the model and what it is trained on."""

    hardware: HardwareProfile
    family: Family
    workload: Workload
    training_bytes: int | None = None
    """What training may take, if that is less than the device's budget."""

    @property
    def budget_bytes(self) -> int:
        """Bytes that may be taken of the device."""
        own = self.hardware.device.budget_bytes
        return own if self.training_bytes is None else self.training_bytes


@dataclass(frozen=True)
class Choices:
    """The values that may be tried, and those that may not, each with the reason."""

    admitted: tuple[Choice, ...]
    rejected: Mapping[Choice, str] = field(default_factory=dict)
    pinnable: Mapping[Choice, str] = field(default_factory=dict)
    """Values that work and may be pinned, but that no search tries, and why not: a rule or a
    measurement settles the knob, or the value pays in rare cases alone."""


@dataclass(frozen=True)
class GradientTolerance:
    """How far adapter gradients under a choice may lie from the reference's before it counts as
    another computation.

    For an optimizer, which makes updates from gradients: how far the adapter moves.
    """

    checked_choice: Choice
    """The value that is run to find out, on a model of a few blocks. Choices that run the same
    code share it: 2 checkpointed blocks prove 40."""
    tolerance: float
    """Root mean square, over the adapter's tensors, of the relative error; the compute dtype's is
    added for gradients."""
    reason: str
    """Where an error of this size comes from."""
    other_choices: Mapping[str, Choice] = field(default_factory=dict)
    """Other knobs' values without which it does not run."""


def gradient_capability(knob: str, checked_choice: Choice) -> str:
    """Name of the machine's capability to compute right gradients under a knob's value."""
    return f"parity.{knob}.{checked_choice}"


def why_not(hardware: HardwareProfile, capability: str) -> str | None:
    """Why the machine lacks the capability of this name; None if it has it, or if it is unknown."""
    return next(
        (g.reason for g in hardware.capabilities if g.name == capability and not g.available), None
    )


class Knob(ABC):
    """One tunable dimension. Stateless: instances live in the registry."""

    name: ClassVar[str]
    """The field of `Candidate` it sets."""
    is_composed: ClassVar[bool] = False
    """Whether it is a number of blocks, which the cost model chooses together with the other
    numbers of blocks."""
    needs_reload: ClassVar[bool] = False
    """Whether another value needs the model loaded anew."""
    compared_with: ClassVar[Choice | None] = None
    """If a rule settles the knob: the libraries' own way, which the last trial of a search
    compares it with. Gradients of the other values are compared with this one's, so that it
    needs no such check."""

    @property
    def title(self) -> str:
        """What people call it, in at most 14 characters."""
        return self.name.replace("_", " ")

    @property
    def names(self) -> tuple[str, ...]:
        """Every value on any machine, if values are names; empty if they are numbers."""
        return ()

    @abstractmethod
    def choices(self, context: TuningContext) -> Choices:
        """The values worth trying in this context, those that need less memory first."""

    def choices_for_family(self, context: TuningContext) -> Choices:
        """`choices`; the knob's default alone if the family excludes the others."""
        choices, reason = self.choices(context), context.family.excluded.get(self.name)
        if reason is None:
            return choices
        field = Candidate.model_fields[self.name]
        default = 0 if field.is_required() else field.default
        rejected = {
            **dict.fromkeys((*choices.admitted, *choices.pinnable), reason),
            **choices.rejected,
        }
        return Choices(
            (default,), {choice: why for choice, why in rejected.items() if choice != default}
        )

    def why_not_on(self, choice: Choice, hardware: HardwareProfile) -> str | None:
        """Why `choice` does not work on this machine at all; None if it may."""
        return why_not(hardware, f"{self.name}.{choice}")

    def why_not(self, candidate: Candidate, context: TuningContext) -> str | None:
        """Why this knob's value cannot go with the candidate's other values; None if it can."""
        return None

    def gradient_tolerance(self, choice: Choice) -> GradientTolerance | None:
        """How gradients under `choice` are compared with the reference's; None if it changes
        nothing about them."""
        return None

    def describe(self, choice: Choice, workload: Workload) -> str:
        """The choice in words for people."""
        return str(choice)
