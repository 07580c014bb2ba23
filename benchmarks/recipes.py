"""What six trainers ship against what `plan` would choose: predicted on four cards, and measured on
this CPU.

    python benchmarks/recipes.py predict CHECKOUTS RESULT.jsonl    # 40 CPU-minutes
    python benchmarks/recipes.py measure CHECKOUTS RESULT.jsonl    # 15 CPU-minutes
    python benchmarks/recipes.py page RESULT.jsonl                 # writes docs/presets.md

CHECKOUTS is that of `trainer_examples.py`; rows are appended to RESULT, and `--preset NAME` takes
one alone. Ours learn the same: model, size, rank, layers, optimizer, images of a step. Weights are
stored at the strictest quality floor that admits the preset's.

Measured are mid-size models of four families, all in our executor and in fp32, since bf16 is
emulated on most CPUs. Time is the process's own on one core, so that other work on the machine
counts little; each keeps its fastest step.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.system.process import silence_libraries

silence_libraries()

import torch
from configs import MID
from cost_accuracy import workload_of
from cpu_truth import RealSteps, run
from search_tasks import StepMemoryModel
from trainer_examples import find_examples

import autotune
from autotune.cost.predict import CostModel
from autotune.exchange import settings_as_written
from autotune.interop.importing import ImportedConfig, import_config
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.knob import TuningContext
from autotune.machine.probe import cached_profile
from autotune.models.registry import FAMILIES
from autotune.plan.candidate import Candidate, TrialResult
from autotune.plan.hardware import HardwareProfile
from autotune.plan.prediction import Estimate
from autotune.plan.words import label_of
from autotune.plan.workload import Learning, OptimizerChoice
from autotune.search.next import ResidualSearch, SearchLimits
from autotune.search.space import build_search_space, expand_block_counts
from autotune.search.study import run_search
from autotune.system.files import write_text_atomic

CARDS = {
    "rtx-3060": "RTX 3060, 12 GB",
    "rtx-4060-ti-16gb": "RTX 4060 Ti, 16 GB",
    "rtx-4090": "RTX 4090, 24 GB",
    "h100-sxm": "H100 SXM, 80 GB",
}
PRESETS = {
    ("OneTrainer", "FLUX.1"): "training_presets/Flux Dev.1/#flux LoRA.json",
    ("OneTrainer", "Qwen-Image"): "training_presets/QwenImage/#qwen LoRA 24GB.json",
    ("OneTrainer", "Qwen-Image, for 16 GB"): "training_presets/QwenImage/#qwen LoRA 16GB.json",
    ("OneTrainer", "Z-Image"): "training_presets/Z-Image/#z-image LoRA 16GB.json",
    ("OneTrainer", "Z-Image, for 8 GB"): "training_presets/Z-Image/#z-image LoRA 8GB.json",
    ("SimpleTuner", "FLUX.1"): "simpletuner/examples/flux.peft-lora/config.json",
    ("SimpleTuner", "Qwen-Image"): "simpletuner/examples/qwen_image.peft-lora/config.json",
    ("SimpleTuner", "Z-Image"): "simpletuner/examples/z-image.peft-lora/config.json",
    ("SimpleTuner", "Wan 2.1"): (
        "simpletuner/examples/wan2.1-t2v-1.3b-480p-single-gpu.peft-lora+ramtorch/config.json"
    ),
    ("ai-toolkit", "FLUX.1"): "config/examples/train_lora_flux_24gb.yaml",
    ("ai-toolkit", "Qwen-Image"): "config/examples/train_lora_qwen_image_24gb.yaml",
    ("ai-toolkit", "Wan 2.1"): "config/examples/train_lora_wan21_1b_24gb.yaml",
    ("musubi-tuner", "Qwen-Image"): "docs/qwen_image.md:191",
    ("musubi-tuner", "Z-Image"): "docs/zimage.md:138",
    ("musubi-tuner", "Wan 2.1"): "docs/wan.md:169",
    ("sd-scripts", "FLUX.1"): "docs/flux_train_network.md:123",
    ("diffusers", "FLUX.1"): "examples/dreambooth/README_flux.md:146",
    ("diffusers", "Qwen-Image"): "examples/dreambooth/README_qwen.md:75",
    ("diffusers", "Z-Image"): "examples/dreambooth/README_z_image.md:124",
}
"""Of each trainer and family that both have. A page's is the command at that line."""
SIDE_PX = {"qwen-image": 128, "flux1-dev": 128, "z-image": 128, "wan-2.1": 64}
"""Of what is measured. The last one's are clips of five frames."""
MAX_TRIALS = 8
ROUNDS = 4
PAGE = Path(__file__).parents[1] / "docs" / "presets.md"
TEXT = """# What trainers ship, and what autotune plans instead

{num} presets of six trainers for four families, read by `import-config`: those that the trainers
ship or, if they ship none, the first command that their documents show. A plan learns the same:
model, size, rank, layers, kind of optimizer, images of a step. It stores weights at the strictest
[quality floor](settings.md) that admits the preset's format. Gain is a preset's seconds of a step
divided by the plan's; where a preset does not fit, none is counted.

{summary}

**Predicted** are the preset in its own program, whose ways were read in its source; the same
settings in autotune; and the plan. Nothing ran: no trainer, and none of these cards. Times are
uncertain ([how far off](evidence.md)), but most of their error is the same in both times of a gain
in autotune. 64 GiB of system RAM are assumed. A gain is of steps: a run of some 100 steps on a fast
card does not pay back the minute in which norm and RoPE are compiled.

**Measured** are mid-size models of the same families (a few hundred channels, 6 to 10 blocks, 128
px, Wan's clips 64 px), in autotune alone, on one core of an {cpu} with torch {torch}. A search of
{trials} trials chose what is planned. All ran in fp32, since this CPU emulates bf16, in which they
are shipped. A CPU has no block swap, so the two presets for smaller cards were left out. Losses are
those of step {steps} from equal weights, inputs and noise; they differ by at most {loss:.2%}.

Made by `benchmarks/recipes.py`, whose head says how, from
`benchmarks/results/{file}`, which has each one's settings, too.

{sections}
"""


