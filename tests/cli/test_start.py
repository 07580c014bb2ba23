"""Commands that need no torch, and mistakes told before it is imported, all in one process."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from tests.api.test_report import PLAN, run_folder
from tests.share.examples import record
from tests.train.small import write_model_and_images

CONFIG = Path(__file__).parents[1] / "interop" / "configs" / "ai_toolkit.yaml"
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
