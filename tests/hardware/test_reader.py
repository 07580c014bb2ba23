"""No answer of a driver, however wrong, raises anything but the typed error, and no absent fact becomes 0."""

import copy

from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import AutotuneError
from autotune.hardware.diagnosis import findings
from autotune.hardware.doctor_facts import read_doctor_facts
from autotune.hardware.probing import read_profile
from autotune.hardware.reader import SIZE, Reader
from autotune.schema.hardware import HardwareProfile
from tests.hardware.fleet import ANSWERS, MACHINES, FakeSystem

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


def places(answers):
    for source, known in answers.items():
        if "absent" in known:
            continue
        for question in known:
            if question != "devices":
                yield (source, question)
        for index, device in enumerate(known.get("devices", ())):
            yield from ((source, "devices", index, question) for question in device)


def survived(answers):
    """The profile, or None where the typed error was raised; any other error escapes."""
    try:
        findings(read_doctor_facts(FakeSystem(answers), 2**36))
        return read_profile(FakeSystem(answers))
    except AutotuneError as error:
        if not error.hint:
            raise
        return None


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_nonsense_raises_only_the_typed_error(data):
    answers = copy.deepcopy(ANSWERS[data.draw(st.sampled_from(MACHINES))])
    where = sorted(places(answers), key=str)
    for path in data.draw(st.lists(st.sampled_from(where), min_size=1, max_size=12, unique=True)):
        target = answers
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = data.draw(NONSENSE)
    profile = survived(answers)
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
    most = device.free_memory_bytes if device.free_memory_bytes is not None else device.total_memory_bytes
    assert 0 <= device.budget_bytes <= most


@given(st.sampled_from(sorted({source for answers in ANSWERS.values() for source in answers} - {"os"})))
def test_a_missing_source_is_survived(source):
    for name in MACHINES:
        survived({**ANSWERS[name], source: {"absent": "gone"}})


def test_the_first_source_that_makes_sense_wins_and_the_others_are_remembered():
    reader = Reader(FakeSystem({"torch": {"x": -1}, "nvml": {"x": 7}}))
    assert reader.fact("fact", SIZE, "torch:x", "nvml:x") == 7
    assert reader.provenance[-1].source == "NVML"
    assert reader.fact("other", SIZE, "torch:x", "driver:x") is None
    assert reader.provenance[-1].absent_because == (
        "CUDA runtime: reports -1, which is invalid; CUDA driver API: not reported"
    )
