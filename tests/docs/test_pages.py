"""The guides say what the code says: commands parse, messages and variables exist, tables are
current.
"""

import ast
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from autotune.cli.app import app
from autotune.hardware.diagnosis import MIN_DRIVERS, torch_fix
from autotune.hardware.doctor_facts import Gpu
from autotune.schema.hardware import Versions
from tests.conftest import autotune_here
from tests.docs import compatibility

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
SYNTAX = re.compile(r"^ {4}(?:\$ )?(autotune .*)$")
RUN = ("autotune doctor", "autotune probe --list")
"""Documented commands that need neither data nor a model nor time, and so are run as they stand.
The real command line parses all others; `RUN_BY` says which tests run them, on small data of
their own."""
RUN_BY = {
    "audit": "trainers/test_audits.py",
    "check": "test_journey.py",
    "compare": "planning/test_comparison.py",
    "diff": "planning/test_commands.py",
    "doctor": "cli/test_start.py",
    "estimate": "test_planning_elsewhere.py",
    "export-config": "trainers/test_exporting.py",
    "import-config": "trainers/test_configured_plans.py",
    "models": "reporting/test_models.py",
    "plan": "planning/test_commands.py",
    "probe": "hardware/test_commands.py",
    **{f"profiles {name}": "sharing/test_commands.py"
       for name in ("diff", "export", "list", "prune", "pull", "push", "show", "verify")},
    # it uploads: test_publishing.py calls its function against a hub on this machine
    "publish": "",
    "report": "cli/test_start.py",
    "sample": "schema/test_schema_1.py",
    "train": "test_journey.py",
    "weights convert": "weights/test_convert.py",
    "weights inspect": "weights/test_inspection.py",
}  # fmt: skip
"""By command the file of tests that runs it."""
SHELL = re.compile(r"^ {4}(?:\$ )?(?:[A-Z]+=\S+ )*(?:[a-z]+=\$\()?([a-z][a-z0-9_-]*) (.*)")
"""A line of an example that may be a program's: its name, and its arguments."""
NOT_RUN = {
    "git": "needs a repository elsewhere; sharing/ has local ones",
    "pip": "installs; the hosted workflow installs the wheel into a clean environment",
    "torchrun": "starts processes; training/test_processes.py starts some by its variables",
    "make": "runs the tests, or the demo, which conftest.py runs",
    "buildah": "needs root; containers/check, which it runs, is run in the image by a workflow",
    "debootstrap": "needs root, and a mirror of Debian",
    "docker": "needs Docker; a workflow builds and checks the image, jobs/ reads the compose file",
    "sudo": "changes the machine",
    "tensorboard": (
        "a server of another project; training/test_metrics.py reads the curves as it does"
    ),
    "optuna-dashboard": "planning/test_dashboard.py starts its server on a study of its own",
    "python3": "sets up an environment; `make` does that before every test",
}
"""Other programs on the pages, and why no test runs them as they stand."""


def commands() -> list[tuple[str, str]]:
    """(page, command) of every line of an example that begins with autotune, continued lines
    joined.
    """
    found = []
    for page in PAGES:
        text = re.sub(r"\s*\\\n\s*", " ", page.read_text())
        found += [
            (page.name, match[1]) for line in text.splitlines() if (match := SYNTAX.match(line))
        ]
    return found


def words_of(line: str) -> list[str]:
    """The arguments, without what the page says about them after two spaces or a hash."""
    line = re.split(r"\s{2,}|\s[#|>]|\s&&", line)[0]
    return shlex.split(re.sub(r"\.\.\.|[`\[\]]", "", line))[1:]


def parse(words: list[str]) -> None:
    """Have the command line parse the words, without running anything. Raises its error of
    usage.
    """
    command: Any = typer.main.get_command(app)
    context = command.make_context("autotune", list(words))
    while hasattr(command, "commands"):
        rest = [*context._protected_args, *context.args]
        if not rest:
            return
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def test_there_are_commands() -> None:
    assert len(commands()) > 60


@pytest.mark.parametrize(("page", "line"), sorted(set(commands())))
def test_every_command_of_the_documentation_is_understood(page: str, line: str) -> None:
    if "," in line.split("  ", maxsplit=1)[0] or " PLAN|" in line:  # a list of commands, or a form
        pytest.skip("it is not one command")
    parse(words_of(line))


def subcommand(line: str) -> str:
    """`plan`, `profiles push`."""
    first, *rest = words_of(line)
    return f"{first} {rest[0]}" if first in ("data", "profiles", "weights") else first


def commands_of(file: Path) -> set[str]:
    """Texts that stand where a command does: arguments of calls, the first of a list or tuple, a
    key's first word.
    """
    found: set[object] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        parts = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])[:1]
        found |= {part.value for part in parts if isinstance(part, ast.Constant)}
        keys = node.keys if isinstance(node, ast.Dict) else []
        found |= {str(key.value).split(" ")[0] for key in keys if isinstance(key, ast.Constant)}
    return {str(each) for each in found}


