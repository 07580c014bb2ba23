"""Commands that need no torch, and mistakes told before it is imported, all in one process."""

import json
import os
import pty
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from tests.api.test_report import PLAN, run_folder
from tests.share.examples import record
from tests.train.small import write_model_and_images

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "tests" / "interop" / "configs" / "ai_toolkit.yaml"
DONE, WRONG = yaml.safe_load((Path(__file__).parent / "commands.yaml").read_text()).values()
HEAVY = {"torch", "diffusers", "transformers", "peft", "torchao", "optuna", "scipy", "plotly"}


RUN = f"""
import contextlib, io, json, sys
from autotune.cli.app import main
told = []
for words in json.loads(sys.argv[1]):
    before, said = set(sys.modules), io.StringIO()
    sys.argv = ["autotune", *words]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as ended:
            status = ended.code or 0
    imported = {{name for name, module in sys.modules.items() if module and name not in before}}
    told.append((status, said.getvalue(), sorted(imported & {HEAVY!r})))
print(json.dumps(told))
"""

Told = dict[str, tuple[int, str, list[str]]]
"""By command: its status, what it printed, and the libraries that it was the first to import."""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    model, images = write_model_and_images(folder)
    (folder / "garbage.yaml").write_text("a: [1, 2\n")
    shutil.copy(PLAN, folder / "plan.yaml")
    shutil.copy(CONFIG, folder / "config.yaml")
    newer = PLAN.read_text().replace("schema_version: 2", "schema_version: 99")
    (folder / "newer.yaml").write_text(newer)
    run_folder(folder / "finished")
    for path in ("adapter.safetensors", "finished/pytorch_lora_weights.safetensors"):
        save_file({"transformer.a.lora_A.weight": torch.ones(1, 1)}, folder / path)
    shared = record()
    stored = folder / "store" / shared.key
    stored.parent.mkdir(parents=True)
    stored.write_bytes(shared.content)
    shutil.copytree(images, folder / "bare", ignore=shutil.ignore_patterns("*.txt"))
    (folder / "half").mkdir()
    shutil.copy(model / "model_index.json", folder / "half")
    shutil.copytree(model, folder / "cut")
    for file in (folder / "cut" / "vae").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-9])
    commands = (*DONE, *WRONG)
    arguments = [sys.executable, "-c", RUN, json.dumps([words.split() for words in commands])]
    process = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=True)
    return dict(zip(commands, json.loads(process.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("command", [*DONE, *WRONG])
def test_commands_need_no_torch(command, told):
    status, said, loaded = told[command]
    assert (DONE | WRONG)[command] in " ".join(said.split())
    assert status in ((0,) if command in DONE else (1, 2)), said
    assert loaded == ["plotly"] * command.startswith("report"), said


BROKEN = f"""
import sys
sys.modules.update(dict.fromkeys({sorted({*HEAVY, "safetensors", "PIL", "accelerate"})!r}))
{RUN}"""


def test_doctor_works_in_broken_installations():
    commands = [["doctor"], ["plan", "--model", "sdxl", "--hardware", "4090"]]
    arguments = [sys.executable, "-c", BROKEN, json.dumps(commands)]
    process = subprocess.run(arguments, capture_output=True, text=True, check=True)
    (_, findings, _), (status, error, _) = json.loads(process.stdout.splitlines()[-1])
    assert (status, "pip install" in error, "bug" in error) == (1, True, False), error
    assert "error" not in findings


SHELLS = {
    "bash": ("bash --norc -i", ""),
    "zsh": ("zsh -f -i", "autoload -Uz compinit; compinit -u\n"),
}


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_complete_what_is_typed(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    program = tmp_path / "autotune"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m autotune "$@"\n')
    program.chmod(0o755)
    command, typed = SHELLS[shell]
    typed += f'eval "$(_AUTOTUNE_COMPLETE={shell}_source autotune)"\n'
    typed += "autotune bug-r\t--help\nautotune plan --quality com\t\nexit\n"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TERM": "vt100"}
    screen, terminal = pty.openpty()
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    with subprocess.Popen(command.split(), cwd=tmp_path, env=env, **ends):
        os.close(terminal)
        os.write(screen, typed.encode())
        shown = ""
        with suppress(OSError):  # which is how a terminal ends
            while read := os.read(screen, 4096):
                shown += read.decode(errors="replace")
    os.close(screen)
    assert "Usage: autotune bug-report" in shown
    assert "name a model" in shown  # so nothing is wrong with --quality
