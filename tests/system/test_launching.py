"""The processes of a run: started here, or by torchrun as its variables say."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from autotune.errors import InvalidInput
from autotune.machine.probe import MEASURE
from autotune.system.process import Launch, adopt_launch, launch
from autotune.train.watchdog import COMMAND


def launched(run_id: str = "none", **changes: object) -> dict[str, str]:
    """The environment of the second of two processes of torchrun, on the second of two nodes."""
    numbers = {"RANK": 1, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
    place = {"MASTER_ADDR": "node-1", "MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": run_id}
    return {name: str(value) for name, value in {**numbers, **place, **changes}.items()}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (launched(), Launch(1, 0, 2, 1, "node-1:29500")),
        (launched("autotune-7"), Launch(1, 0, 2, 1, "node-1:29500", is_own=True)),
        (launched(RANK=0, WORLD_SIZE=1, MASTER_ADDR="a"), Launch(0, 0, 1, 1, "a:29500")),
        ({}, None),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, None),
    ],
)
def test_torchruns_variables_are_understood(environment, expected):
    assert Launch.read(environment) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "1"},
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        *(launched(RANK=rank) for rank in (2, -1, "x")),
        *(launched(LOCAL_RANK=1), launched(LOCAL_WORLD_SIZE=3)),
        *(launched(MASTER_PORT=70000), launched(MASTER_ADDR="")),
    ],
)
def test_a_contradiction_is_refused(environment):
    with pytest.raises(InvalidInput, match="name no process among others"):
        Launch.read(environment)


def test_other_numbers_than_planned_are_refused(monkeypatch):
    monkeypatch.setattr("os.environ", launched(OMPI_COMM_WORLD_SIZE=7))
    for planned in (1, 3):
        with pytest.raises(InvalidInput, match=f"started 2 process.*plan is for {planned}"):
            adopt_launch(planned)
    assert adopt_launch(2) == Launch(1, 0, 2, 1, "node-1:29500")
    assert "OMPI_COMM_WORLD_SIZE" not in os.environ, "accelerate would believe it"


def ending(monkeypatch: pytest.MonkeyPatch, how: Exception | None, file: Path | None = None) -> int:
    def start(*arguments: str) -> None:
        if file:
            file.touch()
        if how:
            raise how

    monkeypatch.setattr(
        "torch.distributed.launcher.api.elastic_launch", lambda config, executable: start
    )
    folder = file.parent if file else Path("nowhere")
    return launch(2, ["train"], lambda: set(folder.glob("*")))


@pytest.mark.parametrize(
    ("code", "expected"), [(4, 4), (-signal.SIGKILL, 137), (-signal.SIGTERM, 143)]
)
def test_a_failed_process_gives_its_status(monkeypatch, code, expected):
    monkeypatch.setattr("os.environ", dict(os.environ))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file="")
    assert ending(monkeypatch, ChildFailedError("train", {0: failure})) == expected


def test_signal_preempts_if_checkpoint_was_written(tmp_path, monkeypatch):
    """torch kills processes that take too long to write one."""
    monkeypatch.setattr("os.environ", dict(os.environ))
    stopped, file = SignalException("stopped", signal.SIGTERM), tmp_path / "checkpoint"
    assert ending(monkeypatch, stopped, file) == 75
    assert ending(monkeypatch, stopped, file) == 143


@pytest.mark.parametrize("command", [MEASURE, COMMAND])
def test_no_child_imports_from_current_folder(tmp_path, command):
    *rooms, module = command[-1].split(".")
    installed, data = tmp_path / "installed", tmp_path / "data"
    for folder, code in ((installed, "import json, threading"), (data, "import os; os._exit(7)")):
        room = folder.joinpath(*rooms)
        room.mkdir(parents=True)
        for made in (room.parent / "__init__.py", room / "__init__.py"):
            made.touch()
        (room / f"{module}.py").write_text(code)
    (data / "json.py").write_text("import os; os._exit(7)")
    around = {**os.environ, "PYTHONPATH": str(installed)}
    assert subprocess.run(command, cwd=data, env=around, check=False).returncode == 0


FORKS = "p = fork_server_context().Process(target=print); p.start(); p.join(); exit(p.exitcode)"
LAUNCHES = "exit(launch(2, ['-c', 'import json, threading, torch'], set))"


@pytest.mark.slow
@pytest.mark.parametrize("code", [FORKS, LAUNCHES])
def test_runs_ignore_the_current_folder(tmp_path, code):
    for name in ("autotune", *sys.stdlib_module_names):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(7)")
    command = [sys.executable, "-P", "-c", f"from autotune.system.process import *; {code}"]
    assert subprocess.run(command, cwd=tmp_path, timeout=300, check=False).returncode == 0
