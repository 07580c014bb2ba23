"""The command line's surface: light to import, quick to help, the same options tomorrow."""

import dataclasses
import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from autotune.api.amounts import memory_bytes
from autotune.cli.app import _fail, app
from autotune.cli.options import JobOptions, option_of
from autotune.cli.output import Progress
from autotune.cli.terminal import show_events
from autotune.errors import InvalidInput
from autotune.runtime.process import limit_thread_spinning
from autotune.schema.events import Notice
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


@pytest.mark.parametrize("own", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}])
def test_threads_wait_briefly_unless_the_user_says_how(own: dict[str, str]) -> None:
    environment = dict(own)
    limit_thread_spinning(environment)
    assert environment == own
    environment.clear()
    limit_thread_spinning(environment)
    assert int(environment["GOMP_SPINCOUNT"]) < 20_000


@pytest.mark.parametrize(
    ("command", "max_seconds"),
    [(("-c", "import autotune"), 0.2), (("-m", "autotune", "--help"), 0.5)],
)
def test_importing_and_helping_take_little_time_of_the_cpu(
    command: tuple[str, ...], max_seconds: float
) -> None:
    """Beyond what Python itself takes to start, and far from what torch takes, on a busy
    machine, too.
    """
    assert (
        min(cpu_seconds(*command) for _ in range(5)) - min(cpu_seconds("-c", "") for _ in range(5))
        < max_seconds
    )


def cpu_seconds(*arguments: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    "command",
    [
        "doctor",
        "probe",
        "models",
        "plan",
        "check",
        "explain",
        "train",
        "demo",
        "data check",
        "weights convert",
    ],
)
def test_every_command_explains_itself_in_80_columns(
    capfd: pytest.CaptureFixture[str], command: str
) -> None:
    process = autotune_here(capfd, *command.split(), "--help")
    assert process.returncode == 0
    assert "Usage: " in process.stdout
    assert max(map(len, process.stdout.splitlines())) <= 80


@pytest.mark.parametrize("group", [[], ["data"], ["profiles"], ["weights"]])
def test_lists_of_commands_are_not_cut_off(
    capfd: pytest.CaptureFixture[str], group: list[str]
) -> None:
    listing = autotune_here(capfd, *group, "--help").stdout
    assert "..." not in listing.partition("Commands:")[2]
    assert max(map(len, listing.splitlines())) <= 80


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
    assert "hint: " in process.stderr
    assert ("Traceback" in process.stderr) == ("--verbose" in typed)
    assert "hunter2" not in process.stdout + process.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_an_error_that_cannot_be_written_as_json_is_still_told() -> None:
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "autotune", "explain", "nowhere.yaml", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert process.returncode == 2
    assert process.stderr.startswith("error: there is no plan")
    assert "Traceback" not in process.stderr


WRONG = {
    "caption_dropout": "2",
    "num_steps": "0",
    "num_train_epochs": "0",
    "learning_rate": "7",
    "lr_scheduler": "polynomial",
    "lr_warmup_steps": "-1",
    "timestep_sampling": "sometimes",
    "timestep_shift": "-1",
    "guidance_scale": "nan",
    "preview_every": "-1",
    "validation": "100%",
    "validation_every": "-1",
    "checkpointing_steps": "-1",
    "seed": "-1",
    "save_dtype": "fp8",
    "adapter_format": "lycoris",
    "clips": "0",
    "shuffle_tags": "-1",
    "keep_tags": "-1",
    "crop": "left",
    "loss_mask": "perhaps",
    "mask_floor": "2",
    "cache": "tape",
    "weighting_scheme": "heavy",
    "expert": "Middle!",
    "checkpointing_epochs": "0",
    "checkpoints_total_limit": "0",
    "checkpoints_keep_every": "-1",
}
ANY_TEXT = {
    "control",
    "caption",
    "trigger",
    "preview_prompts",
    "base",
    "from_adapter",
    "vae",
    "text_encoders",
}
FLAGS = {"flip", "keep_best"}


