"""Moves the frozen weights of some blocks between host and device while training runs.

Each block's weights are copied to the device just before its forward pass, which also runs when a checkpoint recomputes
it for its backward pass, and the next block's meanwhile, on a stream of its own. Nothing is copied back: frozen weights
never change, so a block leaves the device by forgetting its copy. The same values meet the same kernels, so gradients
are bit for bit those without swapping.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autotune.weights import Transform

if TYPE_CHECKING:
    from torch import Tensor

    from autotune.families import Family

Place = tuple[nn.Module, str, nn.Parameter]
"""A module, the name of one of its parameters, and that parameter on the host."""


class BlockSwap:
    """At most two blocks are on the device: the one that runs, and the one that comes next.

    Args:
        blocks: in the order that they run; each must run under a checkpoint.
        device: where they run.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.places = [_offload_frozen(block, device) for block in blocks]
        assert all(self.places), "a block with nothing frozen would be swapped in name only"
        self.arrivals: dict[int, torch.cuda.Event | None] = {}
        """Of the blocks on the device: when their weights have arrived; None where copies are immediate."""
        self.last = -1
        for number, block in enumerate(blocks):
            _bring(block, device)  # an optimizer may look at them before anything runs
            block.register_forward_pre_hook(partial(self._before, number))

    def _before(self, number: int, block: nn.Module, *_: Any) -> None:
        _bring(block, self.device)  # adapters are added where the weights are: perhaps on the host, at any time
        following = self._following(number)
        for other in [other for other in self.arrivals if other not in (number, following)]:
            self._forget(other)
        self._fetch(number)
        self._await(number)
        if following is not None:
            self._fetch(following)
        self.last = number

    def _following(self, number: int) -> int | None:
        """Forward passes go up, backward passes down; at either end they turn round. Without gradients all go up."""
        up = number > self.last or (number == 0 and (self.last == 0 or not torch.is_grad_enabled()))
        following = number + (1 if up else -1)
        return following if 0 <= following < len(self.places) else None

    def _fetch(self, number: int) -> None:
        if number in self.arrivals:
            return
        if self.stream is not None:  # memory that is taken now may still be read by what was queued before
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for module, name, home in self.places[number]:
            module._parameters[name] = nn.Parameter(_each_part(home, self._copied), requires_grad=False)
        self.arrivals[number] = self.stream.record_event() if self.stream is not None else None

    def _copied(self, part: "Tensor") -> "Tensor":
        copy = torch.empty_like(part, device=self.device)  # on the running stream, where it will be freed
        with torch.cuda.stream(self.stream):  # does nothing for None
            return copy.copy_(part, non_blocking=True)

    def _await(self, number: int) -> None:
        event = self.arrivals[number]
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _forget(self, number: int) -> None:
        self._await(number)
        del self.arrivals[number]
        for module, name, home in self.places[number]:
            module._parameters[name] = home


def _bring(block: nn.Module, device: torch.device) -> None:
    """Move what is trained to the device, for good."""
    for parameter in block.parameters():
        if parameter.requires_grad and parameter.device != device:
            parameter.data = parameter.data.to(device)


def _offload_frozen(block: nn.Module, device: torch.device) -> list[Place]:
    """Move the block's frozen parameters to the host, pinned for CUDA, and buffers to the device."""
    places = []
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.requires_grad:
                continue
            home = nn.Parameter(_each_part(parameter, partial(_at_home, device.type == "cuda")), requires_grad=False)
            module._parameters[name] = home
            places.append((module, name, home))
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    return places


def _at_home(pinned: bool, part: "Tensor") -> "Tensor":
    home = part.detach().cpu()
    return home.pin_memory() if pinned else home


def _each_part(tensor: Any, move: "Callable[[Tensor], Tensor]") -> Any:
    """`tensor` with `move` applied to it, or to each tensor that a quantized one is made of."""
    tensor = tensor.detach()
    if not hasattr(tensor, "__tensor_flatten__"):
        return move(tensor)
    names, context = tensor.__tensor_flatten__()
    parts = {name: move(getattr(tensor, name)) for name in names}
    return type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())


def offload_on_arrival(
    family: "Family", transformer: nn.Module, num_blocks: int, transform: Transform | None
) -> Transform:
    """What to do with each module as its weights arrive: `transform`, then to the host if its block is swapped."""
    inside = {id(module) for block in family.blocks(transformer)[:num_blocks] for module in block.modules()}

    def arrived(name: str, module: nn.Module) -> nn.Module | None:
        replacement = transform(name, module) if transform else None
        if id(module) in inside:
            (replacement or module).to("cpu")
        return replacement

    return arrived
