"""A whole job is priced, and candidates that cannot be are refused."""

import dataclasses

import pytest
from tiny_models import TINY, gpu, workload_of

from autotune.cost.estimate import job_time, plan_seconds, require_sound
from autotune.cost.predict import CostModel, choice_of
from autotune.errors import InvalidInput
from autotune.knobs.knob import TuningContext
from autotune.models.registry import FAMILIES
from autotune.plan.candidate import Candidate
from autotune.plan.workload import Bucket
from tests import builders


def test_vae_elsewhere_is_priced():
    """Clips on the CPU wait for its cores; the card has room meanwhile, and the host holds them."""
    name = "kandinsky5-video-lite"
    family, card = FAMILIES[name], gpu("nvidia-rtx-4090")
    # Which would take more than a tiny clip.
    parts = dataclasses.replace(family.parts, text_encoder_parameters=())

    def built(**pins: str) -> CostModel:
        how = {"parts": parts, "caching_pins": pins}
        return CostModel.build(card, workload_of(name), family, TINY[name], **how)

    candidate = Candidate(micro_batch_size=1, checkpointed_blocks=0)
    here, there = built(vae_device="training"), built(vae_device="cpu")
    vae = here.model.vae_cost(candidate.precision)
    cache = [own.predict(candidate).phases[1] for own in (here, there)]
    assert [each.breakdown.transient_bytes for each in cache] == [vae.encode_transient_bytes, 0]
    on_host = there.tables.encoder_size.bytes_at("cpu", there.caching)
    assert on_host == vae.weight_bytes + vae.encode_transient_bytes
    assert there.host_memory_bytes(candidate) > on_host
    counts = {"num_steps": 1, "num_images": 1, "num_previews": 0}
    jobs = [job_time(own, own.predict(candidate), **counts) for own in (here, there)]
    seconds = [job.cache_seconds for job in jobs]
    cores = there.hardware.host.physical_cores or there.hardware.host.logical_cores
    moving = vae.encode_bytes_moved / here.tables.rates_of(choice_of(candidate)).bandwidth
    assert seconds[1] - seconds[0] == pytest.approx(vae.encode_flops / (5e10 * cores) - moving)
    assert seconds[1] > 10 * seconds[0]


def plans_for(attention="native", size=1, **changes):
    """Seconds of cuDNN's plans for 30 images of two shapes, with captions of 10 to 200 tokens."""
    plain = {"width_px": 96, "num_frames": 1, "num_items": 15}
    buckets = tuple(Bucket(height_px=side, **plain) for side in (64, 96))
    tokens = {"max_text_tokens": 200, "text_token_quantiles": (10, 100, 200)}
    work = workload_of("qwen-image", buckets=buckets, **tokens, **changes)
    own = CostModel.build(gpu("nvidia-h100-sxm"), work, FAMILIES["qwen-image"], TINY["qwen-image"])
    values = {"checkpointed_blocks": 0, "micro_batch_size": size, "attention": attention}
    choice = choice_of(Candidate(**values))
    return [plan_seconds(own, choice, recomputes=recomputes) for recomputes in (False, True)]


def test_cudnn_plans_attention_once_a_length():
    assert plans_for(text_padding="masked") == [30, 60]  # every image has a length of its own
    # 24 and 36 tokens of image: 128 or 256 in all.
    assert plans_for(text_padding="masked", size=2) == [4, 8]
    assert plans_for("_native_efficient", text_padding="masked") == [0, 0]


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"quantization": "int3"}, "bnb-nf4"),
        ({"attention": "sage"}, "native"),
        ({"precision": "fp8"}, "bf16"),
        ({"checkpointed_blocks": 99}, "5"),
        ({"micro_batch_size": 3}, "2"),
        ({"checkpointed_blocks": 4, "swapped_blocks": 2, "quantization": "int3"}, "bnb-nf4"),
        ({"swapped_blocks": 2}, "--list"),
    ],
)
def test_candidates_that_cannot_be_are_refused(changes, hint):
    good = {"micro_batch_size": 1, "checkpointed_blocks": 0}
    context = TuningContext(builders.hardware(), FAMILIES["qwen-image"], workload_of("qwen-image"))
    require_sound(Candidate(**good), context)
    with pytest.raises(InvalidInput) as error:
        require_sound(Candidate(**{**good, **changes}), context)
    assert hint in error.value.hint
