"""What NVML and the CUDA driver API report. Neither opens a CUDA context, so both are safe while
someone trains."""

import ctypes
import os
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import pynvml

from autotune.machine.system import Unavailable

Query = Callable[[int], object]
"""Reads one value of the device with that index."""

CU_ATTRIBUTE_INTEGRATED = 18
CU_ATTRIBUTE_PAGEABLE_USES_HOST_PAGE_TABLES = 100

TOPOLOGY_PATHS = {
    0: "same board",
    10: "pcie switch",
    20: "pcie switches",
    30: "host bridge",
    40: "same socket",
    50: "cpu sockets",
}
"""NVML's topology levels in words."""


class NvmlSource:
    """NVML. `uuid_of` maps CUDA's device index to a UUID, because NVML numbers devices in
    another order and ignores CUDA_VISIBLE_DEVICES; None means NVML's own order."""

    def __init__(self, uuid_of: Callable[[int], str] | None) -> None:
        self._uuid_of = uuid_of
        self._initialized = False
        self.queries: Mapping[str, Query] = {
            "driver": lambda _: _text(self._nvml().nvmlSystemGetDriverVersion()),
            "cuda_driver": lambda _: cuda_version_text(
                self._nvml().nvmlSystemGetCudaDriverVersion_v2()
            ),
            "count": lambda _: self._nvml().nvmlDeviceGetCount(),
            "name": self._get("nvmlDeviceGetName", _text),
            "capability": self._get("nvmlDeviceGetCudaComputeCapability", tuple),
            "total_bytes": lambda index: self._memory(index).total,
            "free_bytes": lambda index: self._memory(index).free,
            "pcie_generation": self._get("nvmlDeviceGetMaxPcieLinkGeneration"),
            "pcie_width": self._get("nvmlDeviceGetCurrPcieLinkWidth"),
            "pcie_max_width": self._get("nvmlDeviceGetMaxPcieLinkWidth"),
            "power_limit_watts": self._get("nvmlDeviceGetEnforcedPowerLimit", _watts),
            "default_power_limit_watts": self._get(
                "nvmlDeviceGetPowerManagementDefaultLimit", _watts
            ),
            "mig": self._get(
                "nvmlDeviceIsMigDeviceHandle", lambda flag: getattr(flag, "value", flag)
            ),  # a c_uint
            "display_active": self._get("nvmlDeviceGetDisplayActive"),
            "other_process_bytes": self._other_process_bytes,
            "links": self._links,
            "clock_mhz": self._get("nvmlDeviceGetClockInfo", int, 1),
            "temperature_celsius": self._get("nvmlDeviceGetTemperature", int, 0),
            "power_watts": self._get("nvmlDeviceGetPowerUsage", _watts),
        }

    def _nvml(self) -> Any:
        if not self._initialized:
            try:
                pynvml.nvmlInit()
            except pynvml.NVMLError as error:
                raise Unavailable(str(error)) from error
            self._initialized = True
        return pynvml

    def _handle(self, index: int) -> Any:
        nvml = self._nvml()
        if self._uuid_of is None:
            return nvml.nvmlDeviceGetHandleByIndex(index)
        name = self._uuid_of(index)
        for prefix in ("GPU-", "MIG-"):
            try:
                return nvml.nvmlDeviceGetHandleByUUID(prefix + name)
            except nvml.NVMLError:
                continue
        raise Unavailable(f"no device with UUID {name}")

    def _get(
        self, function: str, convert: Callable[[Any], object] = lambda value: value, *arguments: int
    ) -> Query:
        return lambda index: convert(
            getattr(self._nvml(), function)(self._handle(index), *arguments)
        )

    def _memory(self, index: int) -> Any:
        nvml = self._nvml()
        return nvml.nvmlDeviceGetMemoryInfo(self._handle(index), version=nvml.nvmlMemory_v2)

    def _other_process_bytes(self, index: int) -> int:
        nvml, handle = self._nvml(), self._handle(index)
        processes = [
            *nvml.nvmlDeviceGetComputeRunningProcesses(handle),
            *nvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
        ]
        bytes_of = {
            process.pid: process.usedGpuMemory
            for process in processes
            if process.pid != os.getpid()
        }
        if any(num_bytes is None for num_bytes in bytes_of.values()):
            raise Unavailable(
                f"{len(bytes_of)} other processes, whose memory the driver does not report"
            )
        return sum(bytes_of.values())

    def _links(self, index: int) -> list[tuple[int, str]]:
        nvml, handle = self._nvml(), self._handle(index)
        links = []
        for peer in range(nvml.nvmlDeviceGetCount()):
            other = nvml.nvmlDeviceGetHandleByIndex(peer)
            if nvml.nvmlDeviceGetUUID(other) == nvml.nvmlDeviceGetUUID(handle):
                continue
            status = nvml.nvmlDeviceGetP2PStatus(handle, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            path = TOPOLOGY_PATHS[nvml.nvmlDeviceGetTopologyCommonAncestor(handle, other)]
            links.append((peer, "nvlink" if status == nvml.NVML_P2P_STATUS_OK else path))
        return links


class DriverSource:
    """The CUDA driver API through ctypes. `cuInit` and attribute queries open no context."""

    def __init__(self) -> None:
        self._library: Any = None
        self.queries: Mapping[str, Query] = {
            "count": lambda _: self._integer("cuDeviceGetCount"),
            "cuda_driver": lambda _: cuda_version_text(self._integer("cuDriverGetVersion")),
            "integrated": lambda index: self._attribute(CU_ATTRIBUTE_INTEGRATED, index),
            "host_page_tables": lambda index: self._attribute(
                CU_ATTRIBUTE_PAGEABLE_USES_HOST_PAGE_TABLES, index
            ),
        }

    def _call(self, function: str, *arguments: Any) -> None:
        if self._library is None:
            library = ctypes.CDLL("libcuda.so.1")
            if status := library.cuInit(0):
                raise Unavailable(f"cuInit failed with error {status}")
            self._library = library
        if status := getattr(self._library, function)(*arguments):
            raise Unavailable(f"{function} failed with error {status}")

    def _integer(self, function: str, *arguments: int) -> int:
        value = ctypes.c_int()
        self._call(function, ctypes.byref(value), *arguments)
        return value.value

    def uuid(self, index: int) -> str:
        """UUID of CUDA device `index`; of the slice, under MIG."""
        buffer = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", buffer, self._integer("cuDeviceGet", index))
        return str(uuid.UUID(bytes=bytes(buffer)))

    def _attribute(self, attribute: int, index: int) -> int:
        return self._integer("cuDeviceGetAttribute", attribute, self._integer("cuDeviceGet", index))


def cuda_version_text(version: int) -> str:
    """13000 is 13.0, 12040 is 12.4."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _watts(milliwatts: float) -> float:
    return milliwatts / 1000
