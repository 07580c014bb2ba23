"""The catalog finds a card by the name that CUDA reports, and mistakes no sibling for it."""

import pytest

import autotune
from autotune.cost.timing import Rates
from autotune.errors import InvalidInput
from autotune.machine.capabilities import NO_BF16
from autotune.machine.catalog import PCIE_BYTES_PER_LANE, find_gpu, load_catalog
from autotune.machine.probe import hardware_named
from autotune.machine.target import hardware_for, limit_memory
from autotune.plan.request import PlanRequest

GIB = 2**30


def test_every_name_finds_its_own_entry_alone():
    assert len(load_catalog()) == 44
    for gpu in load_catalog():
        assert find_gpu(gpu.name, gpu.memory_bytes) is gpu
        others = [other for other in load_catalog() if other is not gpu and other.name != gpu.name]
        assert all(find_gpu(other.name, None) is not gpu for other in others)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4060",
        "NVIDIA GeForce RTX 4070 Ti",
        "NVIDIA GeForce RTX 4080 Laptop GPU",
        "NVIDIA GeForce RTX 3060 Ti",
        "NVIDIA GeForce RTX 3060 Laptop GPU",
        "NVIDIA GeForce RTX 3080 Ti Laptop GPU",
        "NVIDIA GeForce RTX 5060",
        "NVIDIA GeForce RTX 5070 Laptop GPU",
        "NVIDIA GeForce RTX 5070 Ti Laptop GPU",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
        "NVIDIA RTX 2000E Ada Generation",
        "NVIDIA RTX 2000 Ada Generation Laptop GPU",
        "NVIDIA RTX 2000 Ada Generation Embedded GPU",
        "NVIDIA RTX 4000 SFF Ada Generation",
        "NVIDIA RTX 4000 Ada Generation Laptop GPU",
        "NVIDIA RTX 5000 Ada Generation Laptop GPU",
        "NVIDIA RTX A4000",
        "NVIDIA RTX A5000",
        "Quadro RTX 4000",
        "Quadro RTX 5000",
        "NVIDIA T400",
        "NVIDIA T4G",
        "GRID T4-16Q",
        "Tesla V100S-PCIE-32GB",
        "Tesla V100-SXM3-32GB",
        "Tesla V100-FHHL-16GB",
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
    assert find_gpu(name, None) is None


def test_a_card_of_the_same_name_and_another_size_is_another_card():
    assert find_gpu("NVIDIA GeForce RTX 3060", 8 * GIB) is None
    assert find_gpu("NVIDIA GeForce RTX 3060", 12 * GIB) is not None
    for name in ("NVIDIA GeForce RTX 4060 Ti", "NVIDIA GeForce RTX 5060 Ti"):
        assert find_gpu(name, 8 * GIB) is None
        assert find_gpu(name, 16 * GIB) is not None


@pytest.mark.parametrize(
    ("name", "seen_gib"),
    [
        ("nvidia-l4", 22.04),
        ("nvidia-rtx-4090", 23.64),
        ("nvidia-rtx-3090", 23.7),
        ("nvidia-rtx-3080", 9.78),
        ("nvidia-rtx-3080-ti", 11.78),
        ("nvidia-rtx-3090-ti", 23.65),
        ("nvidia-rtx-4060-ti-16gb", 15.57),
        ("nvidia-rtx-4070-ti-super", 15.57),
        ("nvidia-rtx-4080-super", 15.58),
        ("nvidia-rtx-5060-ti-16gb", 15.45),
        ("nvidia-rtx-5070", 11.49),
        ("nvidia-rtx-5070-ti", 15.47),
        ("nvidia-rtx-4000-ada", 19.55),
        ("nvidia-t4", 14.56),
        ("nvidia-v100-sxm2-16gb", 15.76),
        ("nvidia-v100-sxm2-32gb", 31.74),
        ("nvidia-v100-pcie-16gb", 15.79),
        ("nvidia-v100-pcie-32gb", 31.75),
    ],
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
        ("Tesla V100-SXM2-32GB", "nvidia-v100-sxm2-32gb", 900),
        ("Tesla V100-PCIE-32GB", "nvidia-v100-pcie-32gb", 900),
    ],
)
def test_pcie_cards_are_not_taken_for_their_sxm_siblings(name, id_, gb_per_second):
    gpu = find_gpu(name, None)
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


def test_tensor_cores_sum_in_fp32_at_half_rate_on_geforce_cards_alone():
    """What the vendor gives no table for is SMs x operations x boost clock: 512 of GeForce
    cards, 1,024 of others."""
    for gpu in load_catalog():
        half = gpu.dense_tflops.get("fp16_fp16_accumulate", 0) > 1.5 * gpu.dense_tflops["fp16"]
        assert half == ("GeForce" in gpu.name), gpu.id
        if "bf16" in gpu.dense_tflops:
            assert gpu.dense_tflops["bf16"] == gpu.dense_tflops["fp16"] or gpu.id == "nvidia-gb10"


