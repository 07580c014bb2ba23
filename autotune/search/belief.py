"""What the search believes of candidates that it has not tried, from those that it has.

A Bayesian linear model of log(measured / prior) over the candidate's knobs: the prior carries what is known of the
machine, a few trials correct it. With no trial the belief is the prior with its own uncertainty.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.schema import Candidate, Choice

Prior = Callable[[Candidate], float]
"""Expected seconds of an optimizer step, up to a common factor."""

PRIOR_SIGMA = 0.3
"""Standard deviation of each knob's effect on the log-residual before any trial."""
SCALE_SIGMA = 2.0
"""Of the common factor: before the first trial the machine's speed is almost unknown."""
NOISE_SIGMA = 0.05
"""Of one trial's median step time, interactions that the linear model lacks included."""


@dataclass(frozen=True)
class Belief:
    """Mean and standard deviation of log step seconds, by candidate."""

    mean: Mapping[Candidate, float]
    sigma: Mapping[Candidate, float]


def believe(
    candidates: Sequence[Candidate],
    choices: Mapping[str, tuple[Choice, ...]],
    prior: Prior,
    measured: Mapping[Candidate, float],
) -> Belief:
    """Condition the prior on the measured step seconds.

    The posterior of a linear-Gaussian model in weight space (Rasmussen and Williams 2006, equation 2.8).
    """
    features = np.stack([_features(candidate, choices) for candidate in candidates])
    base = np.array([math.log(prior(candidate)) for candidate in candidates])
    precision = np.diag([1 / SCALE_SIGMA**2] + [1 / PRIOR_SIGMA**2] * (features.shape[1] - 1))
    moment = np.zeros(features.shape[1])
    for candidate, seconds in measured.items():
        x = _features(candidate, choices)
        precision += np.outer(x, x) / NOISE_SIGMA**2
        moment += x * (math.log(seconds) - math.log(prior(candidate))) / NOISE_SIGMA**2
    covariance = np.linalg.inv(precision)
    mean = base + features @ (covariance @ moment)
    variance = np.einsum("ij,jk,ik->i", features, covariance, features)
    return Belief(
        mean=dict(zip(candidates, mean.tolist(), strict=True)),
        sigma=dict(zip(candidates, np.sqrt(variance).tolist(), strict=True)),
    )


def _features(candidate: Candidate, choices: Mapping[str, tuple[Choice, ...]]) -> NDArray[np.float64]:
    """A one, then per knob: numbers as their log or share of the range, names as indicators."""
    row = [1.0]
    for name, admitted in choices.items():
        value = getattr(candidate, name)
        if len(admitted) < 2:
            continue
        if isinstance(value, int):
            low, high = min(map(int, admitted)), max(map(int, admitted))
            row.append((value - low) / (high - low))
            row.append(math.log1p(value - low) / math.log1p(high - low))
        else:
            row.extend(float(value == choice) for choice in admitted[1:])
    return np.array(row)
