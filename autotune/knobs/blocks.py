"""Runs blocks: the first ones recomputed for their backward pass, and all of them compiled."""

from collections import deque
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autotune.models.adapter import find_dropout_layers
from autotune.models.family import Family
from autotune.plan.candidate import Choice


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
    """The two contexts of one block that `torch.utils.checkpoint.checkpoint` takes."""
    kept: deque[tuple[Any, ...]] = deque()  # the results of each attention that ran, in order

    def run_and_keep(operation: Any, args: Any, kwargs: Any) -> Any:
        results = operation(*args, **kwargs)
        # Autograd gives the results a history, which would hold on to all that made them.
        kept.append(tuple(item.detach() if isinstance(item, Tensor) else item for item in results))
        return results

    return _OnAttention(run_and_keep), _OnAttention(lambda *_: kept.popleft())


class _OnAttention:
    """Sends a block's fused attention operations through `attend`, below autograd.

    The function is replaced by name: a block calls it whichever of torch's backends it runs.
    """

    def __init__(self, attend: Callable[[Any, Any, Any], Any]) -> None:
        self._mode = _AttentionMode(attend)
        self._plain: Any = None

    def __enter__(self) -> None:
        self._plain = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = self._attend

    def __exit__(self, *_: object) -> None:
        functional.scaled_dot_product_attention = self._plain

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
    """With strides of a whole: torch compiles anew for others, even of dimensions of one."""
    is_in_order = tensor.is_contiguous() and 1 not in tensor.shape
    return tensor if is_in_order else tensor.flatten().view(tensor.shape)
