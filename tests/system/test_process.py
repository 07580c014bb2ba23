"""What a process settles before it loads libraries."""

import subprocess
import sys

ENDS = """
import atexit, gc
import autotune
atexit.register(lambda: print("frozen:", gc.get_freeze_count() > 0))
autotune.prepare_process()
autotune.prepare_process()
"""


def test_a_process_that_ends_does_not_look_through_its_objects_once_more() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=True)
    assert done.stdout == "frozen: True\n"
