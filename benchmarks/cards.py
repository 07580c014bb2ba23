"""Writes `docs/cards.md`: what three exact settings are predicted to be worth on the cards of
`profiles/predictions.json`.

    python benchmarks/cards.py

With them, the figures are those of that file; without them 32 plans are predicted here, which
takes some three CPU-minutes.
"""

import json
import statistics
from pathlib import Path

from autotune.system.process import silence_libraries

silence_libraries()

from autotune.errors import NothingFits
from autotune.machine.catalog import CatalogGpu, load_catalog, profile_of_gpu
from autotune.plan.request import PlanRequest
from autotune.search.comparison import FILE
from autotune.search.planner import make_plan
from autotune.system.files import shipped_path, write_text_atomic

PAGE = Path(__file__).parents[1] / "docs" / "cards.md"
MODELS = {"qwen-image": "Qwen-Image", "flux1-dev": "FLUX.1 dev"}
LEVERS = (("modulation", "resident"), ("norm_rope", "stock"), ("selective_blocks", "0"))
"""Values of the settings' knobs that leave them out."""

TEXT = """# What three exact settings are predicted to be worth, card by card

The table shows seconds per optimizer step (four images of 1,024 px, rank 16, `--quality high`), as
`autotune plan --hardware CARD` predicts them without and with three settings that do not change
what is learned: modulation computed ahead, norm and rotary positions as one function, and
checkpoints that keep attention. "Gain" is the time without these settings divided by the
time with them. The median gain is {medians}. Memory is that of
the phase that needs most, with them.

**All of it is predicted.** Of these cards only the H200 has run autotune, for 46 minutes: compiled
norm and rotary positions took 6% off FLUX.1's step, modulation ahead 15% off its memory, and
keeping attention gained nothing ([evidence](evidence.md)). The ranges of
predicted times are wide, but most of their error is the same in both times of a row, so their ratio
is more accurate. `benchmarks/cards.py` writes this page, for the cards that people have most;
`autotune plan --hardware CARD` tells any other's.

"""


def seconds_without(model: str, gpu: CatalogGpu) -> float | None:
    """Predicted seconds of a step without these settings, or None if nothing fits then."""
    request = PlanRequest(model=model, hardware="another", pins=LEVERS)
    try:
        return make_plan(request, profile_of_gpu(gpu)).plan.frozen.expected.step_seconds
    except NothingFits:
        return None


def main() -> None:
    known = json.loads(shipped_path(FILE).read_text())["models"]
    columns = " | ".join(f"{name} without, s | with, s | gain | GiB" for name in MODELS.values())
    rows: list[tuple[float, str]] = []
    gains: dict[str, list[float]] = {model: [] for model in MODELS}
    for gpu in load_catalog():
        if gpu.id not in known["qwen-image"]:
            continue
        cells = [gpu.id]
        for model in MODELS:
            there, without = known[model][gpu.id], seconds_without(model, gpu)
            cells.append(f"{without:#.3g}" if without else "nothing fits")
            if there is None:
                cells += ["nothing fits", "", ""]
                continue
            if without:
                gains[model].append(without / there["step_seconds"])
            gain = f"{gains[model][-1]:.2f}" if without else ""
            cells += [
                f"{there['step_seconds']:#.3g}",
                gain,
                f"{there['run_memory_bytes'] / 2**30:.1f}",
            ]
        first = known["qwen-image"][gpu.id]
        rows.append((first["step_seconds"] if first else float("inf"), f"| {' | '.join(cells)} |"))
        print(rows[-1][1].replace(".|", "|"), flush=True)
    medians = " and ".join(
        f"{statistics.median(gains[model]):.2f} for {name}" for model, name in MODELS.items()
    )
    table = [
        f"| card | {columns} |",
        "|---" * (1 + 4 * len(MODELS)) + "|",
        *(row for _, row in sorted(rows)),
    ]
    write_text_atomic(
        PAGE, TEXT.format(medians=medians) + "\n".join(table).replace(". |", " |") + "\n"
    )


if __name__ == "__main__":
    main()
