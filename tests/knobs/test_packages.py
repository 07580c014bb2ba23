"""FlashAttention 3 and 4 through diffusers; modules with their signatures stand for them."""

import sys
from types import ModuleType

import pytest
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

from autotune.knobs.attention import ATTENTION_BACKENDS


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
