"""Lessons of trials for the cost model: log-residuals per knob, by Bayesian linear regression.

log(measured / predicted) = offset + a term for each choice of a candidate + noise, all with
Gaussian priors (Bishop, Pattern Recognition and Machine Learning, section 3.3). Residuals are
learned one after the other in plain arithmetic: libraries' last bits differ between CPUs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from autotune.plan.candidate import MAX_RESIDUAL, Candidate, Residual, TrialResult
from autotune.plan.prediction import Prediction

OFFSET, DOUBLING, KEEPS_ATTENTION = "offset", "batch>", "keeps attention"
IN_PRECISION = "in precision="
LEVERS = ("modulation=", "norm_rope=")
# One sigma of the offset's logarithm before any trial, by where the rates are from.
PRIOR_TIME_DATASHEET = 0.35
PRIOR_TIME_MEASURED = 0.25
PRIOR_MEMORY = 0.04
# Sigma of a choice's term, of the offset's. .2, .4, .7 and 1 were tried on 40 simulated searches:
# .7 was within 5% of the best most often (see benchmarks/DECISIONS.md).
CHOICE_SHARE = 0.7
# Of a doubling of the micro-batch; .2, .3 and .5 were tried on 96 simulated tasks.
DOUBLING_SHARE = 0.3
# Keeping attention saves 4% of a step (Qwen-Image, FLUX.1, Z-Image at 1,024 px on a 4090,
# predicted), and a quarter of that is doubted. With .1 simulated searches took 11 trials, with .03
# 8 to 10, without these variants 7 or 8.
VARIANT_SHARE = 0.03
# Without these terms a search never learned that a lever is worth less than predicted.
LEVER_SHARE = 0.3
# Of a format or backend in one precision: its kernels for another are others. On development tables
# the fastest of 8 trials was 0.0% slower than the best there is, 1.4% without.
IN_PRECISION_SHARE = 0.3
NOISE = {"time": 0.03, "memory": 0.005}  # one sigma of a repeated measurement
DIGITS = 9  # Decimals that are kept: logarithms' last bits differ between CPUs and C libraries.


def features_of(candidate: Candidate) -> tuple[str, ...]:
    """List a candidate's terms: the offset, and one per choice that changes how a step runs."""
    return _features(
        candidate.compile != "off",
        candidate.swapped_blocks > 0,
        candidate.selective_blocks > 0,
        candidate.quantization,
        candidate.attention,
        candidate.precision,
        candidate.modulation,
        candidate.norm_rope,
        candidate.recomputed_blocks > 0,
        (candidate.micro_batch_size - 1).bit_length(),
    )


@lru_cache(maxsize=1024)
def _features(
    compiles: bool,
    swaps: bool,
    keeps_attention: bool,
    quantization: str,
    attention: str,
    precision: str,
    modulation: str,
    norm_rope: str,
    recomputes: bool,
    doublings: int,
) -> tuple[str, ...]:
    rare = {"compiles": compiles, "swaps": swaps, KEEPS_ATTENTION: keeps_attention}
    return (
        *(name for name, does in rare.items() if does),
        OFFSET,
        f"quantization={quantization}",
        f"attention={attention}",
        f"precision={precision}",
        f"modulation={modulation}",
        f"norm_rope={norm_rope}",
        f"{IN_PRECISION}{precision},{quantization}",
        f"{IN_PRECISION}{precision},{attention}",
        f"recomputes={recomputes}",
        # Sizes share the terms of the doublings up to them: what 4 taught holds for 8 too, but for
        # one term.
        *(f"{DOUBLING}{2**number}" for number in range(doublings)),
    )