def configs(checkouts: Path, preset: str | None) -> Iterator[tuple[str, ImportedConfig]]:
    with tempfile.TemporaryDirectory() as folder:
        found = {(who, name): path for who, name, path in find_examples(checkouts, Path(folder))}
        for (trainer, model), shipped in PRESETS.items():
            name = f"{trainer}: {model}"
            if preset not in (None, name):
                continue
            config = import_config(found[trainer, shipped])
            stored = WEIGHT_FORMATS[config.pins["quantization"]]
            options = {**config.options, "quality": stored.quality}
            yield name, config.changed(options=options)


def predict(name: str, config: ImportedConfig) -> Iterator[dict[str, Any]]:
    for card in CARDS:
        found = autotune.audit(config, hardware=card, on_event=lambda _: None)
        estimates = {
            "as shipped": found.in_trainer,
            "in autotune": found.as_written,
            "planned": found.fastest,
        }
        yield {
            "preset": name,
            "commit": config.version,
            "card": card,
            "lacks": found.breaks,
            **{column: estimate and figures(estimate) for column, estimate in estimates.items()},
        }


def figures(estimate: Estimate) -> dict[str, Any]:
    return {
        "step_seconds": round(estimate.step_seconds, 3),
        "run_memory_bytes": estimate.run_memory_bytes,
        "fits": estimate.fits,
        "settings": label_of(dict(estimate.prediction.candidate)),
    }


class Bench:
    """A preset's work on its family's mid-size model: every candidate can be run."""

    def __init__(self, config: ImportedConfig, hardware: HardwareProfile) -> None:
        self.family, self.config = FAMILIES[config.family], MID[config.family]
        self.hardware = hardware
        usual, side = workload_of(config.family), SIDE_PX[config.family]
        learning = {
            name: value for name, value in config.options.items() if name in Learning.model_fields
        }
        self.workload = usual.changed(
            resolution_px=side,
            buckets=tuple(one.changed(width_px=side, height_px=side) for one in usual.buckets),
            optimizer=OptimizerChoice.named(config.options.get("optimizer", "adamw")),
            **learning | {"lora_dropout": 0.0},  # the benchmark's steps drop nothing
        )

    def steps(self, candidate: Candidate) -> RealSteps:
        return RealSteps(self.family, self.config, self.workload, candidate)

    def searched(self) -> Candidate:
        """The fastest of the trials of a search."""
        budget_bytes = self.hardware.device.budget_bytes
        cost = CostModel.build(self.hardware, self.workload, self.family, self.config)
        space = expand_block_counts(build_search_space(cost.context), cost)
        measured: Any = StepMemoryModel(cost)
        search = ResidualSearch(space, measured, budget_bytes)

        def trial(candidate: Candidate) -> TrialResult:
            truth = run(self.family, self.config, self.workload, candidate)
            return TrialResult(
                candidate=candidate,
                outcome="ok" if truth.peak_bytes <= budget_bytes else "oom",
                step_seconds=truth.step_seconds,
                peak_memory_bytes=truth.peak_bytes,
            )

        limits = SearchLimits(max_trials=MAX_TRIALS, max_seconds=float("inf"))
        ran = run_search(search, trial, limits, lambda result: None)
        fitting = [one for one in ran if one.outcome == "ok"]
        return min(fitting, key=lambda one: one.median_step_seconds or 0.0).candidate


