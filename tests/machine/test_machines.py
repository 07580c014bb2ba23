"""Real machines, as their tools report them, give exactly the profile that a person would write
down."""

import os
import tomllib
from pathlib import Path

import pytest

from autotune.errors import InvalidInput
from autotune.knobs.registry import Attention
from autotune.machine.capabilities import NO_BF16, limit_device
from autotune.machine.doctor import MIN_VERSIONS, findings, read_doctor_facts
from autotune.machine.probe import read_profile
from autotune.machine.target import hardware_for, limit_memory
from autotune.plan.request import PlanRequest
from tests.machine.fleet import HERE, MACHINES, SOURCES, FakeSystem, as_text, machine

GIB = 2**30

# Written by hand, apart from the recorded profiles below: (kind, memory kind, findings).
TRUTH = {
    "rtx-3060": ("cuda", "discrete", {"drives-display"}),
    "rtx-4090": ("cuda", "discrete", {"power-limited", "narrow-pcie", "sage-installed"}),
    "rtx-5090": ("cuda", "discrete", set()),
    "a100-40gb": ("cuda", "discrete", {"cuda-12"}),
    "v100": ("cuda", "discrete", set()),
    "h100-sxm": ("cuda", "discrete", set()),
    "h200": ("cuda", "discrete", set()),
    "gh200": ("cuda", "coherent", set()),
    "gb10": ("cuda", "integrated", {"shared-memory", "little-host-memory"}),
    "orin": ("cuda", "integrated", {"shared-memory", "cuda-12"}),
    "thor": ("cuda", "integrated", {"shared-memory"}),
    "two-gpus": ("cuda", "discrete", {"gpu-busy"}),
    "mig-slice": ("cuda", "discrete", set()),
    "wsl2-4090": ("cuda", "discrete", {"wsl-spill", "drives-display", "little-host-memory"}),
    "driver-550": ("cpu", "host", {"driver-too-old"}),
    "cpu-only-torch": ("cpu", "host", {"cpu-only-torch"}),
    "no-nvml": ("cuda", "discrete", {"no-nvml", "little-host-memory"}),
    "no-gpu": ("cpu", "host", set()),
    "apple-m3-max": ("mps", "integrated", {"little-host-memory"}),
    "rocm": ("cpu", "host", {"rocm-torch"}),
}


def found(system):
    return {finding.name: finding for finding in findings(read_doctor_facts(system))}


def changed(name, **sources):
    """The machine with some values of some sources replaced."""
    return FakeSystem(
        {**SOURCES[name], **{s: {**SOURCES[name].get(s, {}), **new} for s, new in sources.items()}}
    )


def test_every_machine_has_a_truth():
    assert set(TRUTH) == set(MACHINES)


@pytest.mark.parametrize("name", MACHINES)
def test_kind_memory_and_findings_are_true(name):
    profile = read_profile(machine(name))
    assert (profile.device.kind, profile.device.memory_kind, set(found(machine(name)))) == TRUTH[
        name
    ]


