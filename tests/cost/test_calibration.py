"""Residuals teach what Bayesian linear regression says, at once or one by one."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.cost.calibration import NOISE, OFFSET, Posterior, features_of, fit, time_doubt
from autotune.plan.candidate import Candidate

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


def learn(before: Posterior, noise: float, known: Pairs) -> Posterior:
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
    candidate = Candidate(micro_batch_size=1, checkpointed_blocks=0)
    elsewhere = fit(Posterior(0.25), NOISE["time"], [candidate], [0.4])
    here = elsewhere.tempered(0.5)
    assert here.log_factor(candidate) == pytest.approx(elsewhere.log_factor(candidate) / 2)
    at = elsewhere.index[OFFSET]
    variance = 0.25 * elsewhere.covariance[at][at] + 0.75 * 0.25**2
    assert here.covariance[at][at] == pytest.approx(variance)


def test_slow_swaps_spare_their_format() -> None:
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
    one = Candidate(micro_batch_size=1, checkpointed_blocks=0)
    other = one.changed(quantization="torchao-int8")
    prior = Posterior(0.35)
    differing = {*dict(features_of(one)).items()} ^ {*dict(features_of(other)).items()}
    assert len(differing) == 4
    doubt = math.hypot(*(prior.sigma(name) for name, _ in differing))
    assert time_doubt(one, other) == pytest.approx(doubt)
    assert time_doubt(one, one) == 0
