"""Swapped blocks give the gradients of unswapped ones, and at most two are on the device."""

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autotune.cost.timing import swap_seconds
from autotune.cost.trace import PEAK, BlockTables, PassTable, compose
from autotune.errors import AutotuneError
from autotune.knobs import blocks as blocks_module
from autotune.knobs.blocks import BlockSwap, HostRegion
from autotune.knobs.norm_rope import KERNELS, NormRopeFunction
from autotune.knobs.quantized_layers import quantize_inside
from autotune.plan.prediction import SwapPractice

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self, num_blocks=5):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList()
        for _ in range(num_blocks):
            base = nn.Linear(32, 32).requires_grad_(False)
            block = nn.ModuleDict({"base": base, "adapter": nn.Linear(32, 32)})
            self.blocks.append(block)
            block.forward = lambda x, b=block: x + torch.tanh(b["base"](x)) + b["adapter"](x)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def gradients(model, num_passes=2):
    torch.manual_seed(1)
    for _ in range(num_passes):
        model(torch.randn(3, 32)).square().sum().backward()
    return [p.grad for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("storage", ["none", "torchao-int8", "torchao-fp8"])
@pytest.mark.parametrize("num_swapped", [1, 5])
def test_gradients_are_bit_equal(storage, num_swapped):
    plain, swapped = Model(), Model()
    for model in (plain, swapped):
        quantize = quantize_inside(model.blocks, storage)
        for block in model.blocks if quantize else ():
            quantize("base", block["base"])
    BlockSwap(swapped.blocks[:num_swapped], CPU)
    for expected, found in zip(gradients(plain), gradients(swapped), strict=True):
        assert torch.equal(expected, found)


def test_norms_keep_no_left_block(monkeypatch):
    model, arrived = Model(), []
    for block in model.blocks:
        block.weight = nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(x, b=block):
            heads = NormRopeFunction.apply(
                KERNELS["fused"], (b.weight,), (None,), 1e-6, False, x.view(1, 3, 8, 4)
            )
            return heads.flatten(2)[0] + b["adapter"](x)

        block.forward = forward

    def arriving(*given, **how):
        made = torch.zeros_like(*given, **how)
        if made.dtype == torch.uint8 and made.device == CPU:  # a block's region
            arrived.append(weakref.ref(made.untyped_storage()))
        return made

    BlockSwap(model.blocks, CPU)
    monkeypatch.setattr(blocks_module.torch, "empty_like", arriving)
    model(torch.randn(3, 32))
    out = model(torch.randn(3, 32))
    assert len(arrived) == 10
    assert sum(each() is not None for each in arrived) <= 2
    out.sum().backward()


@pytest.mark.parametrize("num_swapped", [0, 1, 3, 5])
def test_next_block_is_on_its_way(num_swapped):
    """Weights of as many blocks are there as the peak of each segment counts."""
    model = Model()
    swap = BlockSwap(model.blocks[:num_swapped], CPU) if num_swapped else None
    sizes, there = np.array([3.0, 11.0, 7.0, 5.0, 2.0]), []

    def look(*_):
        there.append(sum(sizes[number] for number in swap.arrivals) if swap else 0)

    for block in model.blocks:
        block.register_forward_pre_hook(look)
    gradients(model)
    counted = []
    for segment in (*range(1, 6), *range(7, 12)):  # but for what runs before blocks and between
        table = np.zeros((12, 4))
        table[segment, PEAK] = 100
        rows = table[0], table[1:6], table[6], table[:6:-1]
        tables = BlockTables([PassTable(*rows)] * 3, np.zeros(5), sizes)
        counted.append(compose(tables, np.array([[5, 0, num_swapped]]), False).visiting_bytes[0])
    assert there[10:] == counted


class Stream:
    """A queue of a simulated device: what it ran so far ended at `time`."""

    def __init__(self):
        self.time = 0.0

    def wait_stream(self, other):
        self.time = max(self.time, other.time)

    def wait_event(self, event):
        self.time = max(self.time, event)

    def record_event(self):
        return self.time


@pytest.mark.parametrize("copy_seconds", [0.5, 2.0, 3.5, 8.0])
@pytest.mark.parametrize("num_swapped", [1, 3, 5])
def test_copies_wait_as_predicted(monkeypatch, num_swapped, copy_seconds):
    model, running, visits = Model(), Stream(), [0] * 5
    swap = BlockSwap(model.blocks[:num_swapped], CPU)
    swap.stream = Stream()

    @contextmanager
    def copying(stream):
        yield
        stream.time += copy_seconds

    def compute(block, inputs, number):
        visits[number] += 1
        running.time += 1.0 if visits[number] % 2 else 3.0  # the latter recomputes

    monkeypatch.setattr(torch.cuda, "stream", copying)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: running)
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *given, n=number: compute(*given, n))
    gradients(model, num_passes=1)
    before = running.time
    gradients(model, num_passes=1)
    waited = running.time - before - 5 * (1.0 + 3.0)
    computed = 5 * np.array([1.0, 1.0, 2.0]).reshape(3, 1)
    copies, swapped = np.full(5, copy_seconds), np.array([num_swapped])
    predicted = swap_seconds(SwapPractice(), copies, swapped, computed)
    assert waited == pytest.approx(predicted.item())


