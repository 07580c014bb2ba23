"""Sources of facts: control groups, CPU names, the CUDA driver API and NVML."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from autotune.machine import sources
from autotune.machine.capabilities import compute_budget
from autotune.machine.facts import Reader
from autotune.machine.sources import System, Unavailable

GIB = 2**30


def query(name, source="os"):
    return System(with_torch=False).query(source, name)


@pytest.fixture
def groups(tmp_path, monkeypatch):
    (tmp_path / "own").write_text("1:name=systemd:/elsewhere\n0::/slurm/job_7/step_0\n")
    (tmp_path / "fs" / "slurm" / "job_7" / "step_0").mkdir(parents=True)
    monkeypatch.setattr(sources, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(sources, "CGROUPS", tmp_path / "fs")
    return tmp_path / "fs"


def limit(group, most, used=0, inactive=0):
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")


def affinity(monkeypatch, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)


def test_narrowest_limit_above_process_counts(groups):
    limit(groups / "slurm", 100 * GIB, used=90 * GIB, inactive=5 * GIB)
    limit(groups / "slurm" / "job_7", 32 * GIB, used=2 * GIB)
    limit(groups / "slurm" / "job_7" / "step_0", "max")
    assert query("container_free_bytes") == 15 * GIB


def test_containers_see_themselves_as_root(groups):
    limit(groups, 8 * GIB, used=GIB)
    sources.OWN_CGROUP.write_text("0::/\n")
    assert query("container_free_bytes") == 7 * GIB


def test_limits_of_cgroup_v1_count_too(groups, monkeypatch):
    """Of a Docker container, which reads its path as the host sees it."""
    affinity(monkeypatch, 64)
    own = "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n"
    sources.OWN_CGROUP.write_text(own)
    for controller in ("memory", "cpu"):
        (groups / controller).mkdir()
    (groups / "memory" / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (groups / "memory" / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    (groups / "memory" / "memory.stat").write_text(f"inactive_file 5\ntotal_inactive_file {GIB}\n")
    (groups / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert query("container_free_bytes") == 2 * GIB
    for quota, cores in (("-1", 64), ("250000", 2)):
        (groups / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        assert query("logical_cores") == cores
    (groups / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # none
    with pytest.raises(Unavailable, match="no limit"):
        query("container_free_bytes")


def test_small_containers_keep_a_share(groups, monkeypatch):
    large = SimpleNamespace(total=512 * GIB, available=400 * GIB)
    monkeypatch.setattr(sources.psutil, "virtual_memory", lambda: large)
    limit(groups, 2 * GIB, used=GIB // 4)
    host = Reader(System(with_torch=False)).read_host()
    total, free = host.memory_bytes, host.available_memory_bytes
    assert (total, free) == (2 * GIB, 2 * GIB - GIB // 4)
    assert compute_budget("host", total, free, None)[0] == int(1.5 * GIB)


@pytest.mark.parametrize("damage", ["", "max", "-1", "1 2 3", "none of your business", "\0"])
def test_odd_control_groups_cost_nothing(groups, damage, monkeypatch):
    affinity(monkeypatch, 8)
    for file in ("cpu.max", "memory.current", "memory.stat"):
        (groups / file).write_text(damage)
    (groups / "slurm" / "memory.max").mkdir()
    assert query("logical_cores") == 8
    assert query("memory_bytes") == sources.psutil.virtual_memory().total
    sources.OWN_CGROUP.unlink()
    with pytest.raises(Unavailable, match="no limit"):
        query("container_free_bytes")


def test_quotas_count_cores(groups, monkeypatch):
    affinity(monkeypatch, 64)
    (groups / "slurm" / "cpu.max").write_text("max 100000\n")
    for group, quota, cores in (("job_7", 850_000, 8), ("job_7/step_0", 50_000, 1)):
        (groups / "slurm" / group / "cpu.max").write_text(f"{quota} 100000\n")
        assert query("logical_cores") == cores


ARM = """processor\t: 0\nBogoMIPS\t: 2000.00\nFeatures\t: fp asimd
CPU implementer\t: 0x41\nCPU architecture: 8
CPU variant\t: 0x0\nCPU part\t: 0xd4f\nCPU revision\t: 0
"""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel\t\t: 143\nmodel name\t: Intel(R) Xeon(R) 8480+\n", "Xeon(R) 8480+"),
        ("processor : 0\nModel : Raspberry Pi 5 Model B\n", "Raspberry Pi 5 Model B"),
        (ARM, "aarch64 0x41/0xd4f"),
        ("", "aarch64"),
        ("\udcff", "aarch64"),
    ],
)
def test_the_kernel_names_the_cpu(text, name, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_bytes(text.encode(errors="surrogateescape"))
    monkeypatch.setattr(sources, "CPUINFO", tmp_path / "cpuinfo")
    for function, value in {"system": "Linux", "processor": "", "machine": "aarch64"}.items():
        monkeypatch.setattr(sources.platform, function, lambda value=value: value)
    assert query("cpu").endswith(name)


def test_called_nvml_functions_exist():
    text = Path(sources.__file__).read_text()
    called = set(re.findall(r"\b(nvml[A-Z]\w+|nvmlMemory_v2|NVML_\w+)", text))
    assert len(called) > 20
    assert [name for name in sorted(called) if not hasattr(pynvml, name)] == []
