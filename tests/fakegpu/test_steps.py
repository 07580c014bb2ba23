"""What a step does on the device: waits, copies, kernels, and what it leaves there."""

import warnings
from pathlib import Path

import pytest
import torch

from autotune.models.registry import FAMILIES
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import Candidate
from autotune.plan.job import ModelRef
from autotune.plan.workload import WorkloadRequest
from autotune.search.worker import StepRunner, TrialRequest, load_for_trial
from autotune.train import model
from autotune.train.prepare import describe_workload
from autotune.train.processes import set_device

ASKS_THE_DEVICE = {"qwen-image-2.1"}  # its class in diffusers reads masks for the shapes of tokens


@pytest.fixture(autouse=True)
def _any_quality(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "require_quality", lambda *_: None)  # of what no kernel computed


def start(
    folder: Path, *, device: str = "cuda:0", padding: str = "exact", **changes: object
) -> StepRunner:
    """A runner that has taken its first steps."""
    ref = ModelRef.of(folder / "model")
    sizes = {"resolution": (128, 128), "effective_batch_size": 2, "text_tokens": 16}
    work = describe_workload(resolve_model(ref), None, WorkloadRequest(rank=4, **sizes))
    work = work.changed(quality="compact", text_padding=padding)
    fields = {"micro_batch_size": 1, "checkpointed_blocks": 1, "batch_memory": "pinned", **changes}
    candidate = Candidate.model_validate(fields)
    set_device(torch.device(device))
    loaded = load_for_trial(TrialRequest(ref, work, candidate, device, 2))
    runner = StepRunner(loaded, work, candidate)
    for _ in range(2):
        runner.timed_step()
    return runner


def waits_in(runner: StepRunner) -> list[str]:
    """Where torch says that the host waits for the device in a step."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        runner.timed_step()
        torch.cuda.set_sync_debug_mode("default")
    synchronizing = (each for each in told if "called a synchronizing" in str(each.message))
    return [f"{Path(each.filename).name}:{each.lineno}" for each in synchronizing]


@pytest.mark.parametrize(
    ("name", "padding"),
    [
        (name, padding)
        for name, family in FAMILIES.items()
        for padding in (["exact", "masked"] if family.masks_padding else ["exact"])
        if name not in ASKS_THE_DEVICE
    ],
)
def test_the_host_waits_once(name, padding, pipeline):
    size = 2 if padding == "masked" else 1
    runner = start(pipeline, padding=padding, micro_batch_size=size)
    waits = waits_in(runner)
    assert [place.partition(":")[0] for place in waits] == ["step.py"], waits
