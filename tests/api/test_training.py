"""`plan` and `train`: mistakes are told before anything long, and runs go on by their own plan."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

import autotune
from tests.small import write_small

MODELS = "qwen-image", "flux1-dev", "sdxl", "z-image"


def predict(model):
    return autotune.estimate(model, hardware="4090").run_memory_bytes


@pytest.mark.slow
def test_threads_do_everything_at_once(tmp_path):
    outputs = [os.fstat(number).st_ino for number in (1, 2)]
    for family in ("qwen-image", "sdxl"):
        write_small(family, tmp_path / family)

    def plan(family):
        folder, job = tmp_path / family, {"num_steps": 8, "resolution": 64, "max_trials": 1}
        return autotune.plan(folder / "model", folder / "images", **job)

    def train(made):
        outputs = (str(tmp_path / made.digest[-8:] / name) for name in ("run", "again"))
        return tuple(autotune.train(made, output=output).final_loss for output in outputs)

    with ThreadPoolExecutor(3) as threads:
        plans = list(threads.map(plan, ("qwen-image", "sdxl")))
        predicted = [threads.submit(predict, model) for model in MODELS]
        losses = list(threads.map(train, plans))
    assert [each.result() for each in predicted] == [predict(model) for model in MODELS]
    assert all(first == again for first, again in losses)
    assert [os.fstat(number).st_ino for number in (1, 2)] == outputs
