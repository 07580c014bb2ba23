"""Whole runs of small pipelines under settings that together hold every value of every knob.

It runs on the stand-in for NVIDIA's libraries (CONTRIBUTING, "Without a GPU"):

    tests/fakegpu/run benchmarks/every_value.py ROWS.jsonl [MACHINE...] [--families NAME...]

Each family on each machine caches, loads, trains two steps, previews, saves, and resumes for a
third. Nothing may be left on the device or pinned, the host waits once a step, swapped blocks move
the bytes foretold, and attention runs the kernel foretold. A run is a process of its own and gives
a line; those that the file has are left out. One to three minutes of a core for each pair.
"""

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import autotune.search.preload  # noqa: F401  # before diffusers, as trials do
from autotune.cost.predict import CostModel, choice_of
from autotune.knobs.attention import cuda_kernel
from autotune.knobs.caching import PIN, caching_choices, why_not_cast
from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import KNOBS
from autotune.knobs.settings import OPTIMIZERS, plain_choices
from autotune.machine.probe import probe
from autotune.machine.sources import cudnn_version
from autotune.models.registry import FAMILIES, get_family
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import BLOCK_COUNTS, CachingSettings, Candidate
from autotune.plan.job import ModelRef
from autotune.plan.workload import TextPadding
from tests.fakegpu import test_steps
from tests.fakegpu.conftest import StandIn, in_fork
from tests.fakegpu.test_families import FIRST, MACHINES, judge_nothing, plan_for, run_and_resume
from tests.small import write_small

USUAL = Candidate.model_validate(FIRST)
WAYS_TO_CACHE: tuple[dict[str, Any], ...] = (
    {},
    {"text_encoder_device": "cpu"},
    {"text_encoder_quantization": "torchao-int8"},
    {"text_encoder_quantization": "bnb-nf4", "residency": "keep"},
    {"text_encoder_streamed": True},
    {"vae_device": "cpu"},
)
# Pinned kernels that take no mask, or none of a small pipeline's lengths: runs say so.
NO_KERNEL = {
    "kandinsky5-image-lite": "_native_cudnn",
    "kandinsky5-video-lite": "_native_cudnn",
    "ltx-2.3": "_native_cudnn",
    "krea-2": "_native_flash",
    "minimax-h3": "_native_flash",
}
WINDOWS = {"modulation.py", "tensors.py"}  # where modulations ahead wait when one begins


def mixtures(context: TuningContext) -> Iterator[Candidate]:
    """Yield settings that together hold every value that the machine and the family can use."""
    found = {knob.name: knob.choices_for_family(context) for knob in KNOBS}
    values = {name: (*each.admitted, *each.pinnable) for name, each in found.items()}
    for name in BLOCK_COUNTS:
        values[name] = tuple({0, 1, max(values[name])})
    refusing = NO_KERNEL.get(context.family.name)
    values["attention"] = tuple(each for each in values["attention"] if each != refusing)
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
        if context.family.name == "ltx-2.3" and "vae_device" in way:
            continue  # its statistics, cast on the device before they leave it, would be zero
        kept = {
            name: value
            for name, value in way.items()
            if name == "residency" or value in usable[PIN + name]
        }
        if not why_not_cast(kept.get("text_encoder_quantization", "none"), context.family):
            yield CachingSettings.model_validate(kept)


def require_one_wait(folder: Path, settings: Candidate) -> None:
    judge_nothing()
    settings = settings.changed(optimizer="adamw")  # others wait for their own numbers
    waits = test_steps.waits_in(test_steps.start(folder / "pipeline", **dict(settings)))
    allowed = WINDOWS if settings.modulation == "ahead" else set()
    places = [place for place in waits if place.partition(":")[0] not in allowed]
    assert [place.partition(":")[0] for place in places] == ["step.py"], places


