"""Runs blocks: the first ones recomputed for their backward pass, all compiled, some swapped.

Swapping: each block's weights are copied to the device, all at once, just before its forward pass,
which also runs when a checkpoint recomputes it, and the next block's meanwhile, on a stream of its
own. Frozen weights never change, so a block leaves by dropping its copy. The same values meet the
same kernels: gradients are bit for bit those without swapping.
"""

import contextlib
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autotune.errors import AutotuneError
from autotune.models.adapter import find_dropout_layers
from autotune.models.family import Family
from autotune.plan.candidate import Choice
from autotune.weights.stream import Transform


def apply_recomputation(
    transformer: nn.Module, family: Family, whole: int, selective: int = 0
) -> None:
    """Let the first `whole` blocks recompute all, and `selective` after them all but attention."""
    if not whole + selective:
        transformer.disable_gradient_checkpointing()  # type: ignore[operator]
        return
    # Without, no block need save the random state.
    has_dropout = bool(find_dropout_layers(transformer))
    recomputing = family.blocks(transformer)[: whole + selective]
    position = {id(block): at for at, block in enumerate(recomputing)}

    def run(block: Any, *inputs: Any) -> Any:
        inputs = *inputs, *getattr(block, "left_out_inputs", ())
        at = position.get(id(block))
        if at is None:
            return block(*inputs)
        compiled = block._compiled_call_impl
        if compiled is not None and at < whole:
            return compiled.recomputing(*inputs)
        keeping: dict[str, Any] = {} if at < whole else {"context_fn": _keep_attention}
        return checkpoint(
            block, *inputs, use_reentrant=False, preserve_rng_state=has_dropout, **keeping
        )

    transformer.enable_gradient_checkpointing(run)  # type: ignore[operator]


def _keep_attention() -> tuple["_OnAttention", "_OnAttention"]:
    kept: deque[tuple[Any, ...]] = deque()  # the results of each attention that ran, in order

    def run_and_keep(operation: Any, args: Any, kwargs: Any) -> Any:
        results = operation(*args, **kwargs)
        # Autograd gives the results a history, which would hold on to all that made them.
        kept.append(tuple(item.detach() if isinstance(item, Tensor) else item for item in results))
        return results

    return _OnAttention(run_and_keep), _OnAttention(lambda *_: kept.popleft())


class _OnAttention:
    """Sends a block's fused attention operations through `attend`, below autograd. The function is
    replaced by name: a block calls it whichever of torch's backends it runs."""

    def __init__(self, attend: Callable[[Any, Any, Any], Any]) -> None:
        self._mode = _AttentionMode(attend)
        self._plain: Any = None

    def __enter__(self) -> None:
        self._plain = nn.functional.scaled_dot_product_attention
        nn.functional.scaled_dot_product_attention = self._attend

    def __exit__(self, *_: object) -> None:
        nn.functional.scaled_dot_product_attention = self._plain

    def _attend(self, *args: Any, **kwargs: Any) -> Any:
        with self._mode:
            return self._plain(*args, **kwargs)


