"""Whole runs of small pipelines under settings that together hold every value of every knob.

It runs on the stand-in for NVIDIA's libraries (CONTRIBUTING, "Without a GPU"):

    tests/fakegpu/run benchmarks/every_value.py ROWS.jsonl [MACHINE...] [--families NAME...]

Each family on each machine caches, loads, trains two steps, previews, saves, and resumes for a
third. Nothing may be left on the device or pinned, the host waits once a step, and swapped blocks
move the bytes foretold. A run is a process of its own and gives a line; those that the file has are
left out. One to three minutes of a core for each pair.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import autotune.search.preload  # noqa: F401  # before diffusers, as trials do
from autotune.cost.predict import CostModel, choice_of
from autotune.knobs.caching import PIN, caching_choices, why_not_cast
from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import KNOBS
from autotune.knobs.settings import OPTIMIZERS, plain_choices
from autotune.machine.probe import probe
from autotune.models.registry import FAMILIES, get_family
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import BLOCK_COUNTS, CachingSettings, Candidate
from autotune.plan.job import ModelRef
from autotune.train import loop, model
from autotune.train.run import train
from tests.fakegpu import test_steps
from tests.fakegpu.conftest import StandIn, in_fork
from tests.fakegpu.numbers import DecisiveNumbers
from tests.fakegpu.test_families import MACHINES, PHASES, TABLES_BYTES
from tests.small import shortest_clip, write_small
from tests.train.small import make_plan

FIRST = {"micro_batch_size": 1, "checkpointed_blocks": 1}
WAYS_TO_CACHE: tuple[dict[str, Any], ...] = (
    {},
    {"text_encoder_device": "cpu"},
    {"text_encoder_quantization": "torchao-int8"},
    {"text_encoder_quantization": "bnb-nf4", "residency": "keep"},
    {"text_encoder_streamed": True},
    {"vae_device": "cpu"},
)
hardware = cache(probe)  # of the process; another look finds other free memory: another plan
WINDOWS = {"modulation.py", "tensors.py"}  # where modulations ahead wait when one begins


def mixtures(context: TuningContext) -> Iterator[Candidate]:
    """Yield settings that together hold every value that the machine and the family can use."""
    found = {knob.name: knob.choices_for_family(context) for knob in KNOBS}
    values = {name: (*each.admitted, *each.pinnable) for name, each in found.items()}
    for name in BLOCK_COUNTS:
        values[name] = tuple({0, 1, max(values[name])})
    if context.family.name.startswith("kandinsky5"):
        # Small ones preview a caption of one token, and cuDNN takes none of that length.
        values["attention"] = tuple(x for x in values["attention"] if x != "_native_cudnn")
    values |= plain_choices(context)
    # fastsafetensors finds no CUDA runtime here.
    values |= {"optimizer": tuple(OPTIMIZERS), "loader": ("safetensors", "pread")}
    left = [(name, value) for name in values for value in values[name]]
    while left:
        fields = {**FIRST, "precision": values["precision"][0]}
        chosen = dict[str, object]()
        for name, value in left:
            settings = Candidate.model_validate({**fields, **chosen, name: value})
            if name not in chosen and not any(knob.why_not(settings, context) for knob in KNOBS):
                chosen[name] = value
        assert chosen, f"nothing goes with {left}"
        left = [(name, value) for name, value in left if chosen.get(name) != value]
        yield Candidate.model_validate({**fields, **chosen})


def ways_to_cache(context: TuningContext) -> Iterator[CachingSettings]:
    usable = caching_choices(context)
    for way in WAYS_TO_CACHE:
        kept = {
            name: value
            for name, value in way.items()
            if name == "residency" or value in usable[PIN + name]
        }
        if not why_not_cast(kept.get("text_encoder_quantization", "none"), context.family):
            yield CachingSettings.model_validate(kept)


def judge_nothing() -> None:
    """Let pass what would be judged by numbers that no kernel computed."""
    model.ErrorMeter.result = lambda _: None  # type: ignore[method-assign, assignment]
    loop.EVALUATION_STEPS = 1


def plan_for(name: str, folder: Path, settings: Candidate, **job: Any) -> Any:
    family, pipeline = get_family(name), folder / "pipeline"
    job |= {
        "num_frames": shortest_clip(family),
        "preview_prompts": ("a red square",),
        # The fewest each takes: a second step looks numbers up that no kernel computed.
        "preview_steps": 2 if name == "minimax-h3" else 1,
        "checkpointing_steps": 1,
        "resolution_px": 64,
        "output": str(folder / "out"),
    }
    if family.max_controls:
        job["control"] = str(pipeline / "control")
    if settings.optimizer == "prodigy":
        job["learning_rate"] = 1.0
    return make_plan(pipeline / "model", pipeline / "images", hardware(), settings=settings, **job)


def run_and_resume(name: str, folder: Path, settings: Candidate, caching: Any) -> None:
    judge_nothing()
    for num_steps in (2, 3):
        plan = plan_for(name, folder, settings, num_steps=num_steps, caching=caching)
        with DecisiveNumbers():
            report = train(plan, hardware(), folder / "cache", resume=num_steps == 3)
        assert not report.warnings, report.warnings
        phases = {phase.name: phase for phase in report.phases}
        assert phases.keys() == PHASES
        assert all(phase.device_bytes for phase in phases.values())
        assert (folder / "out" / report.adapter).exists()
    on_device, pinned = StandIn().bytes_left()
    assert on_device <= TABLES_BYTES, f"{on_device} bytes left on the device"
    assert pinned == 0, f"{pinned} bytes left pinned"


def require_one_wait(name: str, folder: Path, settings: Candidate) -> None:
    judge_nothing()
    settings = settings.changed(optimizer="adamw")  # others wait for their own numbers
    waits = test_steps.waits_in(test_steps.start(folder / "pipeline", **dict(settings)))
    allowed = WINDOWS if settings.modulation == "ahead" else set()
    places = [place for place in waits if place.partition(":")[0] not in allowed]
    if name not in test_steps.ASKS_THE_DEVICE:
        assert [place.partition(":")[0] for place in places] == ["step.py"], places


def require_foretold_copies(name: str, folder: Path) -> None:
    """Swapped blocks are copied once in each direction, but for those that are still there."""
    judge_nothing()
    pipeline = folder / "pipeline"
    plan, resolved = plan_for(name, folder, USUAL), resolve_model(ModelRef.of(pipeline / "model"))
    cost = CostModel.build(hardware(), plan.frozen.workload, resolved.family, resolved.config)
    *sizes, _ = cost.tables.model_bytes(choice_of(USUAL)).block_weight_bytes  # the last stays

    def moved_bytes(swapped: int) -> int:
        changes = {"checkpointed_blocks": len(sizes), "swapped_blocks": swapped}
        runner = test_steps.start(pipeline, **changes)
        counted = StandIn().counted(runner.timed_step, "bytes_to_device")
        return int(counted["bytes_to_device"])

    foretold, found = 2 * (sum(sizes[1:]) + sum(sizes[:-1])), moved_bytes(len(sizes))
    found -= moved_bytes(1)
    assert abs(found - foretold) <= 0.01 * foretold, f"{found} bytes for {foretold}"


USUAL = Candidate.model_validate(FIRST)


def rows_of(name: str, machine: str, known: set[tuple[str, str, str]]) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as made:
        base, runs = Path(made), list[tuple[Candidate, Any]]()
        in_fork(machine, lambda: write_small(name, base / "pipeline"))

        def list_runs() -> None:
            work = plan_for(name, base, USUAL).frozen.workload.changed(quality="compact")
            context = TuningContext(hardware(), get_family(name), work)
            found = [settings.model_dump() for settings in mixtures(context)]
            ways = [way.model_dump() for way in ways_to_cache(context)]
            (base / "runs").write_text(json.dumps([found, ways]))

        in_fork(machine, list_runs)
        found, ways = json.loads((base / "runs").read_text())
        for settings, way in zip_longest(map(Candidate.model_validate, found), ways):
            caching = CachingSettings.model_validate(way or {})
            runs.append((settings or USUAL.changed(precision=found[0]["precision"]), caching))
        checks: list[tuple[str, Any]] = [
            ("copies of swapped blocks", lambda folder: require_foretold_copies(name, folder))
        ]
        for settings, caching in runs:
            changes = settings.differences(USUAL) | caching.model_dump(exclude_defaults=True)
            text = ", ".join(f"{key}={value}" for key, value in changes.items()) or "usual"
            run = (settings, caching)
            checks.append((text, lambda folder, run=run: run_and_resume(name, folder, *run)))
            wait = f"one wait: {text}"
            checks.append((wait, lambda folder, run=run: require_one_wait(name, folder, run[0])))
        for number, (text, check) in enumerate(checks):
            if (name, machine, text) in known:
                continue
            folder, start = base / str(number), time.monotonic()
            folder.mkdir()
            (folder / "pipeline").symlink_to(base / "pipeline")
            failure = ""
            try:
                in_fork(machine, lambda check=check, folder=folder: check(folder))
            except BaseException as error:  # pytest's own is none of Exception
                failure = str(error)[-600:]
            seconds = round(time.monotonic() - start, 1)
            yield {"family": name, "machine": machine, "run": text, "seconds": seconds} | (
                {"failure": failure} if failure else {}
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("machines", nargs="*", default=MACHINES)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    asked = parser.parse_args()
    lines = asked.rows.read_text().splitlines() if asked.rows.exists() else []
    known = {(row["family"], row["machine"], row["run"]) for row in map(json.loads, lines)}
    for machine in asked.machines:
        for name in asked.families:
            for row in rows_of(name, machine, known):
                with asked.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
