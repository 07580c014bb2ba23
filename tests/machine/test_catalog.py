"""The catalog finds a card by any name that means it alone, and mistakes no sibling for it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autotune
from autotune.cost.timing import Rates
from autotune.errors import InvalidInput
from autotune.machine.capabilities import NO_BF16
from autotune.machine.catalog import PCIE_BYTES_PER_LANE, SERIES, find_gpu, gpu_named, load_catalog
from autotune.machine.probe import hardware_for, hardware_named, limit_memory, save_profile
from autotune.plan.request import PlanRequest

GIB = 2**30
IDS = [gpu.id for gpu in load_catalog()]
WORDS = sorted({word for id_ in IDS for word in id_.split("-")})


def test_every_name_finds_its_own_entry_alone():
    assert len(load_catalog()) == 44
    for gpu in load_catalog():
        assert find_gpu(gpu.name, gpu.memory_bytes) is gpu
        others = [other for other in load_catalog() if other.name != gpu.name]
        assert all(find_gpu(other.name, None) is not gpu for other in others)


@pytest.mark.parametrize(
    "name",
    [
        *(
            f"NVIDIA GeForce RTX {name}"
            for name in ("4060", "4070 Ti", "3060 Ti", "5060", "5090 D")
        ),
        *(f"NVIDIA GeForce RTX {name} Laptop GPU" for name in ("4090", "3080 Ti", "5070 Ti")),
        *(f"NVIDIA RTX {name}" for name in ("2000E Ada Generation", "4000 SFF Ada Generation")),
        *("NVIDIA RTX 2000 Ada Generation Embedded GPU", "NVIDIA RTX A4000", "Quadro RTX 4000"),
        *("NVIDIA T400", "NVIDIA T4G", "GRID T4-16Q", "Tesla V100S-PCIE-32GB", "NVIDIA L40"),
        *("Tesla V100-SXM3-32GB", "Tesla V100-FHHL-16GB", "NVIDIA A10", "NVIDIA H200 NVL"),
        *("NVIDIA H100 NVL", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "AMD Radeon RX 7900 XTX"),
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    ],
)
def test_siblings_are_not_mistaken(name):
    assert find_gpu(name, None) is None


def test_another_size_is_another_card():
    assert find_gpu("NVIDIA GeForce RTX 3060", 8 * GIB) is None
    assert find_gpu("NVIDIA GeForce RTX 3060", 12 * GIB) is not None
    for name in ("NVIDIA GeForce RTX 4060 Ti", "NVIDIA GeForce RTX 5060 Ti"):
        assert find_gpu(name, 8 * GIB) is None
        assert find_gpu(name, 16 * GIB) is not None


SEEN_GIB = {
    **{"l4": 22.04, "rtx-4090": 23.64, "rtx-3090": 23.7, "rtx-3080": 9.78, "rtx-3080-ti": 11.78},
    **{"rtx-3090-ti": 23.65, "rtx-4060-ti-16gb": 15.57, "rtx-4070-ti-super": 15.57},
    **{"rtx-4080-super": 15.58, "rtx-5060-ti-16gb": 15.45, "rtx-5070": 11.49, "t4": 14.56},
    **{"rtx-5070-ti": 15.47, "rtx-4000-ada": 19.55, "v100-sxm2-16gb": 15.76},
    **{"v100-sxm2-32gb": 31.74, "v100-pcie-16gb": 15.79, "v100-pcie-32gb": 31.75},
}


def test_no_card_holds_more_than_torch_reports_on_linux():
    for name, seen_gib in SEEN_GIB.items():
        assert hardware_named(name).device.total_memory_bytes <= seen_gib * GIB, name


def test_geforce_tensor_cores_sum_in_fp32_at_half_rate():
    """What the vendor gives no table for is SMs x operations x boost clock: 512 of GeForce
    cards, 1,024 of others."""
    for gpu in load_catalog():
        half = gpu.dense_tflops.get("fp16_fp16_accumulate", 0) > 1.5 * gpu.dense_tflops["fp16"]
        assert half == ("GeForce" in gpu.name), gpu.id
        if "bf16" in gpu.dense_tflops:
            assert gpu.dense_tflops["bf16"] == gpu.dense_tflops["fp16"] or gpu.id == "nvidia-gb10"


def test_the_host_is_reached_by_lanes_or_nvlink():
    for name, bytes_per_second in {
        "rtx-4090": 16 * PCIE_BYTES_PER_LANE[4],
        "rtx-5060-ti-16gb": 8 * PCIE_BYTES_PER_LANE[5],
        "gh200-96gb": 450e9,
    }.items():
        assert hardware_named(name).datasheet.pcie_bytes_per_second == bytes_per_second


def test_cards_without_bf16_train_in_fp16():
    old = [gpu for gpu in load_catalog() if gpu.training_dtype == "fp16"]
    assert {gpu.compute_capability for gpu in old} == {"7.0", "7.5"}
    for gpu in old:
        profile = hardware_named(gpu.id)
        fp16, fp32 = (1e12 * gpu.dense_tflops[dtype] for dtype in ("fp16", "fp32"))
        assert profile.datasheet.tf32_flops_per_second is None
        assert profile.datasheet.fp32_flops_per_second == fp32
        assert not profile.capability("precision.bf16").available
        assert profile.capability("precision.fp16").available
        assert any(note.startswith(NO_BF16) for note in profile.notes)
        assert Rates(profile, "fp32", "native", "efficient").reached == 0.8 * fp32
        measured = 1e12 * gpu.measured_tflops.get("fp16", 0.8e-12 * fp16)  # power limits a T4
        assert Rates(profile, "fp16", "native", "efficient").reached == pytest.approx(measured)


def test_cards_that_cuda_13_left_out_get_cuda_12():
    for name, cuda in (("nvidia-v100-sxm2-16gb", "12.6"), ("nvidia-t4", "13.0")):
        profile = hardware_named(name)
        assert profile.versions.cuda_runtime == cuda
        assert any(f"CUDA {cuda}" in note for note in profile.notes)


def test_every_entry_gives_a_profile_with_its_assumptions():
    for gpu in load_catalog():
        profile = hardware_named(gpu.id)
        sheet = profile.datasheet
        peaks = {"bf16": sheet.bf16_flops_per_second, "fp16": sheet.fp16_flops_per_second}
        assert peaks.pop(gpu.training_dtype) == gpu.training_tflops * 1e12
        assert [*peaks.values()] == [None]
        assert (profile.origin, profile.rates) == ("catalog", ())
        assert profile.device.memory_kind == gpu.memory_kind
        assert 0 < profile.device.budget_bytes < gpu.memory_bytes
        assert any("assumed" in note for note in profile.notes)


def test_host_memory_and_reserve_can_be_said():
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


def test_packages_can_be_assumed():
    told = hardware_for("4090", assume=["flash-attn"])
    assert told.capability("attention.flash").available
    assert told.assumed == ("flash-attn",)
    assert any("flash-attn installed" in note for note in told.notes)
    assert told.match_keys == hardware_for("4090").match_keys
    with pytest.raises(InvalidInput, match=r"run on .*V100.*needs compute capability 8\.0") as old:
        hardware_for("v100-sxm2-16gb", assume=["flash-attn"])
    assert "leave --assume out" in old.value.hint
    with pytest.raises(InvalidInput, match="sageattention") as useless:
        hardware_for("4090", assume=["sageattention"])
    assert useless.value.hint.endswith("flash-attn, flash-attn-3, flash-attn-4, xformers")
    with pytest.raises(InvalidInput, match="known"):
        hardware_for(told.changed(origin="probe"), assume=["flash-attn"])
    with pytest.raises(InvalidInput, match="known"):
        autotune.plan("kandinsky5-image-lite", assume=["flash-attn"])


def meant(name):
    return gpu_named(name).id


def all_meant(error):
    """The ids that a refusal offers."""
    return {*error.message.partition(" any of ")[2].split(", ")} - {""}


def refusal(name):
    with pytest.raises(InvalidInput) as caught:
        gpu_named(name)
    assert "--list" in caught.value.hint
    return caught.value


def test_every_card_is_found_by_its_names():
    for gpu in load_catalog():
        short = gpu.id.removeprefix("nvidia-").removeprefix("rtx-")
        for name in (gpu.id.upper(), gpu.id.removeprefix("nvidia-"), f"RTX {short}", gpu.name):
            assert meant(name) == gpu.id


@given(
    st.sampled_from(IDS),
    st.lists(st.sampled_from([" ", "-", "_", "  "]), min_size=8, max_size=8),
    st.randoms(),
)
def test_words_may_be_joined_and_written_in_any_way(id_, joints, random):
    words = [random.choice([word, word.upper(), word.title()]) for word in id_.split("-")]
    assert meant("".join(itertools.chain(*zip(words, joints, strict=False)))) == id_


@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=4, unique=True))
def test_what_is_found_has_every_word(words):
    name = " ".join(words)
    holding = [
        gpu.id
        for gpu in load_catalog()
        if all(word in f"{gpu.id} {gpu.name.lower()} {gpu.memory_nominal_gb:g}gb" for word in words)
        or not {*words} - {*SERIES}
    ]
    try:
        found = {meant(name)}
    except InvalidInput as error:
        found = all_meant(error)
        assert len(found) != 1, "the one that it means"
    assert found <= {*holding}


def test_names_that_people_use():
    for name, id_ in {
        **{"4090": "rtx-4090", "4080": "rtx-4080", "RTX 4080": "rtx-4080", "3080": "rtx-3080"},
        **{"4080 super": "rtx-4080-super", "GeForce_RTX_4080_Super": "rtx-4080-super"},
        **{"3080-ti": "rtx-3080-ti", "4060 ti": "rtx-4060-ti-16gb", "h200": "h200-sxm"},
        **{"a100 40gb": "a100-40gb", "v100 pcie 16gb": "v100-pcie-16gb", "l40s": "l40s"},
        **{
            "RTX 4000 Ada": "rtx-4000-ada",
            "T4": "t4",
            "rtx4090": "rtx-4090",
            "3060 12gb": "rtx-3060",
        },
        **{"geforce rtx 4090": "rtx-4090", "dgx spark": "gb10", "Jetson Thor": "thor"},
    }.items():
        assert meant(name) == f"nvidia-{id_}"


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("h100", {"h100-sxm", "h100-pcie"}),
        ("A100 PCIe", {"a100-pcie-40gb", "a100-pcie-80gb"}),
        ("gh200", {"gh200-96gb", "gh200-144gb"}),
        ("rtx 6000", {"rtx-6000-ada", "rtx-pro-6000"}),
    ],
)
def test_a_name_of_several_cards_is_refused_with_all(name, ids):
    assert all_meant(refusal(name)) == {f"nvidia-{id_}" for id_ in ids}


@pytest.mark.parametrize("name", ["", " ", "-", "nvidia", "GeForce RTX", "l40", "90", "4090d"])
def test_a_name_of_no_card_is_refused(name):
    assert "no hardware called" in refusal(name).message


@pytest.mark.parametrize(
    ("name", "other"), [("4070 Ti", "4070-ti-super"), ("4060", "4060-ti-16gb")]
)
def test_an_unknown_card_is_not_its_ti_or_super(name, other):
    assert f"another card is nvidia-rtx-{other}" in refusal(name).hint


def test_a_saved_profile_goes_before_a_part_of_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_profile(hardware_named("nvidia-b200"), tmp_path / "4090")
    assert hardware_named("4090").datasheet.id == "nvidia-b200"
    assert hardware_named("nvidia-rtx-4090").datasheet.id == "nvidia-rtx-4090"
