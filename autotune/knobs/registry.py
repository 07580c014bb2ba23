"""The knobs that the search turns. Adding one: its file, its field in `Candidate`, and one line here."""

from collections.abc import Mapping

from autotune.knobs.allocator import Allocator
from autotune.knobs.attention import BACKENDS, Attention
from autotune.knobs.base import Knob
from autotune.knobs.checkpointing import Checkpointing
from autotune.knobs.compile import Compile
from autotune.knobs.data_loading import BatchMemory, DataWorkers
from autotune.knobs.loader import WeightLoader
from autotune.knobs.micro_batch import MicroBatch
from autotune.knobs.optimizer import Optimizer
from autotune.knobs.precision import Precision
from autotune.knobs.quantization import QUALITY_OF, Quantization
from autotune.knobs.swapping import Swapping
from autotune.schema import Candidate, Choice
from autotune.weights.loaders import LOADERS

KNOBS: tuple[Knob, ...] = (
    MicroBatch(),
    Checkpointing(),
    Quantization(),
    Swapping(),
    Attention(),
    Compile(),
    Precision(),
    Optimizer(),
    WeightLoader(),
    Allocator(),
    DataWorkers(),
    BatchMemory(),
)

NAMES: Mapping[str, tuple[str, ...]] = {
    "quantization": tuple(QUALITY_OF),
    "attention": BACKENDS,
    "precision": ("bf16", "fp32"),
    "compile": ("off", "block"),
    "optimizer": ("adamw", "adamw-8bit"),
    "loader": tuple(LOADERS),
    "allocator": ("default", "expandable"),
    "batch_memory": ("pageable", "pinned"),
}
"""Every value, on whatever machine, of the knobs whose values are names."""


def reload_key(candidate: Candidate) -> tuple[Choice, ...]:
    """What of a candidate needs the model loaded anew: a model loaded for one serves all with the same."""
    return tuple(getattr(candidate, knob.name) for knob in KNOBS if knob.needs_reload)
