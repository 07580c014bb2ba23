"""One function for norm, rotation and joining: diffusers' numbers, and only its inputs kept."""

from dataclasses import replace

import pytest
import torch
from diffusers.models.normalization import RMSNorm
from hypothesis import given, settings, strategies as st

from autotune.knobs import norm_rope as processor
from autotune.knobs.norm_rope import KERNELS, NormRopeFunction, use_kernels
from autotune.models.registry import FAMILIES
from autotune.plan.candidate import Candidate
from autotune.search.gradient_checks import adapter_gradients, plain_transformer, relative_error
from tests.search.test_gradient_checks import request_of

# What is compiled, as Python runs it.
PLAIN = KERNELS["compiled"]._replace(
    forward=processor._wide_forward, backward=processor._wide_backward
)
WAYS = {"fused": KERNELS["fused"], "wide": PLAIN}
EPSILON = 1e-6


def reference(streams, weights, tables, epsilon=EPSILON):
    """In the dtype of the streams, each step an operation that autograd knows."""
    outs = []
    for x, weight, table in zip(streams, weights, tables, strict=True):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
        y = y if weight is None else y * weight
        if table is not None:
            turned = torch.view_as_complex(y.unflatten(-1, (-1, 2))) * table
            y = torch.view_as_real(turned).flatten(-2)
        outs.append(y)
    return torch.cat(outs, dim=1)


def make(lengths, batch, heads, pairs, *, dtype=torch.float64, weighted=True, turned=True, scale=1):
    torch.manual_seed(0)
    drawn = [torch.randn(batch, n, heads, 2 * pairs, dtype=dtype) * scale for n in lengths]
    streams = [each.requires_grad_() for each in drawn]
    weights = [torch.randn(2 * pairs, dtype=dtype) if weighted else None for _ in lengths]
    angles = [torch.randn(n, 1, pairs, dtype=dtype) for n in lengths]
    tables = [torch.polar(torch.ones_like(a), a) if turned else None for a in angles]
    return streams, weights, tables


def ours(kernels, streams, weights, tables, *, rounds=False, epsilon=EPSILON):
    narrow = [None if table is None else table.to(torch.complex64) for table in tables]
    forms = tuple(None if table is None else kernels.table(table) for table in narrow)
    return NormRopeFunction.apply(kernels, tuple(weights), forms, epsilon, rounds, *streams)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    pairs=st.integers(1, 5),
    weighted=st.booleans(),
    turned=st.booleans(),
    scale=st.sampled_from([1e-4, 1.0, 1e3]),
)
def test_numbers_are_the_references(way, lengths, batch, heads, pairs, weighted, turned, scale):
    exact = make(lengths, batch, heads, pairs, weighted=weighted, turned=turned, scale=scale)
    expected = reference(*exact)
    torch.manual_seed(1)
    gradient = torch.randn(expected.shape, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, exact[0], gradient)
    streams = [x.detach().float().requires_grad_() for x in exact[0]]
    weights = [None if w is None else w.float() for w in exact[1]]
    out = ours(WAYS[way], streams, weights, exact[2])
    found = torch.autograd.grad(out, streams, gradient.float())
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    size = max(float(each.norm()) for each in wanted)
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).norm()) <= 2e-5 * size + 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_bf16_is_as_exact_as_diffusers(way):
    exact = make([3, 40], 2, 4, 16)
    expected = reference(*exact)
    gradient = torch.randn(expected.shape, dtype=torch.float64)
    wanted = [expected.detach(), *torch.autograd.grad(expected, exact[0], gradient)]
    streams = [x.detach().bfloat16().requires_grad_() for x in exact[0]]
    weights = [w.bfloat16() for w in exact[1]]

    def stock(streams):
        outs = []
        for x, weight, table in zip(streams, weights, exact[2], strict=True):
            norm = RMSNorm(x.shape[-1], EPSILON)
            norm.weight = torch.nn.Parameter(weight, requires_grad=False)
            y = norm(x).float().unflatten(-1, (-1, 2))
            turned = torch.view_as_real(torch.view_as_complex(y) * table.to(torch.complex64))
            outs.append(turned.flatten(-2).to(x.dtype))
        return torch.cat(outs, dim=1)

    def errors(out):
        gradients = torch.autograd.grad(out, streams, gradient.bfloat16())
        results = (each.detach().double() for each in (out, *gradients))
        pairs = zip(results, wanted, strict=True)
        return [float((one - other).norm() / other.norm()) for one, other in pairs]

    own = errors(ours(WAYS[way], streams, *exact[1:]))
    assert all(map(lambda one, other: one <= 1.05 * other, own, errors(stock(streams))))


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_zeros_give_finite_gradients(way):
    streams, weights, tables = make([2], 1, 1, 4, dtype=torch.float32)
    streams[0].data[:, 0] = 0
    out = ours(WAYS[way], streams, weights, tables)
    (found,) = torch.autograd.grad(out.sum(), streams)
    assert torch.isfinite(out).all()
    assert torch.isfinite(found).all()


