"""What on this machine will hurt a training run, worst first, each with its fix.

It imports no torch and opens no CUDA context, so it is safe beside someone's run, and it can say which build of torch
this driver needs before one is installed.
"""

from autotune.hardware.answers import RealSystem
from autotune.hardware.checks import CHECKS, Finding, Severity
from autotune.hardware.patient import Patient, examine

ORDER: tuple[Severity, ...] = ("blocks", "hurts", "note")

DEFAULT_DISK_BYTES = 90 * 2**30
"""Qwen-Image in bf16 (58 GB on the hub), its caches, checkpoints and room to write a shard twice."""


def doctor(*, disk_needed_bytes: int = DEFAULT_DISK_BYTES) -> tuple[Finding, ...]:
    """Findings about this machine, worst first; empty when nothing will hurt.

    Raises:
        AutotuneError: the operating system does not say how much memory there is.
    """
    return findings(examine(RealSystem(torch=False), disk_needed_bytes))


def findings(patient: Patient) -> tuple[Finding, ...]:
    """All findings, worst first; equal ones in the order of the checks."""
    found = [finding for check in CHECKS for finding in check(patient)]
    return tuple(sorted(found, key=lambda finding: ORDER.index(finding.severity)))
