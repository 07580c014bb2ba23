"""The memory that counts as a process's own."""

import subprocess
import sys
import weakref

import pytest
import torch

from autotune.system.memory import measure_peak_memory

CPU = torch.device("cpu")

A_FORK = """
import os, torch
from autotune.system.memory import host_peak_bytes
print(host_peak_bytes(), flush=True)
if os.fork() == 0:
    print(host_peak_bytes(), flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports what is mapped")
def test_forks_count_no_less():
    """A trial is a fork, a training run is not, and one's figures are promised for the other."""
    result = subprocess.run(
        [sys.executable, "-c", A_FORK], capture_output=True, text=True, check=True, timeout=600
    )
    parent, fork = map(int, result.stdout.split())
    assert fork == pytest.approx(parent, rel=0.03)


def test_measured_work_may_free_live_tensors():
    """Block swap does; a list of what was live before would keep one."""
    weights = [torch.zeros(4)]
    reference = weakref.ref(weights[0])

    def work() -> bool:
        weights.clear()
        return reference() is None

    assert measure_peak_memory(CPU, lambda: list(weights), work)[0]
