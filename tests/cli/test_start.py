"""Commands that need no torch, and mistakes that are told before it is imported.

One process runs them all, one after the other, and says what each added to `sys.modules`: so the
first that loads a library is the one that fails.
"""

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

PLACES = {
    "PLAN": PLAN,
    "CONFIG": Path(__file__).parents[1] / "interop" / "configs" / "ai_toolkit.yaml",
    "ADAPTER": Path("adapter.safetensors"),
    **{
        name.upper(): Path(name)
        for name in ("model", "images", "bare", "half", "cut", "finished", "store")
    },
}
"""What words of a command stand for; relative ones lie in the folder where the commands run."""
HEAVY = (
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "torchao",
    "optuna",
    "scipy",
    "plotly",
)

DONE = {
    "--help": "Usage",
    "--version": "autotune 0",
    "doctor --json": "severity",
    "probe --list": "nvidia-h200-sxm",
    "models --hardware 4090": "qwen-image",
    "explain PLAN": "part of the fastest settings",
    "diff PLAN PLAN": "do not differ",
    "report FINISHED PLAN -o page.html": "page.html",
    "profiles list --store STORE": "RTX 4090",
    "profiles verify --store STORE": "records",
    "import-config CONFIG": "ai-toolkit",
    "weights inspect --no-values ADAPTER": "lora_A",
    "data check IMAGES --resolution 32": "usable",
}
"""Commands that do their work without, and a word of what they print."""

WRONG = {
    "train nope.yaml": "there is no plan at nope.yaml",
    "train garbage.yaml": "not YAML",
    "train newer.yaml": "has schema 99",
    "train PLAN --model MODEL --data nope": "there is no data folder nope",
    "train PLAN --model MODEL --data BARE": "have no caption",
    "train PLAN --model qwen-imagee --data IMAGES": "neither a folder nor a known model",
    "train PLAN --model HALF --data IMAGES": "it has no transformer/",
    "train PLAN --model CUT --data IMAGES": "is cut off",
    "train PLAN --model MODEL --data IMAGES --output images/run": "lies in the data folder",
    "train PLAN --model MODEL --data IMAGES --output FINISHED": "holds",
    (
        "train PLAN --model MODEL --data IMAGES --from-adapter nope.safetensors"
    ): "nope.safetensors does not exist",
    "plan --model MODEL --data IMAGES --frames 5": "qwen-image makes images",
    "train PLAN --optimizer lion": "not for lion",
    "plan --model qwen-imgae --data IMAGES --hardware 4090": "nearest: qwen-image",
    "plan --model qwen-imgae --data IMAGES": "neither a folder nor a known model",
    "plan --model HALF --data IMAGES": "it has no transformer/",
    "plan --model MODEL --data nope": "there is no data folder nope",
    "plan --model MODEL --data BARE": "have no caption",
    "plan --model MODEL --data IMAGES --pin nonsense=1": "no knob called 'nonsense'",
    "plan --model MODEL --data IMAGES --pin quantization=int7": "no quantization called 'int7'",
    "plan --model MODEL --data IMAGES --quality best": "'exact', 'high'",
    "plan --model qwen-image --hardware 9999": "no hardware called '9999'",
    "plan --model MODEL --data IMAGES --resolution 999": "does not suit qwen-image",
    "plan --model MODEL --data IMAGES --rank 0": "not in the range 1<=x",
    "plan --model MODEL --data IMAGES --max-memory potatoes": "not an amount of memory",
    "plan --model MODEL --data IMAGES --optimizer adamx": "adamx",
    "plan --model MODEL --data IMAGES --output images": "images",
    "plan --from garbage.yaml": "not YAML",
    "plan --model qwen-imgae --list-knobs": "neither a folder nor a known model",
    "estimate --model qwen-imgae": "neither a folder nor a known model",
    "estimate --model qwen-image --hardware 9999": "no hardware called '9999'",
    "estimate --model qwen-image --quantization int7": "no quantization called 'int7'",
    "compare --model qwen-imgae": "neither a folder nor a known model",
    "check nope.yaml": "there is no plan at nope.yaml",
    "sample IMAGES --prompt x": "holds no trained adapter",
    "sample garbage.yaml --prompt x": "not YAML",
    "sample FINISHED --prompt x --control nope.png": "there is no control image nope.png",
    "fetch --model qwen-imgae": "neither a folder nor a known model",
    "data check nope": "there is no data folder nope",
    "data check IMAGES --model qwen-imgae": "no model family called 'qwen-imgae'",
    "weights inspect nope.safetensors": "does not exist",
    "weights convert nope.safetensors out.safetensors --format comfyui": "does not exist",
    "export-config PLAN --to kohyaa -o out": "kohyaa",
    "import-config nope.toml": "nope.toml",
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
    told.append((status, said.getvalue(), sorted(imported.intersection({HEAVY!r}))))
print(json.dumps(told))
"""

Told = dict[str, tuple[int, str, list[str]]]
"""By command: its status, what it printed, and the libraries that it was the first to import."""


def _words(command: str) -> list[str]:
    return [str(PLACES.get(word, word)) for word in command.split()]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    folder = tmp_path_factory.mktemp("start")
    model, images = write_model_and_images(folder)
    (folder / "garbage.yaml").write_text("a: [1, 2\n")
    (folder / "newer.yaml").write_text(
        PLACES["PLAN"].read_text().replace("schema_version: 2", "schema_version: 99")
    )
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
    arguments = [sys.executable, "-c", RUN, json.dumps([*map(_words, commands)])]
    process = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=True)
    return dict(zip(commands, json.loads(process.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("command", [*DONE, *WRONG])
def test_what_needs_no_torch_is_done_or_told_without_it(command: str, told: Told) -> None:
    status, said, loaded = told[command]
    assert (DONE | WRONG)[command] in " ".join(said.split())
    assert status in ((0,) if command in DONE else (1, 2)), said
    assert loaded == ["plotly"] * command.startswith("report"), said
