"""`train` without a plan file plans first, or goes on with the plan of the run that is resumed."""

from typing import Any

import pytest

import autotune
from autotune.errors import InvalidInput
from autotune.plan.plan import TrainingPlan
from tests.train.small import machine, write_model_and_images
from tests.train.small import make_plan as plan_by_hand


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"model": "qwen-image"}, "no data to train on"), ({"data": "photos"}, "no model is named")],
)
def test_what_is_missing_is_told(arguments, words, tmp_path):
    with pytest.raises(InvalidInput, match=words):
        autotune.train(**arguments, output=str(tmp_path / "run"))
