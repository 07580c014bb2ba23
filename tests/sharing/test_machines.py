"""A record's machine as hardware to plan for."""

from pathlib import Path

import pytest

from autotune.errors import InvalidInput
from autotune.sharing.machines import hardware_from_record
from autotune.sharing.store import user_store
from tests.conftest import autotune_here
from tests.sharing.examples import machine, rate, record


def test_a_gpus_record_gives_its_rates_and_budget() -> None:
    shared = record()
    profile = hardware_from_record(shared.name, shared)
    assert profile.device.compute_capability == (8, 9)
    assert profile.rates == shared.machine.rates
    assert profile.device.budget_bytes <= shared.machine.budget_bytes
    assert any(shared.name[:12] in note for note in profile.notes)


def test_a_record_that_cannot_be_true_gives_nothing() -> None:
    with pytest.raises(InvalidInput, match="above the device's peak"):
        hardware_from_record("0" * 64, record(machine(rates=(rate("memory.bandwidth", 9e13),))))


def test_a_device_outside_the_catalog_is_refused() -> None:
    unknown = machine(name="Nobody's GPU")
    with pytest.raises(InvalidInput, match="not in the catalog"):
        hardware_from_record("0" * 64, record(unknown))


def test_hardware_takes_the_beginning_of_a_records_name(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    shared = record()
    user_store().add(shared)
    answer = autotune_here(
        capfd,
        "estimate",
        "--model",
        "kandinsky5-image-lite",
        "--hardware",
        shared.name[:12],
        "--resolution",
        256,
        "--json",
    )
    assert answer.returncode == 0, answer.stderr
    assert shared.machine.device_name in answer.stdout
    missing = autotune_here(
        capfd, "estimate", "--model", "qwen-image", "--hardware", "0123456789ab"
    )
    assert missing.returncode == 2
