"""The edge to NVML and the driver API, against stand-ins with the real calling conventions."""

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.machine import sources as nvidia
from autotune.machine.facts import FLAG
from autotune.machine.sources import DriverSource, NvmlSource, System, Unavailable

LIBCUDA = """
#include <string.h>
static int ready = 0;
int cuInit(unsigned flags) { ready = flags == 0; return FAIL; }
int cuDriverGetVersion(int *v) { *v = 13020; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return ready ? 0 : 3; }
int cuDeviceGet(int *d, int i) { if (i != 0) return 101; *d = 42; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { if (d != 42) return 101; *v = a == 18 || a == 100; return 0; }
int cuDeviceGetUuid_v2(unsigned char *u, int d) { for (int i = 0; i < 16; i++) u[i] = i; return d == 42 ? 0 : 101; }
"""


@pytest.fixture
def libcuda(tmp_path, monkeypatch):
    """Builds a libcuda whose cuInit returns `status`, and puts it where ctypes loads it from."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")

    def build(status):
        source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
        source.write_text(LIBCUDA.replace("FAIL", str(status)))
        subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, source], check=True)
        load = nvidia.ctypes.CDLL
        monkeypatch.setattr(nvidia.ctypes, "CDLL", lambda name: load(str(library)))
        return DriverSource()

    return build


def test_the_driver_api_is_read_through_ctypes(libcuda):
    driver = libcuda(0)
    values = {name: read(0) for name, read in driver.queries.items()}
    assert values == {"count": 1, "cuda_driver": "13.2", "integrated": 1, "host_page_tables": 1}
    assert driver.uuid(0) == "00010203-0405-0607-0809-0a0b0c0d0e0f"
    with pytest.raises(Unavailable, match="101"):
        driver.queries["integrated"](1)


def test_a_driver_that_does_not_start_is_a_reason(libcuda):
    with pytest.raises(Unavailable, match="cuInit failed with error 100"):
        libcuda(100).queries["integrated"](0)


class FakeNvml:
    """As much of the pynvml module as the probe calls, with its conventions (milliwatts, bytes,
    handles)."""

    NVMLError = type("NVMLError", (Exception,), {})
    nvmlMemory_v2 = 33554472
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0

    def nvmlInit(self):
        return None

    def nvmlSystemGetDriverVersion(self):
        return b"580.95.05"

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return 13000

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return f"GPU-{index}"

    def nvmlDeviceGetHandleByUUID(self, name):
        if name not in ("GPU-0", "GPU-1"):
            raise self.NVMLError("Not Found")
        return name

    def nvmlDeviceGetUUID(self, handle):
        return handle

    def nvmlDeviceGetMemoryInfo(self, handle, version):
        return SimpleNamespace(total=100, free=60)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return 350_000

    def nvmlDeviceIsMigDeviceHandle(self, handle):
        return ctypes.c_uint(handle == "GPU-0")

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        mine = SimpleNamespace(pid=os.getpid(), usedGpuMemory=1000)
        return [mine, SimpleNamespace(pid=1, usedGpuMemory=30 if handle == "GPU-0" else None)]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle):
        return [SimpleNamespace(pid=1, usedGpuMemory=30 if handle == "GPU-0" else None)]

    def nvmlDeviceGetP2PStatus(self, handle, other, kind):
        return 0

    def nvmlDeviceGetTopologyCommonAncestor(self, handle, other):
        return 50


def test_nvml_is_read_by_uuid_and_in_our_units(monkeypatch):
    monkeypatch.setattr(nvidia, "pynvml", FakeNvml())
    queries = NvmlSource(
        lambda index: str(1 - index)
    ).queries  # CUDA's order is the other way round
    assert queries["driver"](0) == "580.95.05"
    assert queries["cuda_driver"](0) == "13.0"
    assert queries["free_bytes"](0) == 60
    assert queries["power_limit_watts"](0) == 350.0
    assert [FLAG.validate_python(queries["mig"](index)) for index in (0, 1)] == [False, True]
    assert queries["links"](0) == [(0, "nvlink")]
    assert (
        queries["other_process_bytes"](1) == 30
    )  # ours is left out, and a process seen twice counts once
    with pytest.raises(Unavailable, match="1 other processes"):
        queries["other_process_bytes"](0)


def test_every_function_that_is_called_exists_in_the_real_module():
    called = set(
        re.findall(r"\b(nvml[A-Z]\w+|nvmlMemory_v2|NVML_\w+)", Path(nvidia.__file__).read_text())
    )
    assert len(called) > 20
    assert [name for name in sorted(called) if not hasattr(nvidia.pynvml, name)] == []


def test_a_device_that_nvml_does_not_know_is_a_reason(monkeypatch):
    monkeypatch.setattr(nvidia, "pynvml", FakeNvml())
    with pytest.raises(Unavailable, match="no device with UUID 9"):
        NvmlSource(lambda _: "9").queries["free_bytes"](0)


@pytest.mark.parametrize("source", ["torch", "nvml", "driver", "os", "packages", "environment"])
def test_the_real_machine_has_a_value_or_a_reason(source):
    with pytest.raises(Unavailable):
        System(torch=False).query(source, "no such query")


def test_the_real_machine_knows_its_memory_and_packages():
    system = System(torch=False)
    assert system.query("os", "memory_bytes") >= system.query("os", "available_bytes") > 0
    assert system.query("os", "logical_cores") >= 1
    assert system.query("packages", "pydantic").startswith("2")
    with pytest.raises(Unavailable, match="not installed"):
        system.query("packages", "surely-not-installed")


def test_models_are_kept_where_the_hub_keeps_them(tmp_path, monkeypatch):
    looked = []
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: looked.append(folder) or SimpleNamespace(free=7)
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "large" / "hub"))
    (tmp_path / "large").mkdir()
    assert System(torch=False).query("os", "disk_free_bytes") == 7
    assert looked == [tmp_path / "large"]
