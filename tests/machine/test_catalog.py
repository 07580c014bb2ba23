"""The catalog finds a card by any name that means it alone, and mistakes no sibling for it."""

import itertools
from pathlib import Path

import pytest
import yaml
from hypothesis import given, strategies as st

import autotune
from autotune.cost.timing import Rates
from autotune.errors import InvalidInput
from autotune.machine.capabilities import NO_BF16
from autotune.machine.catalog import SERIES, find_gpu, gpu_named, load_catalog
from autotune.machine.probe import hardware_for, hardware_named, limit_memory, save_profile
from autotune.plan.request import PlanRequest

GIB = 2**30
NAMES = yaml.safe_load((Path(__file__).parent / "names.yaml").read_text())
IDS = [gpu.id for gpu in load_catalog()]
WORDS = sorted({word for id_ in IDS for word in id_.split("-")})


@pytest.mark.slow
def test_names_find_their_own_entry():
    for gpu in load_catalog():
        assert all(find_gpu(name, gpu.memory_bytes) is gpu for name in gpu.names)
        others = [other for other in load_catalog() if other.name != gpu.name]
        assert all(find_gpu(other.name, None) is not gpu for other in others)


@pytest.mark.parametrize("name", NAMES["SIBLINGS"])
def test_siblings_are_not_mistaken(name):
    assert find_gpu(name, None) is None


def test_another_size_is_another_card():
    for name, small, large in (("3060", 8, 12), ("4060 Ti", 8, 16), ("5060 Ti", 8, 16)):
        found = [find_gpu(f"NVIDIA GeForce RTX {name}", size * GIB) for size in (small, large)]
        assert [gpu.memory_nominal_gb for gpu in found] == [small, large]
    assert find_gpu("NVIDIA GeForce RTX 4090", 48 * GIB) is None


def test_cards_hold_what_torch_reports():
    for name, seen_gib in NAMES["SEEN_GIB"].items():
        assert hardware_named(name).device.total_memory_bytes <= seen_gib * GIB, name


def test_geforce_sums_at_half_rate():
    """What the vendor gives no table for is SMs x operations x boost clock: 512 of GeForce
    cards, 1,024 of others."""
    for gpu in load_catalog():
        if "x 512 x" in gpu.source or "x 1024 x" in gpu.source:
            assert ("x 512 x" in gpu.source) == ("GeForce" in gpu.name), gpu.id
        if gpu.int8_tflops and not gpu.id.endswith(("b300", "a10g", "5090-d")):
            per_product = gpu.int8_tflops / (gpu.bf16_tflops or gpu.fp16_tflops)
            assert round(per_product) == (4 if "GeForce" in gpu.name else 2), gpu.id


def test_cards_without_bf16_train_in_fp16():
    old = [gpu for gpu in load_catalog() if gpu.training_dtype == "fp16"]
    assert {gpu.compute_capability for gpu in old} == {"7.0", "7.5"}
    for gpu in old:
        profile = hardware_named(gpu.id)
        fp16, fp32 = (1e12 * gpu.fp16_tflops, 1e12 * gpu.fp32_tflops)
        assert profile.datasheet.tf32_flops_per_second is None
        assert profile.datasheet.fp32_flops_per_second == fp32
        assert not profile.capability("precision.bf16").available
        assert profile.capability("precision.fp16").available
        assert any(note.startswith(NO_BF16) for note in profile.notes)
        assert Rates(profile, "fp32", "native", "efficient").reached == 0.8 * fp32
        measured = 1e12 * (gpu.reached_tflops or 0.8e-12 * fp16)  # power limits a T4
        assert Rates(profile, "fp16", "native", "efficient").reached == pytest.approx(measured)


def test_old_cards_get_older_cuda():
    for name, cuda in (("nvidia-v100-sxm2-16gb", "12.6"), ("nvidia-t4", "13.0")):
        profile = hardware_named(name)
        assert profile.versions.cuda_runtime == cuda
        assert any(f"CUDA {cuda}" in note for note in profile.notes)


def test_host_memory_can_be_said():
    usual, small = hardware_for("4090"), hardware_for("4090", host_memory="32GiB")
    assert (usual.host.memory_bytes, small.host.memory_bytes) == (64 << 30, 32 << 30)
    assert small.host.available_memory_bytes < 32 << 30
    assert any("32 GiB of system RAM" in note for note in small.notes)
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
    probed = told.changed(origin="probe")
    wrong = ("v100-sxm2-16gb", "flash-attn"), ("4090", "sage"), (probed, "xformers")
    for where, package in wrong:
        with pytest.raises(InvalidInput):
            hardware_for(where, assume=[package])
    with pytest.raises(InvalidInput, match="known"):
        autotune.plan("kandinsky5-image-lite", assume=["flash-attn"])


def meant(name):
    return gpu_named(name).id


@given(
    st.sampled_from(IDS),
    st.lists(st.sampled_from([" ", "-", "_", "  "]), min_size=8, max_size=8),
    st.randoms(),
)
def test_words_may_be_joined_anyhow(id_, joints, random):
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
        found = {*error.message.partition(" any of ")[2].split(", ")} - {""}
        assert len(found) != 1, "the one that it means"
    assert found <= {*holding}


def test_names_that_people_use():
    for name, id_ in NAMES["MEANT"].items():
        assert meant(name) == f"nvidia-{id_}"


@pytest.mark.parametrize("name", ["", " ", "-", "nvidia", "GeForce RTX", "90"])
def test_name_of_no_card_is_refused(name):
    with pytest.raises(InvalidInput, match="no hardware called"):
        gpu_named(name)


def test_saved_profiles_go_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_profile(hardware_named("nvidia-b200"), tmp_path / "4090")
    assert hardware_named("4090").datasheet.id == "nvidia-b200"
    assert hardware_named("nvidia-rtx-4090").datasheet.id == "nvidia-rtx-4090"
