"""Steps on the GPU: the host waits once in each; a group of one over NCCL takes the same."""

import warnings

import pytest
import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from autotune.models.resolve import resolve_model
from autotune.plan.job import ModelRef
from autotune.search.worker import longest_captions, synthetic_samples
from autotune.train.model import load_model
from autotune.train.optimizer import AdapterOptimizer
from autotune.train.processes import Processes, set_device
from autotune.train.step import optimizer_step, to_device
from tests.gpu.conftest import candidate, work


@pytest.fixture
def processes(device):
    own = torch.device(device)
    set_device(own)
    backend = "nccl" if own.type == "cuda" else "gloo"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    yield Processes(0, 1, own)
    distributed.destroy_process_group()


def take_step(loaded, network, model):
    workload, resolved = work(model), resolve_model(ModelRef.of(model))
    known = (resolved.family, resolved.config, workload, workload.largest_bucket)
    lengths = longest_captions(resolved.family, workload, 2)
    samples = synthetic_samples(*known, lengths, loaded.dtype)
    batches = [to_device(loaded.collate([each]), loaded.device, loaded.dtype) for each in samples]
    options = {"learning_rate": 1e-3, "weight_decay": 0.0, "max_grad_norm": 1.0}
    optimizer = AdapterOptimizer(loaded.adapter, **options)
    known = resolved.family, network, optimizer, batches
    return optimizer_step(*known, step=1, effective_batch_size=2)


def load(model, device, precision, shards=1):
    resolved = resolve_model(ModelRef.of(model))
    known = work(model), candidate(precision), torch.device(device), 0
    return load_model(resolved, *known, shards=shards)


@pytest.mark.values
@pytest.mark.anywhere
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_group_of_one_steps_alike(model, device, precision, processes, strategy):
    alone = load(model, device, precision)
    expected = take_step(alone, alone.transformer, model)
    loaded = load(model, device, precision, shards=1 if strategy == "ddp" else 2)
    is_sharded = any(isinstance(weight, DTensor) for weight in loaded.transformer.parameters())
    assert is_sharded is (strategy == "fsdp2")
    found = take_step(loaded, processes.replicate(loaded.transformer, has_unused=True), model)
    assert found.loss == pytest.approx(expected.loss, rel=1e-2)
    assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-2)


def test_host_waits_once_a_step(model, device, precision):
    loaded = load(model, device, precision)
    take_step(loaded, loaded.transformer, model)  # whatever is made at the first call
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            take_step(loaded, loaded.transformer, model)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    told = [str(wait.message) for wait in waits if "called a synchronizing" in str(wait.message)]
    assert len(told) == 1, told
