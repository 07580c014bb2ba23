"""Caches of the tests' own, and one journey made by the commands as a user runs them."""

import gc
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest
from filelock import FileLock

# Tiny tensors gain nothing from threads; children inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts background jobs with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

from autotune.plan.file import load_plan
from autotune.system.process import silence_libraries
from tests.forked import start_server

silence_libraries()
same = {"derandomize": True, "deadline": None}
hypothesis.settings.register_profile("same everywhere", max_examples=25, **same)
hypothesis.settings.register_profile("drawn anew", deadline=None, print_blob=True)
hypothesis.settings.load_profile("same everywhere")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark as slow what has none of the values (or tuples of them) of its `quick(value, ...)`."""
    for item in items:
        for marker in item.iter_markers("quick"):
            has = {_called(value) for value in item.callspec.params.values()}
            asked = [each if isinstance(each, tuple) else (each,) for each in marker.args]
            if not any({_called(value) for value in each} <= has for each in asked):
                item.add_marker("slow")


def _called(value):
    return str(getattr(value, "name", getattr(value, "__name__", value)))


@pytest.fixture(scope="session", autouse=True)
def _own_caches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("XDG_DATA_HOME", str(folder / "data"))
        patch.setenv("COLUMNS", "80")
        patch.setenv("HF_HUB_OFFLINE", "1")
        start_server()
        yield


@pytest.fixture(autouse=True)
def _imports_are_no_garbage():
    """Runs and trials collect garbage between phases: imports are half a million objects."""
    if len(sys.modules) > _num_frozen_modules[0] + 200:
        gc.collect()
        gc.freeze()
        _num_frozen_modules[0] = len(sys.modules)


_num_frozen_modules = [0]  # how many there were at the last freeze


def autotune(*arguments, timeout=600, folder=None):
    """Run the command in a process that imports everything anew; see also `tests.forked`."""
    places = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
    return subprocess.run(
        [sys.executable, "-P", "-m", "autotune", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))},
    )


def autotune_here(capfd, *arguments):
    """Run the command in this process, without paying for the imports again."""
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
    """What `plan` and `train` left behind in a folder, and what they printed."""

    folder: Path
    printed: str

    @property
    def plan_file(self):
        return self.folder / "plan.yaml"

    @property
    def plan(self):
        return load_plan(self.plan_file)

    @property
    def hostile(self):
        return self.folder / "hostile"

    @property
    def result(self):
        return self.folder / "result"


@pytest.fixture(scope="session")
def journey(tmp_path_factory, worker_id):
    """Plan and train a small Qwen-Image in processes, once for all test workers, in a folder of
    modules that end whatever imports them."""
    from tests.small import write_small

    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "journey"
    folder.mkdir(exist_ok=True)
    found = Journey(folder, str(folder / "printed"))
    with FileLock(folder / "lock"):
        if not Path(found.printed).exists():
            asked = [*write_small("qwen-image", folder), "--no-profiles", "-o", found.plan_file]
            options = ["--steps", 60, "--max-trials", 2, "--quality", "exact"]
            options += ["--run-output", found.result]
            found.hostile.mkdir(exist_ok=True)
            for name in ("autotune", *sys.stdlib_module_names):
                (found.hostile / f"{name}.py").write_text("import os; os._exit(7)")
            commands = ("plan", *asked, *options), ("train", found.plan_file)
            processes = [autotune(*words, folder=found.hostile) for words in commands]
            printed = "".join(process.stdout + process.stderr for process in processes)
            assert [process.returncode for process in processes] == [0, 0], printed
            Path(found.printed).write_text(printed)
    return Journey(folder, Path(found.printed).read_text())
