"""Starts early what takes seconds to load."""

from autotune.trials import start_fork_server


def warm_up() -> None:
    """Let the process that trials are started from import its libraries beside what this process does; returns at once.

    `plan` does it by itself, as soon as it has found what it was asked sound.

    Example:
        >>> autotune.warm_up()
        >>> plan = autotune.plan("/models/Qwen-Image", "photos")
    """
    start_fork_server()
