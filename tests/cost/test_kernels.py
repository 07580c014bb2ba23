"""What the one table of a device's kernels says: which attention runs, and what it takes."""

import pytest
from tiny_models import gpu

from autotune.cost.kernels import kernel_for
from autotune.cost.timing import Rates
from autotune.schema import Rate


def with_cudnn(card: str, version: str | None):
    one = gpu(card)
    return one.model_copy(update={"versions": one.versions.model_copy(update={"cudnn": version})})


@pytest.mark.parametrize(
    ("card", "cudnn", "precision", "masked", "kernel"),
    [
        ("nvidia-h100-sxm", "9.20.0", "bf16", False, "cudnn"),
        ("nvidia-h100-sxm", "9.20.0", "bf16", True, "cudnn"),
        ("nvidia-b200", "9.15.1", "bf16", True, "cudnn"),
        ("nvidia-h100-sxm", "9.15.0", "bf16", True, "efficient"),
        ("nvidia-h100-sxm", None, "bf16", False, "flash"),
        ("nvidia-h100-sxm", "9.20.0", "fp32", False, "efficient"),
        ("nvidia-rtx-4090", "9.20.0", "bf16", False, "flash"),
        ("nvidia-rtx-4090", "9.20.0", "bf16", True, "efficient"),
        ("nvidia-rtx-5090", "9.20.0", "bf16", False, "flash"),
    ],
)
def test_native_attention_is_the_kernel_that_torch_prefers_on_the_card(card, cudnn, precision, masked, kernel):
    assert kernel_for("native", "cuda", masked, with_cudnn(card, cudnn), precision) == kernel


def test_a_card_before_ampere_has_no_flash_attention():
    one = gpu("nvidia-rtx-3090")
    turing = one.model_copy(update={"device": one.device.model_copy(update={"compute_capability": (7, 5)})})
    assert kernel_for("native", "cuda", False, turing, "bf16") == "efficient"


def test_kernels_made_for_ampere_do_not_grow_with_blackwells_peak():
    hopper, blackwell = (Rates(gpu(f"nvidia-{card}"), "bf16", "native", "flash") for card in ("h100-sxm", "b200"))
    assert blackwell.attention_rate(4096) == pytest.approx(hopper.attention_rate(4096), rel=0.1)


def measured(card: str, rates: dict[str, float]):
    known = (Rate(name=name, value=value, unit="FLOP/s", spread=0.0, num_samples=1) for name, value in rates.items())
    return gpu(card).model_copy(update={"rates": tuple(known)})


def test_masked_native_attention_goes_by_the_rate_of_the_kernel_that_takes_masks():
    rates = {"attention.native.bf16.4096": 1e14, "attention._native_efficient.bf16.4096": 5e13}
    one = measured("nvidia-rtx-4090", rates)
    assert Rates(one, "bf16", "native", "flash").attention_rate(4096) == 1e14
    assert Rates(one, "bf16", "native", "efficient").attention_rate(4096) == 5e13
    assert Rates(one, "bf16", "xformers", "efficient").attention_rate(4096) == 1e14  # not measured
    assert Rates(one, "bf16", "native", "cudnn").attention_rate(4096) == 1e14  # native's own, with and without a mask
