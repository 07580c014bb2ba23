"""Whole runs of every family, each on one of the machines (all: benchmarks/every_value.py)."""

import pytest

from autotune.machine.probe import probe
from autotune.models.registry import FAMILIES, get_family
from autotune.plan.candidate import Candidate
from autotune.train import loop, model
from autotune.train.run import train
from tests.fakegpu.numbers import DecisiveNumbers
from tests.small import shortest_clip
from tests.train.small import make_plan

SETTINGS = {
    "4090": {"quantization": "torchao-int8", "swapped_blocks": 1, "allocator": "expandable"},
    "h100": {"modulation": "ahead", "batch_memory": "pinned"},
    "5090": {"quantization": "bnb-nf4", "micro_batch_size": 2},
    "2080-ti": {"precision": "fp16", "swapped_blocks": 1},
    "gb10": {"quantization": "torchao-fp8", "checkpointed_blocks": 0},
}
MACHINES = tuple(SETTINGS)
TABLES_BYTES = 4 << 20  # diffusers' cached functions keep Qwen-Image's positions
PHASES = {"caching", "loading", "training", "previews", "saving"}


@pytest.mark.parametrize(
    ("name", "machine"),
    [(name, MACHINES[number % len(MACHINES)]) for number, name in enumerate(FAMILIES)],
)
def test_run_ends_and_leaves_nothing_behind(
    name, machine, pipeline, tmp_path, standin, monkeypatch
):
    monkeypatch.setattr(model.ErrorMeter, "result", lambda _: None)  # of what no kernel computed
    monkeypatch.setattr(loop, "EVALUATION_STEPS", 1)
    family, hardware, changes = get_family(name), probe(), dict(SETTINGS[machine])
    if family.modulation is None:
        changes.pop("modulation", None)
    if family.max_micro_batch_size == 1:
        changes.pop("micro_batch_size", None)
    fields = {"micro_batch_size": 1, "checkpointed_blocks": 1, **changes}
    job = {
        "num_frames": shortest_clip(family),
        "preview_prompts": ("a red square",),
        # The fewest each takes: a second step looks numbers up that no kernel computed.
        "preview_steps": 2 if name == "minimax-h3" else 1,
    }
    if family.max_controls:
        job["control"] = str(pipeline / "control")

    def run(num_steps, resume):
        plan = make_plan(
            pipeline / "model",
            pipeline / "images",
            hardware,
            settings=Candidate.model_validate(fields),
            resolution_px=64,
            output=str(tmp_path / "out"),
            num_steps=num_steps,
            checkpointing_steps=1,
            **job,
        )
        report = train(plan, hardware, tmp_path / "cache", resume=resume)
        assert not report.warnings
        phases = {phase.name: phase for phase in report.phases}
        assert phases.keys() == PHASES
        assert all(phase.device_bytes for phase in phases.values())
        assert (tmp_path / "out" / report.adapter).exists()

    with DecisiveNumbers():
        run(2, resume=False)
        run(3, resume=True)
    on_device, pinned = standin.bytes_left()
    assert on_device <= TABLES_BYTES
    assert pinned == 0
