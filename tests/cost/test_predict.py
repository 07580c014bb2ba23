"""Predictions order candidates as they must, break down completely, and come fast."""

import itertools
import math

import diffusers
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tiny_models import TINY, cpu, gpu, workload_of

from autotune.cost import recorder as shapes
from autotune.cost.calibration import NOISE, OFFSET, Posterior, features_of, fit, time_doubt
from autotune.cost.estimate import estimate, job_time, require_divisor, require_sound
from autotune.cost.kernels import CLASSES
from autotune.cost.memory import Parallel
from autotune.cost.predict import CostModel, prediction_errors
from autotune.cost.trace import trace_inference
from autotune.errors import InvalidInput
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.knob import TuningContext
from autotune.models.registry import FAMILIES
from autotune.plan.candidate import BLOCK_COUNTS, Candidate
from autotune.plan.job import num_previews
from autotune.plan.prediction import Prediction
from autotune.search.expected import build_expectation
from autotune.search.winner import Score
from tests import builders
from tests.builders import trial
from tests.plan.test_file import make_plan

MASKED = [name for name in TINY if FAMILIES[name].has_attention_mask(2, "masked")]
STEP_PARTS = (*CLASSES, "optimizer", "overhead", "transfer")


@pytest.fixture(scope="module")
def card():
    return card_model("qwen-image")


def card_model(name):
    return CostModel.build(gpu("nvidia-rtx-4090"), workload_of(name), FAMILIES[name], TINY[name])


@pytest.mark.quick("int8-rotated", "bnb-nf4")
@pytest.mark.parametrize("quantization", WEIGHT_FORMATS)
def test_parts_add_up_and_survive_json(card, quantization):
    depth = {"micro_batch_size": 2, "checkpointed_blocks": 3}
    prediction = card.predict(Candidate(**depth, quantization=quantization))
    for phase in prediction.phases:
        assert sum(dict(phase.breakdown).values()) == phase.run_memory_bytes
    parts = sum(getattr(prediction.step_time, f"{part}_seconds") for part in STEP_PARTS)
    assert parts == pytest.approx(prediction.step_seconds)
    assert prediction.run_memory_bytes == max(phase.run_memory_bytes for phase in prediction.phases)
    assert Prediction.model_validate_json(prediction.model_dump_json()) == prediction


@pytest.mark.quick(("qwen-image", "masked"))
@pytest.mark.parametrize(
    ("name", "text_padding"),
    [*((name, "exact") for name in TINY), *((n, "masked") for n in MASKED)],
)
def test_predictions_do_not_depend_on_order(name, text_padding):
    known = (cpu(), workload_of(name, text_padding=text_padding), FAMILIES[name], TINY[name])
    tried = ((2, 3, "none"), (3, 0, "none"), (1, 3, "torchao-int8"))
    candidates = [
        Candidate(micro_batch_size=size, checkpointed_blocks=k, quantization=q, precision="fp32")
        for size, k, q in tried
    ]
    one, other = CostModel.build(*known), CostModel.build(*known)
    forwards = [one.predict(candidate) for candidate in candidates]
    backwards = [other.predict(candidate) for candidate in reversed(candidates)]
    # A trace of SDXL's UNet depends on the one before by some KB; the cause is not known.
    share = 1e-3 if name == "sdxl" else 1e-12
    for a, b in zip(forwards, backwards[::-1], strict=True):
        assert a.allocated_memory_bytes == pytest.approx(b.allocated_memory_bytes, rel=share)
        assert a.step_seconds == pytest.approx(b.step_seconds, rel=10 * share)


@pytest.mark.quick("kandinsky5-image-lite", "qwen-image")
@pytest.mark.parametrize(
    ("name", "quantization"),
    [("flux1-dev", "torchao-int8"), ("kandinsky5-image-lite", "none"), ("qwen-image", "bnb-nf4")],
)
def test_remembered_traces_equal_fresh_ones(name, quantization, monkeypatch):
    known = (cpu(), workload_of(name, text_padding="masked"), FAMILIES[name], TINY[name])
    asked = ("fp32", quantization, "cpu", 2, 2)
    CostModel.build(*known).model.traced(*asked)
    remembered = CostModel.build(*known).model.traced(*asked)

    monkeypatch.setattr(shapes, "key_of", lambda func, args, kwargs: None)
    assert CostModel.build(*known).model.traced(*asked) == remembered


def test_predictions_together_equal_those_alone(card):
    together, alone = card_model("qwen-image"), card
    most = together.workload.model.num_blocks
    candidates = [
        Candidate(micro_batch_size=2, **dict(zip(BLOCK_COUNTS, numbers, strict=True)))
        for numbers in itertools.product((0, 1, most - 1, most), (0, 1), (0, 1))
        if numbers[0] + numbers[1] <= most and numbers[2] <= numbers[0] + numbers[1]
    ]
    together.prepare(candidates)
    assert len(together.tables.steps) == len(candidates)
    found, expected = ([own.predict(each) for each in candidates] for own in (together, alone))
    assert found == expected


