"""Makes the page "Will it fit?" and the matrix of cards and models, of `profiles/predictions.json`.

python docs/site/fit_page.py FILE
"""

import json
import sys
from pathlib import Path
from typing import Any

from autotune.api import list_models
from autotune.machine.catalog import find_gpu, load_catalog, profile_of_gpu
from autotune.models.registry import FAMILIES
from autotune.plan.prediction import TIME_EVIDENCE
from autotune.plan.words import MAIN, setting_text, unusual_settings
from autotune.report.text import range_text, rough_seconds
from autotune.search.comparison import USUAL_IMAGES, CatalogPrediction, catalog_predictions
from autotune.search.problem import host_room

TEMPLATE = Path(__file__).with_name("fit.html")
ROOT = Path(__file__).parents[2]
RESULTS, RECORDS = ROOT / "benchmarks" / "results" / "gpu", ROOT / "profiles" / "records"
MATRIX = """---
hide: [toc]
---

# Models by card: measured, predicted, unsupported

Predicted time of a step with each model's defaults (most: four images of 1,024 px, rank 16), in a
computer with 64 GiB of system RAM. **Bold**: the model's memory and time were measured on that
card, in at least one setting, by us or in a record that was sent ([how far off](evidence.md)). A
dash: unsupported, since nothing fits without 4 bits. All else is predicted.
"""
RAM_GIB = (16, 32, 64, 128)
SIZES = {"usual": "", "768": "@768"}  # what is chosen, by the end of names in the predictions


def render() -> str:
    """Return the page, which needs no server and loads nothing."""
    cards = {gpu.id: gpu for gpu in load_catalog()}
    gpus, models = {}, {}
    for summary in list_models():
        defaults = FAMILIES[summary.family].defaults
        by_size = {size: catalog_predictions(summary.name + end) for size, end in SIZES.items()}
        steps = defaults.num_steps(USUAL_IMAGES)
        unit = "a clip" if summary.kind == "video" else "an image"
        models[summary.name] = {
            "title": summary.hub_id.partition("/")[2],
            "license": summary.license,
            "steps": steps,
            "px": defaults.resolution_px,
            "found": {
                size: {
                    each.gpu: _answer(each, steps, defaults.effective_batch_size, unit)
                    for each in predictions
                    if each.step_seconds
                }
                for size, predictions in by_size.items()
                if predictions
            },
        }
        for each in by_size["usual"]:
            gpus[each.gpu] = gpus.get(each.gpu) or {
                "title": f"{cards[each.gpu].name.removeprefix('NVIDIA ')}, {each.memory_gb:g} GB",
                "memory_gb": each.memory_gb,
                "name": each.gpu.removeprefix("nvidia-"),
                "memory_bytes": profile_of_gpu(cards[each.gpu]).device.budget_bytes,
            }
    sizes = ((gib, gib * 2**30) for gib in RAM_GIB)
    data = {
        "models": dict(sorted(models.items())),
        "gpus": dict(sorted(gpus.items(), key=lambda item: (item[1]["memory_gb"], item[0]))),
        "ram": {gib: host_room(size, int(0.9 * size)) for gib, size in sizes},
        "evidence": f"All of it is predicted. {TIME_EVIDENCE}.",
    }
    return TEMPLATE.read_text().replace("DATA", json.dumps(data).replace("<", "\\u003c"), 1)


def matrix() -> str:
    """Return the page that marks what was measured, is predicted, or does not fit."""
    measured = set()
    for file in RESULTS.glob("*/truth-*.jsonl"):
        rows = map(json.loads, file.read_text().splitlines())
        card = file.parent.name.rpartition("-")[2]
        measured |= {(row["model"], card) for row in rows if "model" in row}
    for file in RECORDS.rglob("*.json"):
        record = json.loads(file.read_text())
        machine, model = record["machine"], record["workload"]["model"]["name"]
        if gpu := find_gpu(machine["device_name"], machine["total_memory_bytes"]):
            measured.add((model, gpu.id))
    cards = catalog_predictions("qwen-image")
    names = [each.gpu.removeprefix("nvidia-").removeprefix("rtx-") for each in cards]
    lines = [MATRIX, f"| | {' | '.join(names)} |", f"|---{'|---' * len(names)}|"]
    for summary in sorted(list_models(), key=lambda each: each.name):
        found = {each.gpu: each.step_seconds for each in catalog_predictions(summary.name)}
        cells = []
        for each, name in zip(cards, names, strict=True):
            seconds = found.get(each.gpu)
            text = rough_seconds(seconds) if seconds else "-"
            is_measured = (summary.name, name.partition("-")[0]) in measured
            is_measured |= (summary.hub_id, each.gpu) in measured
            cells.append(f"**{text}**" if is_measured else text)
        lines.append(f"| {summary.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _answer(each: CatalogPrediction, steps: int, batch: int, unit: str) -> dict[str, Any]:
    assert each.step_seconds is not None
    assert each.settings is not None

    def told(seconds: float) -> str:
        return range_text(seconds, each.time_uncertainty, rough_seconds)

    settings = [setting_text("quantization", each.settings.quantization)]
    settings += unusual_settings(dict(each.settings), MAIN[1:])
    return {
        "step": told(each.step_seconds),
        "image": f"{told(each.step_seconds / batch)} {unit}",
        "run": told(each.step_seconds * steps),
        "memory_bytes": each.run_memory_bytes,
        "host_bytes": each.host_memory_bytes,
        "settings": f"{each.settings.micro_batch_size} at a time; {'; '.join(settings)}",
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render())
