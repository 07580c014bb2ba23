"""What a process must settle before the first import of torch."""

import os

from autotune.runtime.quiet import silence_libraries
from autotune.runtime.threads import limit_thread_spinning


def prepare_process() -> None:
    """Silence the libraries, and let idle threads sleep. Safe to call twice; what the user has set stays."""
    silence_libraries()
    limit_thread_spinning(os.environ)