@pytest.mark.parametrize("name", MACHINES)
def test_the_whole_profile_is_as_recorded(name):
    """After a wanted change: REWRITE_EXPECTED=1 pytest tests/machine/test_machines.py, and
    review the difference."""
    lines = [
        f"{f.severity} {f.name}: {f.what} -- {f.fix}"
        for f in findings(read_doctor_facts(machine(name)))
    ]
    text, path = as_text(read_profile(machine(name)), lines), HERE / "expected" / f"{name}.yaml"
    if os.environ.get("REWRITE_EXPECTED"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", MACHINES)
def test_the_same_machine_has_the_same_fingerprint_with_another_process_running(name):
    busy = changed(
        name,
        nvml={"other_process_bytes": 9 * GIB, "free_bytes": GIB},
        os={"available_bytes": 20 * GIB},
    )
    assert read_profile(machine(name)).fingerprint == read_profile(busy).fingerprint


def test_another_gpu_memory_or_driver_is_another_machine():
    card = read_profile(machine("rtx-4090"))
    others = [
        *(
            read_profile(machine(name))
            for name in MACHINES
            if TRUTH[name][0] != "cpu" and name != "rtx-4090"
        ),
        read_profile(changed("rtx-4090", nvml={"driver": "595.10"})),
        read_profile(changed("rtx-4090", packages={"torch_cuda": "12.9"})),
        card.changed(device=card.device.changed(total_memory_bytes=48 * GIB)),
        card.changed(device=card.device.changed(compute_capability=(9, 0))),
        card.changed(device=card.device.changed(memory_kind="coherent")),
    ]
    assert len({profile.fingerprint for profile in (card, *others)}) == len(others) + 1


def test_a_cpu_is_known_by_its_name_cores_and_memory_but_not_by_what_is_free_or_installed():
    cpu = read_profile(machine("no-gpu"))
    same = changed("no-gpu", os={"available_bytes": 8 * GIB}, packages={"torch": "2.14.0"})
    others = ({"cpu": "AMD EPYC 9654"}, {"physical_cores": 3}, {"memory_bytes": 700 * GIB})
    assert read_profile(same).fingerprint == cpu.fingerprint
    assert (
        len(
            {
                cpu.fingerprint,
                *(read_profile(changed("no-gpu", os=one)).fingerprint for one in others),
            }
        )
        == 4
    )


def test_whether_a_plan_may_be_reused_does_not_depend_on_the_driver():
    card, newer = (
        read_profile(changed("rtx-4090", nvml={"driver": driver}))
        for driver in ("580.95.05", "595.10")
    )
    assert newer.match_keys == card.match_keys
    assert newer.fingerprint != card.fingerprint


def test_of_gpus_that_train_together_the_fullest_decides(monkeypatch):
    """The second of two is busy."""
    free, busy = (read_profile(machine("two-gpus"), index) for index in range(2))
    monkeypatch.setattr("autotune.machine.target.probe", lambda index: (free, busy)[index])
    assert busy.device.budget_bytes < free.device.budget_bytes - GIB
    assert limit_memory(free, PlanRequest()) == free
    both = limit_memory(free, PlanRequest(num_gpus=2)).device
    assert (both.index, both.budget_bytes) == (0, busy.device.budget_bytes)
    assert not both.budget_set_by_user
    left = limit_memory(free, PlanRequest(num_gpus=2, reserve_memory="2GiB")).device
    assert left.budget_bytes == limit_device(busy.device, reserve_bytes=2 * GIB).budget_bytes
    assert left.budget_set_by_user


def unequal(*sizes_gib):
    """GPUs of these sizes."""
    torch, nvml = SOURCES["two-gpus"]["torch"], SOURCES["two-gpus"]["nvml"]
    cards = [
        {**torch["devices"][0], "name": f"card of {size}", "total_bytes": size * GIB}
        for size in sizes_gib
    ]
    seen = [{**nvml["devices"][0], "free_bytes": size * GIB - GIB} for size in sizes_gib]
    return changed(
        "two-gpus",
        torch={"count": len(cards), "devices": cards},
        nvml={"count": len(cards), "devices": seen},
    )


def test_of_unequal_gpus_the_largest_trains_and_knows_the_others():
    device = read_profile(unequal(12, 48, 24)).device
    assert (device.index, device.name) == (1, "card of 48")
    assert [(gpu.index, gpu.name, gpu.total_memory_bytes) for gpu in device.others] == [
        (0, "card of 12", 12 * GIB), (2, "card of 24", 24 * GIB)
    ]  # fmt: skip
    assert all(gpu.budget_bytes < gpu.total_memory_bytes - GIB for gpu in device.others)
    assert read_profile(unequal(24, 24)).device.index == 0
    assert read_profile(unequal(12, 48), 0).device.name == "card of 12"


def test_gb10_budgets_from_available_memory_not_from_a_container_limit():
    device = read_profile(machine("gb10")).device
    assert device.budget_bytes == 110_000_000_000 - device.total_memory_bytes // 8


def test_orin_ignores_what_cuda_calls_free():
    assert read_profile(machine("orin")).device.budget_bytes > 40 * GIB


def test_a_display_keeps_a_reserve_and_the_user_can_set_it():
    profile = read_profile(machine("rtx-3060"))
    assert "display" in profile.device.budget_reason
    changed = limit_device(profile.device, reserve_bytes=0)
    assert changed.budget_bytes == profile.device.budget_bytes + GIB


def test_a_cap_holds_where_nobody_knows_the_devices_size():
    profile = read_profile(machine("rtx-3060"))
    unknown = profile.device.changed(total_memory_bytes=None)
    assert limit_device(unknown, cap_bytes=4 * GIB).budget_bytes < 4 * GIB


def test_the_smallest_limit_of_several_decides_and_none_leaves_the_machines_own_budget():
    device = read_profile(machine("rtx-3060")).device
    assert limit_device(device) == limit_device(device, max_bytes=device.budget_bytes) == device
    capped = limit_device(device, cap_bytes=4 * GIB)
    limited = limit_device(device, cap_bytes=4 * GIB, max_bytes=2 * GIB)
    assert limited.budget_bytes == 2 * GIB < capped.budget_bytes
    assert limit_device(device, cap_bytes=4 * GIB, reserve_bytes=0) == capped


def test_each_of_two_gpus_has_its_own_profile():
    first, second = (
        read_profile(machine("two-gpus"), 0).device,
        read_profile(machine("two-gpus"), 1).device,
    )
    assert (first.links[0].peer_index, second.links[0].peer_index, first.links[0].path) == (
        1,
        0,
        "nvlink",
    )
    assert second.budget_bytes < 5_000_000_000 < first.budget_bytes
    with pytest.raises(InvalidInput, match="no cuda device 2"):
        read_profile(machine("two-gpus"), 2)


def test_memory_kind_can_be_overridden_and_says_so():
    profile = read_profile(changed("gb10", environment={"AUTOTUNE_MEMORY_KIND": "coherent"}))
    assert profile.device.memory_kind == "coherent"
    assert "AUTOTUNE_MEMORY_KIND=coherent" in profile.device.memory_kind_reason
    assert any("AUTOTUNE_MEMORY_KIND" in note for note in profile.notes)
    with pytest.raises(InvalidInput):
        read_profile(changed("gb10", environment={"AUTOTUNE_MEMORY_KIND": "unified"}))


@pytest.mark.parametrize(
    ("name", "capability", "available", "because"),
    [
        ("rtx-3060", "precision.fp8", False, "8.9"),
        ("rtx-4090", "precision.fp8", True, ""),
        ("h100-sxm", "attention._flash_3_hub", False, "fetched code"),
        ("h100-sxm", "attention._native_cudnn", True, ""),
        ("rtx-4090", "attention.sage", False, "no backward"),
        ("rtx-4090", "attention.flash", True, ""),
        ("v100", "precision.bf16", False, "needs compute capability 8.0, this is 7.0"),
        ("v100", "quantization.bnb-nf4", True, ""),
        ("gb10", "quantization.bnb-nf4", False, "not installed"),
        ("no-gpu", "quantization.torchao-int8", True, ""),
        ("no-gpu", "quantization.bnb-nf4", False, "not installed"),
        (
            "cpu-only-torch",
            "quantization.bnb-nf4",
            False,
            "needs bitsandbytes 0.50, this is 0.49.0",
        ),
        ("apple-m3-max", "quantization.bnb-nf4", False, "needs cuda or cpu"),
        ("no-gpu", "attention._native_flash", True, ""),
        ("no-gpu", "precision.fp16", False, "CPU"),
        ("orin", "compile", False, "triton"),
        ("h100-sxm", "gds", True, ""),
        ("rtx-4090", "gds", False, "nvidia-fs"),
        ("apple-m3-max", "attention._native_flash", False, "mps"),
    ],
)
def test_capabilities_are_true_and_say_why(name, capability, available, because):
    actual = read_profile(machine(name)).capability(capability)
    assert actual.available == available
    assert because in actual.reason


def test_a_card_without_bf16_says_what_it_trains_in(monkeypatch):
    old, new = (read_profile(machine(name)) for name in ("v100", "a100-40gb"))
    assert any(note.startswith(NO_BF16) and "trains in fp16" in note for note in old.notes)
    assert not any(note.startswith(NO_BF16) for note in new.notes)
    monkeypatch.setattr("autotune.machine.target.cached_profile", lambda **_: old)
    events = []
    hardware_for(None, on_event=events.append)
    assert "trains in fp16" in events[-1].text


def test_a_card_of_eight_lanes_misses_none():
    width = {"pcie_width": 8, "pcie_max_width": 8}
    card = {
        **SOURCES["rtx-4090"]["nvml"]["devices"][0],
        **width,
        "name": "NVIDIA GeForce RTX 4060 Ti",
    }
    sold = changed("rtx-4090", nvml={"devices": [{**card, "total_bytes": 16380 << 20}]})
    slot = changed(
        "rtx-4090", nvml={"devices": [{**card, "total_bytes": 16380 << 20, "pcie_width": 4}]}
    )
    assert "narrow-pcie" not in found(sold)
    assert "4 PCIe lanes of 8" in found(slot)["narrow-pcie"].what


def test_bitsandbytes_runs_on_a_cpu_from_the_version_that_was_tried():
    newer = read_profile(changed("cpu-only-torch", packages={"bitsandbytes": "0.50.2"}))
    assert newer.capability("quantization.bnb-nf4").available


@pytest.mark.parametrize("storage", ["torchao-int8", "torchao-fp8"])
@pytest.mark.parametrize(("version", "usable"), [("0.17.0", False), ("0.18.0", True)])
def test_torchao_stores_weights_as_training_reads_them_from_the_version_that_was_tried(
    storage, version, usable
):
    capability = read_profile(changed("rtx-4090", packages={"torchao": version})).capability(
        f"quantization.{storage}"
    )
    assert capability.available is usable


@pytest.mark.parametrize(
    ("name", "sources", "finding"),
    [
        ("rtx-4090", {"environment": {"CUDA_VISIBLE_DEVICES": "all"}}, "visible-devices"),
        ("rtx-4090", {"environment": {"CUDA_VISIBLE_DEVICES": ""}}, "visible-devices"),
        (
            "rtx-4090",
            {"environment": {"CUDA_VISIBLE_DEVICES": "\N{SUPERSCRIPT TWO}"}},
            "visible-devices",
        ),
        ("two-gpus", {"environment": {"CUDA_VISIBLE_DEVICES": "0,7"}}, "visible-devices"),
        ("rtx-4090", {"environment": {"DIFFUSERS_ATTN_BACKEND": "sage"}}, "sage-chosen"),
        ("rtx-4090", {"os": {"compiler": {"absent": "none on PATH"}}}, "no-compiler"),
        ("rtx-4090", {"os": {"disk_free_bytes": 20 * GIB}}, "little-disk"),
        ("rtx-4090", {"packages": {"torch": {"absent": "not installed"}}}, "no-torch"),
        ("rtx-4090", {"packages": {"torch": "2.6.0"}}, "old-torch"),
        ("rtx-4090", {"packages": {"peft": "0.19.1"}}, "old-peft"),
        ("rtx-4090", {"packages": {"torchvision_needs": "torch==2.12.0"}}, "torchvision-mismatch"),
        ("no-gpu", {"os": {"nvidia_cards": 1}}, "no-driver"),
        ("rtx-4090", {"os": {"system": "Windows 11"}}, "windows"),
    ],
)
def test_the_doctor_notices(name, sources, finding):
    assert finding in found(changed(name, **sources))
    assert finding not in found(machine(name))


def test_the_doctor_requires_the_versions_that_an_installation_requires():
    required = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "dependencies"
    ]
    assert {f"{name}>={version}" for name, version in MIN_VERSIONS.items()} <= set(required)


