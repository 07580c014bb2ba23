"""Runs commands in processes of their own, as many at once as there are places for them, and
ends none because of another."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.runtime.signals import catch_stop_signals

POLL_SECONDS = 0.1
PR_SET_PDEATHSIG = 1
"""Option of prctl(2) that sets the signal that a process gets when the one that started it is
gone.
"""

Environment = Mapping[str, str]


@dataclass(frozen=True)
class QueuedCommand:
    """A command that waits for its turn."""

    name: str
    arguments: tuple[str, ...]
    log: Path
    """File to which everything that it prints is appended."""
    is_free: Callable[[], bool] = lambda: True
    """Whether it can start now; until then others go first."""


def run_queue(
    commands: Sequence[QueuedCommand],
    places: Sequence[Environment],
    on_start: Callable[[QueuedCommand, Environment], None],
    on_end: Callable[[QueuedCommand, int], None],
) -> str | None:
    """Run all, each in one of the `places`; returns the name of the signal that stopped this, None
    if none did.

    A signal goes on to those that run, as SIGTERM, and the others are not started. They also get it
    if this process is killed, on Linux.

    Args:
        commands: in the order in which they start.
        places: what is set in the environment of a command that runs there.
        on_start: called before a command starts, with its place.
        on_end: called with the exit status; negative for a signal.
    """
    waiting, free = list(commands), list(places)
    running: list[tuple[subprocess.Popen[bytes], QueuedCommand, Environment]] = []
    end_with_parent, told = _preexec(), False
    with catch_stop_signals(second_ends=True) as stopped:
        try:
            while running or (waiting and not stopped()):
                for process, command, place in [
                    each for each in running if each[0].poll() is not None
                ]:
                    running.remove((process, command, place))
                    free.append(place)
                    on_end(command, process.returncode)
                while (
                    free
                    and not stopped()
                    and (ready := next((one for one in waiting if one.is_free()), None))
                ):
                    waiting.remove(ready)
                    place = free.pop(0)
                    on_start(ready, place)
                    running.append((_start(ready, place, end_with_parent), ready, place))
                if stopped() and not told:  # once: a second signal would not wait for a checkpoint
                    told = True
                    _stop(running)
                time.sleep(POLL_SECONDS)
        finally:
            if not told:
                _stop(running)
        return stopped()


def _start(
    command: QueuedCommand, place: Environment, preexec: Callable[[], None] | None
) -> subprocess.Popen[bytes]:
    command.log.parent.mkdir(parents=True, exist_ok=True)
    with command.log.open("ab") as log:
        return subprocess.Popen(
            command.arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **place},
            start_new_session=True,  # Ctrl-C reaches it once, through this process
            preexec_fn=preexec,  # noqa: PLW1509  it calls one function of the kernel
        )


def _stop(running: list[tuple[subprocess.Popen[bytes], QueuedCommand, Environment]]) -> None:
    for process, _, _ in running:
        process.send_signal(signal.SIGTERM)  # Popen sends none to one that has ended


def _preexec() -> Callable[[], None] | None:
    """What lets a child end with this process; None where the system has no such thing."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # found here: between fork and exec nothing may be loaded
    return lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
