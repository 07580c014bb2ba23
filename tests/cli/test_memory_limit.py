"""A limit of memory that is too small for a command, as job schedulers set it, is told as what
it is."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

# In a process of its own, and with one large piece: a limit is reached at another place on each
# machine, and Python tells an import that lacks memory in a dozen ways.
LIMITED = """
import resource
import autotune
from autotune.cli.app import main

limit = 2**36
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
autotune.estimate = lambda **_: bytes(2 * limit)
main()
"""

LIMITED_DATA = """
import resource
import psutil
import autotune.api
from autotune.cli.app import main

hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
resource.setrlimit(resource.RLIMIT_DATA, (psutil.Process().memory_info().data + 60 * 2**20, hard))
main()
"""


def test_too_little_memory_is_no_bug_of_ours() -> None:
    command = [
        sys.executable,
        "-c",
        LIMITED,
        "estimate",
        "--model",
        "flux1-dev",
        "--hardware",
        "nvidia-rtx-4090",
    ]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert ended.stderr.startswith("error: memory ran out"), ended.stderr
    assert (
        "\nhint: close other programs that use memory, or raise the limit (ulimit -v, -d)"
        in ended.stderr
    )


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere the limit does not count what is mapped"
)
def test_too_little_memory_for_a_picture_does_not_call_it_broken(tmp_path: Path) -> None:
    Image.new("RGB", (7_900, 8_000)).save(
        tmp_path / "large.png", compress_level=1
    )  # 190 MB when it is decoded
    (tmp_path / "large.txt").write_text("a dog")
    command = [sys.executable, "-c", LIMITED_DATA, "data", "check", str(tmp_path)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert ended.stderr.startswith("error: memory ran out"), ended.stderr
