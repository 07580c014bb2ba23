"""`autotune doctor` and `autotune probe` as a script uses them."""

import json

import pytest
from click.testing import CliRunner

from autotune.cli.app import app
from autotune.machine import doctor
from autotune.machine import probe as probing
from autotune.machine.catalog import load_catalog
from autotune.plan.hardware import HardwareProfile
from tests.machine.fleet import machine


@pytest.mark.parametrize(("name", "status"), [("cpu-only-torch", 1), ("gb10", 0), ("h200", 0)])
def test_the_doctor_exits_with_one_where_something_blocks(monkeypatch, name, status):
    monkeypatch.setattr(doctor, "System", lambda torch: machine(name))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    severities = [finding["severity"] for finding in json.loads(result.stdout)]
    assert result.exit_code == status == int("blocks" in severities)


def test_the_probe_shows_the_fingerprint_to_people_and_scripts(monkeypatch):
    monkeypatch.setattr(probing, "System", lambda: machine("rtx-4090"))
    fingerprint = probing.probe().fingerprint
    assert fingerprint[:23] in CliRunner().invoke(app, ["probe", "--quick"]).stdout
    printed = CliRunner().invoke(app, ["probe", "--quick", "--json"]).stdout
    assert json.loads(printed)["fingerprint"] == fingerprint
    assert HardwareProfile.model_validate_json(printed) == probing.probe()


def test_the_catalog_is_listed_for_people_and_for_scripts():
    assert "nvidia-rtx-4090" in CliRunner().invoke(app, ["probe", "--list"]).stdout
    entries = json.loads(CliRunner().invoke(app, ["probe", "--list", "--json"]).stdout)
    assert len({entry["id"] for entry in entries}) == len(load_catalog())
