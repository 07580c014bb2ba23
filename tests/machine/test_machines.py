"""Real machines give the profile that a person would write; nonsense the typed error."""

import copy
import json
import os

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.cli.app import app
from autotune.errors import AutotuneError, InvalidInput
from autotune.knobs.registry import Attention
from autotune.machine import doctor
from autotune.machine import probe as probing
from autotune.machine.capabilities import (
    NO_BF16,
    OVERRIDES,
    classify_memory,
    compute_budget,
    limit_device,
)
from autotune.machine.doctor import findings, read_doctor_facts
from autotune.machine.facts import SIZE, Reader
from autotune.machine.probe import hardware_for, limit_memory, read_profile
from autotune.plan.hardware import HardwareProfile
from autotune.plan.request import PlanRequest
from tests.machine.fleet import HERE, MACHINES, SOURCES, FakeSystem, as_text, machine

GIB = 2**30


def found(system):
    return {finding.name: finding for finding in findings(read_doctor_facts(system))}


def changed(name, **sources):
    """The machine with some values of some sources replaced."""
    new = {source: {**SOURCES[name].get(source, {}), **own} for source, own in sources.items()}
    return FakeSystem({**SOURCES[name], **new})


@pytest.mark.parametrize("name", MACHINES)
def test_profile_and_findings_are_true(name):
    """After a wanted change: REWRITE_EXPECTED=1 pytest tests/machine/test_machines.py, and
    review the difference."""
    profile, reported = read_profile(machine(name)), found(machine(name)).values()
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
    later = read_profile(changed(name, nvml=busy, os={"available_bytes": 20 * GIB}))
    assert later.fingerprint == profile.fingerprint


def test_changed_hardware_is_another_machine():
    card = read_profile(machine("rtx-4090"))
    gpus = [one for one in map(read_profile, map(machine, MACHINES)) if one.device.kind != "cpu"]
    newer = read_profile(changed("rtx-4090", nvml={"driver": "595.10"}))
    others = [
        newer,
        *(one for one in gpus if one.device.name != card.device.name),
        read_profile(changed("rtx-4090", packages={"torch_cuda": "12.9"})),
        card.changed(device=card.device.changed(total_memory_bytes=48 * GIB)),
        card.changed(device=card.device.changed(compute_capability=(9, 0))),
        card.changed(device=card.device.changed(memory_kind="coherent")),
    ]
    assert len({profile.fingerprint for profile in (card, *others)}) == len(others) + 1
    assert newer.match_keys == card.match_keys, "plans hold across drivers"


def test_cpus_are_known_by_facts():
    cpu = read_profile(machine("no-gpu"))
    same = changed("no-gpu", os={"available_bytes": 8 * GIB}, packages={"torch": "2.14.0"})
    assert read_profile(same).fingerprint == cpu.fingerprint
    for other in ({"cpu": "AMD EPYC 9654"}, {"physical_cores": 3}, {"memory_bytes": 700 * GIB}):
        assert read_profile(changed("no-gpu", os=other)).fingerprint != cpu.fingerprint


def test_fullest_gpu_decides(monkeypatch):
    """The second of two is busy."""
    free, busy = (read_profile(machine("two-gpus"), index) for index in range(2))
    monkeypatch.setattr("autotune.machine.probe.probe", lambda index: (free, busy)[index])
    assert busy.device.budget_bytes < free.device.budget_bytes - GIB
    assert limit_memory(free, PlanRequest()) == free
    both = limit_memory(free, PlanRequest(num_gpus=2)).device
    assert (both.index, both.budget_bytes) == (0, busy.device.budget_bytes)
    assert not both.budget_set_by_user
    left = limit_memory(free, PlanRequest(num_gpus=2, reserve_memory="2GiB")).device
    assert left.budget_bytes == limit_device(busy.device, reserve_bytes=2 * GIB).budget_bytes
    assert left.budget_set_by_user
    assert (free.device.links[0].peer_index, busy.device.links[0].peer_index) == (1, 0)
    with pytest.raises(InvalidInput, match="no cuda device 2"):
        read_profile(machine("two-gpus"), 2)


def unequal(*sizes_gib):
    """GPUs of these sizes."""
    torch, nvml = SOURCES["two-gpus"]["torch"]["devices"], SOURCES["two-gpus"]["nvml"]["devices"]
    cards = [{**torch[0], "name": f"card of {n}", "total_bytes": n * GIB} for n in sizes_gib]
    seen = [{**nvml[0], "free_bytes": n * GIB - GIB} for n in sizes_gib]
    sources = {"torch": cards, "nvml": seen}
    return changed(
        "two-gpus", **{s: {"count": len(each), "devices": each} for s, each in sources.items()}
    )


