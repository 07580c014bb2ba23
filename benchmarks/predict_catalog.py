"""Writes `profiles/predictions.json`: what the cards that people have most would do with each
model's defaults.

    python benchmarks/predict_catalog.py [MODEL[@PX] ...]        without names, all

Z-Image took 10 CPU-seconds for its first card, then 2 to 7 for each: all of it takes some 25
CPU-minutes, and all 113 cards of the catalog four hours, which nobody kept up.

`autotune plan` shows it where there is no GPU, and a test compares some of it with the planner.
Written again whenever the cost model, the knobs, a family's defaults or the catalog change what is
predicted.
"""

import json
import sys
from collections.abc import Mapping

from autotune.system.process import silence_libraries

silence_libraries()

from autotune.errors import NothingFits
from autotune.machine.catalog import CatalogGpu, load_catalog, profile_of_gpu
from autotune.models.registry import FAMILIES
from autotune.plan.request import PlanRequest
from autotune.search.comparison import FILE
from autotune.search.planner import make_plan
from autotune.system.files import shipped_path, write_text_atomic

CARDS = (
    "nvidia-rtx-3060",
    "nvidia-rtx-3090",
    "nvidia-rtx-4060-ti-16gb",
    "nvidia-rtx-4070",
    "nvidia-rtx-4070-ti-super",
    "nvidia-rtx-4080",
    "nvidia-rtx-4090",
    "nvidia-rtx-5060-ti-16gb",
    "nvidia-rtx-5070-ti",
    "nvidia-rtx-5080",
    "nvidia-rtx-5090",
    "nvidia-l40s",
    "nvidia-a100-80gb",
    "nvidia-h100-sxm",
    "nvidia-h200-sxm",
    "nvidia-gb10",
)
# Models predicted at a second resolution, too, for those who have little memory.
SMALLER_PX = 768
SMALLER = ("qwen-image", "flux1-dev", "z-image", "sdxl")


def predict(name: str, gpu: CatalogGpu) -> dict[str, object] | None:
    model, _, side = name.partition("@")
    request = PlanRequest(model=model, hardware="another")
    request = request.changed(resolution=int(side)) if side else request
    try:
        plan = make_plan(request, profile_of_gpu(gpu)).plan
    except NothingFits:
        return None
    expected = plan.frozen.expected
    return {
        "step_seconds": float(f"{expected.step_seconds:.3g}"),
        "time_uncertainty": round(expected.time_uncertainty or 0.0, 2),
        "run_memory_bytes": expected.run_memory_bytes,
        "host_memory_bytes": expected.host_memory_bytes,
        "settings": plan.frozen.settings.model_dump(mode="json", exclude_defaults=True),
    }


def write(found: Mapping[str, Mapping[str, object]]) -> None:
    """One line for each model and GPU, so that what changed can be read in a diff."""
    models = []
    for name, predictions in found.items():
        lines = (f"  {json.dumps(gpu)}: {json.dumps(each)}" for gpu, each in predictions.items())
        models.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    write_text_atomic(shipped_path(FILE), '{"models": {\n' + ",\n".join(models) + "\n}}\n")


def main() -> None:
    models = {
        model.name: (family, model) for family in FAMILIES.values() for model in family.models
    }
    models |= {f"{name}@{SMALLER_PX}": models[name] for name in SMALLER}
    cards = [card for card in load_catalog() if card.id in CARDS]
    known = json.loads(shipped_path(FILE).read_text())["models"] if sys.argv[1:] else {}
    found: dict[str, dict[str, dict[str, object] | None]] = {
        name: known[name] for name in models if name in known
    }
    done: dict[
        str, str
    ] = {}  # models by what they are built of: a distilled one is trained as its base is
    for name in sys.argv[1:] or models:
        family, model = models[name]
        made_of = repr((family.name, model.config, model.parts, name.partition("@")[2]))
        if made_of not in done:
            done[made_of] = name
            found[name] = {card.id: predict(name, card) for card in cards}
        found[name] = found[done[made_of]]
        write({each: found[each] for each in models if each in found})
        print(name, "done" if done[made_of] == name else f"as {done[made_of]}", file=sys.stderr)


if __name__ == "__main__":
    main()
