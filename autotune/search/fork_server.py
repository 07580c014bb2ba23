"""The fork server: a process that imports once what trials need, so that each of them starts warm.

This module loads no library, so that the server's imports can run beside this process's own.
"""

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

from autotune.system.process import redirect_output


def fork_server_context() -> ForkServerContext:
    """What starts processes in the server, and the server itself if there is none yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["autotune.search.preload"])
    return context


def warm_up() -> None:
    """Let the process that trials are started from import its libraries beside what this process
    does; returns at once.

    `plan` does it by itself once it has checked its arguments, the model and the data. Safe to call
    twice.
    """
    fork_server_context()
    with redirect_output(os.devnull):  # it would keep a pipe open after this process has ended
        forkserver.ensure_running()