def test_largest_gpu_trains():
    device = read_profile(unequal(12, 48, 24)).device
    assert (device.index, device.name) == (1, "card of 48")
    others = [(gpu.index, gpu.name, gpu.total_memory_bytes) for gpu in device.others]
    assert others == [(0, "card of 12", 12 * GIB), (2, "card of 24", 24 * GIB)]
    assert all(gpu.budget_bytes < gpu.total_memory_bytes - GIB for gpu in device.others)
    assert read_profile(unequal(24, 24)).device.index == 0
    assert read_profile(unequal(12, 48), 0).device.name == "card of 12"


def test_shared_memory_is_the_hosts():
    """Neither a container's limit nor what CUDA calls free counts."""
    device = read_profile(machine("gb10")).device
    assert device.budget_bytes == 110_000_000_000 - device.total_memory_bytes // 8
    assert read_profile(machine("orin")).device.budget_bytes > 40 * GIB


def test_the_smallest_limit_decides():
    device = read_profile(machine("rtx-3060")).device
    assert "display" in device.budget_reason
    assert limit_device(device, reserve_bytes=0).budget_bytes == device.budget_bytes + GIB
    assert limit_device(device) == limit_device(device, max_bytes=device.budget_bytes) == device
    capped = limit_device(device, cap_bytes=4 * GIB)
    limited = limit_device(device, cap_bytes=4 * GIB, max_bytes=2 * GIB)
    assert limited.budget_bytes == 2 * GIB < capped.budget_bytes
    assert limit_device(device, cap_bytes=4 * GIB, reserve_bytes=0) == capped
    unknown = device.changed(total_memory_bytes=None)
    assert limit_device(unknown, cap_bytes=4 * GIB).budget_bytes < 4 * GIB


