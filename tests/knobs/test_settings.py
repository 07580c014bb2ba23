"""Knobs that a rule settles: what they admit where, and why the rest is not tried."""

import os
from dataclasses import replace

import pytest
import torch

from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import Attention, Quantization, Swapping
from autotune.knobs.settings import ALLOCATOR_VARIABLES as VARIABLES
from autotune.knobs.settings import configure_allocator, plain_choices
from autotune.machine.catalog import load_catalog, profile_of_gpu
from autotune.models.registry import get_family
from autotune.plan.hardware import Capability, HardwareProfile, Rate
from autotune.search.space import build_search_space
from tests import builders
from tests.builders import hardware, workload


def context(*capabilities: str, **changes: object) -> TuningContext:
    return TuningContext(hardware(*capabilities, **changes), get_family("qwen-image"), workload())


def test_shared_memory_decides_on_allocators():
    integrated = builders.context(machine({}, kind="integrated"))
    cases = (
        (context(), ("expandable", "default"), ("pinned", "pageable")),
        (integrated, ("default", "expandable"), ("pageable",)),
        (context(kind="cpu"), ("default",), ("pageable",)),
    )
    for where, allocators, memories in cases:
        choices = plain_choices(where)
        assert choices["allocator"] == allocators
        assert choices["batch_memory"] == memories


@pytest.fixture
def told(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    settings = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    return settings


def test_what_user_told_allocator_stays(monkeypatch, told):
    monkeypatch.setenv(VARIABLES[1], "max_split_size_mb:128")
    configure_allocator("expandable")
    assert VARIABLES[0] not in os.environ
    assert os.environ[VARIABLES[1]] == "max_split_size_mb:128"
    assert not told


def test_expandable_segments_reach_a_running_allocator(told):
    """The probe's questions start CUDA, and then the variables have been read; an import alone
    may read them, too."""
    configure_allocator("expandable")
    assert all(os.environ[name] == "expandable_segments:True" for name in VARIABLES)
    assert told == ["expandable_segments:True"]


def test_eight_bit_products_need_compact():
    names = ("quantization.int8-matmul", "quantization.fp8-matmul")
    strict = Quantization().choices(context(*names))
    both = ("int8-matmul", "fp8-matmul")
    assert all("--quality compact" in strict.rejected[name] for name in both)
    places = context(*names), context(*names, kind="cpu")
    work = workload(quality="compact")
    card, cpu = (Quantization().choices(replace(each, workload=work)) for each in places)
    assert card.admitted == ("int8-matmul", "fp8-matmul", "none")
    assert cpu.admitted == ("int8-matmul", "none")
    assert "float8 units" in cpu.pinnable["fp8-matmul"]


@pytest.mark.parametrize(
    ("speed", "is_tried"), [(1.5, True), (1.0, False), (0.5, False), (None, False)]
)
def test_measurements_decide_on_attention(speed, is_tried):
    one = profile_of_gpu(next(gpu for gpu in load_catalog() if gpu.id == "nvidia-h100-sxm"))
    speeds = {"native": 1.0} if speed is None else {"native": 1.0, "_native_flash": speed}
    known = {"unit": "FLOP/s", "spread": 0.0, "num_samples": 3}
    rates = tuple(
        Rate(name=f"attention.{name}.bf16.4096", value=value * 1e14, **known)
        for name, value in speeds.items()
    )
    choices = Attention().choices(builders.context(one.model_copy(update={"rates": rates})))
    assert ("_native_flash" in choices.admitted) == is_tried
    assert ("_native_flash" in choices.pinnable) == (not is_tried)
    assert {"_native_cudnn", "_native_efficient", "_native_math"} <= choices.pinnable.keys()
    assert "native" in choices.admitted


def test_dora_has_whole_weights_on_device():
    usual = context()
    dora = replace(usual, workload=usual.workload.changed(adapter="dora"))
    assert Quantization().choices(dora).admitted == ("none",)
    assert Swapping().choices(dora).admitted == (0,)
    assert len(Swapping().choices(usual).admitted) > 1


GIB = 2**30


def machine(
    cold: dict[str, float],
    warm: dict[str, float] | None = None,
    *,
    budget_bytes: int = 90 * GIB,
    kind: str = "discrete",
) -> HardwareProfile:
    plain = builders.hardware(budget_bytes=budget_bytes)
    rates = [(f"disk.{name}", value) for name, value in cold.items()]
    rates += [(f"page_cache.{name}", value) for name, value in (warm or {}).items()]
    how = {"unit": "B/s", "spread": 0.1, "num_samples": 3}
    measured = tuple(Rate(name=name, value=value * 1e9, **how) for name, value in rates)
    device = plain.device.model_copy(update={"memory_kind": kind})
    return plain.changed(device=device, rates=measured)


def chosen(hardware: HardwareProfile) -> str:
    return str(plain_choices(builders.context(hardware))["loader"][0])


def test_the_fastest_loader_is_taken():
    assert chosen(machine({})) == "safetensors"
    cold = {"safetensors": 1.0, "pread": 2.0, "fastsafetensors": 5.0}
    assert chosen(machine(cold)) == "fastsafetensors"
    cold = {"safetensors": 1.0, "pread": 1.05, "fastsafetensors": 1.02}
    warm = {"safetensors": 9.0, "pread": 3.0, "fastsafetensors": 4.0}
    assert chosen(machine(cold, warm)) == "safetensors"


def test_mapped_files_count_twice():
    cold = {"safetensors": 3.0, "pread": 2.0}
    assert chosen(machine(cold, kind="integrated")) == "safetensors"
    tight = machine(cold, budget_bytes=50 * GIB, kind="integrated")  # the model takes 38 GiB
    assert chosen(tight) == "pread"
    assert chosen(machine({}, budget_bytes=50 * GIB, kind="integrated")) != "safetensors"


def test_wrong_precisions_give_way():
    wrong = Capability(name="parity.precision.bf16", available=False, reason="differs")
    hardware = builders.hardware("precision.bf16", "precision.fp16", "attention.native")
    where = builders.context(hardware)
    assert build_search_space(where).choices["precision"] == ("bf16",)
    hardware = hardware.changed(capabilities=(*hardware.capabilities, wrong))
    assert build_search_space(builders.context(hardware)).choices["precision"] == ("fp16",)
