"""A limit of memory that is too small for a command, as job schedulers set it, is told as what it is."""

import contextlib
import multiprocessing
import resource
import sys
from pathlib import Path

import psutil
import pytest

from autotune.cli import main


def limited(output: Path) -> None:
    """Run a command where hardly any memory is left; what it prints goes to the file."""
    sys.stdout = sys.stderr = output.open("w", buffering=1)
    sys.argv = ["autotune", "estimate", "--model", "flux1-dev", "--hardware", "nvidia-rtx-4090"]
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (psutil.Process().memory_info().data + 2**20, hard))
    taken = []
    with contextlib.suppress(MemoryError):  # what the tests before it have freed, and this process could use again
        while True:
            taken.append(bytes(2**14))
    del taken[-64:]
    main()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the limit does not count what is mapped")
def test_too_little_data_is_no_bug_of_ours(tmp_path: Path) -> None:
    output = tmp_path / "output"
    child = multiprocessing.get_context("fork").Process(target=limited, args=(output,))
    child.start()
    child.join(300)
    told = output.read_text()
    assert child.exitcode == 1, told
    assert told.startswith("error: memory ran out"), told
    assert "\nhint: close other programs that use memory, or raise the limit (ulimit -v, -d)" in told
