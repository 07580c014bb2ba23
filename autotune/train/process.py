"""One of several processes that train together; `several.py` starts it.

The first one of the machine writes its events as JSON lines, then its report, or the error it ends
with, to the pipe of the starting process. Of several machines only the first one's have events.
"""

import os
import sys
from pathlib import Path

from autotune.errors import Preempted
from autotune.events import Event, event_line
from autotune.plan.plan_file import read_plan
from autotune.system.failures import error_line, explain_error
from autotune.system.process import current_launch, prepare_process, silence_progress_bars


def main(plan_file: str, pipe: str, cache_folder: str, *flags: str) -> None:
    """Train; exits with the status of the error, if there is one."""
    prepare_process()  # before the imports below load torch
    from autotune.machine.probing import probe
    from autotune.train.run import train
    from autotune.train.several import report_line

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
