"""Short forms of the campaigns in `benchmarks/faults`, which say how the long ones are run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
needs_root = pytest.mark.skipif(
    not os.access("/dev/loop-control", os.W_OK), reason="disks are mounted by root"
)


def rows_of(campaign, *words):
    command = [sys.executable, "-m", f"benchmarks.faults.{campaign}", *words]
    told = subprocess.check_output(command, cwd=Path(__file__).parents[1])
    return [json.loads(line) for line in told.splitlines()]


@pytest.mark.parametrize(
    "words",
    [
        "kill",
        "quota vanish clock stop --work push save --stop-seconds 3",
        pytest.param("full readonly --work push save", marks=needs_root),
    ],
)
def test_struck_work_ends_as_whole(words):
    rows = rows_of("strike", *words.split(), "--number", "1")
    assert [row for row in rows if row["wrong"]] == []


def test_long_runs_hold_no_more():
    pictures, steps = rows_of("soak", "--steps", "200", "--pictures", "20")
    assert pictures["checked"] == pictures["cached"] == 20
    assert steps["descriptors"]["per_1000_steps"] == steps["threads"]["per_1000_steps"] == 0


def test_fuzzed_readers_raise_typed_errors():
    pytest.importorskip("atheris")
    assert [row["reader"] for row in rows_of("fuzz", "--seconds", "5") if row["failed"]] == []
