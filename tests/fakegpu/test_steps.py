"""A step on the device: waits, copies, kernels, and what it leaves there."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autotune.knobs.attention import cuda_kernel
from autotune.knobs.blocks import BlockSwap
from autotune.machine.sources import cudnn_version
from autotune.models.registry import FAMILIES
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import Candidate
from autotune.plan.job import ModelRef
from autotune.plan.workload import WorkloadRequest
from autotune.search.worker import StepRunner, TrialRequest, load_for_trial
from autotune.train import model
from autotune.train.processes import set_device
from autotune.train.workload import describe_workload


@pytest.fixture(autouse=True)
def _any_quality(monkeypatch):
    monkeypatch.setattr(model.ErrorMeter, "result", lambda _: None)  # of what no kernel computed


def start(folder, *, device="cuda:0", padding="exact", **changes):
    resolved = resolve_model(ModelRef.of(folder / "model"))
    sizes = {"resolution": (128, 128), "effective_batch_size": 2, "text_tokens": 64}
    work = describe_workload(resolved, None, WorkloadRequest(rank=4, **sizes))
    work = work.changed(quality="compact", text_padding=padding)
    fields = {"micro_batch_size": 1, "checkpointed_blocks": 1, "batch_memory": "pinned", **changes}
    candidate = Candidate.model_validate(fields)
    set_device(torch.device(device))
    loaded = load_for_trial(TrialRequest(resolved, work, candidate, device, 2))
    runner = StepRunner(loaded, work, candidate)
    for _ in range(2):
        runner.timed_step()
    return runner


def waits_in(runner):
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
    ],
)
def test_the_host_waits_once(name, padding, pipeline):
    size = 2 if padding == "masked" else 1
    runner = start(pipeline, padding=padding, micro_batch_size=size)
    waits = waits_in(runner)
    assert [place.partition(":")[0] for place in waits] == ["step.py"], waits


@pytest.mark.parametrize("name", ["qwen-image"])
def test_trials_hold_what_runs_hold(name, pipeline):
    runner = start(pipeline)
    torch._C._cuda_clearCublasWorkspaces()
    tensors = runner.optimizer.live_tensors(runner.model.transformer)
    sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    on_device = sum(-(-size // 512) * 512 for size in sizes.values())
    assert torch.cuda.memory_allocated() == pytest.approx(on_device, abs=2**14)


KERNELS = {"flash": "flash_fwd", "efficient": "fmha_cutlassF", "cudnn": ""}  # cuDNN's has no name


@pytest.mark.parametrize("padding", ["exact", "masked"])
@pytest.mark.parametrize("machine", ["4090", "h100", "5090", "2080-ti", "gb10"])
@pytest.mark.parametrize("name", ["qwen-image"])
def test_kernel_of_attention_is_one_foretold(name, machine, padding, pipeline, standin):
    capability = torch.cuda.get_device_capability()
    precision = "bf16" if capability >= (8, 0) else "fp16"
    is_masked = padding == "masked"
    start(pipeline, padding=padding, micro_batch_size=2, precision=precision)
    how = {"masked": is_masked, "precision": precision, "capability": capability}
    foretold = cuda_kernel("native", cudnn=cudnn_version(), **how)
    launched = standin.kernels()
    assert {kernel for kernel, part in KERNELS.items() if part and part in launched} == (
        set() if foretold == "cudnn" else {foretold}
    )
    assert bool(standin.count("executions")) is (foretold == "cudnn")


def test_swapped_blocks_are_copied_once(standin):
    num_blocks, width, device = 6, 512, torch.device("cuda:0")
    set_device(device)
    blocks = [nn.Linear(width, width, bias=False).requires_grad_(False) for _ in range(num_blocks)]
    swap = BlockSwap(blocks, device)
    inputs = torch.zeros(1, width, device=device, requires_grad=True)
    block_bytes = 4 * width**2
    assert standin.count("pinned_bytes") == num_blocks * block_bytes

    def step():
        values = inputs
        for block in blocks:
            values = checkpoint(block, values, use_reentrant=False)
        values.sum().backward()

    step()
    counted = standin.counted(
        step, "copies_to_device", "bytes_to_device", "pageable_bytes_to_device", "host_waits"
    )
    copies = 2 * (num_blocks - 1)  # the last in one direction is the first in the other
    assert counted == {
        "copies_to_device": copies,
        "bytes_to_device": copies * block_bytes,
        "pageable_bytes_to_device": 0,
        "host_waits": 0,
    }
    assert torch.cuda.memory_allocated() < 4 * block_bytes + 2**24
    blocks.clear()
    del swap
    assert standin.bytes_left()[1] == 0


@pytest.mark.parametrize("machine", ["h100"])
@pytest.mark.parametrize("changes", [{}, {"compile": "block"}])
@pytest.mark.parametrize("name", ["flux1-dev"])
def test_cudnn_gets_dense_gradients(name, machine, changes, pipeline, monkeypatch):
    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "cudnn_attention_backward" in func.name():
                are_dense.append(args[0].transpose(1, 2).is_contiguous())
            return func(*args, **(kwargs or {}))

    def backward(*args, **named):
        with Noting():
            plain(*args, **named)

    are_dense, plain, runner = [], torch.autograd.backward, start(pipeline, **changes)
    monkeypatch.setattr(torch.autograd, "backward", backward)
    runner.timed_step()
    assert are_dense
    assert all(are_dense)


@pytest.mark.parametrize("machine", ["2080-ti,4090"])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen-image", {"quantization": "torchao-int8", "swapped_blocks": 1}),
        ("qwen-image", {"modulation": "ahead"}),
        ("sdxl", {"quantization": "bnb-nf4"}),
        ("flux1-dev", {"quantization": "int8-rotated"}),
    ],
)
def test_second_device_trains_alone(name, machine, changes, pipeline, standin):
    runner = start(pipeline, device="cuda:1", **changes)
    runner.memory_step()
    assert (standin.has_context(0), standin.used_bytes(0)) == (False, 0)
    assert standin.has_context(1)
    for block in runner.model.family.blocks(runner.model.transformer):
        frozen = (each for each in block.parameters() if not each.requires_grad)
        assert len({each.untyped_storage().data_ptr() for each in frozen}) == 1  # no holes between
