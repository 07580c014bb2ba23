"""Mistakes in a request are told before anything long: the rates, a trial, a download."""

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.errors import AutotuneError
from autotune.plan.plan import TrainingPlan
from tests.small import draw_images
from tests.train.small import machine, write_model_and_images
from tests.train.small import make_plan as plan_by_hand

TABLE = """(
    elsewhere.CatalogPrediction(
        gpu="nvidia-rtx-4090", memory_gb=24, step_seconds=14.1, time_uncertainty=0.3,
        run_memory_bytes=19 << 30,
    ),
    elsewhere.CatalogPrediction(gpu="nvidia-rtx-3060", memory_gb=12),
)"""
HEAVY = ("torch", "diffusers", "transformers", "optuna")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of a small model and of its data."""
    return write_model_and_images(tmp_path_factory.mktemp("small"))


def _drop_captions(images: Path, folder: Path) -> dict[str, Any]:
    draw_images(folder, count=2)
    for file in folder.glob("*.txt"):
        file.unlink()
    return {"data": folder}


WRONG: dict[str, tuple[Callable[[Path, Path], dict[str, Any]], str]] = {
    "captions": (_drop_captions, "have no caption"),
    "data": (lambda images, folder: {"data": folder / "gone"}, "there is no data folder"),
    "steps": (lambda images, _: {"data": images, "num_steps": 0}, "num_steps"),
    "output": (
        lambda images, _: {"data": images, "output": str(images / "run")},
        "lies in the data folder",
    ),
    "memory": (lambda images, _: {"data": images, "max_memory": "12 potatoes"}, "not an amount"),
    "processes": (
        lambda images, _: {"data": images, "num_gpus": 3, "effective_batch_size": 4},
        "shared evenly",
    ),
    "rate": (lambda images, _: {"data": images, "learning_rate": 1.0}, "cannot learn"),
    "step": (
        lambda images, _: {"data": images, "optimizer": "prodigy", "learning_rate": 1e-4},
        "cannot learn",
    ),
    "pins": (lambda images, _: {"data": images, "pins": {"attention": "sage"}}, "sage"),
}


@pytest.mark.parametrize("what", WRONG)
def test_mistakes_told_before_measuring_rates(what, small, tmp_path, monkeypatch):
    def measure(*asked: object) -> None:
        pytest.fail("the rates are being measured")

    monkeypatch.setattr("autotune.machine.probe.measure_rates", measure)
    monkeypatch.setattr("autotune.machine.probe.has_valid_rates", lambda saved, now: False)
    arguments, words = WRONG[what]
    with pytest.raises(AutotuneError, match=words):
        autotune.plan(
            str(small[0]), **arguments(small[1], tmp_path / "data"), path=tmp_path / "plan.yaml"
        )


@pytest.mark.parametrize("what", ["captions", "data", "output"])
def test_impossible_runs_are_not_tried(what, small, tmp_path, monkeypatch):
    def tried(*asked: object) -> TrainingPlan:
        pytest.fail("the plan is being tried")

    monkeypatch.setattr("autotune.search.arrival.load_or_verify", tried)
    made = plan_by_hand(*small, machine())
    expected = made.frozen.expected.changed(evidence="predicted")
    predicted = made.changed(frozen=made.frozen.changed(expected=expected))
    arguments, words = WRONG[what]
    with pytest.raises(AutotuneError, match=words):
        autotune.train(predicted, **arguments(small[1], tmp_path / "data"))


def test_other_hardware_named_without_gpu():
    code = (
        "import sys, autotune.api as machines\n"
        "machines.may_have_gpu = lambda: False\n"
        "from autotune.search import comparison as elsewhere\n"
        f"elsewhere.catalog_predictions = lambda family: {TABLE}\n"
        "from autotune.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as ended: print('status', ended.code)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    asked = ["plan", "--model", "qwen-image", "--data", "my photos", "--rank", "4"]
    process = subprocess.run(
        [sys.executable, "-c", code, *asked], capture_output=True, text=True, check=True
    )
    *table, status, loaded = process.stdout.splitlines()
    assert (status, loaded) == ("status 3", "[]")
    assert any(line.startswith("nvidia-rtx-4090") and "2.6 to 4.8 s" in line for line in table)
    assert table[-1] == "does not fit: nvidia-rtx-3060"
    assert max(map(len, table)) <= 80
    assert "cannot be tried here: this machine has no GPU" in process.stderr
    command = " ".join(process.stderr.split())
    assert f"{shlex.join(['autotune', *asked])} --hardware nvidia-rtx-4090" in command