def test_cards_of_eight_lanes_reach_the_host_at_half_the_rate():
    for name, generation, lanes in (
        ("4090", 4, 16),
        ("4060-ti-16gb", 4, 8),
        ("5060-ti-16gb", 5, 8),
    ):
        sheet = hardware_named(f"nvidia-rtx-{name}").datasheet
        assert sheet is not None
        assert sheet.pcie_bytes_per_second == lanes * PCIE_BYTES_PER_LANE[generation]


def test_cards_without_bf16_train_in_fp16_and_say_so():
    old = [gpu for gpu in load_catalog() if gpu.training_dtype == "fp16"]
    assert {gpu.compute_capability for gpu in old} == {"7.0", "7.5"}
    for gpu in old:
        profile = hardware_named(gpu.id)
        assert profile.datasheet is not None
        assert (
            profile.datasheet.bf16_flops_per_second
            is profile.datasheet.tf32_flops_per_second
            is None
        )
        assert profile.datasheet.fp32_flops_per_second == gpu.dense_tflops["fp32"] * 1e12
        assert profile.datasheet.fp16_flops_per_second == gpu.dense_tflops["fp16"] * 1e12
        assert not profile.capability("precision.bf16").available
        assert profile.capability("precision.fp16").available
        assert any(note.startswith(NO_BF16) for note in profile.notes)
        assert (
            Rates(profile, "fp32", "native", "efficient").reached
            == 0.8e12 * gpu.dense_tflops["fp32"]
        )
        measured = gpu.measured_tflops.get(
            "fp16", 0.8 * gpu.dense_tflops["fp16"]
        )  # power limits a T4
        assert Rates(profile, "fp16", "native", "efficient").reached == pytest.approx(
            1e12 * measured
        )


def test_cards_that_cuda_13_left_out_are_planned_for_with_cuda_12():
    for name, cuda in (("nvidia-v100-sxm2-16gb", "12.6"), ("nvidia-t4", "13.0")):
        profile = hardware_named(name)
        assert profile.versions.cuda_runtime == cuda
        assert any(f"CUDA {cuda}" in note for note in profile.notes)


def test_every_entry_gives_a_profile_that_says_what_is_assumed():
    for gpu in load_catalog():
        profile = hardware_named(gpu.id)
        assert profile.origin == "catalog"
        assert not profile.rates
        assert profile.datasheet is not None
        peaks = profile.datasheet.bf16_flops_per_second, profile.datasheet.fp16_flops_per_second
        assert peaks == tuple(
            gpu.dense_tflops[d] * 1e12 if d == gpu.training_dtype else None
            for d in ("bf16", "fp16")
        )
        assert profile.device.memory_kind == gpu.memory_kind
        assert 0 < profile.device.budget_bytes < gpu.memory_bytes
        assert any("assumed" in note for note in profile.notes)


def test_an_unknown_name_is_refused_with_the_way_to_a_known_one():
    with pytest.raises(InvalidInput, match="nvidia-rtx-9090") as caught:
        hardware_named("nvidia-rtx-9090")
    assert "--list" in caught.value.hint


def test_the_host_of_a_catalog_card_can_be_described_and_a_reserve_asked_for() -> None:
    usual, small = hardware_for("4090"), hardware_for("4090", host_memory="32GiB")
    assert (usual.host.memory_bytes, small.host.memory_bytes) == (64 << 30, 32 << 30)
    assert small.host.available_memory_bytes < 32 << 30
    assert any("32 GiB of host memory" in note for note in small.notes)
    assert small.device == usual.device
    left = limit_memory(usual, PlanRequest(reserve_memory="1GiB")).device.budget_bytes
    assert left == usual.device.budget_bytes - (1 << 30)
    with pytest.raises(InvalidInput, match="it is this device's own memory"):
        hardware_for("gb10", host_memory="32GiB")
    with pytest.raises(InvalidInput, match="known"):
        autotune.plan("kandinsky5-image-lite", host_memory="32GiB")


def test_a_catalog_card_can_be_told_to_have_a_package() -> None:
    told = hardware_for("4090", assume=["flash-attn"])
    assert told.capability("attention.flash").available
    assert told.assumed == ("flash-attn",)
    assert any("flash-attn installed" in note for note in told.notes)
    assert told.match_keys == hardware_for("4090").match_keys
    with pytest.raises(
        InvalidInput, match=r"does not run on .*V100.*needs compute capability 8\.0, this is 7\.0"
    ) as old:
        hardware_for("v100-sxm2-16gb", assume=["flash-attn"])
    assert "leave --assume out" in old.value.hint
    with pytest.raises(InvalidInput, match="sageattention") as useless:
        hardware_for("4090", assume=["sageattention"])
    assert (
        useless.value.hint
        == "these can be assumed: flash-attn, flash-attn-3, flash-attn-4, xformers"
    )
    with pytest.raises(InvalidInput, match="known"):
        hardware_for(told.changed(origin="probe"), assume=["flash-attn"])
    with pytest.raises(InvalidInput, match="known"):
        autotune.plan("kandinsky5-image-lite", assume=["flash-attn"])
