"""The command line's surface: light to import, quick to help, the same options tomorrow."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from autotune.cli.app import app
from autotune.cli.output import Progress
from tests.conftest import autotune, autotune_here

HEAVY = (
    "torch",
    "diffusers",
    "transformers",
    "optuna",
    "peft",
    "torchao",
    "numpy",
    "rich.progress",
)


@pytest.mark.parametrize("module", ["autotune", "autotune.cli"])
def test_importing_the_front_door_or_the_cli_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "[]"


def test_an_interrupt_that_python_drops_comes_repeat_interrupt() -> None:
    code = """
import signal, sys, time, weakref
from autotune.cli.app import _repeat_interrupt

class Tensor: ...

sys.unraisablehook = _repeat_interrupt
tensor = Tensor()
watched = weakref.ref(tensor, lambda _: signal.raise_signal(signal.SIGINT))
try:
    del tensor
    time.sleep(60)
except KeyboardInterrupt:
    print("heard")
"""
    process = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=30
    )
    assert (process.stdout, process.stderr) == ("heard\n", "")


@pytest.mark.parametrize(
    ("command", "max_seconds"),
    [(("-c", "import autotune"), 0.2), (("-m", "autotune", "--help"), 0.5)],
)
def test_importing_and_helping_take_little_time_of_the_cpu(
    command: tuple[str, ...], max_seconds: float
) -> None:
    """Beyond what Python itself takes to start, and far from what torch takes, on a busy
    machine, too."""
    assert (
        min(cpu_seconds(*command) for _ in range(5)) - min(cpu_seconds("-c", "") for _ in range(5))
        < max_seconds
    )


def cpu_seconds(*arguments: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_wrong_usage_exits_with_2(capfd: pytest.CaptureFixture[str]) -> None:
    assert autotune("plan").returncode == 2
    assert autotune_here(capfd, "no-such-command").returncode == 2
    assert autotune_here(capfd, "plan", "--model", "x", "--quality", "best").returncode == 2
    assert (
        autotune_here(capfd, "plan", "--model", "x", "--steps", "7", "--epochs", "2").returncode
        == 2
    )


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("check nowhere.yaml", "make one with `autotune plan --model MODEL -o plan.yaml`"),
        ("estimate --model qwen-image --bach 2", "autotune estimate --help"),
        ("plan", "autotune plan --help"),
        ("profiles prune 123 --json", "autotune profiles prune --help"),
    ],
)
def test_a_script_that_asked_for_json_gets_the_error_as_json(
    capfd: pytest.CaptureFixture[str], words: str, hint: str
) -> None:
    process = autotune_here(capfd, *words.split(), "--json")
    told = json.loads(process.stdout)
    assert told.keys() == {"error", "hint", "exit_status"}
    assert (told["hint"], told["exit_status"]) == (hint, process.returncode)
    assert told["error"] in process.stderr
    assert not autotune_here(capfd, *words.replace("--json", "").split()).stdout


@pytest.mark.parametrize(
    "typed",
    [
        "plan --model qwen-image --storage postgresql+psycopg://host/db?password=hunter2",
        "plan --model qwen-image --storage=me:hunter2@host/db",
        "weights inspect https://hub.example/a.safetensors?token=hunter2",
        "weights inspect me:hunter2@hub.example",
        "profiles push team https://me:hunter2@host",
        "plan postgresql://me:p@hunter2@host/db",
        "--verbose profiles pull https://me:hunter2@host/x",
    ],
)
def test_no_error_hint_or_traceback_prints_what_may_be_a_password(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, typed: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Progress, "is_verbose", False)
    process = autotune_here(capfd, *typed.split())
    assert process.returncode in (2, 3)

    assert ("Traceback" in process.stderr) == ("--verbose" in typed)
    assert "hunter2" not in process.stdout + process.stderr
    assert not list(tmp_path.iterdir())


def options_under(command: Any) -> set[str]:
    """All options of a command and of those below it."""
    own = {
        option
        for parameter in command.get_params(click.Context(command))
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    return own.union(*(options_under(below) for below in getattr(command, "commands", {}).values()))


def test_every_option_that_a_message_or_the_documentation_names_exists() -> None:
    others = """--help --upgrade --index-url --install --logdir --nproc-per-node --nnodes --signal
        --rdzv-backend --rdzv-endpoint --memory --build-arg --ipc --no-deps --rm --runtime --target
        --user --config --dataset --isolation --storage-driver --pull-never --variant --include"""
    known = options_under(app) | {*others.split()}
    root = Path(__file__).parents[2]
    texts = [root / "README.md", *(root / "docs").glob("*.md"), *(root / "autotune").rglob("*.py")]
    foreign = "interop|report/(page|charts)"  # options of other programs, and names of colors
    texts = [text for text in texts if not re.search(foreign, str(text.relative_to(root)))]
    named = {
        name
        for text in texts
        for name in re.findall(r"(?<![-\w])--[a-z][a-z-]*[a-z]", text.read_text())
    }
    assert len(named) > 40
    assert named - known == set()


def test_closed_streams_change_no_status_and_give_their_numbers_to_no_file() -> None:
    code = (
        "import os, sys; from autotune.cli import app as cli; cli.app.main = lambda *_, **__: "
        "print(os.open('/', 0)); cli.main()"
    )
    command = [sys.executable, "-c", code]
    closed = subprocess.run(
        ["sh", "-c", 'exec "$@" 0<&- 2>&-', "sh", *command], stdout=subprocess.PIPE, check=True
    )
    assert int(closed.stdout) > 2
    absent = [sys.executable, "-m", "autotune", "explain", "/no/such/plan.yaml"]
    assert (
        subprocess.run(
            ["sh", "-c", 'exec "$@" 0<&- >&- 2>&-', "sh", *absent], check=False
        ).returncode
        == 2
    )


def test_an_interruption_says_so_and_has_a_status_of_its_own() -> None:
    code = (
        "import autotune.cli.app as cli\n"
        "def interrupt(): raise KeyboardInterrupt\n"
        "cli.app.commands['doctor'].callback = lambda **_: interrupt()\n"
        "cli.sys.argv = ['autotune', 'doctor']; cli.main()"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.returncode == 130
    assert process.stderr.startswith("error: interrupted\nhint: ")