KINDS = {
    "integrated": [(True, True), (True, False), (None, True), (True, None)],  # GB10, Thor; Orin
    "coherent": [(False, True)],  # GH200, GB200
    "discrete": [(False, False), (None, None), (False, None)],  # H100, 4090
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_signals_decide(kind):
    assert {classify_memory(*signals, None)[0] for signals in KINDS[kind]} == {kind}


def test_memory_kind_can_be_overridden():
    profile = read_profile(changed("gb10", environment={"AUTOTUNE_MEMORY_KIND": "coherent"}))
    assert profile.device.memory_kind == "coherent"
    assert "AUTOTUNE_MEMORY_KIND=coherent" in profile.device.memory_kind_reason
    assert any("AUTOTUNE_MEMORY_KIND" in note for note in profile.notes)
    with pytest.raises(InvalidInput):
        read_profile(changed("gb10", environment={"AUTOTUNE_MEMORY_KIND": "unified"}))


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


def test_cards_without_bf16_say_so(monkeypatch):
    old, new = (read_profile(machine(name)) for name in ("v100", "a100-40gb"))
    assert any(note.startswith(NO_BF16) and "trains in fp16" in note for note in old.notes)
    assert not any(note.startswith(NO_BF16) for note in new.notes)
    monkeypatch.setattr("autotune.machine.probe.cached_profile", lambda **_: old)
    events = []
    hardware_for(None, on_event=events.append)
    assert "trains in fp16" in events[-1].text


def test_card_of_eight_lanes_misses_none():
    card = {"name": "NVIDIA GeForce RTX 4060 Ti", "pcie_max_width": 8, "total_bytes": 16380 << 20}
    card = {**SOURCES["rtx-4090"]["nvml"]["devices"][0], **card}
    in_full, in_narrow = (
        changed("rtx-4090", nvml={"devices": [{**card, "pcie_width": width}]}) for width in (8, 4)
    )
    assert "narrow-pcie" not in found(in_full)
    assert "4 PCIe lanes of 8" in found(in_narrow)["narrow-pcie"].what


ABSENT = {"absent": "not installed"}


@pytest.mark.parametrize(
    ("finding", "name", "source", "values"),
    [
        *(
            ("visible-devices", "rtx-4090", "environment", {"CUDA_VISIBLE_DEVICES": value})
            for value in ("all", "", "\N{SUPERSCRIPT TWO}")
        ),
        ("visible-devices", "two-gpus", "environment", {"CUDA_VISIBLE_DEVICES": "0,7"}),
        ("sage-chosen", "rtx-4090", "environment", {"DIFFUSERS_ATTN_BACKEND": "sage"}),
        ("no-compiler", "rtx-4090", "os", {"compiler": ABSENT}),
        ("little-disk", "rtx-4090", "os", {"disk_free_bytes": 20 * GIB}),
        ("no-torch", "rtx-4090", "packages", {"torch": ABSENT}),
        ("old-torch", "rtx-4090", "packages", {"torch": "2.6.0"}),
        ("other-peft", "rtx-4090", "packages", {"unmet": [("peft>=0.20", "0.19.1")]}),
        ("torchvision-mismatch", "rtx-4090", "packages", {"torchvision_needs": "torch==2.12.0"}),
        ("no-safetensors", "rtx-4090", "packages", {"unmet": [("safetensors>=0.8", "")]}),
        ("broken-peft", "rtx-4090", "packages", {"unmet": [("peft>=0.20", "files are missing")]}),
        ("no-driver", "no-gpu", "os", {"nvidia_cards": 1}),
        ("driver-not-reloaded", "rtx-4090", "nvml", {"absent": "Driver/library version mismatch"}),
        ("cuda-does-not-start", "rtx-4090", "driver", {"absent": "cuInit failed with error 999"}),
        ("gpu-lost", "rtx-4090", "nvml", {"devices": [{"name": {"absent": "GPU is lost"}}]}),
        ("torch-too-old", "rtx-5090", "packages", {"torch_cuda": "12.6"}),
        ("torch-too-old", "thor", "packages", {"torch_cuda": "12.9"}),
        ("windows", "rtx-4090", "os", {"system": "Windows 11"}),
    ],
)
def test_the_doctor_notices(finding, name, source, values):
    assert finding in found(changed(name, **{source: values}))
    assert finding not in found(machine(name))


@pytest.mark.parametrize("value", ["0", "0,", "0,1", "GPU-8f1c", "MIG-aa", "3"])
def test_the_doctor_accepts_indices_and_uuids(value):
    """Without NVML hidden GPUs are not counted, so no index is too high."""
    system = changed(
        "no-nvml" if value == "3" else "two-gpus", environment={"CUDA_VISIBLE_DEVICES": value}
    )
    assert "visible-devices" not in found(system)


@pytest.mark.parametrize(
    ("driver", "capability", "build"),
    [
        ("580.95.05", [8, 9], "cu130"),
        ("550.163.01", [8, 9], "cu126"),
        ("570.10", [12, 0], "cu129"),
        ("580.95.05", [7, 0], "cu126"),
        ("1000.1", [8, 9], "cu130"),
        ("470.256.02", [8, 9], "update the driver to 580 or newer, then install the cu130 build"),
    ],
)
def test_doctor_names_torch_for_driver(driver, capability, build):
    card = {"name": "GPU", "capability": capability}
    nvml = {"driver": driver, "devices": [card]}
    system = changed("rtx-4090", packages={"torch": ABSENT, "torch_cuda": ABSENT}, nvml=nvml)
    assert build in found(system)["no-torch"].fix


def test_unknown_drivers_get_cuda_builds():
    system = changed("no-nvml", packages={"torch_cuda": ABSENT}, torch={"cuda": ABSENT})
    assert "cu126" in found(system)["cpu-only-torch"].fix


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
    for name in ("sm_count", "l2_bytes", "total_memory_bytes", "pcie_width", "pcie_generation"):
        assert getattr(device, name) is None or getattr(device, name) > 0
    free = device.free_memory_bytes
    assert 0 <= device.budget_bytes <= (device.total_memory_bytes if free is None else free)


@pytest.mark.parametrize("source", ["torch", "nvml", "driver", "packages", "environment"])
def test_a_missing_source_is_survived(source):
    for name in MACHINES:
        survived({**SOURCES[name], source: {"absent": "gone"}})


def test_first_source_that_makes_sense_wins():
    reader = Reader(FakeSystem({"torch": {"x": -1}, "nvml": {"x": 7}}))
    assert reader.fact("fact", SIZE, "torch:x", "nvml:x") == 7
    assert reader.fact("other", SIZE, "torch:x", "driver:x") is None
    assert reader.absent["other"] == (
        "CUDA runtime: reports -1, which is invalid; CUDA driver API: not reported"
    )


@pytest.mark.parametrize(("name", "status"), [("cpu-only-torch", 1), ("gb10", 0), ("h200", 0)])
def test_doctor_fails_where_something_blocks(monkeypatch, name, status):
    monkeypatch.setattr(doctor, "System", lambda with_torch: machine(name))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    severities = [finding["severity"] for finding in json.loads(result.stdout)["items"]]
    assert result.exit_code == status == int("blocks" in severities)


def test_scripts_read_fingerprint_that_was_probed(monkeypatch, tmp_path):
    monkeypatch.setattr(probing, "System", lambda: machine("rtx-4090"))
    fingerprint = probing.probe().fingerprint
    printed = CliRunner().invoke(app, ["probe", "--quick", "--json"]).stdout
    assert json.loads(printed)["fingerprint"] == fingerprint
    (file := tmp_path / "probe.json").write_text(printed)
    assert probing.hardware_named(str(file)) == probing.probe()
