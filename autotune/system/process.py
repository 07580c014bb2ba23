"""What a process must settle before the first import of torch."""

import atexit
import gc
import os
import sys
from collections.abc import MutableMapping

from autotune.system.quiet import silence_libraries

SPIN_COUNT = "6000"
"""How often a thread of a parallel loop polls for work before it sleeps: for some 100 us, longer
than the gap between two operations. When another program with two threads ran, steps took 50 to
64 times as long with libgomp's 300,000 and 3.4 times with this; alone they took the same
(`benchmarks/DECISIONS.md`)."""
UNNEEDED = ("bitsandbytes", "scipy", "triton", "cuda")
"""Packages that diffusers, transformers, peft and torch import if they find them: the first two,
with Inductor, are 900 modules and a quarter of the time of all imports; those of CUDA's build of
torch, 90 MiB of 1,014 and a process."""


def prepare_process(*, only_predicts: bool = False) -> None:
    """Silence the libraries, let idle threads sleep, end quickly. Safe to call twice; what the user
    has set stays.

    With `only_predicts`, for a process that neither trains nor tries anything, packages that
    predictions do not need seem not to be installed until `reveal_packages`.

    Example:
        >>> autotune.prepare_process()
    """
    silence_libraries()
    for name in UNNEEDED if only_predicts else ():
        if name not in sys.modules:
            sys.modules[name] = None  # type: ignore[assignment]
    limit_thread_spinning(os.environ)
    atexit.unregister(gc.freeze)
    atexit.register(
        gc.freeze
    )  # at its end Python would look through all objects of the libraries, for two seconds


def reveal_packages() -> None:
    """Let all that is installed be imported again, before code that may need it: an optimizer's,
    or another distribution's."""
    for name in UNNEEDED:
        if name in sys.modules and sys.modules[name] is None:
            del sys.modules[name]


def limit_thread_spinning(environment: MutableMapping[str, str]) -> None:
    """Set libgomp's spin count, for this process and its children, unless the user has set how
    threads wait."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
