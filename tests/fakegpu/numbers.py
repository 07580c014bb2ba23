"""Numbers that decide what runs: integers as they are, and zeros instead of what no kernel wrote.

Masks, indices and lengths decide shapes, so what has only integers is computed on the CPU; a loss
or a latent must be finite, so what else is made on the device is zero.
"""

import ctypes

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
INDEXING = (
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
)
ON_DEVICE = {"aten::_local_scalar_dense", "aten::is_pinned", "aten::record_stream", "aten::set_"}


class DecisiveNumbers(TorchDispatchMode):
    """Within it, operations on the device compute what shapes and conditions depend on."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in INDEXING:
            args = (args[0], as_places(args[1]), *args[2:])
        inputs = list(_tensors((args, kwargs)))
        is_plain = all(
            type(each) is Tensor or isinstance(each, torch.nn.Parameter) for each in inputs
        )
        if function.is_view or function._schema.name in ON_DEVICE or not is_plain:
            return function(*args, **kwargs)
        device = next((each.device for each in inputs if each.is_cuda), None)
        if device and not any(map(_is_real, inputs)):
            return _on_cpu(function, args, kwargs, device)
        found = function(*args, **kwargs)
        made = [each for each in _tensors(found) if each.is_cuda]
        if not made or function._schema.is_mutable:
            return found
        if not any(map(_is_real, made)):
            return _on_cpu(function, args, kwargs, made[0].device)
        if device:  # else they came from the host
            for each in filter(_is_real, made):
                ctypes.memset(each.untyped_storage().data_ptr(), 0, each.untyped_storage().nbytes())
        return found


def _tensors(values):
    return (each for each in tree_leaves(values) if isinstance(each, Tensor))


def _is_real(tensor):
    return tensor.is_floating_point() or tensor.is_complex()


def as_places(indices):
    found = []
    for index in indices:
        if getattr(index, "is_cuda", False) and index.dtype in (torch.bool, torch.uint8):
            found += (places.to(index.device) for places in index.cpu().nonzero(as_tuple=True))
        else:
            found.append(index)
    return found


def _on_cpu(function, args, kwargs, device):
    wanted = torch.device(kwargs.get("device") or device)
    copies = {}

    def to_cpu(value):
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, Tensor) or not value.is_cuda:
            return value
        return copies.setdefault(id(value), value.cpu())

    own_args, own_kwargs = tree_map(to_cpu, (tuple(args), kwargs))
    found = function(*own_args, **own_kwargs)
    if not function._schema.is_mutable:
        return tree_map(
            lambda value: value.to(wanted) if isinstance(value, Tensor) else value, found
        )
    for given in _tensors((args, kwargs)):
        if given.is_cuda:
            given.copy_(copies[id(given)])
    return kwargs.get("out", args[0])