def test_every_option_of_a_job_has_a_wrong_value_here_or_takes_any_text() -> None:
    assert {field.name for field in dataclasses.fields(JobOptions)} == ANY_TEXT | FLAGS | set(WRONG)


@pytest.mark.parametrize("field", WRONG)
def test_a_value_that_no_job_can_have_is_refused_under_the_name_of_its_option(field: str) -> None:
    option = option_of(field)
    run = CliRunner().invoke(app, ["plan", "--model", "qwen-image", option, WRONG[field]])
    assert run.exit_code == 2
    assert re.search(rf"Invalid value for '?{option}'?:", run.output)


def test_options_of_a_job_go_by_their_declared_names() -> None:
    names = [
        option_of(field)
        for field in ("num_steps", "num_train_epochs", "preview_prompts", "guidance_scale")
    ]
    assert names == ["--steps", "--epochs", "--preview-prompt", "--guidance"]


def options_under(command: Any) -> set[str]:
    """All options of a command and of those below it."""
    own = {
        option
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    return own.union(*(options_under(below) for below in getattr(command, "commands", {}).values()))


def test_every_option_that_a_message_or_the_documentation_names_exists() -> None:
    others = {
        "--help",
        "--upgrade",
        "--index-url",
        "--install",
        "--logdir",
    }  # of pip, wsl, tensorboard
    others |= {"--nproc-per-node", "--nnodes", "--signal"}  # of torchrun, sbatch
    others |= {
        "--memory",
        "--build-arg",
        "--ipc",
        "--no-deps",
        "--rm",
        "--runtime",
        "--target",
        "--user",
    }  # of docker
    others |= {
        "--isolation",
        "--storage-driver",
        "--pull-never",
        "--variant",
        "--include",
    }  # of buildah, debootstrap
    known = options_under(typer.main.get_command(app)) | others
    root = Path(__file__).parents[2]
    texts = [root / "README.md", *(root / "docs").glob("*.md"), *(root / "autotune").rglob("*.py")]
    foreign = "trainers|jobs|page/charts"  # options of other programs, and names of colors
    texts = [text for text in texts if not re.search(foreign, str(text.relative_to(root)))]
    named = {
        name
        for text in texts
        for name in re.findall(r"(?<![-\w])--[a-z][a-z-]*[a-z]", text.read_text())
    }
    assert len(named) > 40
    assert named - known == set()


@pytest.mark.parametrize(
    "text", ["12", "", "GiB", "-1GiB", "12 potatoes", "1e3GiB", "12GiB!", "9" * 400 + "GiB"]
)
def test_an_amount_of_memory_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="not an amount of memory"):
        memory_bytes(text)


@pytest.mark.parametrize(
    "wrong", [("--price", "inf"), ("--alpha", "inf"), ("--rank", "99999"), ("--batch", "9" * 30)]
)
def test_numbers_beyond_any_use_are_refused_before_anything_is_read(
    capfd: pytest.CaptureFixture[str], wrong: tuple[str, str]
) -> None:
    process = autotune_here(capfd, "plan", "--model", "no-such-model", *wrong)
    assert process.returncode == 2
    assert wrong[0] in process.stderr
    assert "no-such-model" not in process.stderr


def test_a_file_that_cannot_be_written_is_named_before_the_search(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wanted = tmp_path / "file" / "plan.yaml"
    wanted.parent.write_text("no folder")
    process = autotune_here(
        capfd, "plan", "--model", "qwen-image", "--hardware", "nvidia-rtx-4090", "-o", str(wanted)
    )
    assert process.returncode == 1
    assert process.stderr.startswith(f"error: {wanted.parent}: File exists\nhint: check the path")


@pytest.mark.parametrize(
    "error",
    [
        "MemoryError()",
        "ImportError('libx.so: failed to map segment from shared object')",
        "RuntimeError('Failed to import a module') from MemoryError()",
        'RuntimeError("can\'t start new thread")',
    ],
)
def test_memory_that_runs_out_before_a_command_has_begun_is_no_bug(error: str) -> None:
    code = (
        "import sys, autotune.cli.app as cli\ndef work(**options): sys.meta_path.clear(); "
        "raise "
        f"{error}\n"
    )
    code += "cli.app = work; cli.main()"  # and nothing can be imported any more
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stderr.startswith("error: memory ran out")) == (1, True)


