"""One of several processes that train together; `several.py` starts it.

The first one of the machine writes its events as JSON lines, then its report, or the error it ends
with, to the pipe of the starting process. Of several machines only the first one's have events.
"""

import os
import sys
from pathlib import Path

from autotune.errors import Preempted
from autotune.runtime import (
    current_launch,
    error_line,
    explain_error,
    prepare_process,
    silence_progress_bars,
)
from autotune.schema import Event, event_line, read_plan


def main(plan_file: str, pipe: str, cache_folder: str, *flags: str) -> None:
    """Train; exits with the status of the error, if there is one."""
    prepare_process()  # before the imports below load torch
    from autotune.hardware import probe
    from autotune.training.run import train
    from autotune.training.several import report_line

    silence_progress_bars()
    launch = current_launch()
    is_first = launch is None or launch.local_rank == 0

    def write_event(event: Event) -> None:
        lines.write(event_line(event) + "\n")

    with Path(pipe if is_first else os.devnull).open("w", encoding="utf-8", buffering=1) as lines:
        try:
            report = train(
                read_plan(Path(plan_file)),
                probe(index=0),
                Path(cache_folder),
                write_event,
                resume="--resume" in flags,
                trace="--trace" in flags,
            )
            lines.write(report_line(report) + "\n")
        except Exception as error:
            if os.environ.get("AUTOTUNE_TRACEBACK"):
                raise
            failure = explain_error(error)
            lines.write(error_line(failure) + "\n")
            if not is_first and not isinstance(
                failure, Preempted
            ):  # the first one says that for all
                sys.stderr.write(f"error: {failure.message}\nhint: {failure.hint}\n")
            sys.exit(failure.exit_status)


if __name__ == "__main__":
    main(*sys.argv[1:])
