"""No value that a driver reports, however wrong, raises anything but the typed error; no absent
fact becomes 0."""

import copy

from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import AutotuneError
from autotune.machine.doctor import findings, read_doctor_facts
from autotune.machine.facts import SIZE, Reader
from autotune.machine.probe import read_profile
from autotune.plan.hardware import HardwareProfile
from tests.machine.fleet import MACHINES, SOURCES, FakeSystem

NONSENSE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**70), max_value=2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.one_of(st.integers(), st.text(max_size=3), st.none()), max_size=3),
    st.just({"absent": "Not Supported"}),
)


def places(sources):
    for source, known in sources.items():
        if "absent" in known:
            continue
        for query in known:
            if query != "devices":
                yield (source, query)
        for index, device in enumerate(known.get("devices", ())):
            yield from ((source, "devices", index, query) for query in device)


def survived(sources):
    """The profile, or None where the typed error was raised; any other error escapes."""
    try:
        findings(read_doctor_facts(FakeSystem(sources)))
        return read_profile(FakeSystem(sources))
    except AutotuneError as error:
        if not error.hint:
            raise
        return None


@settings(max_examples=100)
@given(st.data())
def test_nonsense_raises_only_the_typed_error(data):
    sources = copy.deepcopy(SOURCES[data.draw(st.sampled_from(MACHINES))])
    where = sorted(places(sources), key=str)
    for path in data.draw(st.lists(st.sampled_from(where), min_size=1, max_size=12, unique=True)):
        target = sources
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = data.draw(NONSENSE)
    profile = survived(sources)
    if profile is None:
        return
    assert HardwareProfile.model_validate_json(profile.model_dump_json()) == profile
    device = profile.device
    for number in (
        device.sm_count,
        device.l2_bytes,
        device.total_memory_bytes,
        device.pcie_width,
        device.pcie_generation,
    ):
        assert number is None or number > 0
    most = (
        device.free_memory_bytes
        if device.free_memory_bytes is not None
        else device.total_memory_bytes
    )
    assert 0 <= device.budget_bytes <= most


@given(
    st.sampled_from(sorted({source for sources in SOURCES.values() for source in sources} - {"os"}))
)
def test_a_missing_source_is_survived(source):
    for name in MACHINES:
        survived({**SOURCES[name], source: {"absent": "gone"}})


def test_the_first_source_that_makes_sense_wins_and_an_absent_fact_says_why():
    reader = Reader(FakeSystem({"torch": {"x": -1}, "nvml": {"x": 7}}))
    assert reader.fact("fact", SIZE, "torch:x", "nvml:x") == 7
    assert reader.fact("other", SIZE, "torch:x", "driver:x") is None
    assert reader.absent["other"] == (
        "CUDA runtime: reports -1, which is invalid; CUDA driver API: not reported"
    )
