"""`train --gate` tells schedulers and CI that an adapter is worth nothing."""

from pathlib import Path

import pytest

import autotune
from autotune.schema.run import AdapterVerdict, RunReport
from tests.conftest import autotune_here
from tests.planning.golden import FOLDER
from tests.reporting.page.pages import golden_plan, run_report


def verdict(**changes: object) -> AdapterVerdict:
    values: dict[str, object] = {
        "num_layers": 2, "num_unmoved": 0, "num_not_finite": 0, "layer_norms": {"a": 1.0, "b": 0.0},
        "base_loss": 0.5, "adapter_loss": 0.4,
    }  # fmt: skip
    return AdapterVerdict.model_validate({**values, **changes})


BAD = [
    ({"layer_norms": {"a": 0.0, "b": 0.0}, "num_unmoved": 2}, "the adapter never moved"),
    ({"num_not_finite": 1}, "1 of the adapter's 2 layers are not finite"),
    ({"adapter_loss": 0.5}, "does not lower the loss"),
    ({"adapter_loss": None}, "could not be compared"),
]


def test_an_adapter_that_lowers_the_loss_passes() -> None:
    assert verdict().failures == ()


@pytest.mark.parametrize(("changes", "words"), BAD)
def test_an_adapter_that_is_worth_nothing_fails(changes: dict[str, object], words: str) -> None:
    (failure,) = verdict(**changes).failures
    assert words in failure


@pytest.mark.parametrize(("gate", "status"), [((), 0), (("--gate",), 1)])
@pytest.mark.parametrize("found", [verdict(adapter_loss=0.6), None])
def test_only_the_gate_makes_it_fail(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gate: tuple[str, ...], status: int,
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
    assert ("hint: look at the run's report.html" in done.stderr) is bool(status)
