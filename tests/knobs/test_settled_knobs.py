"""Knobs that a rule settles: what they admit where, and why the rest is not tried."""

import os
from dataclasses import replace

import pytest
import torch

from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import Attention, Checkpointing, Compile, Quantization, Swapping
from autotune.knobs.settings import ALLOCATOR_VARIABLES as VARIABLES
from autotune.knobs.settings import configure_allocator, plain_choices
from autotune.machine.catalog import load_catalog, profile_of_gpu, with_assumed_packages
from autotune.machine.store import hardware_named
from autotune.models.registry import get_family
from autotune.plan.candidate import Candidate
from autotune.plan.hardware import Rate
from tests.builders import hardware, workload


def context(*capabilities: str, **changes: object) -> TuningContext:
    return TuningContext(hardware(*capabilities, **changes), get_family("qwen-image"), workload())


def integrated() -> TuningContext:
    one = hardware()
    device = one.device.model_copy(update={"memory_kind": "integrated"})
    return TuningContext(
        one.model_copy(update={"device": device}), get_family("qwen-image"), workload()
    )


def test_allocator_and_batch_memory_go_by_how_device_and_host_share_memory():
    cases = (
        (context(), ("expandable", "default"), ("pinned", "pageable")),
        (integrated(), ("default", "expandable"), ("pageable",)),
        (context(kind="cpu"), ("default",), ("pageable",)),
    )
    for where, allocators, memories in cases:
        choices = plain_choices(where)
        assert choices["allocator"] == allocators
        assert choices["batch_memory"] == memories


def test_data_workers_are_offered_up_to_the_cores():
    assert plain_choices(context())["data_workers"] == (1, 0, 2)
    assert plain_choices(context(kind="cpu"))["data_workers"] == (0, 1, 2)


@pytest.fixture
def told(monkeypatch):
    """What the running allocator is told; no variable is set at first, nor after the test."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    settings = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    return settings


def test_what_the_user_told_the_allocator_stays(monkeypatch, told):
    monkeypatch.setenv(VARIABLES[1], "max_split_size_mb:128")
    configure_allocator("expandable")
    assert VARIABLES[0] not in os.environ
    assert os.environ[VARIABLES[1]] == "max_split_size_mb:128"
    assert not told


def test_expandable_segments_reach_an_allocator_that_has_read_its_variables_already(told):
    """The probe's questions start CUDA, and then the variables have been read; an import alone
    may read them, too."""
    configure_allocator("expandable")
    assert all(os.environ[name] == "expandable_segments:True" for name in VARIABLES)
    assert told == ["expandable_segments:True"]


def test_blocks_may_be_swapped_where_device_and_host_have_memories_of_their_own():
    card, shared = Swapping().choices(context()), Swapping().choices(integrated())
    assert card.admitted == Checkpointing().choices(context()).admitted
    assert (card.admitted[0], card.admitted[-1]) == (59, 0)
    assert shared.admitted == (0,)
    assert all("share one memory" in why for why in shared.rejected.values())


def test_plain_tensors_of_8_bits_go_with_compiled_blocks_and_other_formats_do_not():
    compiled = Candidate(micro_batch_size=1, checkpointed_blocks=0, compile="block")
    for name in WEIGHT_FORMATS:
        conflict = Compile().conflict(compiled.changed(quantization=name), context("compile"))
        assert (conflict is None) is not name.startswith("bnb-")


def test_products_of_8_bits_need_the_compact_floor_and_float8_on_a_cpu_a_request():
    names = ("quantization.int8-matmul", "quantization.fp8-matmul")
    strict = Quantization().choices(context(*names))
    assert all(
        "--quality compact" in strict.rejected[name] for name in ("int8-matmul", "fp8-matmul")
    )
    card, cpu = (
        Quantization().choices(replace(where, workload=where.workload.changed(quality="compact")))
        for where in (context(*names), context(*names, kind="cpu"))
    )
    assert card.admitted == ("int8-matmul", "fp8-matmul", "none")
    assert cpu.admitted == ("int8-matmul", "none")
    assert "float8 units" in cpu.on_request["fp8-matmul"]


@pytest.mark.parametrize(
    ("speed", "is_tried"), [(1.5, True), (1.0, False), (0.5, False), (None, False)]
)
def test_what_the_probe_measured_decides_on_attention_and_every_backend_can_be_pinned(
    speed, is_tried
):
    one = profile_of_gpu(next(gpu for gpu in load_catalog() if gpu.id == "nvidia-h100-sxm"))
    speeds = {"native": 1.0} if speed is None else {"native": 1.0, "_native_flash": speed}
    rates = tuple(
        Rate(
            name=f"attention.{name}.bf16.4096",
            value=value * 1e14,
            unit="FLOP/s",
            spread=0.0,
            num_samples=3,
        )
        for name, value in speeds.items()
    )
    choices = Attention().choices(
        TuningContext(one.model_copy(update={"rates": rates}), get_family("qwen-image"), workload())
    )
    assert ("_native_flash" in choices.admitted) == is_tried
    assert ("_native_flash" in choices.on_request) == (not is_tried)
    assert {"_native_cudnn", "_native_efficient", "_native_math"} <= choices.on_request.keys()
    assert "native" in choices.admitted


def attention_choices(one, padding):
    return Attention().choices(
        TuningContext(one, get_family("qwen-image"), workload(text_padding=padding))
    )


@pytest.mark.parametrize(
    ("card", "package", "name", "says"),
    [
        ("h100-sxm", "flash-attn-3", "flash-3", None),
        (
            "h100-sxm",
            "flash-attn-4",
            "flash-4",
            "published for its kernel is 0.96 times the speed of native",
        ),
        ("b200", "flash-attn-4", "flash-4", None),
        (
            "5090",
            "flash-attn-4",
            "flash-4",
            "published for its kernel is 1.00 times the speed of native",
        ),
    ],
)
def test_later_versions_of_flash_attention_are_tried_where_they_are_published_to_be_faster(
    card, package, name, says
):
    choices = attention_choices(with_assumed_packages(hardware_named(card), [package]), "exact")
    assert choices.admitted == (("native", name) if says is None else ("native",))
    assert choices.on_request.get(name) == says


def test_dora_has_whole_weights_on_the_device():
    usual = context()
    dora = replace(usual, workload=usual.workload.changed(adapter="dora"))
    assert Quantization().choices(dora).admitted == ("none",)
    assert Swapping().choices(dora).admitted == (0,)
    assert len(Swapping().choices(usual).admitted) > 1
