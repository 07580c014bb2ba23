"""A small model for trials, runners on it, and planning that predicts by formula."""

import pytest

from autotune.models.resolve import resolve_model
from autotune.plan.candidate import Candidate
from autotune.plan.job import ModelRef
from autotune.plan.workload import Bucket
from autotune.search.trials import ProcessTrialRunner
from tests import builders
from tests.search.formula import by_formula
from tests.small import draw_images, write_small_pipeline

GIB = 2**30
FIRST = Candidate(micro_batch_size=1, checkpointed_blocks=5, precision="fp32")


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trial")
    write_small_pipeline("qwen-image", folder / "model", draw_images(folder / "images"))
    return folder / "model"


def workload(model, side_px=64):
    bucket = Bucket(width_px=side_px, height_px=side_px, num_frames=1, num_items=12)
    sizes = {"resolution_px": side_px, "buckets": (bucket,), "max_text_tokens": 12, "rank": 4}
    return builders.workload(model=resolve_model(ModelRef.of(model)).spec, lora_alpha=4.0, **sizes)


def runner_for(model, work, budget_bytes=8 * GIB, **options):
    made = builders.hardware(kind="cpu", budget_bytes=budget_bytes)
    hardware = made.changed(device=made.device.changed(memory_kind="host", compute_capability=None))
    runner = ProcessTrialRunner(hardware, resolve_model(ModelRef.of(model)), work, **options)
    runner.num_steps = 1  # of several, those that disagree would be repeated
    return runner


@pytest.fixture
def runner(small_model):
    with runner_for(small_model, workload(small_model)) as runner:
        yield runner


@pytest.fixture(scope="module", name="_by_formula")
def by_formula_in_a_module():
    with by_formula(num_blocks=12):  # a search of 50 blocks takes twice as long
        yield
