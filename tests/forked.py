"""Commands in processes that a fork server starts, with imports paid: for signals and output."""

import importlib
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from multiprocessing import forkserver, util
from pathlib import Path
from unittest import mock

from autotune.system.process import fork_server_context


def start_server():
    """Make the fork server a fork of this process: a new one spends ten seconds on imports."""
    import torch

    spawn = util.spawnv_passfds

    def fork(path, words, kept):
        if "forkserver" not in words[-1]:
            return spawn(path, words, kept)
        if process := os.fork():
            return process
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number < 3:
                os.dup2(nowhere, number)
            elif number not in kept:
                os.closerange(number, number + 1)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        try:
            exec(words[-1], {})
        finally:
            os._exit(0)

    # Asking a driver for its devices already forbids the forks of tests on the stand-in.
    if sys.platform == "linux" and not torch.backends.cuda.is_built():
        with mock.patch.object(util, "spawnv_passfds", fork):
            forkserver.set_forkserver_preload(["autotune.search.preload"])
            forkserver.ensure_running()


def start_forked(arguments, output, errors=None, *, environment=None, step_wait_seconds=None):
    words = [str(argument) for argument in arguments]
    surroundings = {**os.environ, **(environment or {})}
    files = str(output), str(errors or output)
    known = (words, surroundings, str(Path.cwd()), *files, step_wait_seconds)
    started = fork_server_context().Process(target=_run, args=known)
    started.start()
    return started


def autotune_forked(*arguments, environment=None, timeout=600):
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "stdout", Path(folder) / "stderr"
        process = start_forked(arguments, output, errors, environment=environment)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"autotune {arguments}: {errors.read_text()}")
        told = output.read_text(), errors.read_text()
        return subprocess.CompletedProcess(arguments, process.exitcode, *told)


def _run(words, environment, folder, output, errors, step_wait_seconds):
    for number, path in ((1, output), (2, errors)):
        with open(path, "a", buffering=1) as lines:
            os.dup2(lines.fileno(), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    if step_wait_seconds:
        processes = importlib.import_module("autotune.train.processes")
        processes.MAX_STEP_WAIT = timedelta(seconds=step_wait_seconds)
    sys.argv = ["autotune", *words]
    from autotune.cli.app import main

    main()
