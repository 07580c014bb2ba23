"""What the terminal shows of a machine fits 80 columns and leaves nothing important out."""

import io

import pytest
from autotune.reporting.hardware import catalog_view, findings_view, human_rate, profile_view
from rich.console import Console

from autotune.hardware.catalog import load_catalog
from autotune.hardware.diagnosis import findings
from autotune.hardware.doctor_facts import read_doctor_facts
from autotune.hardware.probing import read_profile
from autotune.hardware.store import hardware_named
from autotune.schema.hardware import Rate
from tests.hardware.fleet import MACHINES, SOURCES, FakeSystem, machine


def shown(view):
    console = Console(width=80, record=True, file=io.StringIO(), color_system=None)
    console.print(view)
    return console.export_text()


def rate(value, unit, samples=9):
    return Rate(
        name="matmul.bf16.4096x3072x18432", value=value, unit=unit, spread=0.04, num_samples=samples
    )


@pytest.mark.parametrize("name", MACHINES)
def test_a_profile_fits_and_shows_budget_capabilities_and_notes(name):
    profile = read_profile(machine(name)).changed(
        rates=(rate(1.4e14, "FLOP/s"),), notes=("a note",), noisy=True
    )
    text = shown(profile_view(profile))
    assert max(len(line) for line in text.splitlines()) <= 80
    for needed in (
        "budget",
        profile.device.memory_kind,
        "noisy",
        "140.0 TFLOP/s",
        "note: a note",
        "torchao-int8",
    ):
        assert needed in text
    assert "None" not in text


@pytest.mark.parametrize("name", MACHINES)
def test_findings_fit_and_name_their_fix(name):
    found = findings(read_doctor_facts(machine(name), 2**36))
    text = shown(findings_view(found))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.count("fix:") == len(found)
    assert found or "Nothing" in text


def test_brackets_in_a_name_are_shown():
    profile = read_profile(
        FakeSystem(
            {**SOURCES["no-gpu"], "os": {**SOURCES["no-gpu"]["os"], "cpu": "CPU [/rev] [b]"}}
        )
    )
    assert "CPU [/rev] [b]" in shown(profile_view(profile))


def test_the_catalog_fits_with_every_name():
    text = shown(catalog_view(load_catalog()))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert all(gpu.id in text for gpu in load_catalog())


def test_a_catalog_profile_says_that_nothing_was_measured():
    assert "not measured" in shown(profile_view(hardware_named("nvidia-gb10")))


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.5e14, "FLOP/s", "150.0 TFLOP/s"),
        (2e9, "FLOP/s", "2.0 GFLOP/s"),
        (2.5e10, "B/s", "25.00 GB/s"),
        (2**20, "B", "1 MiB"),
        (0.25, "s", "250.00 ms"),
        (9.2e-6, "s", "9.2 us"),
    ],
)
def test_rates_are_told_in_the_units_that_people_use(value, unit, text):
    assert human_rate(rate(value, unit)) == text
