"""Two processes learn what one learns."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from autotune.errors import AutotuneError
from autotune.plan_file import write_plan
from autotune.training.processes import join
from autotune.training.save import ADAPTER_FILE, save_trained
from tests.training.conftest import CPU, Bench


def test_two_processes_end_with_the_weights_of_one(bench: Bench, tmp_path: Path) -> None:
    plan = bench.plan(num_steps=4, num_processes=2, output=str(tmp_path / "two"), checkpointing_steps=2)
    write_plan(tmp_path / "plan.yaml", plan)
    command = [sys.executable, "-m", "autotune", "train", str(tmp_path / "plan.yaml")]
    two = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("adapter: ") == 2  # the verdict's line and the file's, each from one process alone
    one = bench.loop(plan, tmp_path / "one")
    save_trained(tmp_path / "one.safetensors", one.model, one.optimizer, plan, 4)
    left, right = load_file(tmp_path / "two" / ADAPTER_FILE), load_file(tmp_path / "one.safetensors")
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-4, atol=1e-6)


def test_another_number_of_processes_than_planned_is_refused() -> None:
    with pytest.raises(AutotuneError, match="the plan is for 2 processes, but 1 run"):
        join(2, CPU)
