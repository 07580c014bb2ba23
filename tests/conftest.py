"""What several parts share: caches of their own, and one real journey made by the commands as a
user runs them."""

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest
from filelock import FileLock

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # tiny tensors gain nothing from threads; children inherit this
signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a shell starts background jobs with SIGINT ignored

from autotune.plan.file import read_plan
from autotune.plan.plan import TrainingPlan
from autotune.system.process import silence_libraries

silence_libraries()
hypothesis.settings.register_profile(
    "same everywhere", derandomize=True, deadline=None, max_examples=50
)
hypothesis.settings.register_profile(
    "drawn anew", deadline=None, print_blob=True
)  # `make test-all` looks further
hypothesis.settings.load_profile("same everywhere")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Of a test that is marked `quick(value, ...)`, what has none of these values among its
    parameters is slow.

    A value that is a tuple is several, all of which have to be there.
    """
    for item in items:
        for marker in item.iter_markers("quick"):
            has = {_called(value) for value in item.callspec.params.values()}
            asked = [each if isinstance(each, tuple) else (each,) for each in marker.args]
            if not any({_called(value) for value in each} <= has for each in asked):
                item.add_marker("slow")


def _called(value: object) -> str:
    return str(getattr(value, "name", getattr(value, "__name__", value)))


@pytest.fixture(scope="session", autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("XDG_DATA_HOME", str(folder / "data"))
        patch.setenv("COLUMNS", "80")
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(autouse=True)
def _imports_are_no_garbage() -> None:
    """Runs and trials collect garbage between phases, and look at all that lives: half a million
    objects of imports."""
    if len(sys.modules) > _num_frozen_modules[0] + 200:
        gc.collect()
        gc.freeze()
        _num_frozen_modules[0] = len(sys.modules)


_num_frozen_modules = [0]
"""How many modules were there at the last freeze."""


def autotune(*arguments: object, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run the command as a user would, in a process that imports everything anew; see also
    `tests.forked`."""
    return subprocess.run(
        [sys.executable, "-m", "autotune", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
        env=os.environ.copy(),
    )


def autotune_here(
    capfd: pytest.CaptureFixture[str], *arguments: object
) -> subprocess.CompletedProcess[str]:
    """The command in this process: what it prints and exits with, without paying for the imports
    again."""
    from autotune.cli import app

    capfd.readouterr()
    prepare = app.prepare_process
    with pytest.MonkeyPatch.context() as patch:
        # Other tests need what it would hide.
        patch.setattr(app, "prepare_process", lambda **_: prepare())
        patch.setattr(sys, "argv", ["autotune", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            app.main()
    code = ended.value.code
    out, err = capfd.readouterr()
    return subprocess.CompletedProcess(sys.argv, code if isinstance(code, int) else 0, out, err)


@dataclass(frozen=True)
class Journey:
    """What `autotune demo` left behind, and what it printed."""

    folder: Path
    process: subprocess.CompletedProcess[str]

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def images(self) -> Path:
        return self.folder / "images"

    @property
    def plan_file(self) -> Path:
        return self.folder / "plan.yaml"

    @property
    def plan(self) -> TrainingPlan:
        return read_plan(self.plan_file)

    @property
    def result(self) -> Path:
        return self.folder / "result"


@pytest.fixture(scope="session")
def journey(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Journey:
    """The demo, run as a process once for all test workers."""
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "journey"
    folder.mkdir(exist_ok=True)
    told = folder / "process.json"
    with FileLock(folder / "lock"):
        if not told.exists():
            with pytest.MonkeyPatch.context() as patch:  # each worker has a store of its own
                patch.setenv("XDG_DATA_HOME", str(folder / "data"))
                command = "demo", "--no-profiles", "--output", folder / "demo"
                done = autotune(*command, timeout=1500)  # it takes as long on a busy machine
                told.write_text(json.dumps(vars(done)))
    return Journey(folder / "demo", subprocess.CompletedProcess(**json.loads(told.read_text())))
