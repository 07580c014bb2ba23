"""Tests on a real GPU (`pytest tests/gpu -o addopts=`); those marked `anywhere` run on a CPU, and
those not marked `values` on the stand-in of tests/fakegpu."""

import pytest
import torch

from autotune.machine.probe import probe
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import Candidate
from autotune.plan.job import ModelRef
from autotune.plan.workload import WorkloadRequest
from autotune.search.trials import ProcessTrialRunner
from autotune.train.workload import describe_workload
from tests.small import write_small_pipeline

GIB = 2**30
CAPTIONS = ("a red square", "a blue circle on the left")


def pytest_configure(config):
    config.addinivalue_line("markers", "anywhere: runs on a CPU too")
    config.addinivalue_line("markers", "values: compares numbers, which no stand-in for a GPU has")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu" in item.nodeid and not item.get_closest_marker("anywhere"):
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(scope="session")
def hardware():
    return probe()


@pytest.fixture(scope="session")
def device(hardware):
    return f"cuda:{hardware.device.index}" if hardware.device.kind == "cuda" else "cpu"


@pytest.fixture(scope="session")
def precision(hardware):
    return "bf16" if hardware.device.kind == "cuda" else "fp32"


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu") / "model"
    write_small_pipeline("qwen-image", folder, CAPTIONS)
    return folder


def work(model, side_px=128, batch=2, padding="exact"):
    sizes = {"resolution": (side_px, side_px), "effective_batch_size": batch, "text_tokens": 16}
    request = WorkloadRequest(rank=4, **sizes)
    asked = describe_workload(resolve_model(ModelRef.of(model)), None, request)
    return asked.changed(text_padding=padding, quality="compact")  # which admits 4 bits, too


@pytest.fixture
def runner(model, hardware):
    with ProcessTrialRunner(hardware, resolve_model(ModelRef.of(model)), work(model)) as runner:
        yield runner


def candidate(precision, **changes):
    fields = {"micro_batch_size": 1, "checkpointed_blocks": 2, "precision": precision, **changes}
    return Candidate.model_validate(fields)
