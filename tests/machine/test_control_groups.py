"""Limits of containers and of a cluster's jobs are seen, wherever they stand above the process,
in both versions."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.machine import sources
from autotune.machine.capabilities import compute_budget
from autotune.machine.facts import Reader, read_host
from autotune.machine.sources import System, Unavailable

GIB = 2**30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hierarchy whose process lies in /slurm/job_7/step_0."""
    (tmp_path / "own").write_text("1:name=systemd:/elsewhere\n0::/slurm/job_7/step_0\n")
    (tmp_path / "fs" / "slurm" / "job_7" / "step_0").mkdir(parents=True)
    monkeypatch.setattr(sources, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(sources, "CGROUPS", tmp_path / "fs")
    return tmp_path / "fs"


def limit(group: Path, most: int | str, used: int = 0, inactive: int = 0) -> None:
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")


def test_the_narrowest_of_the_limits_above_a_process_counts(groups: Path) -> None:
    limit(groups / "slurm", 100 * GIB, used=90 * GIB, inactive=5 * GIB)
    limit(groups / "slurm" / "job_7", 32 * GIB, used=2 * GIB)
    limit(groups / "slurm" / "job_7" / "step_0", "max")
    assert System(torch=False).query("os", "container_free_bytes") == 15 * GIB


def test_a_container_sees_its_own_group_as_the_root(groups: Path) -> None:
    limit(groups, 8 * GIB, used=GIB)
    sources.OWN_CGROUP.write_text("0::/\n")
    assert System(torch=False).query("os", "container_free_bytes") == 7 * GIB


@pytest.fixture
def v1(groups: Path) -> Path:
    """A Docker container under cgroup v1, which reads its path as the host sees it."""
    sources.OWN_CGROUP.write_text(
        "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n"
    )
    for controller in ("memory", "cpu"):
        (groups / controller).mkdir()
    (groups / "memory" / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (groups / "memory" / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    (groups / "memory" / "memory.stat").write_text(f"inactive_file 5\ntotal_inactive_file {GIB}\n")
    (groups / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    return groups


def test_limits_of_the_older_control_groups_count_too(
    v1: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources.os, "sched_getaffinity", lambda _: range(64), raising=False)
    query = System(torch=False).query
    assert query("os", "container_free_bytes") == 2 * GIB
    (v1 / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert query("os", "logical_cores") == 64
    (v1 / "cpu" / "cpu.cfs_quota_us").write_text("250000\n")
    assert query("os", "logical_cores") == 2
    (v1 / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # none
    with pytest.raises(Unavailable, match="no limit"):
        query("os", "container_free_bytes")


def test_a_small_container_of_a_large_host_keeps_a_share_of_its_own_memory_free(
    groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sources.psutil,
        "virtual_memory",
        lambda: SimpleNamespace(total=512 * GIB, available=400 * GIB),
    )
    limit(groups, 2 * GIB, used=GIB // 4)
    host = read_host(Reader(System(torch=False)))
    assert (host.memory_bytes, host.available_memory_bytes) == (2 * GIB, 2 * GIB - GIB // 4)
    assert compute_budget("host", host.memory_bytes, host.available_memory_bytes, None)[0] == int(
        1.5 * GIB
    )


@pytest.mark.parametrize("damage", ["", "max", "-1", "1 2 3", "none of your business", "\0"])
def test_odd_control_groups_cost_neither_cores_nor_memory(
    groups: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources.os, "sched_getaffinity", lambda _: range(8), raising=False)
    for file in ("cpu.max", "memory.current", "memory.stat"):
        (groups / file).write_text(damage)
    (groups / "slurm" / "memory.max").mkdir()
    assert System(torch=False).query("os", "logical_cores") == 8
    assert (
        read_host(Reader(System(torch=False))).memory_bytes == sources.psutil.virtual_memory().total
    )


def test_without_limits_nothing_is_answered(groups: Path) -> None:
    with pytest.raises(Unavailable, match="no limit"):
        System(torch=False).query("os", "container_free_bytes")
    sources.OWN_CGROUP.unlink()
    with pytest.raises(Unavailable, match="no limit"):
        System(torch=False).query("os", "container_free_bytes")


def test_cores_of_a_job_are_counted_by_its_quota(
    groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources.os, "sched_getaffinity", lambda _: range(64), raising=False)
    (groups / "slurm" / "cpu.max").write_text("max 100000\n")
    (groups / "slurm" / "job_7" / "cpu.max").write_text("850000 100000\n")
    assert System(torch=False).query("os", "logical_cores") == 8
    (groups / "slurm" / "job_7" / "step_0" / "cpu.max").write_text("50000 100000\n")
    assert System(torch=False).query("os", "logical_cores") == 1
