"""The real NVML binding, driver API and torch on simulated machines: probe, doctor and budget."""

import platform
from pathlib import Path

import pytest
import torch
import yaml

from autotune.errors import InvalidInput
from autotune.machine.capabilities import MIN_MARGIN_BYTES
from autotune.machine.doctor import doctor
from autotune.machine.probe import may_have_gpu, probe

GIB = 2**30
ABOUT_THE_HOST = {"little-host-memory", "little-disk"}


def findings():
    return {finding.name for finding in doctor()} - ABOUT_THE_HOST


def facts(device):
    """The facts that differ from a quiet card's with its own memory in a full slot."""
    quiet = {"memory_kind": "discrete", "mig": False, "drives_display": False, "pcie_width": 16}
    return {name: getattr(device, name) for name in quiet if getattr(device, name) != quiet[name]}


MACHINES = yaml.safe_load((Path(__file__).parent / "machines.yaml").read_text())


@pytest.mark.parametrize("machine", MACHINES)
def test_facts_findings_and_budget_are_true(machine, standin, monkeypatch):
    if machine == "wsl2":
        monkeypatch.setattr(platform, "release", lambda: "5.15.167.4-microsoft-standard-WSL2")
    expected, unusual = MACHINES[machine]
    assert findings() == set(expected)
    assert may_have_gpu()
    device = probe().device
    assert device.kind == "cuda"
    assert facts(device) == unusual
    total = torch.cuda.get_device_properties(device.index).total_memory
    others = {"busy": 6 * GIB, "wsl2": 3.4 * GIB}
    others |= dict.fromkeys(("4090-display", "4090-laptop"), 0.4 * GIB)
    if device.memory_kind == "integrated":
        assert "free" in device.budget_reason
    else:
        reserve = max(MIN_MARGIN_BYTES, total // 50) + (GIB if device.drives_display else 0)
        expected_bytes = total - others.get(machine, 0) - reserve
        assert device.budget_bytes == pytest.approx(expected_bytes, abs=GIB // 2)


BROKEN = {
    "old-driver": "driver-too-old",
    "updated-not-rebooted": "driver-not-reloaded",
    "off-the-bus": "gpu-lost",
    "driver-not-loaded": None,
}


@pytest.mark.parametrize("machine", BROKEN)
def test_broken_gpu_is_a_cpu(machine):
    told = {finding.name: finding for finding in doctor()}
    if BROKEN[machine] is not None:
        assert told[BROKEN[machine]].severity == "blocks"
    assert probe().device.kind == "cpu"


@pytest.mark.parametrize("machine", ["titan-and-3060"])
def test_nvml_may_count_otherwise(machine):
    first, second = (probe(index=index).device for index in range(2))
    assert (first.name, second.name) == ("NVIDIA TITAN RTX", "NVIDIA GeForce RTX 3060")
    assert (first.power_limit_watts, second.power_limit_watts) == (280, 170)
    assert probe().device == first
    assert first.links[0].peer_index == 0  # in NVML's order, as nvidia-smi shows it


@pytest.mark.parametrize("machine", ["3060,4090"])
@pytest.mark.parametrize("value", ["0,", "1", "GPU-b0b1b2b3", "7", "0,7"])
def test_visible_devices_are_cudas(machine, value, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    is_blocked = "visible-devices" in findings()
    assert is_blocked is (value in ("7", "0,7"))
    names = {"0,": "RTX 3060", "0,7": "RTX 3060", "7": None}
    wanted = names.get(value, "RTX 4090")
    device = probe().device
    assert (device.kind == "cpu") is (wanted is None)
    assert wanted is None or wanted in device.name
    if wanted:
        with pytest.raises(InvalidInput):
            probe(index=1)


@pytest.mark.parametrize("machine", ["4090"])
def test_reading_facts_opens_no_context(machine, standin):
    probe()
    doctor()
    assert not standin.has_context(0)
