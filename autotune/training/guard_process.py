"""Watches the host's memory beside a training run, from outside its process; `guard.py` starts it.

    python -m autotune.training.guard_process NOTICE_BYTES FLOOR_BYTES WHOLE_HOST

Nothing inside the run can be trusted to notice in time. Below the first limit the run is told, and
finishes its step; below the second it is killed, because the host would hang. Ends with the run.
"""

import os
import signal
import sys
import time

from autotune.hardware import available_bytes, host_available_bytes

POLL_SECONDS = 0.05
"""Between two looks: filling memory at 20 GB/s takes 1 GB meanwhile, less than the 4 GiB or more
of a shared device.
"""


def main(notice_bytes: int, floor_bytes: int, whole_host: bool) -> None:
    """Watch the process that started this one."""
    run, available = os.getppid(), host_available_bytes if whole_host else available_bytes
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the terminal, for the run
    was_told = False
    while os.getppid() == run:
        left = available()
        if left < floor_bytes:
            sys.stderr.write(
                f"error: the host had {left / 2**20:,.0f} MiB left, so training was ended at once\n"
                "hint: go on from the last checkpoint with --resume, with other programs closed or "
                "a plan that needs "
                "less: autotune plan --from PLAN --reserve 4GiB\n"
            )
            os.kill(run, signal.SIGKILL)
            return
        if left < notice_bytes and not was_told:
            sys.stdout.write(f"{left}\n")
            sys.stdout.flush()
            os.kill(run, signal.SIGUSR2)
            was_told = True
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True")
