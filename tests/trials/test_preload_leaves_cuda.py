"""Importing for the fork server neither starts CUDA nor lets a library settle that there is no GPU."""

import subprocess
import sys

PRETEND_A_GPU = """
import torch, sys
asked = []
def record(name, answer):
    setattr(torch.cuda, name, lambda *a, **k: asked.append(name) or answer)
torch.version.cuda = "13.0"
record("is_available", True)
record("get_device_capability", (9, 0))
record("get_device_properties", None)
record("_lazy_init", None)
record("init", None)
record("current_device", 0)
import autotune.trials.preload
from torch.utils._triton import has_triton
print(list(asked), "bitsandbytes" in sys.modules, torch.cuda.is_available(), has_triton.cache_info().currsize)
"""


def test_no_import_asks_the_gpu_anything_that_starts_cuda():
    done = subprocess.run(
        [sys.executable, "-c", PRETEND_A_GPU], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "[] False True 0"
