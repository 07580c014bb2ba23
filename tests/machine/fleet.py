"""The machines of machines.yaml as fakes, and a profile as text that people can review."""

from collections.abc import Mapping
from pathlib import Path

import yaml

from autotune.machine.sources import Unavailable

HERE = Path(__file__).parent
SOURCES = {
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

    def __init__(self, sources):
        self._sources = sources

    def query(self, source, name, index=0):
        values = _present(self._sources.get(source, {}))
        if not isinstance(values, Mapping):
            raise Unavailable(f"{source} reports nothing")
        devices = values.get("devices", ())
        for place in (devices[index] if index < len(devices) else {}, values):
            if name in place:
                return _present(place[name])
        raise Unavailable("not reported")


def _present(value):
    if isinstance(value, Mapping) and "absent" in value:
        raise Unavailable(str(value["absent"]))
    return value


def machine(name):
    return FakeSystem(SOURCES[name])


def as_text(profile, findings):
    data = profile.model_dump(mode="json", exclude={"capabilities", "datasheet"})
    data["match_keys"] = profile.match_keys
    data["datasheet"] = profile.datasheet.id if profile.datasheet else None
    data["capabilities"] = {
        capability.name: f"{'yes' if capability.available else 'no'}: {capability.reason}"
        for capability in profile.capabilities
    }
    data["findings"] = findings
    return yaml.safe_dump(data, sort_keys=False, width=118, default_flow_style=None)
