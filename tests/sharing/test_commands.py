"""The commands as users run them, in 80 columns, never printing a password."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from autotune.api.records import NoSuchFolder
from autotune.cli.app import app
from autotune.errors import AutotuneError, InvalidInput
from autotune.sharing.files import StoreUnreachable, translate_file_errors
from autotune.sharing.store import save_record, user_store
from tests.builders import GIB, candidate, trial
from tests.conftest import autotune_here
from tests.sharing.examples import TRIALS, machine, plan, record, several


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("autotune.api.records.read_machine", machine)


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, ["profiles", *map(str, arguments)])
    if not {"--json"} & set(arguments):
        assert [
            line for line in result.stdout.splitlines() if len(line) > 80 and "; in /" not in line
        ] == []
    return result


def test_a_record_goes_from_one_machine_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = machine()
    name = save_record(plan(here), here)
    missing = run("push", "team").exception
    assert isinstance(missing, NoSuchFolder)
    assert not (tmp_path / "team").exists(), "a slip of the pen makes no folder"
    assert "--create" in missing.hint
    assert run("push", "team", "--create").stdout.startswith(
        "new: 1, already there: 0, refused: 0; in team"
    )
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "bob"))
    assert run("list").stdout.startswith("no records yet")
    assert run("pull", "team").exit_code == 0
    assert name[:12] in run("list").stdout
    assert "new: 0" in run("pull", "team").stdout
    assert run("verify").stdout == "records: 1, bad: 0\n"


def test_list_says_why_a_record_counts_or_not() -> None:
    other = record(machine(torch="2.12.0"))
    poison = record(
        trials=(TRIALS[1], trial(candidate(quantization="torchao-int8"), 0.001, 21 * GIB))
    )
    user_store().add(record(), record(machine(driver="570")), other, poison)
    text = run("list", "--why").stdout
    assert "counts here" in text
    assert "counts here once verified: driver: 570 there, 580.95 here" in text
    assert "does not count here: torch version: 2.12 there, 2.13 here" in text
    assert "cannot be true: trial 2" in text
    rows = json.loads(run("list", "--why", "--json").stdout)
    assert {row["match"] for row in rows} == {"exact", "upgraded", "none", "impossible"}
    assert len(json.loads(run("list", "--json").stdout)) == 4


def test_verify_names_an_altered_record_and_exits_with_1() -> None:
    user_store().add(made := record())
    user_store().files.write(
        {f"{made.folder}/{made.name}.json": made.content.replace(b"580.95", b"580.96")}
    )
    result = run("verify")
    assert result.exit_code == 1
    assert f"{made.name[:12]} was altered" in result.stdout
    assert "left out, no sound records: 1" in run("list").stderr


def test_prune_says_what_goes_and_why() -> None:
    user_store().add(*several(2))
    assert "would delete: 1" in run("prune", "--dry-run").stdout
    assert "is superseded by" in run("prune").stdout
    assert len(user_store().entries()) == 1
    assert "deleted: 0" in run("prune").stdout
    (last,) = user_store().entries()
    assert run("prune", last.name[:8]).stdout == f"{last.name[:12]} was named\ndeleted: 1\n"


def test_a_mistyped_address_is_no_empty_success() -> None:
    for url in ("memory://nowhere", "no/such/folder"):
        error = run("pull", url).exception
        assert isinstance(error, InvalidInput)
        assert "no records at" in error.message


@pytest.mark.parametrize(
    "url",
    [
        "ftp://alice:hunter2@127.0.0.1:1/x",
        "nosuch://alice:hunter2@host/x",
        "nosuch://host/x?token=hunter2",
        "ftp://alice:p@hunter2@127.0.0.1:1/x",
        "nosuch://host/x#hunter2",
        "nosuch://host/x;token=hunter2",
        "https:/alice:hunter2@host/x",
        "alice:hunter2@host:x",
        "file://alice:hunter2@host/x",
    ],
)
def test_a_password_in_an_address_is_never_printed(url: str) -> None:
    result = run("push", url)
    assert isinstance(result.exception, AutotuneError)
    told = f"{result.exception.message} {result.exception.hint} {result.stdout} {result.stderr}"
    assert "hunter2" not in told
    assert not Path("alice:hunter2@host").exists()


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("git@example.com:team/profiles.git", "your clone"),
        ("s3:/bucket/path", "two slashes"),
        ("", "two slashes"),
    ],
)
def test_an_address_that_would_make_a_folder_of_its_name_here_is_refused(
    url: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    user_store().add(record())
    error = run("push", url).exception
    assert isinstance(error, InvalidInput)
    assert hint in error.hint
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_what_a_server_says_cannot_steer_the_terminal() -> None:
    with pytest.raises(StoreUnreachable) as caught, translate_file_errors("s3://team"):
        raise OSError("\x1b]0;owned\x07 \x1b[2J\u202e gone\r\n")
    assert caught.value.message == "cannot reach s3://team: OSError: ]0;owned [2J gone"


def test_errors_have_a_hint_and_a_status(capfd: pytest.CaptureFixture[str]) -> None:
    process = autotune_here(capfd, "profiles", "prune", "zzzz")
    assert process.returncode == 2
    assert "hint: `autotune profiles list`" in process.stderr


@pytest.mark.parametrize("command", ["push", "pull", "list", "prune", "verify"])
def test_every_command_explains_itself_in_80_columns(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Usage: " in result.stdout
