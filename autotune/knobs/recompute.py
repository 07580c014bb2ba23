"""Applies what blocks do with their activations: keep them, recompute all or all but attention.

Blocks are chosen by position: the first recompute everything, the following keep the output of
attention, the rest keep all that the backward pass needs. The settings are two knobs, and each may
be applied by itself at any time.
"""

from typing import TYPE_CHECKING, Any

from autotune.families import Family, find_dropout_layers

if TYPE_CHECKING:
    from torch import nn

ATTRIBUTE = "_recomputation"
"""Where a transformer remembers the settings that were applied, as numbers of blocks by knob."""


def apply_recomputation(transformer: "nn.Module", family: Family, **numbers: int) -> None:
    """Change `checkpointed_blocks`, `selective_blocks` or both; the other stays."""
    from torch.utils.checkpoint import checkpoint

    from autotune.knobs.kept_attention import keep_attention

    numbers = {**getattr(transformer, ATTRIBUTE, {}), **numbers}
    setattr(transformer, ATTRIBUTE, numbers)
    whole, selective = numbers.get("checkpointed_blocks", 0), numbers.get("selective_blocks", 0)
    if not whole + selective:
        transformer.disable_gradient_checkpointing()  # type: ignore[operator]
        return
    has_dropout = bool(
        find_dropout_layers(transformer)
    )  # without, no block need save the random state
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
