"""Inputs of recomputing blocks wait on the host between the forward and the backward pass.

Copies run on a stream of their own, behind what the device computes: a block's input leaves while
the block runs, and the one before it arrives while a block recomputes. So at most two are on the
device beside the one that is in use.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from autotune.knobs.host_region import HostRegion


class Arrival(NamedTuple):
    """An input on its way to the device."""

    tensor: Tensor
    event: torch.cuda.Event | None
    """When it is there; None if copies are immediate."""


class Waiting(NamedTuple):
    """What an input on the host is like."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class InputStore:
    """One host region for each block, which serves all steps."""

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self._regions: dict[int, HostRegion] = {}
        self._waiting: dict[int, Waiting] = {}
        self._leaving: Arrival | None = None
        self._arriving: dict[int, Arrival] = {}

    def send(self, at: int, tensor: Tensor) -> None:
        """Copy the input of block `at` to the host; the device's memory is free again when the
        next one is sent.
        """
        if self.stream is None and tensor.is_cuda:
            self.stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        self._release()
        values = tensor.detach().contiguous()
        region = self._regions.get(at)
        if region is None or region.num_bytes < values.nbytes:
            region = self._regions[at] = HostRegion(values.nbytes, is_locked=tensor.is_cuda)
        self._arriving.pop(at, None)
        self._follow()
        with torch.cuda.stream(self.stream):  # does nothing for None
            region.bytes[: values.nbytes].view(values.dtype).view(values.shape).copy_(
                values, non_blocking=True
            )
        self._waiting[at] = Waiting(values.shape, values.dtype, values.device)
        self._leaving = Arrival(values, self.stream.record_event() if self.stream else None)

    def fetch(self, at: int) -> Tensor:
        """The input of block `at` on its device again; the one of the block before it is called
        for meanwhile.
        """
        self._release()
        self._call_for(at)
        arrival = self._arriving.pop(at)
        if at - 1 in self._waiting:
            self._call_for(at - 1)
        if arrival.event is not None:
            torch.cuda.current_stream(arrival.tensor.device).wait_event(arrival.event)
        return arrival.tensor.requires_grad_()

    def _call_for(self, at: int) -> None:
        if at in self._arriving:
            return
        like = self._waiting.pop(at)
        tensor = torch.empty(
            like.shape, dtype=like.dtype, device=like.device
        )  # on the running stream, as it is freed
        self._follow()
        with torch.cuda.stream(self.stream):
            stored = self._regions[at].bytes[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            tensor.copy_(stored, non_blocking=True)
        self._arriving[at] = Arrival(tensor, self.stream.record_event() if self.stream else None)

    def _follow(self) -> None:
        """Let copies wait for what was queued before: it makes what they read, or reads what
        they write over.
        """
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def _release(self) -> None:
        """Let go of the input that left last, once nothing that follows could write over it
        before it is copied.
        """
        if self._leaving is not None and self._leaving.event is not None:
            torch.cuda.current_stream(self._leaving.tensor.device).wait_event(self._leaving.event)
        self._leaving = None
