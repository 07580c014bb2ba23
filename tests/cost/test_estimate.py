"""An estimate answers in 80 columns and in JSON, with hours and money."""

import dataclasses

import pytest
from tiny_models import TINY, gpu, workload_of

from autotune.cost.estimate import estimate, job_time, plan_seconds
from autotune.cost.predict import CostModel
from autotune.models.registry import FAMILIES
from autotune.plan.candidate import Candidate
from autotune.plan.prediction import Estimate
from autotune.plan.workload import Bucket
from tests.report.page.pages import golden_plan


@pytest.fixture(scope="module")
def answer() -> Estimate:
    candidate = Candidate(micro_batch_size=1, checkpointed_blocks=2, quantization="torchao-int8")
    return estimate(_predictor(), candidate, num_steps=1000, price_per_hour=2.5)


def _predictor() -> CostModel:
    name = "kandinsky5-video-lite"
    return CostModel.build(gpu("nvidia-rtx-4090"), workload_of(name), FAMILIES[name], TINY[name])


def test_money_is_hours_times_price(answer):
    assert answer.cost == pytest.approx(answer.job.total_seconds / 3600 * 2.5)
    assert answer.job.total_seconds >= 1000 * answer.step_seconds


def test_captions_take_longer_where_the_encoders_do_not_stay_on_the_device():
    """Streaming copies all of an encoder for each caption; 16 assumed cores are slower still."""
    family = FAMILIES["qwen-image"]
    parameters = sum(family.parts.text_encoder_parameters)

    def seconds(**pins: str) -> float:
        card, work = gpu("nvidia-h100-sxm"), workload_of("qwen-image")
        own = CostModel.build(
            card, work, family, TINY["qwen-image"], parts=family.parts, caching_pins=pins
        )
        prediction = own.predict(Candidate(micro_batch_size=1, checkpointed_blocks=0))
        images = sum(bucket.num_items for bucket in work.buckets)
        return (
            job_time(own, prediction, num_steps=1, num_images=images, num_previews=0).cache_seconds
            / images
        )

    stays = seconds(text_encoder_device="training")
    assert (
        seconds(text_encoder_streamed="true") - stays > 2 * parameters / 64e9
    )  # PCIe 5.0 with 16 lanes
    tokens = workload_of("qwen-image").max_text_tokens
    assert seconds(text_encoder_device="cpu") - stays > 0.9 * 2 * parameters * tokens / 8e11


def test_a_vae_elsewhere_is_priced_in_memory_and_time():
    """Clips on the CPU wait for its cores; the card has room meanwhile, and the host holds them."""
    name = "kandinsky5-video-lite"
    family, card = FAMILIES[name], gpu("nvidia-rtx-4090")
    parts = dataclasses.replace(
        family.parts, text_encoder_parameters=()
    )  # which would take more than a tiny clip

    def built(**pins: str) -> CostModel:
        return CostModel.build(
            card, workload_of(name), family, TINY[name], parts=parts, caching_pins=pins
        )

    candidate = Candidate(micro_batch_size=1, checkpointed_blocks=0)
    here, there = built(vae_device="training"), built(vae_device="cpu")
    vae = here.model.vae_cost(candidate.precision)
    cache = [
        {phase.name: phase for phase in own.predict(candidate).phases}["cache"]
        for own in (here, there)
    ]
    working = [phase.breakdown.transient_bytes for phase in cache]
    assert working == [vae.encode_transient_bytes, 0]
    on_host = there.tables.encoder_size.bytes_at("cpu", there.caching)
    assert on_host == vae.weight_bytes + vae.encode_transient_bytes
    assert there.host_memory_bytes(candidate) > on_host
    seconds = [
        job_time(
            own, own.predict(candidate), num_steps=1, num_images=1, num_previews=0
        ).cache_seconds
        for own in (here, there)
    ]
    host = there.hardware.host
    cores = host.physical_cores or host.logical_cores
    assert seconds[1] - seconds[0] == pytest.approx(
        vae.encode_flops / (5e10 * cores)
        - vae.encode_bytes_moved / here.tables.rates_of(candidate).bandwidth
    )
    assert seconds[1] > 10 * seconds[0]


def test_measuring_held_out_images_takes_its_passes():
    cost = _predictor()
    candidate = Candidate(micro_batch_size=1, checkpointed_blocks=2)
    prediction, one_pass = cost.predict(candidate), cost.tables.forward_seconds(candidate)
    job = golden_plan().job.changed(num_steps=1000, validation_every=300, validation="10%")
    assert job.num_validations == 5, "without the adapter, after 300, 600, 900 and 1,000 steps"
    assert job.changed(validation_every=0).num_validations == 2
    assert job.changed(validation=None).num_validations == 0
    without, with_them = (
        job_time(
            cost, prediction, num_steps=0, num_images=1, num_previews=0, num_validations=number
        )
        for number in (0, job.num_validations)
    )
    assert with_them.total_seconds - without.total_seconds == pytest.approx(5 * 32 * one_pass)


def plans_for(attention="native", size=1, **changes):
    """Seconds of cuDNN's plans for 30 images of two shapes, with captions of 10 to 200 tokens."""
    buckets = tuple(
        Bucket(width_px=96, height_px=side, num_frames=1, num_items=15) for side in (64, 96)
    )
    quantiles = (10, 100, 200)
    work = workload_of(
        "qwen-image",
        buckets=buckets,
        max_text_tokens=200,
        text_token_quantiles=quantiles,
        **changes,
    )
    own = CostModel.build(gpu("nvidia-h100-sxm"), work, FAMILIES["qwen-image"], TINY["qwen-image"])
    return [
        plan_seconds(
            own, Candidate(micro_batch_size=size, checkpointed_blocks=k, attention=attention)
        )
        for k in (0, 1)
    ]


def test_cudnn_plans_attention_for_each_length_once_and_padding_leaves_few_lengths():
    assert plans_for(text_padding="masked") == [30, 60]  # every image has a length of its own
    assert plans_for(text_padding="masked", size=2) == [
        4,
        8,
    ]  # 24 and 36 tokens of image: 128 or 256 in all
    assert plans_for("_native_efficient", text_padding="masked") == [0, 0]
    own, candidate = _predictor(), Candidate(micro_batch_size=1, checkpointed_blocks=1)
    assert plan_seconds(own, candidate) == 0  # a 4090 runs flash
