"""Every refusal of a bad argument names the nearest valid value."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import workload_of

from autotune.cost.arguments import checked_bucket, parse_resolution, positive, require_sound
from autotune.errors import InvalidInput
from autotune.families.registry import FAMILIES
from autotune.families.resolve import resolve_model
from autotune.knobs.base import TuningContext
from autotune.schema.candidate import Candidate
from autotune.training.describe import WorkloadOverrides, describe_workload
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


@pytest.mark.parametrize(
    ("text", "size"), [("1024", (1024, 1024)), ("512x768", (512, 768)), ("512X768", (512, 768))]
)
def test_resolutions_are_read(text, size):
    assert parse_resolution(text) == size


@given(st.text(max_size=12))
def test_anything_else_is_refused_with_an_example(text):
    sides = text.lower().replace("×", "x").split("x")
    if len(sides) <= 2 and all(side.isascii() and side.isdigit() for side in sides):
        return
    with pytest.raises(InvalidInput) as error:
        parse_resolution(text)
    assert "512x768" in error.value.hint


@pytest.mark.parametrize(("family", "frames"), [(QWEN, 2), (CLIPS, 510)])
def test_more_frames_than_a_family_takes_are_refused(family, frames):
    with pytest.raises(InvalidInput, match=f"not a clip of {frames}"):
        checked_bucket(family, 512, 512, num_frames=frames)
    assert checked_bucket(family, 512, 512, num_frames=frames - 1).num_frames == frames - 1


def test_longer_captions_than_a_family_takes_are_refused():
    model = resolve_model("qwen-image")
    assert (
        describe_workload(model, None, WorkloadOverrides(text_tokens=1024)).max_text_tokens == 1024
    )
    with pytest.raises(InvalidInput, match="no caption of 1025 tokens") as error:
        describe_workload(model, None, WorkloadOverrides(text_tokens=1025))
    assert "1024" in error.value.hint


def test_negative_counts_are_refused():
    with pytest.raises(InvalidInput, match="at least 1"):
        positive("micro-batch-size", -3)


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
