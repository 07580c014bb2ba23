"""Every refusal of a bad argument names the nearest valid value."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import workload_of

from autotune.cost.estimate import checked_bucket, require_sound
from autotune.errors import InvalidInput
from autotune.knobs.knob import TuningContext
from autotune.models.registry import FAMILIES
from autotune.plan.candidate import Candidate
from tests import builders

QWEN, CLIPS = FAMILIES["qwen-image"], FAMILIES["kandinsky5-video-lite"]


@given(st.integers(-50, 10_000), st.integers(-50, 10_000), st.sampled_from([QWEN, CLIPS]))
def test_the_hint_of_a_refused_shape_is_accepted(width, height, family):
    try:
        bucket = checked_bucket(family, width, height)
    except InvalidInput as error:
        side = int(error.hint.split()[-2])
        assert checked_bucket(family, side, side).width_px == side
    else:
        assert (bucket.width_px, bucket.height_px) == (width, height)


@pytest.mark.parametrize(("family", "frames"), [(QWEN, 2), (CLIPS, 510)])
def test_more_frames_than_a_family_takes_are_refused(family, frames):
    with pytest.raises(InvalidInput, match=f"not a clip of {frames}"):
        checked_bucket(family, 512, 512, num_frames=frames)
    assert checked_bucket(family, 512, 512, num_frames=frames - 1).num_frames == frames - 1


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"quantization": "int3"}, "bnb-nf4"),
        ({"attention": "sage"}, "native"),
        ({"precision": "fp8"}, "bf16"),
        ({"checkpointed_blocks": 99}, "5"),
        ({"micro_batch_size": 3}, "2"),
        ({"checkpointed_blocks": 4, "swapped_blocks": 2, "quantization": "int3"}, "bnb-nf4"),
        ({"swapped_blocks": 2}, "--list-knobs"),
    ],
)
def test_candidates_that_cannot_be_are_refused(changes, hint):
    good = {"micro_batch_size": 1, "checkpointed_blocks": 0}
    context = TuningContext(builders.hardware(), QWEN, workload_of("qwen-image"))
    require_sound(Candidate(**good), context)
    with pytest.raises(InvalidInput) as error:
        require_sound(Candidate(**{**good, **changes}), context)
    assert hint in error.value.hint
