"""A limit of memory that is too small for a command, as job schedulers set it, is told as what it is."""

import subprocess
import sys

import pytest

# A process of its own: one that has run other tests could use what they have freed, which no limit counts. The
# first command has imported everything: an import that lacks memory is told by Python in a dozen ways.
LIMITED = """
import contextlib
import io
import resource

import psutil
from autotune.cli import main

with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
resource.setrlimit(resource.RLIMIT_DATA, (psutil.Process().memory_info().data + 2**20, hard))
taken = []
with contextlib.suppress(MemoryError):
    while True:
        taken.append(bytes(2**14))
del taken[-64:]
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the limit does not count what is mapped")
def test_too_little_data_is_no_bug_of_ours() -> None:
    command = [sys.executable, "-c", LIMITED, "estimate", "--model", "flux1-dev", "--hardware", "nvidia-rtx-4090"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert ended.stderr.startswith("error: memory ran out"), ended.stderr
    assert "\nhint: close other programs that use memory, or raise the limit (ulimit -v, -d)" in ended.stderr
