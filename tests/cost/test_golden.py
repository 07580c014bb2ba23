"""Predictions of many settings, machines and kinds of work stay: a wrong factor is silent. After a
deliberate change: `python -m tests.cost.test_golden`, then read the difference and commit it."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from autotune.cost.calibration import PriorResiduals
from autotune.cost.estimate import job_time
from autotune.cost.memory import Parallel
from autotune.cost.predict import CostModel
from autotune.models.facts import Parts
from autotune.models.registry import FAMILIES
from autotune.plan.candidate import BLOCK_COUNTS, CachingSettings, Candidate, Residual
from autotune.plan.hardware import Link, Rate
from autotune.plan.plan import Reason
from autotune.plan.prediction import Overheads
from autotune.plan.workload import Workload
from tests import builders
from tests.cost.tiny_models import TINY, cpu, gpu, workload_of

ASKED = yaml.safe_load(Path(__file__).with_name("golden.yaml").read_text())
FILE = Path(__file__).with_name("golden.json")
SETTINGS = [Candidate(**each) for each in ASKED["settings"]]
COUNTS = {"num_steps": 3, "num_images": 5, "num_previews": 2, "num_validations": 4}


def machine(name, rates):
    how = {"unit": "s", "spread": 0.0, "num_samples": 1}
    own = cpu() if name == "cpu" else gpu(f"nvidia-{name}")
    device = own.device.changed(links=(Link(peer_index=1, path="nvlink"),) * (name == "h100-sxm"))
    known = (Rate(name=kind, value=value, **how) for kind, value in rates.items())
    return own.changed(device=device, rates=tuple(known))


def built(hardware, family, asked):
    work = json.dumps({**workload_of(family).model_dump(mode="json"), **asked["work"]})
    ways, caching, parts = (asked.get(name) for name in ("overheads", "caching", "parts"))
    encoders = {"text_encoder_parameters": tuple((parts or {}).get("text_encoder_parameters", ()))}
    return CostModel.build(
        hardware,
        Workload.model_validate_json(work),
        FAMILIES[family],
        TINY[family],
        Parts(**{**(parts or {}), **encoders}),
        caching=caching and (CachingSettings(**caching), Reason(knob="", chosen="", why="")),
        overheads=ways and Overheads.model_validate_json(json.dumps(ways)),
    ).with_parallel(Parallel(*asked.get("parallel", ())))


def numbers_of(own, candidate):
    """All that is predicted of a candidate and of a job with it."""
    one = own.predict(candidate)
    rows = np.array([[getattr(candidate, name) for name in BLOCK_COUNTS], [2, 1, 2]])
    for phase in one.phases:
        yield from (phase.allocated_memory_bytes, phase.run_memory_bytes)
    yield from dict(one.training.breakdown).values()
    yield from dict(one.step_time).values()
    yield from dict(job_time(own, one, **COUNTS)).values()
    yield from (one.step_seconds, one.images_per_second)
    yield from (one.memory_uncertainty, one.time_uncertainty, own.budget_bytes)
    yield from (one.host_memory_bytes, own.weight_bytes(candidate), own.activation_bytes(candidate))
    yield from np.concatenate(own.predict_block_counts(candidate, rows))


def predictions():
    """By work, settings and machine, a row of numbers."""
    for name, asked in ASKED["works"].items():
        for card, rates in ASKED["machines"].items():
            own = built(machine(card, rates), name.partition(" ")[0], asked)
            if told := asked.get("residuals"):
                pairs = ((SETTINGS[3], Residual(**each)) for each in told)
                trial = builders.trial(SETTINGS[0], 0.5, 1 << 24, host_memory_bytes=1 << 27)
                own = own.with_calibration([trial], [PriorResiduals(tuple(pairs), weight=0.6)])
            for number in asked["tried"][: 1 if card == "cpu" else None]:
                yield f"{name} {number} {card}", [*numbers_of(own, SETTINGS[number])]


@builders.OLD_TORCH
@builders.BITSANDBYTES
def test_predictions_stay_what_they_are():
    expected = json.loads(FILE.read_text())
    for name, found in predictions():
        for one, own in zip(found, expected.pop(name), strict=True):
            assert one == (own if isinstance(one, int) else pytest.approx(own, rel=1e-6)), name
    assert not expected


if __name__ == "__main__":
    rows = (
        (name, [one if isinstance(one, int) else float(f"{one:.7g}") for one in row])
        for name, row in predictions()
    )
    lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows)
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
