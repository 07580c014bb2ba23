"""Trials on the GPU: forked children use it, every open choice trains, failures are typed."""

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.registry import Attention
from autotune.knobs.settings import ALLOCATOR_VARIABLES as VARIABLES
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import Candidate
from autotune.plan.job import ModelRef
from autotune.search.trials import ProcessTrialRunner
from tests.gpu.conftest import GIB, candidate, work

LOSS_TOLERANCES = {"bnb-nf4": 1.0, "torchao-fp8": 0.5, "fp8-matmul": 0.5}
"""Of losses, besides 0.1: random weights magnify errors."""


@pytest.mark.values
@pytest.mark.anywhere
@pytest.mark.parametrize("name", Attention().names)
def test_every_attention_that_is_available_trains(runner, hardware, precision, name):
    capability = hardware.capability(f"attention.{name}")
    if not capability.available:
        pytest.skip(capability.reason)
    result = runner.run(candidate(precision, attention=name))
    assert result.outcome == "ok", result.message


@pytest.mark.values
@pytest.mark.anywhere
@pytest.mark.parametrize("name", [name for name in WEIGHT_FORMATS if name != "none"])
@pytest.mark.parametrize("checkpointed", [0, 2])
def test_every_storage_that_is_available_trains(runner, hardware, precision, name, checkpointed):
    capability = hardware.capability(f"quantization.{name}")
    if not capability.available:
        pytest.skip(capability.reason)
    result = runner.run(candidate(precision, quantization=name, checkpointed_blocks=checkpointed))
    assert result.outcome == "ok", result.message
    # Second: a slower trial after a faster one may end before the step whose loss is compared.
    plain = runner.run(candidate(precision, checkpointed_blocks=checkpointed))
    assert result.final_loss == pytest.approx(plain.final_loss, rel=LOSS_TOLERANCES.get(name, 0.1))


@pytest.mark.values
def test_trials_go_on_beyond_the_cap(model, hardware, precision):
    large = work(model, side_px=1024, batch=8)
    with ProcessTrialRunner(hardware, resolve_model(ModelRef.of(model)), large) as runner:
        runner.memory_cap_bytes = GIB // 8
        large = runner.run(candidate(precision, micro_batch_size=8, checkpointed_blocks=0))
        assert large.outcome == "oom", large.message
        runner.memory_cap_bytes = hardware.device.budget_bytes
        assert runner.run(candidate(precision)).outcome == "ok"


def run_python(script, environment):
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment)


@dataclass(frozen=True)
class AskAllocator:
    """Whether the child's allocator has expandable segments."""

    candidate: Candidate
    device: str

    def perform(self, _):
        torch.zeros(1, device=self.device)
        return torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]


@pytest.mark.values
@pytest.mark.parametrize("memory", ["pageable", "pinned"])
def test_batches_reach_device_from_either_memory(runner, precision, memory):
    plain = runner.run(candidate(precision))
    result = runner.run(candidate(precision, batch_memory=memory))
    assert result.outcome == "ok", result.message
    assert result.final_loss == pytest.approx(plain.final_loss, rel=0.01)


@pytest.mark.parametrize("choice", ["default", "expandable"])
def test_allocator_is_set_before_cuda_starts(runner, precision, choice):
    answer = runner.send(
        AskAllocator(candidate(precision, allocator=choice), runner.device), (choice,)
    )
    assert answer is (choice == "expandable")


def test_run_gets_its_allocator_late():
    script = """
from autotune.machine.probe import probe
from autotune.knobs.settings import configure_allocator
import torch
probe()
assert torch.cuda.is_initialized()
configure_allocator("expandable")
torch.zeros(1, device="cuda")
print(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])
print(all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()))
"""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = run_python(script, environment)
    assert done.stdout.split()[-2:] == ["True", "True"]
