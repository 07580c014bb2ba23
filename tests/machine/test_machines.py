"""Machines give the profile that a person would write; a saved one holds, or is not trusted."""

import copy
import json
import os

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings, strategies as st

from autotune.cli.app import app
from autotune.errors import AutotuneError, InvalidInput
from autotune.knobs.registry import Attention
from autotune.machine import doctor, probe as store
from autotune.machine.capabilities import OVERRIDES, classify_memory, compute_budget, limit_device
from autotune.machine.doctor import findings, read_doctor_facts
from autotune.machine.facts import SIZE, Reader
from autotune.plan.hardware import Conditions, HardwareProfile, Rate
from autotune.plan.request import PlanRequest
from tests.machine.fleet import HERE, MACHINES, SOURCES, FakeSystem, as_text, machine

GIB = 2**30


def found(system):
    return {finding.name: finding for finding in findings(read_doctor_facts(system))}


def changed(name, **sources):
    new = {source: {**SOURCES[name].get(source, {}), **own} for source, own in sources.items()}
    return FakeSystem({**SOURCES[name], **new})


@pytest.mark.parametrize("name", MACHINES)
def test_profile_and_findings_are_true(name):
    """After a wanted change: REWRITE_EXPECTED=1 pytest tests/machine/test_machines.py, and
    review the difference."""
    profile, reported = store.read_profile(machine(name)), found(machine(name)).values()
    lines = [f"{one.severity} {one.name}: {one.what} -- {one.fix}" for one in reported]
    text, path = as_text(profile, lines), HERE / "expected" / f"{name}.yaml"
    if os.environ.get("REWRITE_EXPECTED"):
        path.write_text(text)
    assert text == path.read_text()
    attention = [each for each in profile.capabilities if each.name.startswith("attention.")]
    offered = {f"attention.{name}" for name in Attention().names}
    assert {each.name for each in attention if each.available} <= offered
    assert offered <= {each.name for each in attention}
    busy = {"other_process_bytes": 9 * GIB, "free_bytes": GIB}
    later = store.read_profile(changed(name, nvml=busy, os={"available_bytes": 20 * GIB}))
    assert later.fingerprint == profile.fingerprint


def test_changed_hardware_is_another_machine():
    card = store.read_profile(machine("rtx-4090"))
    profiles = [store.read_profile(machine(name)) for name in MACHINES]
    gpus = [profile for profile in profiles if profile.device.kind != "cpu"]
    newer = store.read_profile(changed("rtx-4090", nvml={"driver": "595.10"}))
    others = [
        newer,
        *(one for one in gpus if one.device.name != card.device.name),
        store.read_profile(changed("rtx-4090", packages={"torch_cuda": "12.9"})),
        card.changed(device=card.device.changed(total_memory_bytes=48 * GIB)),
        card.changed(device=card.device.changed(compute_capability=(9, 0))),
        card.changed(device=card.device.changed(memory_kind="coherent")),
    ]
    assert len({profile.fingerprint for profile in (card, *others)}) == len(others) + 1
    assert newer.match_keys == card.match_keys, "plans hold across drivers"


def test_cpus_are_known_by_facts():
    cpu = store.read_profile(machine("no-gpu"))
    same = changed("no-gpu", os={"available_bytes": 8 * GIB}, packages={"torch": "2.14.0"})
    assert store.read_profile(same).fingerprint == cpu.fingerprint
    for other in ({"cpu": "AMD EPYC 9654"}, {"physical_cores": 3}, {"memory_bytes": 700 * GIB}):
        assert store.read_profile(changed("no-gpu", os=other)).fingerprint != cpu.fingerprint


def test_fullest_gpu_decides(monkeypatch):
    free, busy = (store.read_profile(machine("two-gpus"), index) for index in range(2))
    monkeypatch.setattr("autotune.machine.probe.probe", lambda index: (free, busy)[index])
    assert busy.device.budget_bytes < free.device.budget_bytes - GIB
    assert store.limit_memory(free, PlanRequest()) == free
    both = store.limit_memory(free, PlanRequest(num_gpus=2)).device
    assert (both.index, both.budget_bytes) == (0, busy.device.budget_bytes)
    assert not both.budget_set_by_user
    left = store.limit_memory(free, PlanRequest(num_gpus=2, reserve_memory="2GiB")).device
    assert left.budget_bytes == limit_device(busy.device, reserve_bytes=2 * GIB).budget_bytes
    assert left.budget_set_by_user
    assert (free.device.links[0].peer_index, busy.device.links[0].peer_index) == (1, 0)
    with pytest.raises(InvalidInput, match="no cuda device 2"):
        store.read_profile(machine("two-gpus"), 2)


def unequal(*sizes_gib):
    torch, nvml = SOURCES["two-gpus"]["torch"]["devices"], SOURCES["two-gpus"]["nvml"]["devices"]
    cards = [{**torch[0], "name": f"card of {n}", "total_bytes": n * GIB} for n in sizes_gib]
    seen = [{**nvml[0], "free_bytes": n * GIB - GIB} for n in sizes_gib]
    count = {"count": len(sizes_gib)}
    return changed("two-gpus", torch={**count, "devices": cards}, nvml={**count, "devices": seen})


