"""Keeps what attention returns while everything around it is recomputed: selective checkpointing.

torch has contexts for this (`create_selective_checkpoint_contexts`), but they ask a policy about every operation, and
refuse to recompute with one that they did not see: a copy of weights or inputs that come from the host, for instance.
"""

from collections import deque
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Kept = deque[tuple[Any, ...]]
"""The results of each attention that ran, in order."""


def keep_attention() -> tuple["Keeping", "Replaying"]:
    """The two contexts of one block that `torch.utils.checkpoint.checkpoint` takes as `context_fn`."""
    kept: Kept = deque()
    return Keeping(kept), Replaying(kept)


class _OnAttention(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("aten::_scaled_dot_product") and not name.endswith("backward"):
            return self.attend(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def attend(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The results of an attention."""
        raise NotImplementedError


class Keeping(_OnAttention):  # type: ignore[no-untyped-call]
    """While a block runs forward."""

    def attend(self, func: Any, args: Any, kwargs: Any) -> Any:
        results = func(*args, **kwargs)
        # Autograd gives the results themselves a history, which would hold on to all that made them.
        self.kept.append(tuple(item.detach() if isinstance(item, Tensor) else item for item in results))
        return results


class Replaying(_OnAttention):  # type: ignore[no-untyped-call]
    """While it runs again for its backward pass."""

    def attend(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self.kept.popleft()
