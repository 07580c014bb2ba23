"""The knobs that the search turns. Adding one: its file, its field in `Candidate`, and one line
here.
"""

from autotune.errors import InvalidInput, suggest_nearest
from autotune.knobs.allocator import Allocator
from autotune.knobs.attention import Attention
from autotune.knobs.base import Knob
from autotune.knobs.checkpointed_blocks import Checkpointing, Selective
from autotune.knobs.compile import Compile
from autotune.knobs.data_loading import BatchMemory, DataWorkers
from autotune.knobs.loader import WeightLoader
from autotune.knobs.micro_batch import MicroBatchSize
from autotune.knobs.modulation import Modulation
from autotune.knobs.norm_rope import NormRope
from autotune.knobs.optimizer import Optimizer
from autotune.knobs.precision import Precision
from autotune.knobs.quantization import Quantization
from autotune.knobs.swapped_blocks import Swapping
from autotune.schema import Candidate, Choice

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
    Precision(),
    Optimizer(),
    WeightLoader(),
    Allocator(),
    DataWorkers(),
    BatchMemory(),
)


def require_choice(name: str, value: Choice) -> None:
    """Raise InvalidInput if there is no knob of that name, or its values have names and this is
    none on any machine.
    """
    knob = next((knob for knob in KNOBS if knob.name == name), None)
    if knob is None:
        known = suggest_nearest(name, (knob.name for knob in KNOBS))
        raise InvalidInput(f"there is no knob called {name!r}", hint=known)
    if knob.names and value not in knob.names:
        what = name.replace("_", " ")
        raise InvalidInput(
            f"there is no {what} called {value!r}", hint=suggest_nearest(str(value), knob.names)
        )


def reload_key(candidate: Candidate) -> tuple[Choice, ...]:
    """What of a candidate needs the model loaded anew: a model loaded for one serves all with
    the same.
    """
    return tuple(getattr(candidate, knob.name) for knob in KNOBS if knob.needs_reload)
