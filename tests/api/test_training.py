"""`plan` and `train`: mistakes are told before anything long, and runs go on by their own plan."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.errors import AutotuneError, InvalidInput
from autotune.plan.plan import TrainingPlan
from tests.small import write_small
from tests.train.small import machine, make_plan as plan_by_hand, write_model_and_images

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "captions": ({"data": "bare"}, "have no caption"),
    "data": ({"data": "gone"}, "there is no data folder"),
    "output": ({"output": "images/run"}, "lies in the data folder"),
    "steps": ({"num_steps": 0}, "num_steps"),
    "memory": ({"max_memory": "12 potatoes"}, "not an amount"),
    "processes": ({"num_gpus": 3, "effective_batch_size": 4}, "shared evenly"),
    "rate": ({"learning_rate": 1.0}, "cannot learn"),
    "step": ({"optimizer": "prodigy", "learning_rate": 1e-4}, "cannot learn"),
    "pins": ({"pins": {"attention": "sage"}}, "sage"),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of a small model and of its data; `bare` beside them has no captions."""
    folder = tmp_path_factory.mktemp("small")
    model, images = write_model_and_images(folder)
    shutil.copytree(images, folder / "bare", ignore=shutil.ignore_patterns("*.txt"))
    return model, images


def too_late(*asked: object) -> None:
    pytest.fail("what is wrong is told too late")


@pytest.mark.parametrize("what", WRONG)
def test_mistakes_are_told_first(what, small, monkeypatch):
    """Before rates are measured, and before a predicted plan is tried."""
    monkeypatch.chdir(small[0].parent)
    monkeypatch.setattr("autotune.machine.probe.measure_rates", too_late)
    monkeypatch.setattr("autotune.machine.probe.has_valid_rates", lambda saved, now: False)
    monkeypatch.setattr("autotune.search.arrival.load_or_verify", too_late)
    asked, words = {"data": "images", **WRONG[what][0]}, WRONG[what][1]
    with pytest.raises(AutotuneError, match=words):
        autotune.plan("model", **asked, path="plan.yaml")
    if what in ("captions", "data", "output"):
        made = plan_by_hand(*small, machine())
        expected = made.frozen.expected.changed(evidence="predicted")
        with pytest.raises(AutotuneError, match=words):
            autotune.train(made.changed(frozen=made.frozen.changed(expected=expected)), **asked)


@pytest.mark.slow
def test_run_resumes_by_its_own_plan(tmp_path, monkeypatch):
    asked: list[dict[str, Any]] = []

    def search(**arguments: Any) -> TrainingPlan:
        asked.append(arguments)
        return plan_by_hand(
            *small, machine(), output=arguments["output"], num_steps=arguments["num_steps"]
        )

    monkeypatch.setattr("autotune.training.plan", search)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small = write_model_and_images(tmp_path)
    model, data, output = str(small[0]), str(small[1]), str(tmp_path / "run")
    report = autotune.train(model=model, data=data, output=output, num_steps=2)
    assert report.num_steps == 2
    assert {name: asked[0][name] for name in ("model", "data")} == {"model": model, "data": data}
    with pytest.raises(InvalidInput, match="finished after 2 steps"):
        autotune.train(model=model, data=data, output=output, num_steps=2)
    assert autotune.train(output=output, resume=True, num_steps=3).resumed_at == 2
    assert len(asked) == 1, "what a folder forbids is told before a search, and resuming needs none"


MODELS = "qwen-image", "flux1-dev", "sdxl", "z-image"


def predict(model: str) -> float:
    return autotune.estimate(model, hardware="4090").run_memory_bytes


@pytest.mark.slow
def test_threads_do_everything_at_once(tmp_path):
    outputs = [os.fstat(number).st_ino for number in (1, 2)]
    for family in ("qwen-image", "sdxl"):
        write_small(family, tmp_path / family)

    def plan(family: str) -> TrainingPlan:
        folder, job = tmp_path / family, {"num_steps": 8, "resolution": 64, "max_trials": 1}
        return autotune.plan(folder / "model", folder / "images", **job)

    def train(made: TrainingPlan) -> tuple[float, ...]:
        outputs = (str(tmp_path / made.digest[-8:] / name) for name in ("run", "again"))
        return tuple(autotune.train(made, output=output).final_loss for output in outputs)

    with ThreadPoolExecutor(3) as threads:
        plans = list(threads.map(plan, ("qwen-image", "sdxl")))
        predicted = [threads.submit(predict, model) for model in MODELS]
        losses = list(threads.map(train, plans))
    assert [each.result() for each in predicted] == [predict(model) for model in MODELS]
    assert all(first == again for first, again in losses)
    assert [os.fstat(number).st_ino for number in (1, 2)] == outputs
