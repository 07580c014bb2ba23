"""What trials teach the cost model: log-residuals per knob, by Bayesian linear regression, with what is left uncertain.

log(measured / predicted) = offset + a term for each choice of a candidate + noise, all with Gaussian priors, so one
trial moves every prediction, more trials tell the choices apart, and uncertainty shrinks with each (Bishop, Pattern
Recognition and Machine Learning, section 3.3).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autotune.prediction import Prediction
from autotune.schema import Candidate, TrialResult

OFFSET = "offset"
PRIOR_TIME_DATASHEET = 0.35
PRIOR_TIME_MEASURED = 0.25
"""One sigma of the offset's logarithm before any trial: rates from a datasheet, or measured at the model's shapes."""
PRIOR_MEMORY = 0.04
CHOICE_SHARE = 0.7
"""Sigma of each choice's term, relative to the offset's. .2, .4, .7 and 1 were tried on 40 simulated searches: .7 was
within 5% of the best most often (see benchmarks/LOG.md)."""
NOISE = {"time": 0.03, "memory": 0.005}
"""One sigma of a repeated measurement."""


def features_of(candidate: Candidate) -> tuple[str, ...]:
    """The terms that a candidate has: the offset and one per choice that changes how a step runs."""
    rare = {"compiles": candidate.compile != "off", "swaps": candidate.swapped_blocks > 0}
    return (
        *(name for name, does in rare.items() if does),
        OFFSET,
        f"quantization={candidate.quantization}",
        f"attention={candidate.attention}",
        f"precision={candidate.precision}",
        f"batch={candidate.micro_batch_size}",
        f"recomputes={candidate.checkpointed_blocks > 0}",
    )


@dataclass(frozen=True)
class Posterior:
    """Terms that residuals have told something about; all others keep their prior."""

    prior: float
    index: dict[str, int] = field(default_factory=dict)
    mean: tuple[float, ...] = ()
    covariance: tuple[tuple[float, ...], ...] = ()

    def sigma(self, feature: str) -> float:
        """Prior sigma of a term."""
        return self.prior if feature == OFFSET else self.prior * CHOICE_SHARE

    def log_factor(self, candidate: Candidate) -> float:
        """Expected log-residual."""
        return sum(self.mean[self.index[name]] for name in features_of(candidate) if name in self.index)

    def uncertainty(self, candidate: Candidate) -> float:
        """One sigma of the log-residual."""
        names = features_of(candidate)
        known = [self.index[name] for name in names if name in self.index]
        variance = sum(self.sigma(name) ** 2 for name in names if name not in self.index)
        variance += sum(self.covariance[i][j] for i in known for j in known)
        return math.sqrt(max(variance, 0.0))


def fit(prior: float, noise: float, candidates: Sequence[Candidate], residuals: Sequence[float]) -> Posterior:
    """The posterior after `residuals` (natural logarithms) of `candidates`."""
    if not candidates:
        return Posterior(prior)
    index = {name: i for i, name in enumerate(sorted({name for c in candidates for name in features_of(c)}))}
    empty = Posterior(prior)
    precision = np.diag([empty.sigma(name) ** -2 for name in index])
    rows = np.zeros((len(candidates), len(index)))
    for row, candidate in zip(rows, candidates, strict=True):
        row[[index[name] for name in features_of(candidate)]] = 1.0
    covariance = np.linalg.inv(precision + rows.T @ rows / noise**2)
    mean = covariance @ rows.T @ np.array(residuals) / noise**2
    return Posterior(prior, index, tuple(mean.tolist()), tuple(tuple(row) for row in covariance.tolist()))


@dataclass(frozen=True)
class Calibration:
    """Corrections of time and of memory."""

    time: Posterior
    memory: Posterior
    num_trials: int = 0

    @staticmethod
    def of(trials: Sequence[tuple[TrialResult, Prediction]], *, rates_measured: bool) -> "Calibration":
        """From trials and what was predicted for them before any calibration. Failed trials teach nothing here."""
        good = [(trial, prediction) for trial, prediction in trials if trial.outcome == "ok"]
        timed = [
            (t.candidate, math.log(t.median_step_seconds / p.step_seconds)) for t, p in good if t.median_step_seconds
        ]
        weighed = [
            (t.candidate, math.log(t.peak_memory_bytes / p.allocated_memory_bytes))
            for t, p in good
            if t.peak_memory_bytes
        ]
        prior = PRIOR_TIME_MEASURED if rates_measured else PRIOR_TIME_DATASHEET
        return Calibration(
            time=fit(prior, NOISE["time"], [c for c, _ in timed], [r for _, r in timed]),
            memory=fit(PRIOR_MEMORY, NOISE["memory"], [c for c, _ in weighed], [r for _, r in weighed]),
            num_trials=len(good),
        )
