"""How weights are read. The machine's own measurements settle it: the fastest loader that fits,
no search.
"""

from autotune.knobs.base import Choices, Knob, TuningContext
from autotune.schema import HardwareProfile
from autotune.weights import LOADERS

DEFAULT = "safetensors"
"""The loader of `from_pretrained`; none needs less memory of its own."""
STORED_BYTES = 2
"""Bytes of a parameter in published files."""
AS_FAST = 0.9
"""Share of the fastest rate from disk from which noise decides between loaders, so that the page
cache does instead.
"""


class WeightLoader(Knob):
    """`safetensors`, `pread` or `fastsafetensors`, as `autotune probe` measured them."""

    name = "loader"
    names = tuple(LOADERS)

    def choices(self, context: TuningContext) -> Choices:
        best = _fastest(context)
        return Choices(
            (best,),
            on_request={name: _against(name, best, context) for name in LOADERS if name != best},
        )


def _fastest(context: TuningContext) -> str:
    hardware = context.hardware
    measured = {name: rate for name in LOADERS if (rate := hardware.rate(f"disk.{name}"))}
    fitting = {name: rate for name, rate in measured.items() if not _too_large(name, context)}
    if not measured:
        return min((DEFAULT, *LOADERS), key=lambda name: bool(_too_large(name, context)))
    if not fitting:
        return min(measured, key=lambda name: _held_bytes(name, context))
    close = [name for name, rate in fitting.items() if rate >= AS_FAST * max(fitting.values())]
    return max(close, key=lambda name: (hardware.rate(f"page_cache.{name}") or 0.0, fitting[name]))


def _held_bytes(name: str, context: TuningContext) -> int:
    shared = context.hardware.device.memory_kind == "integrated"
    return LOADERS[name].overhead_bytes(
        STORED_BYTES * context.workload.model.num_parameters, shares_memory=shared
    )


def _too_large(name: str, context: TuningContext) -> str | None:
    """Why the model and what the loader holds besides are too large together; None if they fit."""
    budget = context.budget.num_bytes
    held = _held_bytes(name, context)
    model = STORED_BYTES * context.workload.model.num_parameters
    if (
        model + held <= budget or model > budget
    ):  # a model too large by itself speaks against no loader
        return None
    return (
        f"it holds {held / 2**30:.1f} GiB beside the model while it reads, more than there is "
        "room "
        "for"
    )


def _against(name: str, best: str, context: TuningContext) -> str:
    if large := _too_large(name, context):
        return large
    if not context.hardware.rate(f"disk.{name}"):
        return "not measured on this machine: run `autotune probe`"
    return f"{_speeds(context.hardware, name)}; {best} reads {_speeds(context.hardware, best)}"


def _speeds(hardware: HardwareProfile, name: str) -> str:
    disk, page_cache = hardware.rate(f"disk.{name}") or 0.0, hardware.rate(f"page_cache.{name}")
    return f"{disk / 1e9:.2f} GB/s from disk" + (
        f", {page_cache / 1e9:.2f} from the page cache" if page_cache else ""
    )
