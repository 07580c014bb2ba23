"""How CUDA's caching allocator grows: fixed segments, or ones that expand. A rule settles it, no
search.
"""

import os
import sys

from autotune.knobs.base import Choices, Knob, TuningContext
from autotune.schema import Choice

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch reads the first that is set, once; the second is the older name."""


class Allocator(Knob):
    """Expandable segments on discrete cards: they leave no holes between segments that nothing
    else fits into.
    """

    name = "allocator"
    names = ("default", "expandable")
    needs_reload = True

    def choices(self, context: TuningContext) -> Choices:
        device, system = context.hardware.device, context.hardware.host.system
        if device.kind != "cuda" or system.startswith("Windows"):
            reason = "only CUDA on Linux has them"
            return Choices(("default",), rejected={"expandable": reason})
        if device.memory_kind != "discrete":
            reason = "reports about them contradict each other if GPU and host share memory"
            return Choices(("default",), on_request={"expandable": reason})
        reason = (
            "fixed segments of different sizes leave holes; expandable ones grow at their "
            "end "
            "instead"
        )
        return Choices(("expandable",), on_request={"default": reason})


def configure_allocator(choice: Choice) -> None:
    """Have torch's allocator grow as chosen in this process; what the user has set stays."""
    if choice != "expandable" or any(name in os.environ for name in VARIABLES):
        return
    os.environ.update(dict.fromkeys(VARIABLES, "expandable_segments:True"))
    if torch := sys.modules.get(
        "torch"
    ):  # it may have read the variables already: at the latest as CUDA starts
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