@pytest.mark.parametrize("value", ["0", "0,1", "GPU-8f1c", "MIG-aa", "1"])
def test_the_doctor_accepts_indices_and_uuids(value):
    assert "visible-devices" not in found(
        changed("two-gpus", environment={"CUDA_VISIBLE_DEVICES": value})
    )


def test_without_nvml_hidden_gpus_are_not_counted_so_no_index_is_too_high():
    assert "visible-devices" not in found(
        changed("no-nvml", environment={"CUDA_VISIBLE_DEVICES": "3"})
    )


@pytest.mark.parametrize(
    ("driver", "capability", "build"),
    [
        ("580.95.05", [8, 9], "cu130"),
        ("550.163.01", [8, 9], "cu126"),
        ("570.10", [12, 0], "cu129"),
        ("580.95.05", [7, 0], "cu126"),
        ("1000.1", [8, 9], "cu130"),
    ],
)
def test_the_doctor_names_the_torch_for_a_driver_before_one_is_installed(driver, capability, build):
    card = {"name": "GPU", "capability": capability}
    system = changed(
        "rtx-4090",
        packages={
            "torch": {"absent": "not installed"},
            "torch_cuda": {"absent": "torch is not installed"},
        },
        nvml={"driver": driver, "devices": [card]},
    )
    assert build in found(system)["no-torch"].fix


