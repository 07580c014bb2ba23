"""Moves the frozen weights of some blocks between host and device while training runs.

Each block's weights are copied to the device just before its forward pass, which also runs when a checkpoint recomputes
it for its backward pass, and the next block's meanwhile, on a stream of its own. Nothing is copied back: frozen weights
never change, so a block leaves the device by dropping its copy. The same values meet the same kernels, so gradients are
bit for bit those without swapping.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autotune.families import Family
from autotune.weights import Transform


class HostWeight(NamedTuple):
    """A frozen parameter that waits on the host."""

    module: nn.Module
    name: str
    on_host: nn.Parameter

    def put(self, parameter: nn.Parameter) -> None:
        """Let the module use `parameter`."""
        self.module._parameters[self.name] = parameter


class BlockSwap:
    """At most two blocks are on the device: the one that runs, and the one that comes next.

    Args:
        blocks: in the order that they run; each must run under a checkpoint.
        device: where they run.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.weights = [_offload_frozen(block, device) for block in blocks]
        assert all(self.weights), "a block without frozen weights would be swapped in name only"
        self.arrivals: dict[int, torch.cuda.Event | None] = {}
        """When the weights of each block on the device have arrived; None if copies are immediate."""
        self.last = -1
        for number, block in enumerate(blocks):
            _move_trained(block, device)  # an optimizer may look at them before anything runs
            block.register_forward_pre_hook(partial(self._before_forward, number))

    def _before_forward(self, number: int, block: nn.Module, *_: Any) -> None:
        _move_trained(block, self.device)  # adapters are added where the weights are: perhaps on the host, at any time
        following = self._following(number)
        for other in [other for other in self.arrivals if other not in (number, following)]:
            self._evict(other)
        self._fetch(number)
        self._await(number)
        if following is not None:
            self._fetch(following)
        self.last = number

    def _following(self, number: int) -> int | None:
        """The block that runs next: forward passes go up, backward passes down, and without gradients all go up."""
        is_forward = number > self.last or (number == 0 and (self.last == 0 or not torch.is_grad_enabled()))
        following = number + (1 if is_forward else -1)
        return following if 0 <= following < len(self.weights) else None

    def _fetch(self, number: int) -> None:
        if number in self.arrivals:
            return
        if self.stream is not None:  # memory that is taken now may still be read by what was queued before
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for weight in self.weights[number]:
            weight.put(_map_tensors(weight.on_host, self._copy_to_device))
        self.arrivals[number] = self.stream.record_event() if self.stream is not None else None

    def _copy_to_device(self, tensor: Tensor) -> Tensor:
        copy = torch.empty_like(tensor, device=self.device)  # on the running stream, where it will be freed
        with torch.cuda.stream(self.stream):  # does nothing for None
            return copy.copy_(tensor, non_blocking=True)

    def _await(self, number: int) -> None:
        event = self.arrivals[number]
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _evict(self, number: int) -> None:
        self._await(number)
        del self.arrivals[number]
        for weight in self.weights[number]:
            weight.put(weight.on_host)


def _move_trained(block: nn.Module, device: torch.device) -> None:
    """Move what is trained to the device, for good."""
    for parameter in block.parameters():
        if parameter.requires_grad and parameter.device != device:
            parameter.data = parameter.data.to(device)


def _offload_frozen(block: nn.Module, device: torch.device) -> list[HostWeight]:
    """Move the block's frozen parameters to the host, pinned for CUDA, and buffers to the device."""
    weights = []
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                copy = partial(_copy_to_host, is_pinned=device.type == "cuda")
                weights.append(HostWeight(module, name, _map_tensors(parameter, copy)))
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    for weight in weights:
        weight.put(weight.on_host)
    return weights


def _copy_to_host(tensor: Tensor, *, is_pinned: bool) -> Tensor:
    copy = tensor.detach().cpu()
    return copy.pin_memory() if is_pinned else copy


def _map_tensors(parameter: Any, function: Callable[[Tensor], Tensor]) -> nn.Parameter:
    """A frozen parameter of what `function` makes of the tensor, or of each tensor that a quantized one consists of."""
    tensor = parameter.detach()
    if not hasattr(tensor, "__tensor_flatten__"):
        return nn.Parameter(function(tensor), requires_grad=False)
    names, context = tensor.__tensor_flatten__()
    parts = {name: function(getattr(tensor, name)) for name in names}
    whole = type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
    return nn.Parameter(whole, requires_grad=False)


def offload_on_arrival(
    family: Family, transformer: nn.Module, num_blocks: int, transform: Transform | None
) -> Transform:
    """What to do with each module as its weights arrive: `transform`, then to the host if its block is swapped."""
    inside = {id(module) for block in family.blocks(transformer)[:num_blocks] for module in block.modules()}

    def on_arrival(name: str, module: nn.Module) -> nn.Module | None:
        replacement = transform(name, module) if transform else None
        if id(module) in inside:
            (replacement or module).to("cpu")
        return replacement

    return on_arrival
