"""The machines of machines.yaml as fakes, and a profile as text that people can review."""

from pathlib import Path
from typing import Any

import yaml

from autotune.hardware.system import FakeSystem
from autotune.schema import HardwareProfile

HERE = Path(__file__).parent
ANSWERS: dict[str, Any] = {
    name: answers
    for name, answers in yaml.safe_load((HERE / "machines.yaml").read_text()).items()
    if not name.startswith("_")
}
MACHINES = tuple(ANSWERS)


def machine(name: str) -> FakeSystem:
    return FakeSystem(ANSWERS[name])


def as_text(profile: HardwareProfile, findings: list[str]) -> str:
    """The whole profile, in the order of its fields; what the catalogue says is only named."""
    data = profile.model_dump(mode="json", exclude={"gates", "provenance", "datasheet"})
    data["hard_keys"] = profile.hard_keys
    data["datasheet"] = profile.datasheet.id if profile.datasheet else None
    data["gates"] = {gate.name: f"{'yes' if gate.available else 'no'}: {gate.reason}" for gate in profile.gates}
    data["sources"] = {fact.fact: fact.source or f"absent: {fact.absent_because}" for fact in profile.provenance}
    data["findings"] = findings
    return yaml.safe_dump(data, sort_keys=False, width=118, default_flow_style=None)
