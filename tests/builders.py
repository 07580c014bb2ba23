"""Small objects of every kind that flows, for tests that need one and don't care which."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.knob import TuningContext
from autotune.models.registry import get_family
from autotune.plan.base import SCHEMA_VERSION
from autotune.plan.candidate import Candidate, TrialResult
from autotune.plan.file import seal
from autotune.plan.hardware import HardwareProfile, Rate
from autotune.plan.job import Job
from autotune.plan.plan import Expected, FrozenPart, PlannedHardware
from autotune.plan.workload import Workload
from autotune.system.version import __version__

GIB = 2**30
DEFAULTS = yaml.safe_load((Path(__file__).parent / "builders.yaml").read_text())

BITSANDBYTES = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
OLD_TORCH = pytest.mark.skipif(torch.__version__ < "2.13", reason="of torch 2.13")
"""For what older versions lack: autocast of RMS norms and, on a CPU, products of float8 rows."""
FP8_PRODUCTS = pytest.param("fp8-matmul", marks=OLD_TORCH)


def storages():
    names = [name for name in WEIGHT_FORMATS if name != "none"]
    marks = {"bitsandbytes": BITSANDBYTES}
    return [
        pytest.param(name, marks=marks.get(WEIGHT_FORMATS[name].needs.library or "", ()))
        for name in names
    ]


def hardware(*capabilities, kind="cuda", budget_bytes=24 * GIB, compute_capability=(8, 9)):
    names = capabilities or tuple(DEFAULTS["capabilities"])
    own = {"kind": kind, "budget_bytes": budget_bytes, "compute_capability": compute_capability}
    profile = {
        "device": {**DEFAULTS["device"], **own},
        "host": DEFAULTS["host"],
        "versions": DEFAULTS["versions"],
        "capabilities": [{"name": name, "available": True, "reason": "test"} for name in names],
        "rates": attention_rates(names),
    }
    return HardwareProfile.model_validate(profile, strict=False)


def attention_rates(capabilities):
    """Speeds that make every backend worth a trial, in a dtype that no prediction uses."""
    names = [name for name in capabilities if name.startswith("attention.")]
    fast = [(name, 1e14 if name == "attention.native" else 1.1e14) for name in names]
    return tuple(
        Rate(name=f"{name}.fp16.4096", value=value, unit="FLOP/s", spread=0.0, num_samples=3)
        for name, value in fast
    )


def workload(**changes):
    return Workload.model_validate({**DEFAULTS["workload"], **changes}, strict=False)


def context(machine=None, work=None):
    work = work or workload()
    return TuningContext(machine or hardware(), get_family(work.model.family), work)


def candidate(**changes):
    return Candidate.model_validate({"micro_batch_size": 1, "checkpointed_blocks": 59, **changes})


def trial(run, seconds=1.0, memory=GIB, **changes):
    values = {
        "candidate": run,
        "outcome": "ok" if seconds else "oom",
        "step_seconds": (seconds, seconds, seconds) if seconds else (),
        "peak_memory_bytes": memory if seconds else None,
    }
    return TrialResult.model_validate({**values, **changes})


def plan(machine, work, settings, job, *, planned=None, expected=None, **frozen):
    device, batch = machine.device, work.effective_batch_size
    hardware = {
        "device_name": device.name,
        "device_kind": device.kind,
        "fingerprint": machine.fingerprint,
        "match_keys": machine.match_keys,
        "total_memory_bytes": device.total_memory_bytes,
        "budget_bytes": device.budget_bytes,
        "versions": machine.versions,
        **(planned or {}),
    }
    foretold = {
        "evidence": "measured",
        "step_seconds": 1.0,
        "peak_memory_bytes": GIB,
        "process_memory_bytes": 0,
        **(expected or {}),
    }
    foretold.setdefault("images_per_second", batch / foretold["step_seconds"])
    values = {
        "schema_version": SCHEMA_VERSION,
        "autotune_version": __version__,
        "workload": work,
        "hardware": PlannedHardware(**hardware),
        "expected": Expected(**foretold),
        "settings": settings,
        "reasons": (),
        "search_seconds": 60.0,
        "trials": (),
        **frozen,
    }
    return seal(Job(**{**DEFAULTS["job"], **job}), FrozenPart(**values))
