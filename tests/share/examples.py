"""Records, plans and machines that could be real, for tests of sharing."""

from datetime import date

from autotune.plan.hardware import HardwareProfile, Rate
from autotune.share.store import Record, build_record
from tests import builders
from tests.builders import GIB, candidate, hardware, trial, workload

DAY = date(2026, 3, 1)
TRIALS = (
    trial(candidate(quantization="torchao-int8"), 2.0, 21 * GIB, load_seconds=3.0),
    trial(candidate(quantization="torchao-int8", checkpointed_blocks=50), 1.8, 22 * GIB),
    trial(candidate(quantization="torchao-int8", micro_batch_size=4), None, message="no memory"),
    trial(candidate(quantization="torchao-int8", checkpointed_blocks=25), 1.9, 22 * GIB),
)


def machine(**changes):
    """An RTX 4090 with measured rates; `changes` are fields of the profile or its parts."""
    profile = hardware()
    parts = {name: dict(getattr(profile, name)) for name in ("device", "versions", "host")}
    parts["device"] |= {"total_memory_bytes": 25_386_352_640, "power_limit_watts": 450.0}
    parts["versions"] |= {"driver": "580.95", "diffusers": "0.42.1", "cudnn": "9.13"}
    products = {"matmul.bf16.4096x3072x3072": 1.5e14, "matmul.fp16.4096x3072x3072": 1.4e14}
    top = {"rates": tuple(map(rate, ("memory.bandwidth", *products), (9e11, *products.values())))}
    for key, value in changes.items():
        owner = next((part for part in parts.values() if key in part), top)
        owner[key] = value
    built = {name: getattr(profile, name).changed(**part) for name, part in parts.items()}
    return HardwareProfile.model_validate({**dict(profile), **built, **top})


def rate(name, value):
    unit = "B/s" if name.startswith("memory") else "FLOP/s"
    return Rate(name=name, value=value, unit=unit, spread=0.01, num_samples=9)


def plan(here=None, work=None, trials=TRIALS, **job):
    here, work = here or machine(), work or workload()
    best = min((t for t in trials if t.outcome == "ok"), key=lambda t: t.median_step_seconds or 0.0)
    seconds, peak_bytes = best.median_step_seconds, best.peak_memory_bytes
    expected = {"step_seconds": seconds, "peak_memory_bytes": peak_bytes}
    job = {"data": None, **job}
    return builders.plan(here, work, best.candidate, job, expected=expected, trials=trials)


def record(here=None, work=None, **changes):
    here = here or machine()
    made = build_record(plan(here, work), here).changed(measured_on=DAY)
    if "trials" in changes:
        changes["trials"] = tuple(one.changed(message="") for one in changes["trials"])
    return Record.model_validate({**dict(made), **changes})
