"""Do audits tell the truth? Three configurations of other trainers, audited and measured on this
CPU.

    PYTHONPATH=. python benchmarks/audits.py FOLDER [--output benchmarks/results/audits-<date>.jsonl]        some four minutes

Each is one of the test suite's configurations, turned to a small pipeline: an audit with
`measure=True` predicts it and the fastest settings that learn the same, and runs both. What counts
is whether the predicted saving is there.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from autotune.runtime.quiet import silence_libraries

silence_libraries()

import autotune
from tests.small import write_small_pipeline

CONFIGS = Path(__file__).parents[1] / "tests" / "trainers" / "configs"
CASES = (
    (
        "ai_toolkit.yaml",
        "qwen-image",
        (
            ("name_or_path: Qwen/Qwen-Image", "name_or_path: {model}"),
            ("resolution: [512, 768, 1024]", "resolution: 256"),
        ),
    ),
    (
        "diffusers.sh",
        "qwen-image",
        (("Qwen/Qwen-Image", "{model}"), ("--resolution=1024", "--resolution=256")),
    ),
    (
        "simpletuner.json",
        "flux1-dev",
        (
            ('"--model_family": "qwen_image"', '"--model_family": "flux"'),
            ('"--model_flavour": "v1.0"', '"--pretrained_model_name_or_path": "{model}"'),
            ('"--resolution": 1024', '"--resolution": 256'),
        ),
    ),
)


def write_case(folder: Path, file: str, family: str, changes: tuple[tuple[str, str], ...]) -> Path:
    """The configuration for a small pipeline of the family."""
    model = folder / Path(file).stem
    write_small_pipeline(family, model, ["a red circle"])
    text = (CONFIGS / file).read_text()
    for old, new in changes:
        assert old in text, (file, old)
        text = text.replace(old, new.replace("{model}", str(model)))
    path = folder / file
    path.write_text(text)
    return path


def row(path: Path) -> dict[str, Any]:
    """One audit: seconds of a step and bytes, predicted and measured, as written and fastest."""
    found = autotune.audit(path, measure=True)
    assert found.fastest is not None
    told: dict[str, Any] = {"config": path.name, "trainer": found.config.trainer}
    for name, estimate, trial in (
        ("as_written", found.as_written, found.measured_as_written),
        ("fastest", found.fastest, found.measured_fastest),
    ):
        assert trial is not None
        told[name] = {
            "settings": trial.candidate.label(),
            "predicted_seconds": estimate.step_seconds,
            "measured_seconds": trial.median_step_seconds,
            "predicted_bytes": estimate.prediction.allocated_memory_bytes,
            "measured_bytes": trial.peak_memory_bytes,
        }
    for kind in ("predicted", "measured"):
        told[f"{kind}_speedup"] = (
            told["as_written"][f"{kind}_seconds"] / told["fastest"][f"{kind}_seconds"]
        )
    return told


def main() -> None:
    """Audit and measure all, a line of JSON for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for case in CASES:
        lines.append(json.dumps(row(write_case(arguments.folder, *case))))
        print(lines[-1], flush=True)
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