@pytest.mark.parametrize(
    ("ways", "seconds"),
    [
        ({"slots": "one"}, 2 * 3 * 1.5),
        ({"slots": "one", "copies_back": True}, 4 * 3 * 1.5),
        ({"slots": "one", "by_layer": True}, 3 * 3 * 1.5),
        ({"slots": "resident"}, 3 * 0.5),  # backward, blocks take longer than copies
        ({"slots": "resident", "copies_back": True}, 3 * 2.0),
    ],
)
def test_other_programs_wait_their_own_ways(ways, seconds):
    computed = 5 * np.array([1.0, 1.0, 2.0]).reshape(3, 1)
    waited = swap_seconds(SwapPractice(**ways), np.full(5, 1.5), np.array([3]), computed)
    assert waited.item() == pytest.approx(seconds)


def test_adapter_added_later_is_brought_too(monkeypatch):
    """peft puts what it loads where the base weights lie: on the host."""
    model, brought = Model(), []
    BlockSwap(model.blocks, CPU)
    gradients(model)
    for block in model.blocks:
        block["adapter"] = nn.Linear(32, 32)
    monkeypatch.setattr(blocks_module, "_move_trained", lambda *moved: brought.append(moved))
    with torch.no_grad():
        model(torch.randn(3, 32))
    assert brought == [(block, CPU) for block in model.blocks]


class Attending(nn.Module):
    """Three blocks that count their passes, and in which of them attention ran."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.run, self.passes, self.attended = lambda block, x: block(x), [0] * 3, [0] * 3
        for number, layer in enumerate(self.layers):
            layer.forward = lambda x, n=number, own=layer.forward: self.attend(n, own(x))

    def attend(self, number, x):
        self.passes[number] += 1
        self.within = number
        return x + nn.functional.scaled_dot_product_attention(x, x, x)

    def blocks(self, transformer):
        return list(self.layers)

    def enable_gradient_checkpointing(self, run):
        self.run = run

    def disable_gradient_checkpointing(self):
        """Plain as it is."""

    def gradients(self):
        self.zero_grad()

        class Counting(TorchDispatchMode):
            def __torch_dispatch__(counting, operation, types, given=(), named=None):
                name = operation._schema.name
                is_forward = "scaled_dot_product" in name and "backward" not in name
                if is_forward:
                    self.attended[self.within] += 1
                return operation(*given, **(named or {}))

        x = torch.ones(1, 2, 4, 8)
        with Counting():
            for layer in self.layers:
                x = self.run(layer, x)
            x.square().sum().backward()
        return [parameter.grad for parameter in self.parameters()]


class Compiled:
    """What `compile_blocks` makes of a block."""

    def __init__(self, plain, is_adapted):
        assert is_adapted
        self.recomputing = plain

    def __call__(self, *inputs):
        return self.recomputing(*inputs)


@pytest.mark.parametrize(("whole", "selective"), [(0, 0), (1, 0), (0, 2), (1, 1), (2, 1)])
def test_first_blocks_are_recomputed(whole, selective):
    plain, model = Attending(), Attending()
    blocks_module.apply_recomputation(model, model, whole, selective)
    for expected, found in zip(plain.gradients(), model.gradients(), strict=True):
        assert torch.equal(expected, found)
    assert model.passes == [1 + (at < whole + selective) for at in range(3)]
    assert model.attended == [1 + (at < whole) for at in range(3)]


def test_compiled_blocks_recompute_themselves(monkeypatch):
    monkeypatch.setattr(blocks_module, "CompiledBlock", Compiled)
    model = Attending()
    for dtype in (torch.int8, torch.float32):  # the former's casts are made anew
        model.layers[0].table = nn.Parameter(torch.zeros(1, dtype=dtype), requires_grad=False)
        blocks_module.compile_blocks(model, model, "block")
        assert torch._functorch.config.cse == (dtype is torch.float32)
    blocks_module.apply_recomputation(model, model, 1, 1)
    model.gradients()
    assert model.passes == [1, 2, 1], "no checkpoint lies around compiled code"
    blocks_module.compile_blocks(model, model, "off")
    assert all(layer._compiled_call_impl is None for layer in model.layers)
    model.gradients()
    assert model.passes == [3, 4, 2]


def test_two_blocks_are_there_with_buffers():
    """On torch's meta device, which is another than the host, as a GPU is."""
    device, blocks = torch.device("meta"), [nn.Linear(4, 4).requires_grad_(False) for _ in range(4)]
    for block in blocks:
        block.register_buffer("table", torch.arange(3))
        block.register_buffer("unused", None)
    weights = [block.weight.clone() for block in blocks]
    BlockSwap(blocks, device)
    assert all(torch.equal(block.weight, own) for block, own in zip(blocks, weights, strict=True))
    for number, block in enumerate(blocks):
        assert (block.table.device, block.unused) == (device, None)
        block(torch.empty(1, 4, device=device))
        there = [at for at, each in enumerate(blocks) if each.weight.device == device]
        assert there == [at for at in (number, number + 1) if at < 4]
    assert torch.equal(blocks[0].weight, weights[0])


def test_regions_are_locked_while_they_live(monkeypatch):
    calls, codes = [], [0, 2]

    def register(*given):
        calls.append(given)
        return codes.pop(0)

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=calls.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    region = HostRegion(5000, is_locked=True)
    assert len(region.bytes) == region.num_bytes == 5000
    start = region.bytes.data_ptr()
    assert (calls, start % 4096) == ([(start, 8192, 0)], 0)
    del region
    assert calls[1:] == [start]
    with pytest.raises(AutotuneError, match="could not be locked"):
        HostRegion(8192, is_locked=True)
    assert (calls[2][1], len(calls)) == (8192, 3)
