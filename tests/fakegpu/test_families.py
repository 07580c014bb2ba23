"""Whole runs of every family, each on one of the machines (all: benchmarks/every_value.py)."""

import pytest

from autotune.machine.probe import probe
from autotune.models.registry import FAMILIES, get_family
from autotune.plan.candidate import Candidate
from autotune.train import loop, model
from autotune.train.run import train
from tests.fakegpu.conftest import StandIn
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
MACHINES, FIRST = tuple(SETTINGS), {"micro_batch_size": 1, "checkpointed_blocks": 1}
PHASES = {"caching", "loading", "training", "previews", "saving"}


def judge_nothing():
    """Let pass, in this fork, what would be judged by numbers that no kernel computed."""
    model.ErrorMeter.result = lambda _: None
    loop.EVALUATION_STEPS = 1


def plan_for(name, hardware, folder, settings, **job):
    family, pipeline = get_family(name), folder / "pipeline"
    job |= {
        "learning_rate": 1.0 if settings.optimizer == "prodigy" else 1e-4,
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
    return make_plan(pipeline / "model", pipeline / "images", hardware, settings=settings, **job)


def run_and_resume(name, folder, settings, caching=None):
    judge_nothing()
    hardware = probe()  # another look finds other free memory, and that is another plan
    for num_steps in (2, 3):
        plan = plan_for(name, hardware, folder, settings, num_steps=num_steps, caching=caching)
        with DecisiveNumbers():
            report = train(plan, hardware, folder / "cache", resume=num_steps == 3)
        assert not report.warnings, report.warnings
        assert {phase.name for phase in report.phases} == PHASES
        assert all(phase.device_bytes for phase in report.phases)
        assert (folder / "out" / report.adapter).exists()
    on_device, pinned = StandIn().bytes_left()
    assert on_device <= 4 << 20  # diffusers' cached functions keep Qwen-Image's positions
    assert pinned == 0


@pytest.mark.parametrize(
    ("name", "machine"),
    [(name, MACHINES[number % len(MACHINES)]) for number, name in enumerate(FAMILIES)],
)
def test_run_ends_and_leaves_nothing_behind(name, machine, pipeline, tmp_path):
    family, changes = get_family(name), dict(SETTINGS[machine])
    if family.modulation is None:
        changes.pop("modulation", None)
    if family.max_micro_batch_size == 1:
        changes.pop("micro_batch_size", None)
    (tmp_path / "pipeline").symlink_to(pipeline)
    run_and_resume(name, tmp_path, Candidate.model_validate({**FIRST, **changes}))
