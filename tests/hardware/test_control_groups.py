"""Limits of containers and of a cluster's jobs are seen, wherever they stand above the process."""

from pathlib import Path

import pytest

from autotune.hardware import answers
from autotune.hardware.answers import RealSystem
from autotune.hardware.system import Unanswered

GIB = 2**30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hierarchy whose process lies in /slurm/job_7/step_0."""
    (tmp_path / "own").write_text("1:name=systemd:/elsewhere\n0::/slurm/job_7/step_0\n")
    (tmp_path / "fs" / "slurm" / "job_7" / "step_0").mkdir(parents=True)
    monkeypatch.setattr(answers, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(answers, "CGROUPS", tmp_path / "fs")
    return tmp_path / "fs"


def limit(group: Path, most: int | str, used: int = 0, inactive: int = 0) -> None:
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")


def test_the_narrowest_of_the_limits_above_a_process_counts(groups: Path) -> None:
    limit(groups / "slurm", 100 * GIB, used=90 * GIB, inactive=5 * GIB)
    limit(groups / "slurm" / "job_7", 32 * GIB, used=2 * GIB)
    limit(groups / "slurm" / "job_7" / "step_0", "max")
    assert RealSystem(torch=False).ask("os", "container_free_bytes") == 15 * GIB


def test_a_container_sees_its_own_group_as_the_root(groups: Path) -> None:
    limit(groups, 8 * GIB, used=GIB)
    answers.OWN_CGROUP.write_text("0::/\n")
    assert RealSystem(torch=False).ask("os", "container_free_bytes") == 7 * GIB


def test_without_limits_nothing_is_answered(groups: Path) -> None:
    with pytest.raises(Unanswered, match="no limit"):
        RealSystem(torch=False).ask("os", "container_free_bytes")
    answers.OWN_CGROUP.unlink()
    with pytest.raises(Unanswered, match="no limit"):
        RealSystem(torch=False).ask("os", "container_free_bytes")


def test_cores_of_a_job_are_counted_by_its_quota(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers.os, "sched_getaffinity", lambda _: range(64), raising=False)
    (groups / "slurm" / "cpu.max").write_text("max 100000\n")
    (groups / "slurm" / "job_7" / "cpu.max").write_text("850000 100000\n")
    assert RealSystem(torch=False).ask("os", "logical_cores") == 8
    (groups / "slurm" / "job_7" / "step_0" / "cpu.max").write_text("50000 100000\n")
    assert RealSystem(torch=False).ask("os", "logical_cores") == 1
