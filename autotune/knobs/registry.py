"""The knobs that the search turns. Adding one: its file, its field in `Candidate`, and one line
here."""

from collections.abc import Callable, Mapping

from autotune.errors import InvalidInput, suggest_nearest
from autotune.knobs.attention import Attention
from autotune.knobs.block_swap import Swapping
from autotune.knobs.checkpointing import Checkpointing, Selective
from autotune.knobs.compile import Compile
from autotune.knobs.knob import Knob, MicroBatchSize, Parity
from autotune.knobs.modulation import Modulation
from autotune.knobs.norm_rope import NormRope
from autotune.knobs.quantization import Quantization
from autotune.knobs.settings import (
    PLAIN_SETTINGS,
    optimizer_parity,
    precision_parity,
    unusable_setting,
)
from autotune.plan.candidate import Candidate, Choice
from autotune.plan.hardware import HardwareProfile

KNOBS: tuple[Knob, ...] = (
    MicroBatchSize(),
    Checkpointing(),
    Selective(),
    Quantization(),
    Swapping(),
    Modulation(),
    Attention(),
    NormRope(),
    Compile(),
)
TITLES: Mapping[str, str] = {
    **{knob.name: knob.title for knob in KNOBS},
    **{name: name.replace("_", " ") for name in PLAIN_SETTINGS},
}
"""What people call each field of a candidate."""
PARITY: Mapping[str, Callable[[Choice], Parity | None]] = {
    "precision": precision_parity,
    **{knob.name: knob.parity for knob in KNOBS},
    "optimizer": optimizer_parity,
}
"""By field of a candidate, how what is computed with a value is compared with the reference."""
NAMES: Mapping[str, tuple[str, ...]] = {
    **{knob.name: knob.names for knob in KNOBS},
    **PLAIN_SETTINGS,
}
"""By field of a candidate, the values on any machine; none if they are numbers."""


def require_choice(name: str, value: Choice) -> None:
    """Raise InvalidInput if there is no knob or plain setting of that name, or its values have
    names and this is none on any machine."""
    if name not in NAMES:
        raise InvalidInput(f"there is no knob called {name!r}", hint=suggest_nearest(name, NAMES))
    if NAMES[name] and value not in NAMES[name]:
        what = name.replace("_", " ")
        raise InvalidInput(
            f"there is no {what} called {value!r}", hint=suggest_nearest(str(value), NAMES[name])
        )


def unusable_reason(name: str, value: Choice, hardware: HardwareProfile) -> str | None:
    """Why a value of a candidate's field does not work on this machine at all; None if it may."""
    knob = next((knob for knob in KNOBS if knob.name == name), None)
    if knob is None:
        return unusable_setting(name, value, hardware)
    return knob.unusable_reason(value, hardware)


def reload_key(candidate: Candidate) -> tuple[Choice, ...]:
    """What of a candidate needs the model loaded anew: a model loaded for one serves all with
    the same."""
    names = ("precision", "allocator", *(knob.name for knob in KNOBS if knob.needs_reload))
    return tuple(getattr(candidate, name) for name in names)
