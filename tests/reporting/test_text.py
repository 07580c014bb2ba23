"""Numbers in the units that people use."""

import os
import subprocess
import sys

import pytest

from autotune.cli.terminal import err, out
from autotune.reporting.text import memory_text, seconds_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4e-5, "40 us"), (0.0, "0.000 s"), (0.5, "0.500 s"), (45, "45 s"), (61, "1 min 01 s"), (7265, "2 h 01 min")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(None, "-"), (12, "12 B"), (4096, "4 KiB"), (320 << 20, "320 MiB"), (3 << 29, "1.50 GiB")],
)
def test_sizes_read_well(num_bytes: float | None, text: str) -> None:
    assert memory_text(num_bytes) == text


def test_progress_that_nobody_reads_any_more_ends_nothing() -> None:
    code = "from autotune.cli.terminal import err, out; [err.print('x' * 99) for _ in range(9999)]; out.print('done')"
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=writer, check=False)
    os.close(writer)
    assert (process.returncode, process.stdout) == (0, b"done\n")


def test_no_control_character_of_a_stranger_reaches_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    for console in (out, err):
        console.print("one \x1b[2J\x9b2J\u202e\udcff :cat: [red]\ntwo")
    printed = capfd.readouterr()
    assert printed.out == printed.err == "one ?[2J?2J?? :cat: [red]\ntwo\n"
