"""The fork server: a process that imports once what trials need, so that each of them starts warm.

This module loads no library, so that the server's imports can run beside this process's own.
"""

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

from autotune.runtime import redirect_output


def fork_server_context() -> ForkServerContext:
    """What starts processes in the server, and the server itself if there is none yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["autotune.trials.preload"])
    return context


def start_fork_server() -> None:
    """Let the server begin to import; returns at once. Safe to call twice."""
    fork_server_context()
    with redirect_output(os.devnull):  # it would keep a pipe open after this process has ended
        forkserver.ensure_running()
