"""Small objects of every kind that flows, for tests that need one and don't care which."""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import pytest

from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.knob import TuningContext
from autotune.models.registry import get_family
from autotune.plan.base import SCHEMA_VERSION
from autotune.plan.candidate import Candidate, TrialResult
from autotune.plan.file import seal
from autotune.plan.hardware import Capability, Device, HardwareProfile, Host, Rate, Versions
from autotune.plan.job import Job
from autotune.plan.plan import Expected, FrozenPart, PlannedHardware, TrainingPlan
from autotune.plan.workload import Bucket, ModelSpec, Workload
from autotune.system.version import __version__

GIB = 2**30


BITSANDBYTES = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def storages() -> list[Any]:
    names = [name for name in WEIGHT_FORMATS if name != "none"]
    marks = {"bitsandbytes": BITSANDBYTES}
    return [
        pytest.param(name, marks=marks.get(WEIGHT_FORMATS[name].needs.library or "", ()))
        for name in names
    ]


def hardware(
    *capabilities: str,
    kind: str = "cuda",
    budget_bytes: int = 24 * GIB,
    compute_capability: tuple[int, int] = (8, 9),
) -> HardwareProfile:
    names = capabilities or (
        "attention.native", "attention._native_flash", "precision.bf16",
        "quantization.torchao-int8",
    )  # fmt: skip
    return HardwareProfile.model_validate(
        {
            "device": Device.model_validate(
                {
                    "kind": kind, "index": 0, "name": "NVIDIA GeForce RTX 4090",
                    "compute_capability": compute_capability, "memory_kind": "discrete",
                    "memory_kind_reason": "test", "budget_bytes": budget_bytes,
                    "budget_reason": "test",
                }
            ),
            "host": Host(
                cpu="test", logical_cores=2, memory_bytes=64 * GIB, available_memory_bytes=48 * GIB,
                swap_bytes=0, system="Linux 6.1", memory_model="linux",
            ),
            "versions": Versions(
                python="3.11.7", torch="2.13.0", cuda_runtime="13.0", torchao="0.18.0"
            ),
            "capabilities": tuple(
                Capability(name=name, available=True, reason="test") for name in names
            ),
            "rates": attention_rates(names),
        }
    )  # fmt: skip


def attention_rates(capabilities: Iterable[str]) -> tuple[Rate, ...]:
    """Speeds that make every backend worth a trial, in a dtype that no prediction uses."""
    names = [name for name in capabilities if name.startswith("attention.")]
    fast = [(name, 1e14 if name == "attention.native" else 1.1e14) for name in names]
    return tuple(
        Rate(name=f"{name}.fp16.4096", value=value, unit="FLOP/s", spread=0.0, num_samples=3)
        for name, value in fast
    )


def workload(**changes: object) -> Workload:
    values: dict[str, object] = {
        "model": ModelSpec(
            family="qwen-image", architecture="sha256:0", num_parameters=20_430_401_088,
            num_blocks=60, name="q",
        ),
        "resolution_px": 512,
        "buckets": (Bucket(width_px=512, height_px=512, num_frames=1, num_items=20),),
        "max_text_tokens": 64,
        "text_padding": "masked",
        "rank": 16,
        "lora_alpha": 16.0,
        "targets": "attention",
        "effective_batch_size": 4,
    }  # fmt: skip
    return Workload.model_validate({**values, **changes})


def context(machine: HardwareProfile | None = None, work: Workload | None = None) -> TuningContext:
    work = work or workload()
    return TuningContext(machine or hardware(), get_family(work.model.family), work)


def candidate(**changes: object) -> Candidate:
    return Candidate.model_validate({"micro_batch_size": 1, "checkpointed_blocks": 59, **changes})


def trial(
    run: Candidate, seconds: float | None = 1.0, memory: int = GIB, **changes: object
) -> TrialResult:
    values: dict[str, object] = {
        "candidate": run, "outcome": "ok" if seconds else "oom",
        "step_seconds": (seconds, seconds, seconds) if seconds else (),
        "peak_memory_bytes": memory if seconds else None,
    }  # fmt: skip
    return TrialResult.model_validate({**values, **changes})


def plan(
    machine: HardwareProfile, work: Workload, settings: Candidate, job: dict[str, Any],
    *, planned: dict[str, Any] | None = None, expected: dict[str, Any] | None = None,
    **frozen: Any,
) -> TrainingPlan:  # fmt: skip
    device, batch = machine.device, work.effective_batch_size
    hardware = {
        "device_name": device.name, "device_kind": device.kind, "fingerprint": machine.fingerprint,
        "match_keys": machine.match_keys, "total_memory_bytes": device.total_memory_bytes,
        "budget_bytes": device.budget_bytes, "versions": machine.versions, **(planned or {}),
    }  # fmt: skip
    foretold = {
        "evidence": "measured", "step_seconds": 1.0, "peak_memory_bytes": GIB,
        "process_memory_bytes": 0, **(expected or {}),
    }  # fmt: skip
    foretold.setdefault("images_per_second", batch / foretold["step_seconds"])
    values: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION, "autotune_version": __version__, "workload": work,
        "hardware": PlannedHardware(**hardware), "expected": Expected(**foretold),
        "settings": settings, "reasons": (), "search_seconds": 60.0, "trials": (), **frozen,
    }  # fmt: skip
    usual = {
        "model": "qwen-image", "data": "images", "num_steps": 10, "learning_rate": 1e-4,
        "weight_decay": 1e-3, "max_grad_norm": 1.0, "timestep_shift": 2.2, "seed": 0,
        "preview_steps": 4,
    }  # fmt: skip
    return seal(Job(**{**usual, **job}), FrozenPart(**values))
