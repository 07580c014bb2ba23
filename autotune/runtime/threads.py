"""How the threads of a processor's parallel loops wait for each other. To be settled before torch is imported."""

from collections.abc import MutableMapping

SPIN_COUNT = "6000"
"""Turns of waiting before a thread sleeps: some 100 us, as long as one operation after another keeps them busy. Beside
another program of two threads, steps took 50 to 64 times as long with libgomp's 300,000 and 3.4 times with this; alone
the same (`benchmarks/threads.py` and its log)."""


def limit_thread_spinning(environment: MutableMapping[str, str]) -> None:
    """Tell libgomp, here and in children; what the user has set stays."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
