"""Keeps what attention returns while everything around it is recomputed: selective checkpointing.

torch has contexts for this (`create_selective_checkpoint_contexts`), but they look at every
operation, which costs some 20 us of Python each, and refuse to recompute with one that they did not
see: a copy of weights or inputs that come from the host, for instance. These look at attention
alone.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

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
