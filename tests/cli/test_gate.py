"""`train --gate` tells schedulers and CI that an adapter is worth nothing."""

from pathlib import Path

import pytest

import autotune
from autotune.plan.run import AdapterVerdict, RunReport, ValidationResult
from tests.conftest import autotune_here
from tests.report.page.pages import FOLDER, golden_plan, run_report


def verdict(**changes: object) -> AdapterVerdict:
    values: dict[str, object] = {
        "num_layers": 2, "num_unmoved": 0, "num_not_finite": 0, "layer_norms": {"a": 1.0, "b": 0.0},
        "base_loss": 0.5, "adapter_loss": 0.4,
    }  # fmt: skip
    return AdapterVerdict.model_validate({**values, **changes})


def failures(found: AdapterVerdict, held_out: ValidationResult | None = None) -> tuple[str, ...]:
    return run_report(golden_plan()).changed(verdict=found, validation=held_out).failures


@pytest.mark.parametrize(("kept_step", "is_worse"), [(50, False), (100, True)])
def test_held_out_images_decide_if_there_are_any(kept_step: int, is_worse: bool) -> None:
    """The adapter that was kept counts, whatever fresh noise on trained images says."""
    held_out = ValidationResult(
        num_images=2, base_loss=0.5, final_loss=0.6, lowest_loss=0.45, lowest_step=50,
        overfitting_from=50,
        kept_step=kept_step,
    )  # fmt: skip
    found = failures(verdict(), held_out)
    assert (len(found) == 1 and "not trained on: 0.6000" in found[0]) is is_worse
    assert failures(verdict(adapter_loss=0.6), held_out) == found


@pytest.mark.parametrize(("gate", "status"), [((), 0), (("--gate",), 1)])
@pytest.mark.parametrize("found", [verdict(adapter_loss=0.6), None])
def test_only_the_gate_makes_it_fail(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gate: tuple[str, ...],
    status: int,
    found: AdapterVerdict | None,
) -> None:  # fmt: skip
    def train(*_: object, **arguments: object) -> RunReport:
        assert "gate" not in arguments
        return run_report(golden_plan()).changed(verdict=found)

    monkeypatch.setattr(autotune, "train", train, raising=False)
    done = autotune_here(capfd, "train", str(Path(FOLDER) / "wall.yaml"), *gate)
    assert done.returncode == status
    assert "pytorch_lora_weights.safetensors" in done.stdout, "the report is printed all the same"
    assert ("error: " in done.stderr) is bool(status)
