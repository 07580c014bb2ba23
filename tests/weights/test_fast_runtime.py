"""fastsafetensors reads through the CUDA runtime that torch has loaded, without a toolkit."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FUNCTIONS = (
    "Memcpy MemcpyAsync StreamCreateWithFlags StreamSynchronize StreamDestroy DeviceSynchronize "
    "HostAlloc FreeHost "
    "DeviceGetPCIBusId Malloc Free DriverGetVersion DeviceGetAttribute SetDevice"
)
CUDART = "int cudaGetDeviceCount(int *n) { *n = 1; return 0; }\n" + "".join(
    f"int cuda{name}() {{ return 0; }}\n" for name in FUNCTIONS.split()
)
ASK = """
import ctypes, sys, torch
from autotune.weights.tensors import FastLoader
if sys.argv[1:]:
    ctypes.CDLL(sys.argv[1])  # as torch has it: by its path, which no search for libraries finds
torch.version.cuda, torch.cuda.is_available = "99.1", lambda: True
print([FastLoader().why_not(torch.device(name)) for name in ("cuda", "cpu")])
"""


def asked(*library):
    command = [sys.executable, "-c", ASK, *library]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_the_runtime_that_torch_has_loaded_is_found(tmp_path):
    pytest.importorskip("fastsafetensors")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    source, library = tmp_path / "cudart.c", tmp_path / "libcudart-99.1.so"
    source.write_text(CUDART)
    command = ["cc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcudart.so.99", "-o", library, source]
    subprocess.run(command, check=True)
    assert asked(str(library)) == "[None, None]"
    if not Path("/dev/nvidiactl").exists():
        assert asked().count("finds no CUDA runtime") == 2
