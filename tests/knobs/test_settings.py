"""Knobs that a rule settles: what they admit where, and why the rest is not tried."""

import os
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from hypothesis import given, strategies as st

from autotune.knobs import modulation
from autotune.knobs.attention import ATTENTION_BACKENDS
from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import Attention, Quantization, Swapping
from autotune.knobs.settings import (
    ALLOCATOR_VARIABLES as VARIABLES,
    configure_allocator,
    plain_choices,
)
from autotune.machine.catalog import load_catalog, profile_of_gpu
from autotune.models.registry import get_family
from autotune.plan.hardware import Capability, Rate
from autotune.search.space import build_search_space
from tests import builders
from tests.builders import hardware, workload


def context(*capabilities, **changes):
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
    names = ("quantization.int8-rotated", "quantization.fp8-matmul")
    strict = Quantization().choices(context(*names))
    both = ("int8-rotated", "fp8-matmul")
    assert all("--quality compact" in strict.rejected[name] for name in both)
    places = context(*names), context(*names, kind="cpu")
    work = workload(quality="compact")
    card, cpu = (Quantization().choices(replace(each, workload=work)) for each in places)
    assert card.admitted == ("int8-rotated", "fp8-matmul", "none")
    assert cpu.admitted == ("int8-rotated", "none")
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


def machine(cold, warm=None, *, budget_bytes=90 * GIB, kind="discrete"):
    plain = builders.hardware(budget_bytes=budget_bytes)
    rates = [(f"disk.{name}", value) for name, value in cold.items()]
    rates += [(f"page_cache.{name}", value) for name, value in (warm or {}).items()]
    how = {"unit": "B/s", "spread": 0.1, "num_samples": 3}
    measured = tuple(Rate(name=name, value=value * 1e9, **how) for name, value in rates)
    device = plain.device.model_copy(update={"memory_kind": kind})
    return plain.changed(device=device, rates=measured)


def chosen(hardware):
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


def plain(q, k, v, softmax_scale, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=softmax_scale
    ).transpose(1, 2)


def version_3(q, k, v, softmax_scale=None, causal=False, qv=None, return_attn_probs=False):
    return plain(q, k, v, softmax_scale, causal)


def beta_of_version_3(q, k, v, softmax_scale=None, causal=False, qv=None, window_size=(-1, -1)):
    return plain(q, k, v, softmax_scale, causal), torch.zeros(1)


def version_4(q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False):
    return plain(q, k, v, softmax_scale, causal), None


@pytest.mark.parametrize(
    ("name", "module", "function"),
    [
        ("flash-3", "flash_attn_interface", version_3),
        ("flash-3", "flash_attn_interface", beta_of_version_3),
        ("flash-4", "flash_attn.cute", version_4),
    ],
)
@pytest.mark.parametrize("options", [{}, {"scale": 0.2}, {"is_causal": True}])
def test_numbers_are_those_of_the_package(monkeypatch, name, module, function, options):
    package = ModuleType(module)
    package.flash_attn_func = function
    monkeypatch.setitem(sys.modules, module.partition(".")[0], ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, module, package)
    heads = [torch.randn(2, 6, 3, 8, requires_grad=True) for _ in range(3)]
    backend = ATTENTION_BACKENDS[name].diffusers_name()
    own, native = (
        dispatch_attention_fn(*heads, backend=each, **options) for each in (backend, "native")
    )
    torch.testing.assert_close(own, native)
    ours, theirs = (torch.autograd.grad(out.square().sum(), heads) for out in (own, native))
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match="no mask"):
        dispatch_attention_fn(*heads, attn_mask=torch.ones(2, 6, dtype=torch.bool), backend=backend)


@given(row_bytes=st.integers(1, 1 << 32), images=st.integers(1, 10_000))
def test_windows_keep_their_limits(row_bytes, images):
    most_draws, most_bytes = modulation.MAX_WINDOW_DRAWS, modulation.MAX_WINDOW_BYTES
    steps = modulation.window_steps(row_bytes, images)
    assert steps >= 1
    if steps > 1:
        assert steps * images <= most_draws
        assert steps * images * row_bytes <= most_bytes
    assert (steps + 1) * images > min(most_draws, most_bytes // row_bytes)
