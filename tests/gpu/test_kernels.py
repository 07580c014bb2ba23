"""Gradients on the GPU against the fp32 reference: what is wrong is excluded and says why."""

import pytest

from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import Attention
from autotune.models.registry import FAMILIES
from autotune.models.resolve import resolve_model
from autotune.plan.job import ModelRef
from autotune.search.gradient_checks import check_gradients
from tests.gpu.conftest import CAPTIONS, work
from tests.small import write_small_pipeline

NAMES = [name for name in FAMILIES if not FAMILIES[name].max_controls]


@pytest.mark.values
@pytest.mark.anywhere
@pytest.mark.parametrize("padding", ["exact", "masked"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_agree_or_are_excluded(tmp_path, hardware, precision, name, padding):
    write_small_pipeline(name, tmp_path / "model", CAPTIONS)
    resolved = resolve_model(ModelRef.of(tmp_path / "model"))
    available = {capability.name for capability in hardware.capabilities if capability.available}
    choices = {
        "precision": [precision],
        "attention": [b for b in Attention().names if f"attention.{b}" in available],
        "quantization": [q for q in WEIGHT_FORMATS if f"quantization.{q}" in available],
        "swapped_blocks": [0, 1],
        "compile": ["block"] if "compile" in available and hardware.device.kind == "cuda" else [],
        "optimizer": ["adamw"],
    }
    workload = work(tmp_path / "model", padding=padding)
    context = TuningContext(hardware, resolved.family, workload)
    capabilities = check_gradients(context, choices, resolved)
    assert all(capability.reason for capability in capabilities)
    must = (f"precision.{precision}", "quantization.torchao-int8", "swapped_blocks.2")
    reasons = {each.name: each.reason for each in capabilities if not each.available}
    assert not reasons.keys() & {f"parity.{name}" for name in (*must, "optimizer.adamw")}, reasons