def test_largest_gpu_trains():
    device = store.read_profile(unequal(12, 48, 24)).device
    assert (device.index, device.name) == (1, "card of 48")
    others = [(gpu.index, gpu.name, gpu.total_memory_bytes) for gpu in device.others]
    assert others == [(0, "card of 12", 12 * GIB), (2, "card of 24", 24 * GIB)]
    assert all(gpu.budget_bytes < gpu.total_memory_bytes - GIB for gpu in device.others)
    assert store.read_profile(unequal(24, 24)).device.index == 0
    assert store.read_profile(unequal(12, 48), 0).device.name == "card of 12"


def test_the_smallest_limit_decides():
    device = store.read_profile(machine("rtx-3060")).device
    assert "display" in device.budget_reason
    assert limit_device(device, reserve_bytes=0).budget_bytes == device.budget_bytes + GIB
    assert limit_device(device) == limit_device(device, max_bytes=device.budget_bytes) == device
    assert limit_device(device, max_bytes=2 * GIB, reserve_bytes=0).budget_bytes == 2 * GIB


KINDS = {
    "integrated": [(True, True), (True, False), (None, True), (True, None)],  # GB10, Thor; Orin
    "coherent": [(False, True)],  # GH200, GB200
    "discrete": [(False, False), (None, None), (False, None)],  # H100, 4090
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_signals_decide(kind):
    assert {classify_memory(*signals, None)[0] for signals in KINDS[kind]} == {kind}


def test_memory_kind_can_be_overridden():
    profile = store.read_profile(changed("gb10", environment={"AUTOTUNE_MEMORY_KIND": "coherent"}))
    assert profile.device.memory_kind == "coherent"
    assert "AUTOTUNE_MEMORY_KIND=coherent" in profile.device.memory_kind_reason
    assert any("AUTOTUNE_MEMORY_KIND" in note for note in profile.notes)
    with pytest.raises(InvalidInput):
        store.read_profile(changed("gb10", environment={"AUTOTUNE_MEMORY_KIND": "unified"}))


SIZES = st.one_of(st.none(), st.integers(0, 2**45))
RESERVES = st.one_of(st.none(), st.integers(0, 2**40))


@given(st.sampled_from((*OVERRIDES, "host")), SIZES, SIZES, st.booleans(), RESERVES)
def test_budget_never_exceeds_what_is_free(kind, total, free, display, reserve):
    if total is None and free is None:
        with pytest.raises(AutotuneError):
            compute_budget(kind, total, free, display, reserve)
        return
    num_bytes, why = compute_budget(kind, total, free, display, reserve)
    assert 0 <= num_bytes <= min(size for size in (total, free) if size is not None)
    assert why
    if reserve is not None:
        assert compute_budget(kind, total, free, display, reserve + 1)[0] <= num_bytes


FINDINGS = yaml.safe_load((HERE / "findings.yaml").read_text())


@pytest.mark.parametrize(("finding", "name", "source", "values"), FINDINGS)
def test_the_doctor_notices(finding, name, source, values):
    assert finding in found(changed(name, **{source: values}))
    assert finding not in found(machine(name))


NONSENSE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(min_value=-(2**70), max_value=2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.one_of(st.integers(), st.text(max_size=3), st.none()), max_size=3),
    st.just({"absent": "Not Supported"}),
)


def places(sources):
    for source, known in sources.items():
        if "absent" not in known:
            yield from ((source, query) for query in known if query != "devices")
            for index, device in enumerate(known.get("devices", ())):
                yield from ((source, "devices", index, query) for query in device)


@settings(max_examples=40)
@given(st.data())
def test_nonsense_raises_only_the_typed_error(data):
    sources = copy.deepcopy(SOURCES[data.draw(st.sampled_from(MACHINES))])
    where = sorted(places(sources), key=str)
    for path in data.draw(st.lists(st.sampled_from(where), min_size=1, max_size=12, unique=True)):
        target = sources
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = data.draw(NONSENSE)
    try:
        findings(read_doctor_facts(FakeSystem(sources)))
        profile = store.read_profile(FakeSystem(sources))
    except AutotuneError as error:
        if not error.hint:
            raise
        return
    assert HardwareProfile.model_validate_json(profile.model_dump_json()) == profile
    device = profile.device
    for name in ("sm_count", "l2_bytes", "total_memory_bytes", "pcie_width", "pcie_generation"):
        assert getattr(device, name) is None or getattr(device, name) > 0
    free = device.free_memory_bytes
    assert 0 <= device.budget_bytes <= (device.total_memory_bytes if free is None else free)


def test_first_source_that_makes_sense_wins():
    reader = Reader(FakeSystem({"torch": {"x": -1}, "nvml": {"x": 7}}))
    assert reader.fact("fact", SIZE, "torch:x", "nvml:x") == 7
    assert reader.fact("other", SIZE, "torch:x", "driver:x") is None
    told = "CUDA runtime: reports -1, which is invalid; CUDA driver API: not reported"
    assert reader.absent["other"] == told


