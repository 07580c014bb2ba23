"""What residuals teach is what Bayesian linear regression says, learned at once or one after the
other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.cost.calibration import NOISE, OFFSET, Posterior, features_of, fit
from autotune.plan.candidate import Candidate

candidates = st.builds(
    Candidate,
    micro_batch_size=st.sampled_from([1, 2, 4]),
    checkpointed_blocks=st.sampled_from([0, 3]),
    swapped_blocks=st.sampled_from([0, 3]),
    quantization=st.sampled_from(["none", "torchao-int8", "bnb-nf4"]),
    attention=st.sampled_from(["native", "_native_cudnn"]),
)
pairs = st.lists(st.tuples(candidates, st.floats(-1, 1)), min_size=1, max_size=10)


@settings(max_examples=50)
@given(pairs, candidates)
def test_what_is_learned_is_the_regressions_posterior(
    known: list[tuple[Candidate, float]], asked: Candidate
) -> None:
    learned = fit(
        Posterior(0.25),
        NOISE["time"],
        [candidate for candidate, _ in known],
        [each for _, each in known],
    )
    names = [*learned.index]
    rows = np.array(
        [[float(name in features_of(candidate)) for name in names] for candidate, _ in known]
    )
    prior = np.diag([1 / learned.sigma(name) ** 2 for name in names])
    covariance = np.linalg.inv(prior + rows.T @ rows / NOISE["time"] ** 2)
    mean = covariance @ rows.T @ np.array([each for _, each in known]) / NOISE["time"] ** 2
    assert learned.mean == pytest.approx(mean, abs=1e-7)
    assert np.array(learned.covariance) == pytest.approx(covariance, abs=1e-9)
    assert 0 <= learned.uncertainty(asked) <= Posterior(0.25).uncertainty(asked) + 1e-9


@settings(max_examples=20)
@given(pairs, pairs)
def test_what_is_learned_in_two_goes_is_what_is_learned_in_one(
    first: list[tuple[Candidate, float]], second: list[tuple[Candidate, float]]
) -> None:
    def learn(before: Posterior, known: list[tuple[Candidate, float]]) -> Posterior:
        return fit(
            before,
            NOISE["memory"],
            [candidate for candidate, _ in known],
            [each for _, each in known],
        )

    prior = Posterior(0.04)
    one, other = learn(prior, first + second), learn(learn(prior, first), second)
    for candidate, _ in first + second:
        assert other.log_factor(candidate) == pytest.approx(one.log_factor(candidate), abs=1e-7)
        assert other.uncertainty(candidate) == pytest.approx(one.uncertainty(candidate), abs=1e-7)


def test_half_of_what_was_learned_elsewhere_holds_with_the_doubt_that_is_left() -> None:
    candidate = Candidate(micro_batch_size=1, checkpointed_blocks=0)
    elsewhere = fit(Posterior(0.25), NOISE["time"], [candidate], [0.4])
    here = elsewhere.tempered(0.5)
    assert here.log_factor(candidate) == pytest.approx(elsewhere.log_factor(candidate) / 2)
    variance = (
        0.25 * elsewhere.covariance[elsewhere.index[OFFSET]][elsewhere.index[OFFSET]]
        + 0.75 * 0.25**2
    )
    assert here.covariance[here.index[OFFSET]][here.index[OFFSET]] == pytest.approx(variance)
