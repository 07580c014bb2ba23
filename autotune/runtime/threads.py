"""How the threads of parallel loops on a CPU wait for each other. Must be set before torch is imported."""

from collections.abc import MutableMapping

SPIN_COUNT = "6000"
"""How often a thread polls before it sleeps: for some 100 us, longer than the gap between two operations. When another
program with two threads ran, steps took 50 to 64 times as long with libgomp's 300,000 and 3.4 times with this; alone
they took the same (`benchmarks/threads.py` and its log)."""


def limit_thread_spinning(environment: MutableMapping[str, str]) -> None:
    """Set this for libgomp, in this process and its children, unless the user has set something else."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
