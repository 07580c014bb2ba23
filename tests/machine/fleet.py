"""The machines of machines.yaml as fakes, and a profile as text that people can review."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from autotune.machine.sources import Unavailable
from autotune.plan.hardware import HardwareProfile

HERE = Path(__file__).parent
SOURCES: dict[str, Any] = {
    name: sources
    for name, sources in yaml.safe_load((HERE / "machines.yaml").read_text()).items()
    if not name.startswith("_")
}
MACHINES = tuple(SOURCES)


class FakeSystem:
    """A machine described by data: `{source: {query: value}}`.

    Values under `devices`, a list, belong to one device each. A value `{"absent": reason}` is
    unavailable, and a whole source may be absent in the same way.
    """

    def __init__(self, sources: Mapping[str, object]) -> None:
        self._sources = sources

    def query(self, source: str, name: str, index: int = 0) -> object:
        values = _present(self._sources.get(source, {}))
        if not isinstance(values, Mapping):
            raise Unavailable(f"{source} reports nothing")
        devices = values.get("devices", ())
        for place in (devices[index] if index < len(devices) else {}, values):
            if name in place:
                return _present(place[name])
        raise Unavailable("not reported")


def _present(value: object) -> object:
    if isinstance(value, Mapping) and "absent" in value:
        raise Unavailable(str(value["absent"]))
    return value


def machine(name: str) -> FakeSystem:
    return FakeSystem(SOURCES[name])


def as_text(profile: HardwareProfile, findings: list[str]) -> str:
    data = profile.model_dump(mode="json", exclude={"capabilities", "datasheet"})
    data["match_keys"] = profile.match_keys
    data["datasheet"] = profile.datasheet.id if profile.datasheet else None
    data["capabilities"] = {
        capability.name: f"{'yes' if capability.available else 'no'}: {capability.reason}"
        for capability in profile.capabilities
    }
    data["findings"] = findings
    return yaml.safe_dump(data, sort_keys=False, width=118, default_flow_style=None)
