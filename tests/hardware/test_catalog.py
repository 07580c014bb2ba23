"""The catalog finds a card by the name that CUDA reports, and mistakes no sibling for it."""

import subprocess
import sys

import pytest

from autotune.errors import InvalidInput
from autotune.hardware.catalog import load_catalog, matching
from autotune.hardware.store import hardware_named

GIB = 2**30


def test_every_name_finds_its_own_entry_alone():
    assert len(load_catalog()) == 26
    for gpu in load_catalog():
        assert matching(gpu.name, gpu.memory_bytes) is gpu
        others = [other for other in load_catalog() if other is not gpu and other.name != gpu.name]
        assert all(matching(other.name, None) is not gpu for other in others)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4080 SUPER",
        "NVIDIA GeForce RTX 4070 Ti",
        "NVIDIA GeForce RTX 4070 Ti SUPER",
        "NVIDIA GeForce RTX 3060 Ti",
        "NVIDIA GeForce RTX 3060 Laptop GPU",
        "NVIDIA GeForce RTX 3080 Ti Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
        "NVIDIA L40",
        "NVIDIA A10",
        "NVIDIA H200 NVL",
        "NVIDIA H100 NVL",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "AMD Radeon RX 7900 XTX",
    ],
)
def test_siblings_are_not_mistaken(name):
    assert matching(name, None) is None


def test_a_card_of_the_same_name_and_another_size_is_another_card():
    assert matching("NVIDIA GeForce RTX 3060", 8 * GIB) is None
    assert matching("NVIDIA GeForce RTX 3060", 12 * GIB) is not None


@pytest.mark.parametrize(
    ("name", "seen_gib"),
    [("nvidia-l4", 22.04), ("nvidia-rtx-4090", 23.64), ("nvidia-rtx-3090", 23.7), ("nvidia-rtx-3080", 9.78)],
)
def test_a_card_holds_no_more_than_torch_reports_of_it_on_linux(name, seen_gib):
    assert hardware_named(name).device.total_memory_bytes <= seen_gib * GIB


@pytest.mark.parametrize(
    ("name", "id_", "gb_per_second"),
    [
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100-80gb", 2039),
        ("NVIDIA A100 80GB PCIe", "nvidia-a100-pcie-80gb", 1935),
        ("NVIDIA A100-SXM4-40GB", "nvidia-a100-40gb", 1555),
        ("NVIDIA A100-PCIE-40GB", "nvidia-a100-pcie-40gb", 1555),
    ],
)
def test_pcie_cards_are_not_taken_for_their_sxm_siblings(name, id_, gb_per_second):
    gpu = matching(name, None)
    assert gpu is not None
    assert (gpu.id, gpu.memory_gb_per_second) == (id_, gb_per_second)


def test_what_products_reach_was_measured_with_products():
    known = [gpu for gpu in load_catalog() if "bf16" in gpu.measured_tflops]
    assert [gpu.id for gpu in known if "cuBLAS" not in gpu.source + gpu.notes] == []


def test_weights_of_a_grace_hopper_wait_behind_nvlink():
    for name, bytes_per_second in (("nvidia-gh200-96gb", 450e9), ("nvidia-gh200-144gb", 450e9)):
        sheet = hardware_named(name).datasheet
        assert sheet is not None
        assert sheet.pcie_bytes_per_second == bytes_per_second


def test_every_entry_gives_a_profile_that_says_what_is_assumed():
    for gpu in load_catalog():
        profile = hardware_named(gpu.id)
        assert profile.origin == "catalog"
        assert not profile.rates
        assert profile.datasheet is not None
        assert profile.datasheet.bf16_flops_per_second == gpu.dense_tflops["bf16"] * 1e12
        assert profile.device.memory_kind == gpu.memory_kind
        assert 0 < profile.device.budget_bytes < gpu.memory_bytes
        assert any("assumed" in note for note in profile.notes)


def test_an_unknown_name_is_refused_with_the_way_to_a_known_one():
    with pytest.raises(InvalidInput, match="nvidia-rtx-9090") as caught:
        hardware_named("nvidia-rtx-9090")
    assert "--list" in caught.value.hint


def test_planning_doctor_and_catalog_import_no_torch():
    modules = "autotune.hardware.diagnosis, autotune.hardware.store, autotune.reporting.hardware, sys"
    use = "autotune.hardware.diagnosis.diagnose(); autotune.hardware.store.hardware_named('nvidia-h200-sxm')"
    check = "sys.exit(any(name in sys.modules for name in ('torch', 'diffusers', 'transformers', 'optuna')))"
    assert subprocess.run([sys.executable, "-c", f"import {modules}\n{use}\n{check}"], check=False).returncode == 0
