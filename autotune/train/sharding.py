"""Frozen weights sharded over processes (FSDP2), block by block while they load, so that no device
holds them all.

Each process holds its part of every frozen weight; a block is gathered just before it runs and
freed after it. The adapter is added later and is replicated: it is small, and DDP averages its
gradients.
"""

import torch.distributed
from torch import nn

from autotune.models.family import Family
from autotune.weights.stream import Transform


def shard_on_arrival(family: Family, transformer: nn.Module, device_type: str) -> Transform:
    """A transform for loading that shards each block of an empty `transformer` as soon as it is
    complete.

    What belongs to no block is sharded at the end. Needs torch's process group,
    and frozen weights of one dtype in each block.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    transformer.requires_grad_(False)
    # No name for the mesh: peft takes a weight on a mesh with names as one of tensor parallelism
    mesh = init_device_mesh(device_type, (torch.distributed.get_world_size(),))
    waiting: dict[nn.Module, set[nn.Module]] = {}
    owner: dict[nn.Module, nn.Module] = {}
    for part in (*family.blocks(transformer), transformer):
        own = [module for module in part.modules() if module not in owner and _has_tensors(module)]
        owner |= dict.fromkeys(own, part)
        waiting[part] = set(own)

    def arrived(name: str, module: nn.Module) -> None:
        part = owner[module]
        waiting[part].discard(module)
        if part is not transformer and not waiting[part]:
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
            del waiting[part]
        if waiting.keys() == {transformer} and not waiting[transformer]:
            fully_shard(
                transformer, mesh=mesh, reshard_after_forward=True
            )  # last: it takes what no block has

    return arrived


def _has_tensors(module: nn.Module) -> bool:
    """Whether any tensor of the module itself, not of its children, comes from the files."""
    buffers = (
        value
        for name, value in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    )
    return any(value is not None for value in (*module._parameters.values(), *buffers))


def num_shards_of(transformer: nn.Module) -> int:
    """Over how many processes every frozen weight is sharded, as a DTensor, which has a device
    mesh; else 1."""
    meshes = [
        getattr(weight, "device_mesh", None)
        for weight in transformer.parameters()
        if not weight.requires_grad
    ]
    sizes = {1 if mesh is None else mesh.size() for mesh in meshes}
    return sizes.pop() if len(sizes) == 1 else 1