@pytest.mark.parametrize(("name", "status"), [("cpu-only-torch", 1), ("gb10", 0), ("h200", 0)])
def test_doctor_fails_where_something_blocks(monkeypatch, name, status):
    monkeypatch.setattr(doctor, "System", lambda with_torch: machine(name))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    severities = [finding["severity"] for finding in json.loads(result.stdout)["items"]]
    assert result.exit_code == status == int("blocks" in severities)


CONDITIONS = Conditions(clock_mhz=2520, temperature_celsius=61, power_watts=312.5)
RATE = Rate(
    name="matmul.bf16.4096x3072x3072",
    value=1.5e14,
    unit="FLOP/s",
    spread=0.01,
    num_samples=25,
    conditions=CONDITIONS,
)
RATES = (RATE,)


def measured(name):
    notes = ("an old note", "not measured: gds")
    return store.read_profile(machine(name)).changed(rates=RATES, notes=notes)


@pytest.fixture
def probes(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    state = {"machine": "rtx-4090", "read": 0, "measured": 0}

    def probe(*, index=0, on_progress=None):
        state["read"] += 1
        return store.read_profile(machine(state["machine"]), index)

    def measure(profile, tell):
        state["measured"] += 1
        return measured(state["machine"])

    monkeypatch.setattr(store, "probe", probe)
    monkeypatch.setattr(store, "measure_rates", measure)
    return state


def test_saved_is_read_back_equal(tmp_path):
    path = tmp_path / "deep" / "p.json"
    for name in MACHINES:
        store.save_profile(measured(name), path)
        assert store.load_profile(path) == store.hardware_named(str(path)) == measured(name)
    assert [*path.parent.iterdir()] == [path]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data())
def test_any_damage_is_noticed(tmp_path, data):
    path = tmp_path / "p.json"
    store.save_profile(measured("gb10"), path)
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 2))
    damage = data.draw(st.sampled_from(["cut", "flip"]))
    rest = b"" if damage == "cut" else bytes([whole[at] ^ 1]) + whole[at + 1 :]
    path.write_bytes(whole[:at] + rest)
    try:
        assert store.load_profile(path) == measured("gb10")  # blanks between the values may change
    except InvalidInput:
        return


def test_unwritable_caches_cost_reuse(probes, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    first, again = store.cached_profile(), store.cached_profile()
    assert probes["measured"] == 2
    assert first.rates == again.rates == RATES
    assert [note.partition(":")[0] for note in first.notes][-1] == store.NOT_SAVED


def test_rates_are_reused_with_fresh_budget(probes):
    first, again = store.cached_profile(), store.cached_profile()
    assert (probes["read"], probes["measured"]) == (2, 1)
    assert first.rates == again.rates == RATES
    assert again.notes == (*store.read_profile(machine("rtx-4090")).notes, "not measured: gds")
    store.cached_profile(fresh=True)
    assert probes["measured"] == 2


def test_other_stacks_are_measured_again(probes):
    store.cached_profile()
    probes["machine"] = "rtx-5090"
    store.cached_profile()
    assert probes["measured"] == 2
    path = store.profile_path(store.read_profile(machine("rtx-4090")))
    store.save_profile(measured("wsl2-4090"), path)
    probes["machine"] = "rtx-4090"
    store.cached_profile()
    assert probes["measured"] == 3


@pytest.mark.parametrize(
    ("name", "part", "change", "holds"),
    [
        ("rtx-4090", "device", {"power_limit_watts": 300.0}, False),
        ("rtx-4090", "device", {"power_limit_watts": 340.0}, True),
        ("rtx-4090", "device", {"power_limit_watts": None}, True),
        ("rtx-4090", "host", {"logical_cores": 2}, True),
        ("rtx-4090", "versions", {"driver": "595.10"}, True),
        ("rtx-4090", "versions", {"cuda_runtime": "12.9"}, False),
        ("no-gpu", "host", {"logical_cores": 2}, False),
    ],
)
def test_rates_hold_while_causes_do(name, part, change, holds):
    saved = measured(name)
    now = saved.changed(**{part: getattr(saved, part).changed(**change)})
    assert store.has_valid_rates(saved, now) == holds


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"profile": {}, "digest": ""}', "\x00" * 50, "[" * 9999]
)
def test_a_damaged_file_is_measured_again(probes, content):
    path = store.profile_path(store.read_profile(machine("rtx-4090")))
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert store.cached_profile().rates == RATES
    assert probes["measured"] == 1
    assert store.load_profile(path).rates == RATES


def test_an_edited_rate_is_not_trusted(probes):
    path = store.profile_path(store.cached_profile())
    content = json.loads(path.read_text())
    content["profile"]["rates"][0]["value"] = 9e99
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidInput, match="damaged or edited") as caught:
        store.load_profile(path)
    assert "autotune probe" in caught.value.hint
    assert store.cached_profile().rates == RATES