class _AttentionMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, attend: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._attend = attend

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("aten::_scaled_dot_product") and not name.endswith("backward"):
            return self._attend(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def compile_blocks(transformer: nn.Module, family: Family, choice: Choice) -> None:
    """Compile each block for `block`; leave all as they are for `off`."""
    if choice == "block":
        # Sizes that are equal at the second shape would have to be so at all others.
        torch.fx.experimental._config.use_duck_shape = False
        # What both passes compute alike would be kept: weights of 8 bits that are cast.
        sizes = {weight.element_size() for weight in transformer.parameters()}
        torch._functorch.config.cse = min(sizes) > 1
    for block in family.blocks(transformer):
        is_adapted = any(parameter.requires_grad for parameter in block.parameters())
        compiled = CompiledBlock(block._call_impl, is_adapted) if choice == "block" else None
        block._compiled_call_impl = compiled


class CompiledBlock:
    """The code of a compiled block: one for the first shapes, and one for all others.

    Left to itself torch compiles anew when another input's size changes, and twice what enters the
    first block, which needs no gradient: three buckets and three lengths of captions made six
    graphs. Two are left if the first block runs uncompiled. It is known by its first input, the
    stream: Kandinsky 5's gets text that needs a gradient.
    """

    backend: str | Callable[..., Any] = "inductor"

    def __init__(self, plain: Callable[..., Any], is_adapted: bool) -> None:
        self._plain, self._is_adapted = plain, is_adapted
        self._for_first = torch.compile(plain, backend=self.backend)
        self._for_others = torch.compile(plain, backend=self.backend, dynamic=True)
        self._first: tuple[object, ...] | None = None

    @cached_property
    def recomputing(self) -> "CompiledBlock":
        """The same with its checkpoint compiled, too: around compiled code all would run twice."""
        plain = self._plain

        def run(*inputs: Any) -> Any:
            return checkpoint(plain, *inputs, use_reentrant=False)

        return CompiledBlock(run, self._is_adapted)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        leaves = torch.utils._pytree.tree_leaves((inputs, named))
        tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        stream = next(tensor for tensor in tensors if tensor.is_floating_point())
        if self._is_adapted and not stream.requires_grad:
            return self._plain(*inputs, **named)
        shapes = tuple(getattr(leaf, "shape", leaf) for leaf in leaves)
        self._first = self._first or shapes
        inputs, named = torch.utils._pytree.tree_map_only(torch.Tensor, _in_order, (inputs, named))
        return (self._for_first if shapes == self._first else self._for_others)(*inputs, **named)


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Give it the strides of a whole tensor: torch compiles anew for others, even of size one."""
    is_in_order = tensor.is_contiguous() and 1 not in tensor.shape
    return tensor if is_in_order else tensor.flatten().view(tensor.shape)


PAGE_BYTES = 4096
# Where a tensor may begin in its region: aligned as by CUDA's allocator.
REGION_ALIGNMENT_BYTES = 256


def swap_blocks(transformer: nn.Module, family: Family, num_blocks: int) -> None:
    """Swap the first `num_blocks`, once per loaded model, to the device where other blocks lie."""
    if blocks := family.blocks(transformer)[:num_blocks]:
        on_cuda = (each.device for each in transformer.parameters() if each.is_cuda)
        BlockSwap(blocks, next(on_cuda, next(transformer.parameters()).device))


def region_offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return where tensors of these bytes begin in a block's region, and the region's bytes."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // REGION_ALIGNMENT_BYTES) * REGION_ALIGNMENT_BYTES
    return offsets, end


class HostRegion:
    """Memory that begins at a page, as a tensor of uint8; locked for CUDA as long as it lives."""

    def __init__(self, num_bytes: int, *, is_locked: bool) -> None:
        self.num_bytes = num_bytes
        pages = -(-num_bytes // PAGE_BYTES)
        # No page is shared with another region.
        whole = torch.empty((pages + 1) * PAGE_BYTES, dtype=torch.uint8)
        start = -whole.data_ptr() % PAGE_BYTES
        self.bytes = whole[start : start + num_bytes]
        if is_locked:
            self._lock(pages * PAGE_BYTES)

    def _lock(self, num_bytes: int) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(self.bytes.data_ptr(), num_bytes, 0))
        if code:
            what = f"{num_bytes / 2**20:.0f} MiB of system RAM could not be locked"
            limit = "raise the limit of locked memory (ulimit -l unlimited)"
            hint = f"{limit}, or plan with --pin swapped_blocks=0"
            raise AutotuneError(f"{what} for the GPU (CUDA error {code})", hint=hint)
        memory = self.bytes  # must outlive its registration
        # The driver does so when the process ends.
        weakref.finalize(self, lambda: runtime.cudaHostUnregister(memory.data_ptr())).atexit = False


class HostWeight(NamedTuple):
    """A frozen parameter whose values wait on the host."""

    module: nn.Module
    name: str
    on_host: nn.Parameter
    offset: int  # where it begins in the block's region

    def put(self, parameter: nn.Parameter) -> None:
        self.module._parameters[self.name] = parameter


class HostBlock(NamedTuple):
    """The frozen weights of a block in one region, so that one copy brings them all."""

    region: HostRegion
    weights: tuple[HostWeight, ...]


class BlockSwap:
    """Brings two blocks to the device at most: the one that runs, and the next."""

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.blocks = [_offload_frozen(block, device) for block in blocks]
        assert all(block.weights for block in self.blocks), "a block has no frozen weights"
        # When the weights of each block on the device arrived; None if at once.
        self.arrivals: dict[int, torch.cuda.Event | None] = {}
        self.last = -1
        for number, block in enumerate(blocks):
            _move_trained(block, device)  # an optimizer may look at them before anything runs
            block.register_forward_pre_hook(partial(self._before_forward, number))

    def _before_forward(self, number: int, block: nn.Module, *_: Any) -> None:
        # Adapters are added where the weights are: perhaps on the host, at any time.
        _move_trained(block, self.device)
        following = self._following(number)
        for other in [other for other in self.arrivals if other not in (number, following)]:
            self._evict(other)
        self._fetch(number)
        self._await(number)
        if following is not None:
            self._fetch(following)
        self.last = number

    def _following(self, number: int) -> int | None:
        """Forward passes go up, backward passes down, and without gradients all go up."""
        begins = number == 0 and (self.last == 0 or not torch.is_grad_enabled())
        is_forward = number > self.last or begins
        following = number + (1 if is_forward else -1)
        return following if 0 <= following < len(self.blocks) else None

    def _fetch(self, number: int) -> None:
        if number in self.arrivals:
            return
        # Memory that is taken now may still be read by what was queued before.
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        host = self.blocks[number].region.bytes
        # On the running stream, where it will be freed.
        visiting = torch.empty_like(host, device=self.device)
        with torch.cuda.stream(self.stream):  # does nothing for None
            visiting.copy_(host, non_blocking=True)
        for weight in self.blocks[number].weights:
            weight.put(_placed(weight.on_host, visiting, weight.offset))
        self.arrivals[number] = self.stream.record_event() if self.stream is not None else None

    def _await(self, number: int) -> None:
        if (event := self.arrivals[number]) is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _evict(self, number: int) -> None:
        self._await(number)
        del self.arrivals[number]
        for weight in self.blocks[number].weights:
            weight.put(weight.on_host)


def _move_trained(block: nn.Module, device: torch.device) -> None:
    for parameter in block.parameters():
        if parameter.requires_grad and parameter.device != device:
            parameter.data = parameter.data.to(device)


def _offload_frozen(block: nn.Module, device: torch.device) -> HostBlock:
    frozen = [
        (module, name, parameter.detach())
        for module in block.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and not parameter.requires_grad
    ]
    offsets, num_bytes = region_offsets(parameter.nbytes for _, _, parameter in frozen)
    region, weights = HostRegion(num_bytes, is_locked=device.type == "cuda"), []
    for (module, name, parameter), offset in zip(frozen, offsets, strict=True):
        on_host = _placed(parameter, region.bytes, offset)
        on_host.copy_(parameter)
        weights.append(HostWeight(module, name, on_host, offset))
    for module in block.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    for weight in weights:
        weight.put(weight.on_host)
    return HostBlock(region, tuple(weights))


def _placed(like: Tensor, region: Tensor, offset: int) -> nn.Parameter:
    flat = region[offset : offset + like.nbytes].view(like.dtype)
    # Those of `like` if it is dense, else contiguous ones.
    strides = torch.empty_like(like, device="meta").stride()
    return nn.Parameter(flat.as_strided(like.shape, strides), requires_grad=False)


@contextlib.contextmanager
def packing(blocks: Sequence[nn.Module], transform: Transform | None) -> Iterator[Transform | None]:
    """Make a transform of modules as they arrive, after which a block's weights lie in one region:
    where they arrived, and were perhaps quantized, they leave holes that nothing fits."""
    block_of = {id(each): at for at, block in enumerate(blocks) for each in block.modules()}
    waiting = {
        at: {id(each) for each in block.modules() if [*each.parameters(recurse=False)]}
        for at, block in enumerate(blocks)
    }
    arrived = defaultdict[int, list[nn.Module]](list)
    kinds = [tuple(each.shape for each in block.parameters()) for block in blocks]
    spare = defaultdict[Hashable, list[Tensor]](list)

    def on_arrival(name: str, module: nn.Module) -> nn.Module | None:
        replacement = transform(name, module) if transform else None
        at = block_of.get(id(module))
        if at is not None:
            arrived[at].append(replacement or module)
            waiting[at].discard(id(module))
            if not waiting[at]:
                awaited = [kinds[other] for other, names in waiting.items() if names]
                # The last of a kind needs no room beside all others.
                _pack(arrived.pop(at), spare[kinds[at]], awaited.count(kinds[at]) - 1)
        return replacement

    yield on_arrival if block_of else transform
    spare.clear()
    for modules in arrived.values():
        _pack(modules, [], 0)


def _pack(modules: Iterable[nn.Module], spare: list[Tensor], num_more: int) -> None:
    """Move what is on the device into a region. They are taken side by side for the blocks alike
    that are awaited: behind what arrives, there would be gaps."""
    own = (parameter for module in modules for parameter in module.parameters(recurse=False))
    held: list[tuple[Any, str]] = [(parameter, "data") for parameter in own if parameter.is_cuda]
    states = [getattr(parameter, "quant_state", None) for parameter, _ in held]
    held += [(state, "absmax") for state in states if state]  # scales of bitsandbytes
    offsets, num_bytes = region_offsets(getattr(*each).nbytes for each in held)
    if not num_bytes:
        return
    if {each.nbytes for each in spare} != {num_bytes}:
        spare.clear()
        torch.cuda.empty_cache()  # else they split segments that layers would arrive in
        room = {"dtype": torch.uint8, "device": held[0][0].device}
        spare.extend(torch.empty(num_bytes, **room) for _ in range(1 + max(0, num_more)))
    region = spare.pop()
    for (holder, name), offset in zip(held, offsets, strict=True):
        placed = _placed(getattr(holder, name), region, offset).data
        setattr(holder, name, placed.copy_(getattr(holder, name)))


def offload_on_arrival(
    family: Family, transformer: nn.Module, num_blocks: int, transform: Transform | None
) -> Transform:
    """Make a transform of modules as they arrive: `transform`, then to the host if swapped."""
    swapped = family.blocks(transformer)[:num_blocks]
    inside = {id(module) for block in swapped for module in block.modules()}

    def on_arrival(name: str, module: nn.Module) -> nn.Module | None:
        replacement = transform(name, module) if transform else None
        if id(module) in inside:
            own = replacement or module  # the children of `module` may have no values yet
            own._apply(lambda each: each.to("cpu"), recurse=own is replacement)  # type: ignore[no-untyped-call]
        return replacement

    return on_arrival
