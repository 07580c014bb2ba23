"""The measured tables that the search is judged on."""

import json
from pathlib import Path

import pytest

from autotune.plan.candidate import TrialResult
from autotune.plan.hardware import HardwareProfile
from autotune.plan.workload import Workload

TABLES = Path(__file__).parents[2] / "benchmarks" / "results" / "tables"


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.jsonl")), ids=lambda path: path.stem)
def test_measured_tables_still_read(path):
    first, *lines = path.read_text().splitlines()
    head = json.loads(first)
    HardwareProfile.model_validate_json(json.dumps(head["hardware"]))
    Workload.model_validate_json(json.dumps(head["workload"]))
    assert len([TrialResult.model_validate_json(line) for line in lines]) >= 100
