"""A search in a file on a folder that machines share, for teams without a database.

Optuna's journal storage, with what it lacks: heartbeats, so that a worker that dies on another
machine is noticed. Each is the time at which a file was last written, as the file server's clock
has it.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._file import get_lock_file
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

BLOCK_BYTES = 1 << 20
"""Read at a time while the end of the last whole line is looked for."""


class WholeLines(JournalFileBackend):
    """Optuna's file, from which the start of a line is cut that a kill or a full disk left at
    its end: the next line would be added to it, and the whole search could not be read any more."""

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        with get_lock_file(self._lock), Path(self._file_path).open("rb+") as file:
            end = size = file.seek(0, os.SEEK_END)
            step = 1  # usually the last byte ends a line
            while end:
                start = max(0, end - step)
                file.seek(start)
                if newline := file.read(end - start).rfind(b"\n") + 1:
                    end = start + newline
                    break
                end, step = start, BLOCK_BYTES
            if end < size:
                file.truncate(end)
        super().append_logs(logs)


class SharedJournal(JournalStorage, BaseHeartbeat):
    """The studies in one file.

    Args:
        file: ends with `JOURNAL_SUFFIX`; a folder beside it gets the heartbeats.
        heartbeat_seconds: between two of a worker's.
        grace_seconds: after which a worker without one is dead.
    """

    def __init__(self, file: Path, heartbeat_seconds: int, grace_seconds: int) -> None:
        super().__init__(WholeLines(str(file)))
        self.beats = file.with_suffix(".heartbeats")
        self.beats.mkdir(exist_ok=True)
        self.heartbeat_seconds, self.grace_seconds = heartbeat_seconds, grace_seconds

    def record_heartbeat(self, trial_id: int) -> None:
        """In a thread of its own, where nobody could handle a failure: the next heartbeat may
        come through.
        """
        with suppress(OSError):
            self._beat(str(trial_id))

    def get_heartbeat_interval(self) -> int:
        return self.heartbeat_seconds

    def get_heartbeat_stale_trial_callback(self) -> Callable[[Study, FrozenTrial], None] | None:
        return None

    get_failed_trial_callback = get_heartbeat_stale_trial_callback  # its name before Optuna 4.9

    def _get_stale_trial_ids(self, study_id: int) -> list[int]:
        now = self._beat("now")
        running = self.get_all_trials(study_id, deepcopy=False, states=(TrialState.RUNNING,))
        beats = {trial._trial_id: self.beats / str(trial._trial_id) for trial in running}
        return [
            number
            for number, beat in beats.items()
            if beat.exists() and now - beat.stat().st_mtime > self.grace_seconds
        ]

    def _beat(self, name: str) -> float:
        """Write a heartbeat; returns the file server's time in seconds."""
        file = self.beats / name
        file.write_text("")
        return file.stat().st_mtime