def require_foretold_copies(name: str, folder: Path) -> None:
    """Swapped blocks are copied once in each direction, but for those that are still there."""
    judge_nothing()
    pipeline = folder / "pipeline"
    work = plan_for(name, probe(), folder, USUAL).frozen.workload
    resolved = resolve_model(ModelRef.of(pipeline / "model"))
    cost = CostModel.build(probe(), work, resolved.family, resolved.config)
    *sizes, _ = cost.tables.model_bytes(choice_of(USUAL)).block_weight_bytes  # the last stays

    def moved_bytes(swapped: int) -> int:
        changes = {"checkpointed_blocks": len(sizes), "swapped_blocks": swapped}
        runner = test_steps.start(pipeline, **changes)
        counted = StandIn().counted(runner.timed_step, "bytes_to_device")
        return int(counted["bytes_to_device"])

    foretold, found = 2 * (sum(sizes[1:]) + sum(sizes[:-1])), moved_bytes(len(sizes))
    found -= moved_bytes(1)
    assert abs(found - foretold) <= 0.01 * foretold, f"{found} bytes for {foretold}"


def require_foretold_kernel(padding: TextPadding, folder: Path) -> None:
    judge_nothing()
    family = resolve_model(ModelRef.of(folder / "pipeline/model")).family
    capability = torch.cuda.get_device_capability()
    how = {"precision": "bf16" if capability >= (8, 0) else "fp16"}
    runner = test_steps.start(folder / "pipeline", padding=padding, micro_batch_size=2, **how)
    ran = dict[int, set[str]]()  # kernels by number of scores

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = re.search("scaled_dot_product_([a-z]+)_attention", func.name())
            if found:
                ran.setdefault(args[0].shape[2] * args[1].shape[2], set()).add(found[1])
            return func(*args, **(kwargs or {}))

    with Noting():
        runner.timed_step()
    always = family.has_attention_mask(1, "exact")  # of the text alone
    is_masked = family.has_attention_mask(2, padding) and not always
    foretold = cuda_kernel(
        "native", masked=is_masked, capability=capability, cudnn=cudnn_version(), **how
    )
    # Some families' first blocks see pictures alone, and need no mask.
    assert ran[max(ran)] == {foretold}, f"{ran} for {foretold}"


def checks_of(name: str, machine: str, folder: Path) -> Iterator[tuple[str, Callable[..., None]]]:
    """Yield what is checked on the pipeline in `folder`, each a function of a folder of its own."""

    def list_runs() -> None:
        work = plan_for(name, probe(), folder, USUAL).frozen.workload.changed(quality="compact")
        context = TuningContext(probe(), get_family(name), work)
        found = mixtures(context), ways_to_cache(context)
        told = [[each.model_dump() for each in kind] for kind in found]
        (folder / "runs").write_text(json.dumps(told))

    in_fork(machine, list_runs)
    found, ways = json.loads((folder / "runs").read_text())
    yield "copies of swapped blocks", partial(require_foretold_copies, name)
    yield "attention, exact", partial(require_foretold_kernel, "exact")
    if get_family(name).masks_padding:
        yield "attention, masked", partial(require_foretold_kernel, "masked")
    usual = USUAL.model_dump() | {"precision": found[0]["precision"]}
    for fields, way in zip_longest(found, ways):
        settings = Candidate.model_validate(fields or usual)
        caching = CachingSettings.model_validate(way or {})
        changes = settings.differences(USUAL) | caching.model_dump(exclude_defaults=True)
        text = ", ".join(f"{key}={value}" for key, value in changes.items()) or "usual"
        yield text, partial(run_and_resume, name, settings=settings, caching=caching)
        yield f"one wait: {text}", partial(require_one_wait, settings=settings)


def rows_of(name: str, machine: str, known: set[tuple[str, str, str]]) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as made:
        base = Path(made)
        in_fork(machine, lambda: write_small(name, base / "pipeline"))
        for number, (text, check) in enumerate(checks_of(name, machine, base)):
            if (name, machine, text) in known:
                continue
            folder, start = base / str(number), time.monotonic()
            folder.mkdir()
            (folder / "pipeline").symlink_to(base / "pipeline")
            row = {"family": name, "machine": machine, "run": text}
            try:
                in_fork(machine, partial(check, folder=folder))
            except pytest.fail.Exception as error:
                row["failure"] = str(error)[-600:]
            yield row | {"seconds": round(time.monotonic() - start, 1)}


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
