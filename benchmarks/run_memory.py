"""Does a plan on a CPU promise the memory that each phase of the run then takes? Plans, trains,
compares.

python benchmarks/run_memory.py FOLDER [--width 128 768]

Writes one JSON line per setting to the standard output; FOLDER holds the models and may be used
again.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

SETTINGS = (
    "precision=fp32 quantization=none loader=safetensors",
    "precision=bf16 quantization=none loader=safetensors",
    "precision=bf16 quantization=none loader=pread",
    "precision=fp32 quantization=torchao-int8 loader=safetensors",
)


def write_model(folder: Path, width: int) -> None:
    """The demo's pipeline and data, with a transformer of `width` if it is not the demo's 128."""
    import torch
    from diffusers import QwenImageTransformer2DModel

    from autotune.demo.lesson import make_demo

    demo = make_demo(folder)
    if width != 128:
        torch.manual_seed(0)
        config = json.loads((demo.model / "transformer" / "config.json").read_text())
        config |= {"num_attention_heads": width // 32, "num_layers": 4}
        QwenImageTransformer2DModel.from_config(config).save_pretrained(demo.model / "transformer")


def autotune(cache: Path, *arguments: object) -> None:
    """Run the command without any encoded data; its messages go to the standard error."""
    shutil.rmtree(cache / "autotune" / "encoded", ignore_errors=True)
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "autotune", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=sys.stderr, env=environment)


def promised_and_measured(folder: Path, settings: str) -> dict[str, Any]:
    """Phases in MiB: what the plan promised, what the run took, and the difference in percent."""
    name = settings.replace(" ", ",")
    plan, output = folder / f"{name}.yaml", folder / name
    pins = [word for pair in settings.split() for word in ("--pin", pair)]
    common = (
        "--model",
        folder / "model",
        "--data",
        folder / "images",
        "--resolution",
        64,
        "--steps",
        20,
    )
    cache = folder.parent / "cache"
    autotune(
        cache,
        "plan",
        *common,
        "--batch-size",
        4,
        "--max-trials",
        1,
        "--no-profiles",
        *pins,
        "-o",
        plan,
    )
    autotune(cache, "train", plan, "--output", output)
    report = json.loads((output / "report.json").read_text())
    promised, taken = (
        {phase["name"]: phase["host_bytes"] / 2**20 for phase in report[key]}
        for key in ("expected_phases", "phases")
    )
    rows = {
        n: [round(promised[n]), round(taken[n]), round(100 * (promised[n] / taken[n] - 1), 1)]
        for n in taken
    }
    return {"settings": settings, "phases": rows}


def main() -> None:
    """Every setting on every model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--width", type=int, nargs="+", default=[128, 768])
    arguments = parser.parse_args()
    for width in arguments.width:
        folder = arguments.folder / str(width)
        if not folder.exists():
            write_model(folder, width)
        for settings in SETTINGS:
            print(
                json.dumps({"width": width, **promised_and_measured(folder, settings)}), flush=True
            )


if __name__ == "__main__":
    main()
