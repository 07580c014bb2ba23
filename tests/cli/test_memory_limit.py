"""A limit of memory that is too small for a command, as job schedulers set it, is told as what it is."""

import subprocess
import sys

# In a process of its own, and with one large piece: a limit is reached at another place on each machine, and Python
# tells an import that lacks memory in a dozen ways.
LIMITED = """
import resource
import autotune
from autotune.cli import main

limit = 2**36
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
autotune.estimate = lambda **_: bytes(2 * limit)
main()
"""


def test_too_little_memory_is_no_bug_of_ours() -> None:
    command = [sys.executable, "-c", LIMITED, "estimate", "--model", "flux1-dev", "--hardware", "nvidia-rtx-4090"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert ended.stderr.startswith("error: memory ran out"), ended.stderr
    assert "\nhint: close other programs that use memory, or raise the limit (ulimit -v, -d)" in ended.stderr
