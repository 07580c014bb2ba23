"""Commands that need no torch, and mistakes told before it is imported, all in one process."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.api.test_report import PLAN, run_folder
from tests.share.examples import record
from tests.train.small import write_model_and_images

CONFIG = Path(__file__).parents[1] / "interop" / "configs" / "ai_toolkit.yaml"
HEAVY = {"torch", "diffusers", "transformers", "peft", "torchao", "optuna", "scipy", "plotly"}

DONE = {
    "--version": "autotune 0",
    "doctor --json": "severity",
    "probe --list": "nvidia-h200-sxm",
    "models --hardware 4090": "qwen-image",
    "explain plan.yaml": "all reasons: --all",
    "diff plan.yaml plan.yaml": "do not differ",
    "report finished plan.yaml -o page.html": "page.html",
    "profiles list --store store": "RTX 4090",
    "profiles verify --store store": "records",
    "import-config config.yaml": "ai-toolkit",
    "weights inspect --quick adapter.safetensors": "lora_A",
    "data check images --resolution 32": "usable",
}
"""Commands that do their work without, and a word of what they print."""

WRONG = {
    "train garbage.yaml": "not YAML",
    "train newer.yaml": "has schema 99",
    "train plan.yaml --model model --data nope": "there is no data folder nope",
    "train plan.yaml --model model --data bare": "have no caption",
    "train plan.yaml --model half --data images": "it has no transformer/",
    "train plan.yaml --model cut --data images": "is cut off",
    "train plan.yaml --model model --data images --output images/run": "lies in the data folder",
    "train plan.yaml --model model --data images --output finished": "holds",
    "train plan.yaml --model model --data images --from-adapter nope.st": "nope.st does not exist",
    "train plan.yaml --optimizer lion": "not for lion",
    "plan --model model --data images --frames 5": "qwen-image makes images",
    "plan --model qwen-imgae --data images --hardware 4090": "nearest: qwen-image",
    "plan --model model --data images --pin nonsense=1": "no knob called 'nonsense'",
    "plan --model model --data images --pin quantization=int7": "no quantization called 'int7'",
    "plan --model qwen-image --hardware 9999": "no hardware called '9999'",
    "plan --model qwen-image --hardware=": "no hardware called ''",
    "models --hardware=": "no hardware called ''",
    "plan --model model --data images --resolution 999": "does not suit qwen-image",
    "plan --model model --data images --max-memory potatoes": "not an amount of memory",
    "plan --model model --data images --optimizer adamx": "adamx",
    "estimate --model qwen-image --quantization int7": "no quantization called 'int7'",
    "compare --model qwen-imgae": "no model called 'qwen-imgae'",
    "check nope.yaml": "there is no plan at nope.yaml",
    "sample images --prompt x": "holds no trained adapter",
    "sample finished --prompt x --control nope.png": "there is no control image nope.png",
    "fetch --model qwen-imgae": "no model called 'qwen-imgae'",
    "data check images --model qwen-imgae": "no model called 'qwen-imgae'",
    "export-config plan.yaml --to kohyaa -o out": "kohyaa",
    "audit nope.toml": "nope.toml",
}
"""Mistakes, and words of the message."""

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
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
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
