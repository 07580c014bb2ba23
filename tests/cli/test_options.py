"""Options are the fields of requests: what was given arrives under their names."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from typing import Any

import click
import pytest

from autotune.cli.app import app
from tests.conftest import autotune_here


def parameters(command: Any, path: str = "") -> list[tuple[str, click.Parameter]]:
    """All options and arguments of a command and of those below it, with the commands' names."""
    own = [(path, one) for one in command.get_params(click.Context(command))]
    below = getattr(command, "commands", {}).items()
    return own + [one for name, each in below for one in parameters(each, f"{path} {name}")]


def asked(monkeypatch: pytest.MonkeyPatch, words: str) -> dict[str, Any]:
    name, *rest = words.split()
    command = app.commands[name]
    got: dict[str, Any] = {}
    monkeypatch.setattr(command, "callback", lambda **values: got.update(values["asked"]))
    command.main(rest, standalone_mode=False)
    return got


def test_no_help_is_cut_or_broken():
    def helps(command: Any, name: str) -> list[str]:
        context = click.Context(command, info_name=name, terminal_width=80)
        below = getattr(command, "commands", {}).items()
        own = command.get_help(context).splitlines()
        return own + [line for word, one in below for line in helps(one, f"{name} {word}")]

    lines = helps(app, "autotune")
    assert [line for line in lines if len(line) > 80 or re.search(r"\w-$", line)] == []


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
    """`explain` and the like print reasons; none but groups has no answer."""
    options: dict[str, set[str]] = {}
    for path, one in parameters(app):
        options.setdefault(path.strip(), set()).update(one.opts)
    groups = {"", "data", "profiles", "weights"}
    assert {path for path, names in options.items() if "--json" not in names} == groups


def test_storage_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("AUTOTUNE_STORAGE", "sqlite://")
    assert asked(monkeypatch, "plan") == {"storage": "sqlite://"}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("plan --model x --rank 0", "'--rank': 0 is not in the range 1<=x<=4096."),
        ("plan --model x --learning-rate nan", "'--learning-rate': input should be a finite"),
        ("plan --model x --steps 7 --epochs 2", "'--epochs': epochs take the place of steps"),
        ("plan --model x --validation 0%", "'--validation': a share of the images"),
        ("plan --model x --blocks 3-", "'--blocks': string should match"),
        ("plan --model x --pin attention", "'--pin': 'attention' is not NAME=VALUE"),
        ("compare --rank 3", "Missing option '--model'"),
        ("train p --train_batch_size 2", "Here it is --batch-size"),
        ("train p --keep_last 2", "Options have dashes: --keep-last."),
    ],
)
def test_errors_name_the_option(capfd, words, error):
    process = autotune_here(capfd, *words.split())
    assert process.returncode == 2
    assert error in process.stderr


def test_every_field_has_an_option():
    commands = {path: [] for path, _ in parameters(app)}
    for path, one in parameters(app):
        assert one.help, one
        commands[path] += [*one.opts, *one.secondary_opts]
    assert all(len(names) == len(set(names)) for names in commands.values())


@pytest.mark.parametrize(
    ("shell", "script"),
    [
        ("bash", "{source}; COMP_WORDS=(autotune plan --qua); COMP_CWORD=2; "
         "_autotune_completion autotune; echo ${{COMPREPLY[*]}}"),
        ("zsh", "autoload -U compinit; compinit -u -D; {source}; echo $_comps[autotune]"),
    ],
)  # fmt: skip
def test_shells_complete_options_and_values(tmp_path, shell, script):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    command = tmp_path / "autotune"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m autotune "$@"\n')
    command.chmod(0o755)
    source = f'eval "$(_AUTOTUNE_COMPLETE={shell}_source autotune)"'
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        [shell, "-c", script.format(source=source)],
        env={**os.environ, "PATH": path, "HOME": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() in ("--quality", "_autotune_completion"), done.stderr