def test_a_gpu_whose_driver_version_is_unknown_gets_no_build_for_cpus():
    without = {"absent": "this torch is built without CUDA"}
    findings_by_name = found(
        changed("no-nvml", packages={"torch_cuda": without}, torch={"cuda": without})
    )
    assert "cu126" in findings_by_name["cpu-only-torch"].fix


def test_a_driver_that_runs_no_build_of_torch_is_updated_first():
    for versions in (
        {"torch": {"absent": "not installed"}, "torch_cuda": {"absent": "not installed"}},
        {},
    ):
        findings_by_name = found(
            changed("rtx-4090", packages=versions, nvml={"driver": "470.256.02"})
        )
        fix = findings_by_name["driver-too-old" if not versions else "no-torch"].fix
        assert fix.startswith("update the driver to 580 or newer, then install the cu130 build")


def test_findings_come_worst_first():
    built_without = {"torch_cuda": {"absent": "built without"}}
    system = changed("wsl2-4090", packages=built_without, torch={"cuda": {"absent": "not read"}})
    order = [finding.severity for finding in findings(read_doctor_facts(system))]
    assert order == sorted(order, key=("blocks", "hurts", "note").index)
    assert order[0] == "blocks"


@pytest.mark.parametrize("name", MACHINES)
def test_a_backend_that_the_machine_is_said_to_have_is_one_that_a_plan_can_choose(name):
    capabilities = [
        capability
        for capability in read_profile(machine(name)).capabilities
        if capability.name.startswith("attention.")
    ]
    assert {
        capability.name.removeprefix("attention.")
        for capability in capabilities
        if capability.available
    } <= set(Attention().names)
    assert {f"attention.{backend}" for backend in Attention().names} <= {
        capability.name for capability in capabilities
    }