def test_block_counts_differ_as_their_predictions(card):
    rows = [(0, 0, 0), (2, 0, 0), (1, 2, 0), (3, 1, 2), (4, 0, 4), (2, 2, 3)]  # not the last block
    base = Candidate(micro_batch_size=1, checkpointed_blocks=0)
    found, seconds = card.predict_block_counts(base, np.array(rows))
    each = [base.changed(**dict(zip(BLOCK_COUNTS, row, strict=True))) for row in rows]
    assert seconds == pytest.approx([card.predict_uncalibrated(one).step_seconds for one in each])
    expected = []
    for one in each:
        phase = card.predict_uncalibrated(one).phases[2]
        expected.append(phase.allocated_memory_bytes + phase.breakdown.allocator_rounding_bytes)
    assert found - found[0] == pytest.approx(np.array(expected) - expected[0], abs=2)


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


CANDIDATE = Candidate(micro_batch_size=1, checkpointed_blocks=0)


def test_estimates_are_of_whole_jobs(card):
    found = estimate(card, CANDIDATE, num_steps=700, price_per_hour=3.0)
    counts = {"num_steps": 700, "num_images": 3, "num_previews": num_previews(700)}
    assert found.job == job_time(card, found.prediction, **counts)
    assert found.cost == pytest.approx(3 * found.job.total_seconds / 3600)
    needed, bucket = found.run_memory_bytes, card.workload.buckets[0].changed(num_items=0)
    work = card.workload.changed(buckets=(bucket,))
    for budget, fits in ((needed, True), (needed - 1, False)):
        device = card.hardware.device.changed(budget_bytes=budget)
        known = work, card.family, TINY["qwen-image"]
        own = CostModel.build(card.hardware.changed(device=device), *known)
        usual = estimate(own, CANDIDATE)
        assert (usual.fits, usual.cost) == (fits, None)
        assert usual.num_steps == 500 // work.effective_batch_size == 250
    for size, effective, nearest in ((2, 5, 1), (3, 4, 2), (9, 8, 8)):
        with pytest.raises(InvalidInput) as error:
            require_divisor(size, effective)
        assert error.value.hint.endswith(f" {nearest}")


def test_trials_compare_with_one_process(predictor):
    """It has no buckets; what it teaches must not take them off again where there are several."""
    alone = predictor("flux1-dev")
    two, one = alone.with_parallel(Parallel("ddp", 2)), alone.predict_uncalibrated(CANDIDATE)
    host = 2 * one.allocated_memory_bytes
    ran = trial(CANDIDATE, one.step_seconds, one.allocated_memory_bytes, host_memory_bytes=host)
    residual = two.residual(ran)
    assert (residual.time, residual.memory) == (0.0, 0.0)
    score = Score(CANDIDATE, one.step_seconds, one.allocated_memory_bytes)
    known = alone.workload, make_plan().job
    beside, single = (build_expectation(score, [ran], cost, *known) for cost in (two, alone))
    buckets = alone.model.model_bytes("bf16", "none").adapter_bytes
    assert beside.process_memory_bytes - single.process_memory_bytes == buckets


def test_trials_teach_what_a_process_takes():
    name, settings = "qwen-image", CANDIDATE
    own = CostModel.build(cpu(), workload_of(name), FAMILIES[name], TINY[name])
    before = own.predict_uncalibrated(settings)
    assert (before.time_uncertainty, before.memory_uncertainty) == (0.0, 0.0)
    peak, gib = before.allocated_memory_bytes, 1 << 30
    ran = [
        trial(settings, before.step_seconds, peak, host_memory_bytes=peak + many * gib)
        for many in (1, 3, 10)
    ]
    after = own.with_calibration([*ran, trial(settings, None)]).predict_uncalibrated(settings)
    assert after.run_memory_bytes - after.allocated_memory_bytes == 3 * gib
    ((time, doubt), (memory, _), *others) = prediction_errors(own, ran)
    assert (time, memory, len(others)) == (0.0, 0.0, 4)
    assert doubt > others[-2][1], "doubt shrinks from trial to trial"
    off = trial(settings, 2 * before.step_seconds, round(1.1 * peak))
    doubts = own.predict(settings).time_uncertainty, own.predict(settings).memory_uncertainty
    expected = [
        (math.log(factor) ** 2, pytest.approx(each**2 + NOISE[name] ** 2))
        for factor, each, name in zip((2, 1.1), doubts, ("time", "memory"), strict=True)
    ]
    assert prediction_errors(own, [off]) == [(pytest.approx(x, rel=1e-4), v) for x, v in expected]


