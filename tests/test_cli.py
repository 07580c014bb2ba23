"""The command line's surface: light to import, quick to help, the same options tomorrow."""

import subprocess
import sys
import time

import pytest

from autotune.commands.machine import parse_bytes
from autotune.errors import InvalidInput
from tests.conftest import autotune

HEAVY = ("torch", "diffusers", "transformers", "optuna", "peft", "torchao", "numpy", "rich.progress")


def test_importing_the_cli_loads_nothing_heavy() -> None:
    code = f"import sys, autotune.cli; print([name for name in {HEAVY!r} if name in sys.modules])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


def test_help_is_quick() -> None:
    times = []
    for _ in range(5):
        started = time.perf_counter()
        process = autotune("--help")
        times.append(time.perf_counter() - started)
        assert process.returncode == 0
    # A quarter of a second on an idle machine; the best of five shrugs off a busy one.
    assert min(times) < 0.5


@pytest.mark.parametrize(
    "command",
    ["doctor", "probe", "models", "plan", "check", "explain", "train", "demo", "data check", "weights convert"],
)
def test_every_command_explains_itself_in_80_columns(command: str) -> None:
    process = autotune(*command.split(), "--help")
    assert process.returncode == 0
    assert "Usage: " in process.stdout
    assert max(map(len, process.stdout.splitlines())) <= 80


def test_wrong_usage_exits_with_2() -> None:
    assert autotune("plan").returncode == 2
    assert autotune("no-such-command").returncode == 2
    assert autotune("plan", "--model", "x", "--quality", "best").returncode == 2
    assert autotune("plan", "--model", "x", "--steps", "7", "--epochs", "2").returncode == 2


@pytest.mark.parametrize("text", ["12", "", "GiB", "-1GiB", "12 potatoes", "1e3GiB", "12GiB!"])
def test_an_amount_of_memory_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="no amount of memory"):
        parse_bytes(text)


def test_amounts_of_memory_in_both_kinds_of_units() -> None:
    assert [parse_bytes(text) for text in ("20GiB", " 900 mib", "1.5GB")] == [20 * 2**30, 900 * 2**20, 1_500_000_000]
