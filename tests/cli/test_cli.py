"""The command line: light help, errors and statuses, what it shows, streams, limits of memory."""

import json
import subprocess
import sys

import click
import pytest
from PIL import Image

from autotune.cli import app as cli
from autotune.cli.app import app
from autotune.cli.output import Progress
from tests.conftest import autotune_here


def python(code, *words):
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_help_imports_no_heavy_library():
    libraries = "pydantic", "rich", "torch", "numpy", "diffusers", "optuna", "yaml"
    told = f"print([name for name in {libraries} if name in sys.modules], file=sys.stderr)"
    code = f"import atexit, sys; from autotune.cli.app import main; atexit.register(lambda: {told})"
    assert python(f"{code}; main()", "--help").stderr.strip() == "[]"


def test_interruption_has_its_own_status(capfd, monkeypatch):
    def interrupt(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(app.commands["doctor"], "callback", interrupt)
    process = autotune_here(capfd, "doctor")
    assert process.returncode == 130
    assert process.stderr.startswith("error: interrupted\nhint: ")


@pytest.mark.parametrize("before", ["", "--progress json", "--quiet --progress=none"])
def test_predictions_import_less_however_loud(monkeypatch, before):
    asked = []
    words = [*before.split(), "plan", "--steps", "none", "--hardware", "nvidia-a40"]
    monkeypatch.setattr(cli, "prepare_process", lambda **given: asked.append(given))
    monkeypatch.setattr(sys, "argv", ["autotune", *words])
    with pytest.raises(SystemExit):
        cli.main()
    assert asked == [{"only_predicts": True}]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("check nowhere.yaml", "make one with `autotune plan --model MODEL -o plan.yaml`"),
        ("estimate --model qwen-image --bach 2", "autotune estimate --help"),
        ("profiles prune --no-such", "autotune profiles prune --help"),
    ],
)
def test_json_errors_for_json_scripts(capfd, words, hint):
    process = autotune_here(capfd, *words.split(), "--json", "--progress", "none")
    told = json.loads(process.stdout)
    assert told.keys() == {"schema_version", "error", "hint", "exit_status"}
    assert (told["hint"], told["exit_status"]) == (hint, process.returncode)
    assert told["error"] in process.stderr
    assert not autotune_here(capfd, *words.replace("--json", "").split()).stdout


@pytest.mark.parametrize(
    "typed",
    [
        "plan --model qwen-image --storage postgresql+psycopg://host/db?password=hunter2",
        "weights inspect https://hub.example/a.safetensors?token=hunter2",
        "weights inspect me:hunter2@hub.example",
        "profiles push team https://me:hunter2@host",
        "--verbose profiles pull https://me:hunter2@host/x",
    ],
)
def test_no_message_prints_a_password(capfd, monkeypatch, tmp_path, typed):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Progress, "is_verbose", False)
    process = autotune_here(capfd, *typed.split())
    assert process.returncode in (1, 2, 3)
    assert ("Traceback" in process.stderr) == ("--verbose" in typed)
    assert "hunter2" not in process.stdout + process.stderr
    assert not list(tmp_path.iterdir())


def test_closed_streams_change_no_status():
    code = (
        "import os, sys; from autotune.cli import app as cli; cli.app.main = lambda *_, **__: "
        "print(os.open('/', 0)); cli.main()"
    )
    command = ["sh", "-c", 'exec "$@" 0<&- 2>&-', "sh", sys.executable, "-c", code]
    closed = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    assert int(closed.stdout) > 2
    words = sys.executable, "-m", "autotune", "explain", "/no/such/plan.yaml"
    absent = ["sh", "-c", 'exec "$@" 0<&- >&- 2>&-', "sh", *words]
    assert subprocess.run(absent, check=False).returncode == 2


LIMITED = """
import resource
import psutil
import autotune
from autotune.cli.app import main

autotune.check_data
hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
resource.setrlimit(resource.RLIMIT_DATA, (psutil.Process().memory_info().data + 60 * 2**20, hard))
main()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no limit counts what is mapped")
def test_short_memory_is_no_broken_picture(tmp_path):
    picture = Image.new("RGB", (7_900, 8_000))  # 190 MB when it is decoded
    picture.save(tmp_path / "large.png", compress_level=1)
    (tmp_path / "large.txt").write_text("a dog")
    ended = python(LIMITED, "data", "check", str(tmp_path))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert ended.stderr.startswith("error: memory ran out"), ended.stderr
    assert "\nhint: close other programs that use memory, or raise the limit" in ended.stderr


def parameters(command, path=""):
    own = [(path, one) for one in command.get_params(click.Context(command))]
    below = getattr(command, "commands", {}).items()
    return own + [one for name, each in below for one in parameters(each, f"{path} {name}")]


def asked(monkeypatch, words):
    name, *rest = words.split()
    command = app.commands[name]
    got = {}
    monkeypatch.setattr(command, "callback", lambda **values: got.update(values["asked"]))
    command.main(rest, standalone_mode=False)
    return got


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("plan", {}),
        ("plan --steps 9 -o p.yaml --no-flip", {"num_steps": 9, "path": "p.yaml", "flip": False}),
        ("plan --data a --data b --clips 3", {"data": ("a", "b"), "clips": 3}),
        ("plan --pin attention=native", {"pins": (("attention", "native"),)}),
        ("plan --timestep-shift by_resolution", {"timestep_shift": "by_resolution"}),
        ("plan --no-profiles --guidance 3", {"use_records": False, "guidance_scale": 3.0}),
        ("train p.yaml --output o --resume", {"plan": "p.yaml", "output": "o", "resume": True}),
        ("estimate --model m --checkpointing 7", {"model": "m", "checkpointed_blocks": 7}),
        ("compare --model m --within 90min", {"model": "m", "max_hours": "90min"}),
        ("plan --optimizer-option b=(0.9,1)", {"optimizer_options": (("b", (0.9, 1.0)),)}),
    ],
)
def test_given_values_and_no_defaults(monkeypatch, words, values):
    assert asked(monkeypatch, words) == values


def test_every_command_prints_json_if_asked():
    options = {}
    for path, one in parameters(app):
        options.setdefault(path.strip(), set()).update(one.opts)
    groups = {"", "data", "profiles", "weights"}
    assert {path for path, names in options.items() if "--json" not in names} == groups


def test_storage_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("AUTOTUNE_STORAGE", "sqlite://")
    assert asked(monkeypatch, "plan") == {"storage": "sqlite://"}


@pytest.mark.parametrize(
    "words",
    [
        ["check", "\udcff.yaml"],
        ["estimate", "--hardware", "4090", "--model", "\ud83d"],
        ["estimate", "--hardware", "4090", "--model", "sdxl", "--rank", "9" * 30],
        ["estimate", "--hardware", "4090", "--model", "sdxl", "--resolution", "9" * 30],
        ["estimate", "--hardware", "4090", "--model", "sdxl", "--steps", "9" * 30],
        ["check", "a:" * 2000],
    ],
)
def test_any_argument_is_no_bug(capfd, words):
    process = autotune_here(capfd, *words)
    assert process.returncode in (1, 2)
    assert "bug in autotune" not in process.stderr