def test_the_commands_that_tests_run_are_the_documented_ones() -> None:
    assert set(RUN_BY) == {subcommand(line) for _, line in commands()}, "name the tests that run it"


@pytest.mark.parametrize("command", sorted(name for name, file in RUN_BY.items() if file))
def test_every_documented_command_is_run_by_a_test(command: str) -> None:
    assert command.rsplit(maxsplit=1)[-1] in commands_of(ROOT / "tests" / RUN_BY[command])


def programs(text: str) -> set[str]:
    """What a page calls besides autotune: every known program, and whatever takes options."""
    text = re.sub(r"\s*\\\n\s*", " ", text)
    found = [match.groups() for line in text.splitlines() if (match := SHELL.match(line))]
    return {
        one for one, rest in found if one in NOT_RUN or re.match(r"(?:\S+ )*--?[a-z]", rest)
    } - {"autotune"}


def test_other_programs_on_the_pages_are_known_not_to_run() -> None:
    assert {name for page in PAGES for name in programs(page.read_text())} == set(NOT_RUN)
    assert programs("    DISK=/tmp newfs --quick /dev/x\n    out=$(unknown \\\n      -v)\n") == {
        "newfs",
        "unknown",
    }


@pytest.mark.parametrize("line", RUN)
def test_commands_that_need_nothing_run(capfd: pytest.CaptureFixture[str], line: str) -> None:
    assert any(command.startswith(line) for _, command in commands())
    assert autotune_here(capfd, *words_of(line)).returncode in (0, 1), (
        "the doctor exits with 1 if something blocks"
    )


@cache
def texts() -> list[str]:
    """Every text of the code; what an f-string fills in is a NUL."""
    found = []
    for file in (ROOT / "autotune").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(
                        part.value if isinstance(part, ast.Constant) else "\0"
                        for part in node.values
                    )
                )
    return found


MESSAGES = re.findall(r"^\| `(.+?)` \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_of_the_troubleshooting_page_is_one_of_the_code(message: str) -> None:
    pattern = re.compile(
        r"[^|]*?".join(re.escape(part.strip()) for part in message.split("…")), re.DOTALL
    )
    assert any(pattern.search(text) for text in texts()), (
        "the message has changed: change the page, too"
    )


def test_every_variable_that_the_code_reads_is_on_the_page_and_no_other() -> None:
    page = (DOCS / "environment.md").read_text()
    listed = set(re.findall(r"`(AUTOTUNE_[A-Z_]+)`", page))
    read = {name for text in texts() for name in re.findall(r"\bAUTOTUNE_[A-Z_]+\b", text)}
    assert listed == read
    written = {
        text
        for text in texts()
        if re.fullmatch(r"(TOKENIZERS|DIFFUSERS|TRANSFORMERS|TORCH|GLOO|OMP|GOMP)_[A-Z_]+", text)
    }
    told_elsewhere = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCHELASTIC_RUN_ID"}
    assert {name for name in written if f"`{name}`" not in page} <= told_elsewhere


DRIVERS = re.findall(
    r"^\| (.+?) \| (.+?) \| (cu\d+|cpu|update .*?) \|$",
    (DOCS / "install.md").read_text(),
    re.MULTILINE,
)


@pytest.mark.parametrize(("driver", "cards", "build"), DRIVERS)
def test_the_table_of_drivers_is_what_the_doctor_says(driver: str, cards: str, build: str) -> None:
    number = {
        "580 or newer": "580.10",
        "525 to 579": "550.54",
        "before 525": "470.82",
        "none": None,
    }[driver]
    (capability,) = {(12, 0) if "10.0 or newer" in cards else (7, 0) if "7.0" in cards else (8, 9)}
    gpus = () if number is None else (Gpu(index=0, name="a card", compute_capability=capability),)
    versions = Versions(python="3.11", driver=number)
    fix = torch_fix(versions, gpus)
    assert build in fix if build.startswith(("cu", "cpu")) else fix.startswith("update the driver")


def test_the_page_names_the_oldest_drivers() -> None:
    page = (DOCS / "install.md").read_text()
    assert len(DRIVERS) == 6
    assert f"driver {MIN_DRIVERS['13']} (CUDA 12: {MIN_DRIVERS['12']})" in page


def test_the_compatibility_matrix_is_current() -> None:
    assert compatibility.PAGE.read_text() == compatibility.markdown(), (
        "python -m tests.docs.compatibility"
    )


def test_every_page_is_linked() -> None:
    linked = {
        Path(target).name
        for page in PAGES
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())
    }
    assert {page.name for page in DOCS.glob("*.md")} - linked == set()


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), (page.name, target)
