"""Every family's attention computes the same with its processors replaced, under whatever else a
step can have."""

import copy

import pytest
import torch

from autotune.knobs import norm_rope as processor
from autotune.knobs.norm_rope import KERNELS, _wide_backward, _wide_forward, use_kernels
from autotune.models.registry import FAMILIES
from autotune.plan.candidate import Candidate
from autotune.search.gradient_checks import adapter_gradients, plain_transformer, relative_error
from tests.kinds import KINDS
from tests.search.test_gradient_checks import request_of

DECLARED = [name for name, family in FAMILIES.items() if family.attention_layouts]
TOLERANCE = {name: 3e-3 if name.startswith("kandinsky5") else 1e-5 for name in DECLARED}
"""Kandinsky rounds rotated queries and keys to bf16, so a last bit becomes 1/256 here and there."""


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    """`compiled` runs its functions as Python: what the compiler makes of them, `test_norm_rope`
    and parity check."""
    plain = KERNELS["compiled"]._replace(forward=_wide_forward, backward=_wide_backward)
    monkeypatch.setitem(KERNELS, "compiled", plain)


@pytest.fixture(scope="module")
def plain():
    made = {}

    def of(name):
        if name not in made:
            made[name] = plain_transformer(request_of(name))
        return made[name]

    return of


def error(name, transformer, *, padding="exact", targets="attention", tokens=None, **settings):
    request = request_of(name)
    work = request.workload.changed(text_padding=padding, targets=targets)
    object.__setattr__(request, "workload", work)
    kernels = settings.pop("norm_rope")
    values = {"micro_batch_size": 2, "checkpointed_blocks": 0, "precision": "fp32", **settings}
    found, wanted = (
        adapter_gradients(
            request, transformer, Candidate.model_validate({**values, "norm_rope": one})
        )
        for one in (kernels, "stock")
    )
    assert [one is None for one in found] == [one is None for one in wanted]
    return relative_error(found, wanted)


def test_families_declare_their_attention_or_say_why_not():
    assert set(FAMILIES) - set(DECLARED) == {
        name for name, one in FAMILIES.items() if "norm_rope" in one.excluded
    }
    assert len(DECLARED) >= 6


@pytest.mark.quick(*KINDS)
@pytest.mark.parametrize("kernels", ["fused", "compiled"])
@pytest.mark.parametrize("name", DECLARED)
def test_adapter_gradients_are_the_stock_processors(plain, name, kernels):
    assert 0 < error(name, plain(name), norm_rope=kernels) <= TOLERANCE[name]


@pytest.mark.parametrize("attention", ["_native_flash", "_native_math"])
def test_the_attention_backend_is_the_candidates(plain, attention, monkeypatch):
    seen, original = [], processor.dispatch_attention_fn

    def spy(*args, backend=None, **kwargs):
        seen.append(backend)
        return original(*args, backend=backend, **kwargs)

    monkeypatch.setattr(processor, "dispatch_attention_fn", spy)
    assert error("qwen-image", plain("qwen-image"), norm_rope="fused", attention=attention) <= 1e-5
    assert {str(one.value) for one in seen} == {attention}


def test_several_control_images():
    request = request_of("qwen-image-edit")
    work = request.workload.changed(num_control_images=3)
    object.__setattr__(request, "workload", work)
    transformer = plain_transformer(request)
    values = {"micro_batch_size": 2, "checkpointed_blocks": 0, "precision": "fp32"}
    found, wanted = (
        adapter_gradients(
            request, transformer, Candidate.model_validate({**values, "norm_rope": one})
        )
        for one in ("fused", "stock")
    )
    assert relative_error(found, wanted) <= 1e-5


@pytest.mark.parametrize("name", DECLARED)
def test_processors_change_and_change_back(plain, name):
    family, transformer = FAMILIES[name], copy.deepcopy(plain(name))
    own = [module.processor for module in transformer.modules() if hasattr(module, "processor")]
    classes = [type(one) for one in own]
    use_kernels(transformer, family.attention_layouts, "fused")
    changed = [type(one) for one in own]
    assert all(isinstance(one, stock) for one, stock in zip(own, classes, strict=True))
    assert changed != classes
    use_kernels(transformer, family.attention_layouts, "compiled")
    assert [type(one) for one in own] == changed
    use_kernels(transformer, family.attention_layouts, "stock")
    assert [type(one) for one in own] == classes


def test_positions_that_change_are_not_taken_from_the_last_call():
    tables = processor.RotaryTables()
    first = torch.polar(torch.ones(2, 3, 4), torch.rand(2, 3, 4))
    second = torch.polar(torch.ones(2, 3, 4), torch.rand(2, 3, 4))
    one = tables.get("complex", first, [3], "fused")
    assert tables.get("complex", first, [3], "fused") is one
    assert torch.equal(tables.get("complex", second, [3], "fused")[0], second.unsqueeze(2))
    assert isinstance(tables.get("complex", second, [3], "compiled")[0], tuple)
