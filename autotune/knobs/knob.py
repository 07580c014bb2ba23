"""Questions that a knob, one field of `Candidate`, must answer, and entries of its choices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:  # so that the doctor works where a library is missing
    from autotune.models.family import Family
from autotune.plan.candidate import Candidate, Choice
from autotune.plan.hardware import DeviceKind, HardwareProfile
from autotune.plan.workload import Workload


@dataclass(frozen=True)
class TuningContext:
    """Machine, model and work that choices depend on."""

    hardware: HardwareProfile
    family: Family
    workload: Workload
    training_bytes: int | None = None  # what training may take, if less than the device's budget

    @property
    def budget_bytes(self) -> int:
        own = self.hardware.device.budget_bytes
        return own if self.training_bytes is None else self.training_bytes


@dataclass(frozen=True)
class Choices:
    """The values that may be tried, and those that may not, each with the reason."""

    admitted: tuple[Choice, ...]
    rejected: Mapping[Choice, str] = field(default_factory=dict)
    # What works, but no search tries: a rule settles the knob, or the value pays in rare cases.
    pinnable: Mapping[Choice, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GradientTolerance:
    """Limit on the error of gradients, or of updates, against the reference's."""

    # Run to find out, on a few blocks; choices with the same code share it: 2 blocks prove 40.
    checked_choice: Choice
    # Root mean square, over the adapter's tensors, of the relative error; the dtype's is added.
    tolerance: float
    reason: str
    # Without which it does not run.
    other_choices: Mapping[str, Choice] = field(default_factory=dict)


def gradient_capability(knob: str, checked_choice: Choice) -> str:
    """Name the machine's capability to compute right gradients under a knob's value."""
    return f"parity.{knob}.{checked_choice}"


class Knob(ABC):
    """One tunable dimension, without state."""

    name: ClassVar[str]
    is_composed: ClassVar[bool] = False  # a number of blocks, chosen together with the others
    needs_reload: ClassVar[bool] = False  # another value needs the model loaded anew
    # If a rule settles the knob: the libraries' way, which the last trial is compared with.
    compared_with: ClassVar[Choice | None] = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every value on any machine; empty if values are numbers."""
        return ()

    @abstractmethod
    def choices(self, context: TuningContext) -> Choices:
        """Find the values worth trying, those that need less memory first."""

    def choices_for_family(self, context: TuningContext) -> Choices:
        """Return `choices`, or the knob's default alone if the family excludes the others."""
        choices, reason = self.choices(context), context.family.excluded.get(self.name)
        if reason is None:
            return choices
        field = Candidate.model_fields[self.name]
        default = 0 if field.is_required() else field.default
        usable = dict.fromkeys((*choices.admitted, *choices.pinnable), reason)
        rejected = {**usable, **choices.rejected}
        rejected.pop(default, None)
        return Choices((default,), rejected)

    def capability(self, choice: Choice) -> str:
        """Name the machine's capability without which `choice` does not work."""
        return f"{self.name}.{choice}"

    def why_not(self, candidate: Candidate, context: TuningContext) -> str | None:
        """Tell why this knob's value cannot go with the candidate's other values."""
        return None

    def gradient_tolerance(self, choice: Choice) -> GradientTolerance | None:
        """Return how gradients under `choice` are compared; None if it changes nothing of them."""
        return None


@dataclass(frozen=True)
class Requirements:
    """Needs of an entry from a machine; `autotune.machine` evaluates them."""

    device_kinds: tuple[DeviceKind, ...] = ()  # empty for all
    compute_capability: tuple[int, int] = (0, 0)  # the lowest, of CUDA devices
    library: str | None = None  # field of `Versions`
    min_version: str = "0"
    min_version_on_cpu: str | None = None
    compiles_on: tuple[DeviceKind, ...] = ()  # kinds of devices on which it needs torch.compile
    # Compute capability that it is compiled for, if it is for no other.
    only_major: int | None = None


@dataclass(frozen=True)
class Entry:
    """Common part of attention backends and weight formats."""

    knob: ClassVar[str]
    name: str
    summary: str  # what people read about it if the machine can use it
    needs: Requirements = Requirements()
    _: KW_ONLY
    # Of adapter gradients, against plain attention on unquantized random weights in fp32.
    tolerance: float = 0.0
    tolerance_reason: str = ""
    slow_on_cpu: str = ""  # why no search tries it on a CPU that could use it

    @property
    def capability(self) -> str:
        return f"{self.knob}.{self.name}"