def test_closed_streams_change_no_status_and_give_their_numbers_to_no_file() -> None:
    code = (
        "import os, sys; from autotune.cli import app as cli; cli.app = lambda **_: "
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
        "import autotune.cli.app as cli, typer; app = typer.Typer()\n"
        "@app.command()\ndef work(): raise KeyboardInterrupt\n"
        "cli.app = app; cli.main()"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.returncode == 130
    assert process.stderr.startswith("error: interrupted\nhint: ")


def test_an_interrupted_demo_does_not_advise_what_its_folder_refuses() -> None:
    code = (
        "import sys, autotune\n"
        "def stop(*_): raise KeyboardInterrupt\n"
        "autotune.warm_up, autotune.make_demo = (lambda: None), stop\n"
        "sys.argv = ['autotune', 'demo', '--output', 'here']\n"
        "from autotune.cli import main; main()"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.returncode == 130
    assert "hint: a demo always starts over: remove here, or name another folder" in process.stderr


def test_the_home_of_nobody_is_a_folder_that_is_not_there(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert autotune_here(capfd, "profiles", "list", "--store", "~nobody-here/x").returncode == 0
    process = autotune_here(
        capfd, "estimate", "--model", "~nobody-here/x", "--hardware", "nvidia-rtx-4090"
    )
    assert process.returncode == 2
    assert "neither a folder nor a known model" in process.stderr


@pytest.mark.parametrize(
    "words",
    [
        "profiles push team https://me:hunter2@host",
        "plan postgresql://me:p@hunter2@host/db",
        "--postgresql://me:hunter2@host/db",
        "explain https:/me:hunter2@host/plan",
    ],
)
def test_a_password_that_was_typed_in_a_wrong_place_is_not_repeated(
    capfd: pytest.CaptureFixture[str], words: str
) -> None:
    """Whoever takes what was typed for something else has no idea that it is a password."""
    process = autotune_here(capfd, *words.split())
    assert process.returncode == 2
    assert "hunter2" not in process.stderr
    assert "***@host" in process.stderr


def test_names_with_brackets_are_printed_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    from autotune.cli.terminal import err, out

    for console in (out, err):
        console.print("model  /models/[/red] [bold]v2")
    assert [text.strip() for text in capfd.readouterr()] == ["model  /models/[/red] [bold]v2"] * 2


def test_progress_can_be_read_by_programs_or_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    process = autotune_here(capfd, "--progress", "json", "probe", "--quick", "--json")
    first, *_ = (json.loads(line) for line in process.stderr.splitlines())
    assert first == {"event": "StatusChanged", "text": "reading the machine"}
    assert json.loads(process.stdout)["device"]["kind"]
    assert autotune_here(capfd, "--progress", "none", "probe", "--quick").stderr == ""
    assert autotune_here(capfd, "--progress", "loud", "models").returncode == 2


def test_errors_hints_and_warnings_are_wrapped_for_a_terminal_and_whole_in_a_log(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    message, hint = "what happened and why it did " * 5, "what to do about that " * 8
    with pytest.raises(SystemExit):
        _fail(message, hint, 1)
    assert len(capfd.readouterr().err.splitlines()) == 2
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(SystemExit):
        _fail(message, hint, 1)
    with show_events() as show:
        show(Notice(text=message, level="warning"))
    lines = re.sub(r"\x1b\[[?\d]*\w", "", capfd.readouterr().err).splitlines()
    assert len(lines) > 6
    assert max(map(len, lines)) <= 80
