"""The command line: light help, errors and statuses, what it shows, streams, limits of memory."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from autotune.cli import terminal
from autotune.cli.app import _with_loudness_first
from autotune.cli.output import Progress
from autotune.cli.terminal import EventDisplay, PlainConsole, show_events
from autotune.events import RunStarted, smoothed
from tests.cli.test_options import app, parameters
from tests.conftest import autotune_here
from tests.report.page.pages import FOLDER, golden_plan, steps_of


def python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_help_imports_no_heavy_library():
    libraries = "pydantic", "rich", "torch", "numpy", "diffusers", "optuna", "yaml"
    told = f"print([name for name in {libraries} if name in sys.modules], file=sys.stderr)"
    code = f"import atexit, sys; from autotune.cli.app import main; atexit.register(lambda: {told})"
    assert python(f"{code}; main()", "--help").stderr.strip() == "[]"


def test_interrupt_that_python_drops_comes_again():
    code = """
import signal, sys, time, weakref
from autotune.cli.app import _repeat_interrupt

sys.unraisablehook = _repeat_interrupt
tensor = type("Tensor", (), {})()
watched = weakref.ref(tensor, lambda _: signal.raise_signal(signal.SIGINT))
try:
    del tensor
    time.sleep(60)
except KeyboardInterrupt:
    print("heard")
"""
    process = python(code)
    assert (process.stdout, process.stderr) == ("heard\n", "")


def test_interruption_has_its_own_status(capfd, monkeypatch):
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app.commands["doctor"], "callback", interrupt)
    process = autotune_here(capfd, "doctor")
    assert process.returncode == 130
    assert process.stderr.startswith("error: interrupted\nhint: ")


@pytest.mark.parametrize("words", ["", "plan", "profiles", "no-such-command"])
def test_wrong_usage_exits_with_2(capfd, words):
    assert autotune_here(capfd, *words.split()).returncode == 2


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("check nowhere.yaml", "make one with `autotune plan --model MODEL -o plan.yaml`"),
        ("estimate --model qwen-image --bach 2", "autotune estimate --help"),
        ("profiles prune --no-such", "autotune profiles prune --help"),
    ],
)
def test_json_errors_for_json_scripts(capfd, words, hint):
    process = autotune_here(capfd, *words.split(), "--json")
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
    assert process.returncode in (2, 3)
    assert ("Traceback" in process.stderr) == ("--verbose" in typed)
    assert "hunter2" not in process.stdout + process.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("plan --quiet --model x", "--quiet plan --model x"),
        ("train p --progress json --verbose", "--progress json --verbose train p"),
        ("train p --progress=none", "--progress=none train p"),
        ("plan -- --quiet", "plan -- --quiet"),
    ],
)
def test_general_options_may_stand_anywhere(typed, meant):
    assert _with_loudness_first(typed.split()) == meant.split()


def test_training_shows_epoch_smoothed_loss_time_left_and_memory_against_the_promise(capfd):
    plan = golden_plan()
    steps = [step.changed(epoch=1 + (step.step - 1) // 30) for step in steps_of(100)]
    with show_events() as show:
        show(RunStarted(plan=plan))
        for step in steps:
            show(step)
    lines = capfd.readouterr().err.splitlines()
    assert any("output/report.html, from the first preview on" in line for line in lines)
    shown = [line for line in lines if re.match(r"\d+/100 ", line)]
    assert len(shown) == 10
    assert max(map(len, lines)) <= 80
    loss = smoothed([step.loss for step in steps[:50]])[-1]
    promise = plan.frozen.expected.run_memory_bytes / 2**30
    assert f"epoch 2  loss {loss:.4f}  1.000 s/step  9.00/{promise:.2f} GiB  50 s left" in shown[4]


def test_memory_beyond_promise_is_told_once(capfd):
    plan = golden_plan()
    more = plan.frozen.expected.run_memory_bytes + 1
    with show_events() as show:
        show(RunStarted(plan=plan))
        for step in steps_of(9):
            show(step.changed(memory_bytes=more if step.step > 3 else more - 1))
    told = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert ["after step 4" in line for line in told] == [True]


@pytest.mark.parametrize("columns", [80, 120])
def test_a_bar_shows_numbers_whole(monkeypatch, columns):
    console = PlainConsole(stderr=True)
    console.width, console.file = columns, io.StringIO()
    monkeypatch.setattr(terminal, "err", console)
    bar = terminal._bar()
    show = EventDisplay(bar)
    show.promised_bytes = 15 << 30
    show(steps_of(90, 1000)[-1].changed(epoch=12, gpu_utilization=0.97, gradient_spikes=30))
    console.print(bar.get_renderable())
    *_, shown = console.file.getvalue().splitlines()
    assert "90/1000" in shown
    assert "GiB" in shown
    assert len(shown) <= columns


def test_spikes_and_the_loss_on_held_out_images_are_shown(capfd):
    with show_events() as show:
        for step in steps_of(100):
            held_out = {"validation_loss": 0.24, "base_validation_loss": 0.25}
            measured = held_out if step.step == 37 else {}
            show(step.changed(gradient_spikes=step.step // 40, **measured))
    lines = capfd.readouterr().err.splitlines()
    told = "loss on held-out images after step 37: 0.2500 without the adapter, 0.2400 with it"
    assert f"{told} (-4.0%)" in lines
    shown = [line for line in lines if re.match(r"\d+/100 ", line)]
    assert [" spike" in line for line in shown] == [False] * 3 + [True] * 7
    assert "  1 spike  " in shown[3]
    assert "  2 spikes" in shown[9]


def test_quiet_says_nothing_but_the_answer(capfd):
    done = autotune_here(capfd, "explain", f"{FOLDER}/wall.yaml", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert "all reasons: --all" in done.stdout
    assert autotune_here(capfd, "--quiet", "models", "--verbose").returncode == 2


def test_named_options_exist():
    others = """--help --upgrade --index-url --install --logdir --nproc-per-node --nnodes --signal
        --rdzv-backend --rdzv-endpoint --memory --build-arg --ipc --no-deps --rm --runtime --target
        --network --lora --force-reinstall
        --user --config --dataset --isolation --storage-driver --pull-never --variant --include"""
    known = {name for _, one in parameters(app) for name in (*one.opts, *one.secondary_opts)}
    root = Path(__file__).parents[2]
    texts = [root / "README.md", *(root / "docs").glob("*.md"), *(root / "autotune").rglob("*.py")]
    foreign = "interop|report/(page|charts)"  # options of other programs, and names of colors
    texts = [text for text in texts if not re.search(foreign, str(text.relative_to(root)))]
    pattern = r"(?<![-\w])--[a-z][a-z-]*[a-z]"
    named = {name for text in texts for name in re.findall(pattern, text.read_text())}
    assert len(named) > 40
    assert named - known - {*others.split()} == set()


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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no limit counts what is mapped")
def test_short_memory_is_no_broken_picture(tmp_path):
    picture = Image.new("RGB", (7_900, 8_000))  # 190 MB when it is decoded
    picture.save(tmp_path / "large.png", compress_level=1)
    (tmp_path / "large.txt").write_text("a dog")
    ended = python(LIMITED, "data", "check", str(tmp_path))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert ended.stderr.startswith("error: memory ran out"), ended.stderr
    assert "\nhint: close other programs that use memory, or raise the limit" in ended.stderr


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
