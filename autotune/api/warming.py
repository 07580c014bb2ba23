"""Starts early what takes seconds to load."""

from autotune.trials import start_fork_server


def warm_up() -> None:
    """Let the process that trials are started from import its libraries beside what this process does; returns at once.

    `plan` does it by itself once it has checked its arguments, the model and the data.

    Example:
        >>> autotune.warm_up()
        >>> plan = autotune.plan("/models/Qwen-Image", "photos")
    """
    start_fork_server()