candidates = st.builds(
    Candidate,
    micro_batch_size=st.sampled_from([1, 2, 4]),
    checkpointed_blocks=st.sampled_from([0, 3]),
    swapped_blocks=st.sampled_from([0, 3]),
    quantization=st.sampled_from(["none", "torchao-int8", "bnb-nf4"]),
    attention=st.sampled_from(["native", "_native_cudnn"]),
)
Pairs = list[tuple[Candidate, float]]
pairs = st.lists(st.tuples(candidates, st.floats(-1, 1)), min_size=1, max_size=10)


def learn(before, noise, known):
    return fit(before, noise, [candidate for candidate, _ in known], [each for _, each in known])


@settings(max_examples=50)
@given(pairs, candidates)
def test_what_is_learned_is_regressions_posterior(known, asked):
    known = [(candidate.changed(swapped_blocks=0), each) for candidate, each in known]
    learned = learn(Posterior(0.25), NOISE["time"], known)
    names = [*learned.index]
    terms = [dict(features_of(candidate)) for candidate, _ in known]
    rows = np.array([[has.get(name, 0.0) for name in names] for has in terms])
    prior = np.diag([1 / learned.sigma(name) ** 2 for name in names])
    covariance = np.linalg.inv(prior + rows.T @ rows / NOISE["time"] ** 2)
    mean = covariance @ rows.T @ np.array([each for _, each in known]) / NOISE["time"] ** 2
    assert learned.mean == pytest.approx(mean, abs=1e-7)
    assert np.array(learned.covariance) == pytest.approx(covariance, abs=1e-9)
    assert 0 <= learned.uncertainty(asked) <= Posterior(0.25).uncertainty(asked) + 1e-9


@settings(max_examples=20)
@given(pairs, pairs)
def test_learning_in_two_goes_is_one(first, second):
    prior, noise = Posterior(0.04), NOISE["memory"]
    one = learn(prior, noise, first + second)
    other = learn(learn(prior, noise, first), noise, second)
    for candidate, _ in first + second:
        assert other.log_factor(candidate) == pytest.approx(one.log_factor(candidate), abs=1e-7)
        assert other.uncertainty(candidate) == pytest.approx(one.uncertainty(candidate), abs=1e-7)


def test_tempering_halves_and_keeps_doubt():
    elsewhere = fit(Posterior(0.25), NOISE["time"], [CANDIDATE], [0.4])
    here = elsewhere.tempered(0.5)
    assert here.log_factor(CANDIDATE) == pytest.approx(elsewhere.log_factor(CANDIDATE) / 2)
    at = elsewhere.index[OFFSET]
    variance = 0.25 * elsewhere.covariance[at][at] + 0.75 * 0.25**2
    assert here.covariance[at][at] == pytest.approx(variance)


def test_slow_swaps_spare_their_format():
    plain = Candidate(micro_batch_size=1, checkpointed_blocks=40, quantization="torchao-int8")
    slow, fast = (
        fit(Posterior(0.35), NOISE["time"], [plain.changed(swapped_blocks=40)], [residual])
        for residual in (0.8, -0.8)
    )
    assert 0 < slow.log_factor(plain) < 0.4
    assert fast.log_factor(plain) < -0.4, "nothing but the format or the card is faster"


def test_terms_count_doublings_and_arrivals():
    plain = Candidate(micro_batch_size=4, checkpointed_blocks=0, swapped_blocks=32)
    terms = dict(features_of(plain))
    assert [name for name in terms if name.startswith("batch>")] == ["batch>1", "batch>2"]
    assert terms["swaps"] == math.log1p(2 * 32 / 4 / 16)
    halved = plain.changed(quantization="torchao-int8")
    assert dict(features_of(halved))["swaps"] == math.log1p(32 / 4 / 16)


def test_doubt_is_of_differing_terms():
    one, other = CANDIDATE, CANDIDATE.changed(quantization="torchao-int8")
    prior = Posterior(0.35)
    differing = {*dict(features_of(one)).items()} ^ {*dict(features_of(other)).items()}
    assert len(differing) == 4
    doubt = math.hypot(*(prior.sigma(name) for name, _ in differing))
    assert time_doubt(one, other) == pytest.approx(doubt)
    assert time_doubt(one, one) == 0


def test_tiles_alike_are_traced_once():
    with torch.device("meta"):
        vae = diffusers.AutoencoderKLWan(
            base_dim=8, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[True]
        ).eval()
        latents = torch.empty(1, 4, 1, 16, 16)
    vae.enable_tiling(32, 32, 24, 24)
    calls = []
    vae.decoder.conv_in.register_forward_pre_hook(lambda *_: calls.append(1))
    numbers, peaks = [], []
    for alike in (None, vae.decoder):
        traced = trace_inference(lambda: vae.decode(latents), vae, "cuda", alike)
        peaks.append(traced.peak_bytes)
        numbers.append(len(calls))
    assert peaks[0] == peaks[1] > 0
    assert numbers[1] < 1.3 * numbers[0]
