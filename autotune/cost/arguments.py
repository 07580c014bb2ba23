"""Check what a user asks to estimate or plan, before anything is traced; each refusal names the
nearest valid value.
"""

from autotune.errors import InvalidInput
from autotune.families import Family
from autotune.knobs import KNOBS, TuningContext, require_choice
from autotune.schema import Bucket, Candidate


def parse_resolution(text: str) -> tuple[int, int]:
    """(width, height) in px of `1024` or `512x768`.

    Raises:
        InvalidInput: it is neither.
    """
    sides = text.lower().replace("×", "x").split("x")
    if len(sides) > 2 or not all(side.isascii() and side.isdigit() for side in sides):
        raise InvalidInput(
            f"{text!r} is no resolution",
            hint="give the side of a square in px, or width x height: 1024 or 512x768",
        )
    return int(sides[0]), int(sides[-1])


def checked_bucket(family: Family, width_px: int, height_px: int, num_frames: int = 1) -> Bucket:
    """The bucket of this shape, if the family can take it.

    Raises:
        InvalidInput: a side does not suit the VAE and the patches, or the family takes no clip of
            so many frames.
    """
    for name, side in (("width", width_px), ("height", height_px)):
        step, max_px = family.size_multiple_px, family.max_side_px
        if side < step or side % step or side > max_px:
            nearest = min(max(step, round(side / step) * step), max_px // step * step)
            raise InvalidInput(
                f"a {name} of {side} px does not suit {family.name}: sides are multiples of {step} "
                f"px up to {max_px}",
                hint=f"the nearest valid {name} is {nearest} px",
            )
    positive("frames", num_frames)
    family.check_num_frames(num_frames)
    return Bucket(width_px=width_px, height_px=height_px, num_frames=num_frames, num_items=1)


def positive(name: str, value: int) -> int:
    """`value`, if it is at least 1.

    Raises:
        InvalidInput: it is not.
    """
    if value < 1:
        raise InvalidInput(
            f"{name} must be at least 1, not {value}", hint=f"the nearest valid value is {name} 1"
        )
    return value


def require_divisor(size: int, effective: int) -> None:
    """Raise InvalidInput unless micro-batches of `size` make up the effective batch."""
    if size > 0 and effective % size:
        divisors = [d for d in range(1, effective + 1) if effective % d == 0]
        nearest = min(divisors, key=lambda d: (abs(d - size), d))
        raise InvalidInput(
            f"a micro-batch of {size} does not divide the effective batch size {effective}",
            hint=f"the nearest valid micro-batch size is {nearest}",
        )


def require_sound(candidate: Candidate, context: TuningContext) -> None:
    """Raise InvalidInput if a candidate's values are unknown, or do not go with the work or with
    each other.
    """
    workload = context.workload
    for name, value in candidate:
        require_choice(name, value)
    blocks = workload.model.num_blocks
    if candidate.checkpointed_blocks > blocks:
        raise InvalidInput(
            f"{candidate.checkpointed_blocks} checkpointed blocks are more than the model's "
            f"{blocks}",
            hint=f"the nearest valid value is {blocks}, or `all`",
        )
    require_divisor(candidate.micro_batch_size, workload.effective_batch_size)
    for knob in KNOBS:
        if conflict := knob.conflict(candidate, context):
            what = f"{knob.title} cannot be {getattr(candidate, knob.name)} here: {conflict}"
            raise InvalidInput(
                what, hint="see which settings go together: autotune plan --list-knobs"
            )
