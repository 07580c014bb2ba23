"""Which micro-batches are tried."""

from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import MicroBatchSize
from autotune.models.registry import get_family
from tests.builders import hardware, workload


def test_every_divisor_of_the_effective_batch_is_tried_and_of_a_family_that_takes_one_image_one() -> (
    None
):
    asked = workload().changed(effective_batch_size=6)
    several, one = (
        MicroBatchSize().choices(TuningContext(hardware(), get_family(name), asked))
        for name in ("qwen-image", "qwen-image-2.1")
    )
    assert (several.admitted, several.rejected) == ((1, 2, 3, 6), {})
    assert (one.admitted, [*one.rejected]) == ((1,), [2, 3, 6])
    assert one.rejected[2] == "qwen-image-2.1 takes 1 at once, because captions differ in length"