@pytest.mark.slow
def test_compiled_kernels_give_what_python_gives():
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        streams, weights, tables = make([3, 8], 2, 2, 8, dtype=torch.float32)
        streams = [x.detach().to(dtype).requires_grad_() for x in streams]
        weights = [w.to(dtype) for w in weights]
        results = []
        for kernels in (PLAIN, KERNELS["compiled"]):
            out = ours(kernels, streams, weights, tables)
            results.append([out, *torch.autograd.grad(out.float().square().sum(), streams)])
        for one, other in zip(*results, strict=True):
            assert float((one - other).float().norm()) <= tolerance * float(one.float().norm())


DECLARED = [name for name, family in FAMILIES.items() if family.attention_layouts]


def error(name, **settings):
    request = request_of(name)
    values = {"micro_batch_size": 2, "checkpointed_blocks": 0, "precision": "fp32", **settings}
    own = Candidate.model_validate(values)
    found, wanted = (
        adapter_gradients(replace(request, candidate=candidate), plain_transformer(request))
        for candidate in (own, own.changed(norm_rope="stock"))
    )
    assert [one is None for one in found] == [one is None for one in wanted]
    return relative_error(found, wanted)


@pytest.mark.quick("qwen-image")
@pytest.mark.parametrize("kernels", ["fused", "compiled"])
@pytest.mark.parametrize("name", DECLARED)
def test_adapter_gradients_are_the_stock_processors(name, kernels, monkeypatch):
    monkeypatch.setitem(KERNELS, "compiled", PLAIN)
    # Kandinsky rounds rotated queries and keys to bf16, so a last bit becomes 1/256 here and there.
    tolerance = 3e-3 if name.startswith("kandinsky5") else 1e-5
    assert 0 < error(name, norm_rope=kernels) <= tolerance


def test_the_attention_backend_is_the_candidates(monkeypatch):
    seen, original = [], processor.dispatch_attention_fn

    def spy(*args, backend=None, **kwargs):
        seen.append(backend)
        return original(*args, backend=backend, **kwargs)

    monkeypatch.setattr(processor, "dispatch_attention_fn", spy)
    assert error("qwen-image", norm_rope="fused", attention="_native_math") <= 1e-5
    assert {str(one.value) for one in seen} == {"_native_math"}


@pytest.mark.quick("flux1-dev")
@pytest.mark.parametrize("name", DECLARED)
def test_processors_change_and_change_back(name):
    family, transformer = FAMILIES[name], plain_transformer(request_of(name))
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


def test_changed_positions_are_computed_anew():
    tables = processor.RotaryTables()
    first, second = (torch.polar(torch.ones(2, 3, 4), torch.rand(2, 3, 4)) for _ in range(2))
    one = tables.get("complex", first, [3], "fused")
    assert tables.get("complex", first, [3], "fused") is one
    assert torch.equal(tables.get("complex", second, [3], "fused")[0], second.unsqueeze(2))
    assert isinstance(tables.get("complex", second, [3], "compiled")[0], tuple)