@dataclass(frozen=True)
class Posterior:
    """Terms that residuals have told something about; all others keep their prior."""

    prior: float
    index: dict[str, int] = field(default_factory=dict)
    mean: tuple[float, ...] = ()
    covariance: tuple[tuple[float, ...], ...] = ()
    # Thousands of candidates share some dozens of such tuples.
    _known: dict[tuple[str, ...], tuple[float, float]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def sigma(self, feature: str) -> float:
        if feature == OFFSET:
            return self.prior
        if feature == KEEPS_ATTENTION:
            return self.prior * VARIANT_SHARE
        if feature.startswith(LEVERS):
            return self.prior * LEVER_SHARE
        if feature.startswith(IN_PRECISION):
            return self.prior * IN_PRECISION_SHARE
        return self.prior * (DOUBLING_SHARE if feature.startswith(DOUBLING) else CHOICE_SHARE)

    def log_factor(self, candidate: Candidate) -> float:
        return self._moments(features_of(candidate))[0]

    def uncertainty(self, candidate: Candidate) -> float:
        """Return one sigma of the log-residual."""
        return self._moments(features_of(candidate))[1]

    def _moments(self, names: tuple[str, ...]) -> tuple[float, float]:
        if (found := self._known.get(names)) is None:
            known = [self.index[name] for name in names if name in self.index]
            variance = sum(self.sigma(name) ** 2 for name in names if name not in self.index)
            variance += sum(self.covariance[i][j] for i in known for j in known)
            found = sum(self.mean[i] for i in known), math.sqrt(max(variance, 0.0))
            self._known[names] = found
        return found

    def tempered(self, weight: float) -> "Posterior":
        """Return what holds for something else, whose terms correlate by `weight` in [0, 1]."""
        covariance = [[weight**2 * value for value in row] for row in self.covariance]
        for name, i in self.index.items():
            covariance[i][i] += (1 - weight**2) * self.sigma(name) ** 2
        mean = tuple(weight * mean for mean in self.mean)
        return Posterior(self.prior, self.index, mean, tuple(map(tuple, covariance)))


def fit(
    before: Posterior, noise: float, candidates: Sequence[Candidate], residuals: Sequence[float]
) -> Posterior:
    """Learn `residuals` (natural logarithms) of `candidates` on top of what was known `before`."""
    if not candidates:
        return before
    index = dict(before.index)
    for name in sorted({name for c in candidates for name in features_of(c)}):
        index.setdefault(name, len(index))
    new = [name for name in index if name not in before.index]
    mean = [*before.mean, *[0.0] * len(new)]
    covariance = [[*row, *[0.0] * len(new)] for row in before.covariance]
    for name in new:
        covariance.append([0.0] * len(index))
        covariance[-1][index[name]] = before.sigma(name) ** 2
    for candidate, residual in zip(candidates, residuals, strict=True):
        terms = [index[name] for name in features_of(candidate)]
        # Covariance of each term with this residual.
        shared = [math.fsum(row[i] for i in terms) for row in covariance]
        variance = math.fsum(shared[i] for i in terms) + noise**2
        surprise = residual - math.fsum(mean[i] for i in terms)
        for i, share in enumerate(shared):
            mean[i] += share / variance * surprise
            pairs = zip(covariance[i], shared, strict=True)
            covariance[i] = [value - share * other / variance for value, other in pairs]
    rounded = tuple(round(value, DIGITS) for value in mean)
    return Posterior(before.prior, index, rounded, tuple(map(tuple, covariance)))


def time_doubt(one: Candidate, other: Candidate) -> float:
    """Return one sigma of what trials may yet teach of the log-ratio of two step times."""
    prior, different = Posterior(PRIOR_TIME_DATASHEET), {*features_of(one)} ^ {*features_of(other)}
    return math.sqrt(math.fsum(prior.sigma(name) ** 2 for name in different))


@dataclass(frozen=True)
class PriorResiduals:
    """Residuals of another machine or other work, against the cost model of that."""

    residuals: tuple[tuple[Candidate, Residual], ...]
    weight: float  # in [0, 1]: how much of it is believed to hold here


@dataclass(frozen=True)
class Calibration:
    """Corrections of time and of memory."""

    time: Posterior
    memory: Posterior

    @staticmethod
    def of(
        residuals: Sequence[tuple[Candidate, Residual]],
        *,
        rates_measured: bool,
        priors: Sequence[PriorResiduals] = (),
    ) -> "Calibration":
        """Learn from how trials here differed from predictions, and from `priors`, most alike
        first.

        Priors may tell that steps take more memory than predicted, never less.
        """
        time = Posterior(PRIOR_TIME_MEASURED if rates_measured else PRIOR_TIME_DATASHEET)
        memory = Posterior(PRIOR_MEMORY)
        for prior in reversed(priors):
            candidates = [candidate for candidate, _ in prior.residuals]
            time = fit(time, NOISE["time"], candidates, [r.time for _, r in prior.residuals])
            cautious = [max(0.0, r.memory) for _, r in prior.residuals]
            memory = fit(memory, NOISE["memory"], candidates, cautious)
            time, memory = time.tempered(prior.weight), memory.tempered(prior.weight)
        candidates = [candidate for candidate, _ in residuals]
        return Calibration(
            time=fit(time, NOISE["time"], candidates, [r.time for _, r in residuals]),
            memory=fit(memory, NOISE["memory"], candidates, [r.memory for _, r in residuals]),
        )


def residual_of(trial: TrialResult, prediction: Prediction) -> Residual | None:
    """Tell how far a trial was from its uncalibrated prediction; None if it did not run."""
    seconds, num_bytes = trial.median_step_seconds, trial.peak_memory_bytes
    if trial.outcome not in ("ok", "oom") or not seconds or not num_bytes:
        return None
    ratios = seconds / prediction.step_seconds, num_bytes / prediction.allocated_memory_bytes
    time, memory = (min(MAX_RESIDUAL, max(-MAX_RESIDUAL, math.log(ratio))) for ratio in ratios)
    return Residual(time=time, memory=memory)
