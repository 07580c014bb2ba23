"""Commands that outlive the page that started them.

Each has a folder, in which a restarted server finds it: `command.json`, its stderr `events.jsonl`,
its stdout `answer.txt`, and its exit status. Its process holds a lock there, so that whether it
lives does not depend on process ids.
"""

import contextlib
import fcntl
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path

from autotune.system.files import read_bounded, write_text_atomic
from autotune.system.process import PYTHON

INTERRUPTED = 130
STATES = {0: "finished"}  # by exit status; others failed
STATES |= dict.fromkeys((75, INTERRUPTED, -signal.SIGINT), "stopped")
JOBS, COMMAND, EVENTS, ANSWER, EXIT = "jobs", "command.json", "events.jsonl", "answer.txt", "exit"
LOCK, PROCESS, BEGUN, STOPPING, QUEUE = "lock", "process", "begun", "stopping", "queue"
MAX_TOLD_BYTES = 1 << 20  # of the end of what a command told
MAX_JOBS = 200  # that are looked at, the newest first


def is_locked(path: Path) -> bool:
    """Tell if a living process holds the lock of this file."""
    try:
        with path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@dataclass(frozen=True)
class Job:
    """A command that was started, or only asked for (`draft`), by its folder."""

    folder: Path

    @cached_property
    def words(self) -> list[str]:
        """The command without the program's name."""
        try:
            found = json.loads(read_bounded(self.folder / COMMAND, MAX_TOLD_BYTES))["words"]
            return list(map(str, found)) or ["?"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return ["?"]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def state(self) -> str:
        """One of draft, waiting, running, finished, stopped, failed and lost (killed, or the
        machine was restarted)."""
        if not (self.folder / PROCESS).exists():
            return "draft"
        if is_locked(self.folder / LOCK):
            return "running" if (self.folder / BEGUN).exists() else "waiting"
        try:
            status = int((self.folder / EXIT).read_text())
        except (OSError, ValueError):
            return "lost"
        return STATES.get(status, "failed")

    @property
    def is_over(self) -> bool:
        return self.state not in ("waiting", "running")

    def told(self) -> tuple[list[dict[str, object]], list[str]]:
        """Read the command's recent events, and other lines."""
        events, lines = list[dict[str, object]](), list[str]()
        for line in _tail(self.folder / EVENTS).splitlines():
            try:
                event = json.loads(line)
                events.append(event if isinstance(event, dict) else {})
            except (ValueError, RecursionError):
                lines.append(line)
        return events, lines

    def answer(self) -> str:
        """Read the end of what the command printed to stdout."""
        return _tail(self.folder / ANSWER)

    def stop(self) -> None:
        """Interrupt the command as Ctrl-C does: a run writes a checkpoint, a search its plan."""
        if is_locked(self.folder / LOCK):
            (self.folder / STOPPING).touch()
            with contextlib.suppress(OSError, ValueError):
                os.killpg(int((self.folder / PROCESS).read_text()), signal.SIGINT)


def _tail(path: Path) -> str:
    if path.is_symlink():
        return ""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_TOLD_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return text if size <= MAX_TOLD_BYTES else text.partition("\n")[2]


@dataclass(frozen=True)
class Jobs:
    """The jobs of a workspace, in its hidden folder `.autotune`; commands run in the workspace."""

    workspace: Path

    @property
    def _folder(self) -> Path:
        return self.workspace / ".autotune" / JOBS

    def __iter__(self) -> Iterator[Job]:
        """The newest first."""
        with contextlib.suppress(OSError):
            own = (each.name for each in os.scandir(self._folder) if not each.is_symlink())
            names = sorted(own, reverse=True)
            yield from (Job(self._folder / name) for name in names[:MAX_JOBS])

    def find(self, name: str) -> Job | None:
        """Find the job of this name, which must be one of those that there are."""
        return next((job for job in self if job.name == name), None)

    def draft(self, words: Sequence[str], *, is_queued: bool = False) -> Job:
        """Keep a command without starting it: the page's form shows what was asked for last."""
        name = f"{datetime.now():%Y%m%d-%H%M%S-%f}-{words[0]}-{secrets.token_hex(2)}"
        folder = self._folder / name
        folder.mkdir(parents=True)
        text = json.dumps({"words": list(words), "is_queued": is_queued})
        write_text_atomic(folder / COMMAND, text)
        return Job(folder)

    def start(self, words: Sequence[str], *, is_queued: bool = False) -> Job:
        """Start a command in a process of its own, which neither a closed page nor a stopped server
        ends; a queued one waits until those before it have ended."""
        folder = self.draft(words, is_queued=is_queued).folder
        paths = [folder / name for name in (LOCK, EVENTS, ANSWER)]
        with contextlib.ExitStack() as stack:
            lock, told, answer = (stack.enter_context(path.open("wb")) for path in paths)
            fcntl.flock(lock, fcntl.LOCK_EX)  # kept by the process, as it keeps the file open
            process = subprocess.Popen(
                [*PYTHON, "-m", "autotune.cli.jobs", str(folder)],
                cwd=self.workspace,
                stdin=subprocess.DEVNULL,
                stdout=answer,
                stderr=told,
                start_new_session=True,
                pass_fds=[lock.fileno()],
            )
        (folder / PROCESS).write_text(str(process.pid))
        process.returncode = 0  # it is nobody's to wait for
        return Job(folder)


def _run(folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored below `nohup command &`
    command, status = json.loads((folder / COMMAND).read_text()), INTERRUPTED
    try:
        with (folder.parents[1] / QUEUE).open("w") as queue:
            if command["is_queued"]:
                fcntl.flock(queue, fcntl.LOCK_EX)
            (folder / BEGUN).touch()
            words = [*PYTHON, "-m", "autotune", "--progress", "json", *command["words"]]
            child = subprocess.Popen(words)
            while True:
                with contextlib.suppress(KeyboardInterrupt):  # the command got it, too
                    status = child.wait()
                    break
    except KeyboardInterrupt:
        pass  # while it waited for its turn
    finally:
        write_text_atomic(folder / EXIT, str(status))


if __name__ == "__main__":
    _run(Path(sys.argv[1]))
