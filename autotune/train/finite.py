"""What a step's numbers allow: to go on, to take the step again with another attention backend,
or to end the run."""

import math

from autotune.errors import AutotuneError
from autotune.knobs.attention import ATTENTION_BACKENDS
from autotune.train.step import StepOutcome

LOWER_LEARNING_RATE = "lower the rate: autotune train PLAN --learning-rate X"
CHECK_WEIGHTS = (
    "no rate has had an effect yet: `autotune weights inspect FILE` counts weights "
    "that are not "
    "finite"
)
TRAIN_IN_FP32 = "plan again in fp32: autotune plan --from PLAN --pin precision=fp32"
MIN_LOSS_SCALE = 1.0
"""Losses that need a smaller one have gradients that fp16 has no numbers for."""
LOW_LOSS_SCALE = 2.0**8
"""Gradients that still overflow after eight halvings are more likely wrong than large."""

SURE_ATTENTION = ("_native_efficient", "_native_math")
"""Backends that a step is taken again with when a gradient is not finite, the first that the
machine has. Both take any mask; what they make not finite, no other would."""


class GradientNotFinite(AutotuneError):
    """A gradient is not finite although the loss is. The adapter is as it was before the step."""


def sure_attention(device_kind: str) -> str:
    """The first of `SURE_ATTENTION` that devices of a kind have."""
    needs = {name: ATTENTION_BACKENDS[name].needs.device_kinds for name in SURE_ATTENTION}
    return next(name for name, kinds in needs.items() if not kinds or device_kind in kinds)


def require_finite(outcome: StepOutcome, number: int, *, can_change_attention: bool) -> None:
    """Raise what the numbers of a run's step, counted from 1, leave no way around.

    Raises:
        GradientNotFinite: another attention backend may help, unless the step had one of
            `SURE_ATTENTION`.
        AutotuneError: nothing would.
    """
    scale, hint = outcome.loss_scale, LOWER_LEARNING_RATE if number > 1 else CHECK_WEIGHTS
    if scale is not None:
        hint = f"{TRAIN_IN_FP32}; else {hint}"
    if not math.isfinite(outcome.loss):
        why = "" if scale is None else ": probably activations overflow fp16"
        raise AutotuneError(f"the loss is {outcome.loss} at step {number}{why}", hint=hint)
    if scale is not None and outcome.overflowed:
        if scale < MIN_LOSS_SCALE:
            raise AutotuneError(
                f"gradients overflow fp16 at step {number}, unscaled ones too", hint=hint
            )
        if scale > LOW_LOSS_SCALE or not can_change_attention:
            return
    if not math.isfinite(outcome.gradient_norm):
        message = f"the norm of the gradient is {outcome.gradient_norm} at step {number}"
        raise GradientNotFinite(message, hint=hint)
