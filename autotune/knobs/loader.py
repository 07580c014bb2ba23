"""How weights are read. The machine's own measurements settle it: the fastest loader that fits, no search."""

from autotune.knobs.base import Choices, Knob, TuningContext
from autotune.schema import HardwareProfile
from autotune.weights import LOADERS

DEFAULT = "safetensors"
"""What `from_pretrained` does, and nothing needs less memory of its own."""

STORED_BYTES = 2
"""Of a parameter in published files."""

AS_FAST = 0.9
"""Of the fastest from disk: within this, disks' own noise decides, so speed from the page cache does instead."""


class WeightLoader(Knob):
    """`safetensors`, `pread` or `fastsafetensors`, as `autotune probe` measured them here."""

    name = "loader"
    title = "loader"
    names = tuple(LOADERS)

    def choices(self, context: TuningContext) -> Choices:
        best = _fastest(context)
        return Choices((best,), on_request={name: _against(name, best, context) for name in LOADERS if name != best})


def _fastest(context: TuningContext) -> str:
    hardware = context.hardware
    measured = {name: _cold(hardware, name) for name in LOADERS if _cold(hardware, name)}
    fitting = {name: rate for name, rate in measured.items() if not _too_large(name, context)}
    if not measured:
        return min((DEFAULT, *LOADERS), key=lambda name: bool(_too_large(name, context)))
    if not fitting:
        return min(measured, key=lambda name: _held_bytes(name, context))
    top = max(fitting.values())
    close = [name for name, rate in fitting.items() if rate >= AS_FAST * top]
    return max(close, key=lambda name: (_warm(hardware, name), fitting[name]))


def _cold(hardware: HardwareProfile, name: str) -> float:
    return hardware.rate(f"disk.{name}") or 0.0


def _warm(hardware: HardwareProfile, name: str) -> float:
    return hardware.rate(f"page_cache.{name}") or 0.0


def _held_bytes(name: str, context: TuningContext) -> int:
    shared = context.hardware.device.memory_kind == "integrated"
    return LOADERS[name].overhead_bytes(STORED_BYTES * context.workload.model.num_parameters, shares_memory=shared)


def _too_large(name: str, context: TuningContext) -> str | None:
    """Why the model and what the loader holds besides are too large together; None where they fit."""
    budget = context.hardware.device.budget_bytes
    held = _held_bytes(name, context)
    model = STORED_BYTES * context.workload.model.num_parameters
    if model + held <= budget or model > budget:  # a model too large by itself speaks against no loader
        return None
    return f"it holds {held / 2**30:.1f} GiB beside the model while it reads, more than there is room for"


def _against(name: str, best: str, context: TuningContext) -> str:
    large = _too_large(name, context)
    if large:
        return large
    hardware = context.hardware
    if not _cold(hardware, name):
        return "not measured on this machine: run `autotune probe`"
    return f"{_speeds(hardware, name)}; {best} reads {_speeds(hardware, best)}"


def _speeds(hardware: HardwareProfile, name: str) -> str:
    cold, warm = _cold(hardware, name), _warm(hardware, name)
    return f"{cold / 1e9:.2f} GB/s from disk" + (f", {warm / 1e9:.2f} from the page cache" if warm else "")
