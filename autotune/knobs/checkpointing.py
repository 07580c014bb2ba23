"""Gradient checkpointing of the first blocks: memory for time, in steps instead of all or nothing.

Two knobs: how many blocks recompute everything, and how many after them recompute all but
attention. The search finds the numbers that go together (`search/space.py`).
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autotune.models.adapter import find_dropout_layers
from autotune.models.family import Family


def apply_recomputation(
    transformer: nn.Module, family: Family, whole: int, selective: int = 0
) -> None:
    """Let the first `whole` blocks recompute everything, and the `selective` ones after them all
    but attention."""
    if not whole + selective:
        transformer.disable_gradient_checkpointing()  # type: ignore[operator]
        return
    # Without, no block need save the random state.
    has_dropout = bool(find_dropout_layers(transformer))
    position = {
        id(block): at for at, block in enumerate(family.blocks(transformer)[: whole + selective])
    }

    def run(block: Any, *inputs: Any) -> Any:
        at = position.get(id(block))
        if at is None:
            return block(*inputs)
        compiled = block._compiled_call_impl
        if compiled is not None and at < whole:
            return compiled.recomputing(*inputs)
        keeping: dict[str, Any] = {} if at < whole else {"context_fn": keep_attention}
        return checkpoint(
            block, *inputs, use_reentrant=False, preserve_rng_state=has_dropout, **keeping
        )

    transformer.enable_gradient_checkpointing(run)  # type: ignore[operator]


Kept = deque[tuple[Any, ...]]
"""The results of each attention that ran, in order."""


def keep_attention() -> tuple["AttentionContext", "AttentionContext"]:
    """The two contexts of one block that `torch.utils.checkpoint.checkpoint` takes as
    `context_fn`."""
    kept: Kept = deque()

    def run_and_keep(operation: Any, args: Any, kwargs: Any) -> Any:
        results = operation(*args, **kwargs)
        # Autograd gives the results themselves a history, which would hold on to all that made
        # them.
        kept.append(tuple(item.detach() if isinstance(item, Tensor) else item for item in results))
        return results

    return AttentionContext(run_and_keep), AttentionContext(lambda *_: kept.popleft())


class AttentionContext:
    """While a block runs: torch's fused attention operations go through `attend`, below autograd.

    torch's function is replaced by name, as what a block calls through whichever of torch's
    backends.
    """

    def __init__(self, attend: Callable[[Any, Any, Any], Any]) -> None:
        self.mode = _OnAttention(attend)
        self._plain: Any = None

    def __enter__(self) -> None:
        self._plain = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = self._attend

    def __exit__(self, *_: object) -> None:
        functional.scaled_dot_product_attention = self._plain

    def _attend(self, *args: Any, **kwargs: Any) -> Any:
        with self.mode:
            return self._plain(*args, **kwargs)


class _OnAttention(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, attend: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.attend = attend

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("aten::_scaled_dot_product") and not name.endswith("backward"):
            return self.attend(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