def measure(name: str, config: ImportedConfig, hardware: HardwareProfile) -> dict[str, Any]:
    bench = Bench(config, hardware)
    context = TuningContext(hardware, bench.family, bench.workload)
    shipped, lacks = settings_as_written(config.pins, context, None)
    searched = bench.searched()
    rows = {"as shipped": shipped.changed(precision=searched.precision), "planned": searched}
    steps = {column: bench.steps(candidate) for column, candidate in rows.items()}
    for each in steps.values():
        each.take()
    peaks = {column: each.profiled() + each.resident_bytes() for column, each in steps.items()}
    # One step of each in turn, so that what else the machine does slows all.
    timed = [{column: each.timed() for column, each in steps.items()} for _ in range(ROUNDS)]
    return {
        "preset": name,
        "commit": config.version,
        "cpu": hardware.host.cpu,
        "torch": torch.__version__,
        "lacks": lacks,
        **{
            column: {
                "step_seconds": round(min(taken[column][0] for taken in timed), 4),
                "peak_bytes": peaks[column],
                "loss": round(timed[-1][column][1], 6),
                "settings": label_of(dict(rows[column])),
            }
            for column in rows
        },
    }


def gain(row: Mapping[str, Any], column: str) -> float | None:
    """Steps of the plan in the time of one of `column`; None unless both fit."""
    theirs, ours = row[column], row["planned"]
    if ours is None or not theirs.get("fits", True):
        return None
    return float(theirs["step_seconds"] / ours["step_seconds"])


def gains_text(gains: Iterable[float | None]) -> str:
    found = [one for one in gains if one is not None]
    return f"{statistics.median(found):.2f}, from {min(found):.2f} (n = {len(found)})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def section(
    title: str, rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str], size: str, unit: str
) -> str:
    bytes_of_unit = {"GiB": 2**30, "MB": 10**6}[unit]
    gained = [column for column in titles if column != "planned"]
    lines = []
    for row in rows:
        cells = [row["preset"]]
        for found in (row[column] for column in titles):
            fits = found and found.get("fits", True)
            seconds = f"{found['step_seconds']:#.3g}".rstrip(".") if fits else "does not fit"
            cells += [seconds, f"{found[size] / bytes_of_unit:.1f}" if found else ""]
        gains = (gain(row, column) for column in gained)
        lines.append([*cells, *("" if one is None else f"{one:.2f}" for one in gains)])
    of_columns = [name for title in titles.values() for name in (f"{title}, s", unit)]
    head = ["preset", *of_columns, *(f"gain, {titles[column]}" for column in gained)]
    return f"## {title}\n\n{table(head, lines)}"


def write_page(result: Path) -> None:
    rows = [json.loads(line) for line in result.read_text(encoding="utf-8").splitlines()]
    measured = [row for row in rows if "cpu" in row]
    titles = {"as shipped": "its program", "in autotune": "in autotune", "planned": "planned"}
    summary, sections = [], []
    for card, title in CARDS.items():
        here = [row for row in rows if row.get("card") == card]
        told = [gains_text(gain(row, column) for row in here) for column in titles][:2]
        summary.append([title, *told, ""])
        sections.append(section(f"{title}: predicted", here, titles, "run_memory_bytes", "GiB"))
    predicted = [row for row in rows if "card" in row]
    told = [gains_text(gain(row, column) for row in predicted) for column in titles][:2]
    summary.append(["all four", *told, ""])
    told = [gains_text(gain(row, "as shipped") for row in measured)]
    summary.append(["mid-size models on a CPU", "", "", *told])
    titles = {"as shipped": "in autotune", "planned": "planned"}
    sections.append(section("Mid-size models: measured", measured, titles, "peak_bytes", "MB"))
    head = ["median gain", "predicted, over its program", "predicted, in autotune", "measured"]
    losses = [(row["as shipped"]["loss"], row["planned"]["loss"]) for row in measured]
    text = TEXT.format(
        num=len({row["preset"] for row in predicted}),
        summary=table(head, summary),
        cpu=measured[0]["cpu"],
        torch=measured[0]["torch"],
        trials=MAX_TRIALS,
        steps=ROUNDS + 2,
        loss=max(abs(ours / theirs - 1) for theirs, ours in losses),
        file=result.name,
        sections="\n\n".join(sections),
    )
    write_text_atomic(PAGE, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("predict", "measure", "page"):
        own = commands.add_parser(command)
        if command != "page":
            own.add_argument("checkouts", type=Path)
            own.add_argument("--preset")
        own.add_argument("result", type=Path)
    options = parser.parse_args()
    if options.command == "page":
        write_page(options.result)
        return
    torch.set_num_threads(1)
    hardware = cached_profile()
    with options.result.open("a", encoding="utf-8") as file:
        for name, config in configs(options.checkouts, options.preset):
            rows = predict(name, config)
            if options.command == "measure":
                if ", for" in name:  # it differs in what saves a card's memory alone
                    continue
                rows = iter([measure(name, config, hardware)])
            for row in rows:
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
