"""What trials teach the cost model: log-residuals per knob, by Bayesian linear regression, with
what is left uncertain.

log(measured / predicted) = offset + a term for each choice of a candidate + noise, all with
Gaussian priors, so one trial moves every prediction, more trials tell the choices apart, and
uncertainty shrinks with each (Bishop, Pattern Recognition and Machine Learning, section 3.3). A
dozen terms need no linear algebra library, whose last bits differ between CPUs: residuals are
learned one after the other, in plain arithmetic.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from autotune.plan.candidate import MAX_RESIDUAL, Candidate, Residual, TrialResult
from autotune.plan.prediction import Prediction

OFFSET, DOUBLING, KEEPS_ATTENTION = "offset", "batch>", "keeps attention"
IN_PRECISION = "in precision="
LEVERS = ("modulation=", "norm_rope=")
PRIOR_TIME_DATASHEET = 0.35
PRIOR_TIME_MEASURED = 0.25
"""One sigma of the offset's logarithm before any trial: rates from a datasheet, or measured at
the model's shapes."""
PRIOR_MEMORY = 0.04
CHOICE_SHARE = 0.7
"""Sigma of each choice's term, relative to the offset's. .2, .4, .7 and 1 were tried on 40
simulated searches: .7 was within 5% of the best most often (see benchmarks/DECISIONS.md)."""
DOUBLING_SHARE = 0.3
"""The same for a doubling of the micro-batch; .2, .3 and .5 were tried on 96 simulated tasks
(see the log)."""
VARIANT_SHARE = 0.03
"""The same for variants of recomputing. Keeping attention saves 4% of a step (Qwen-Image,
FLUX.1, Z-Image at 1,024 px on a 4090, predicted), and a quarter of that is doubted. With .1,
searches on simulated cards took 11 trials; with .03 they take 8 to 10, and without these
variants 7 or 8."""
LEVER_SHARE = 0.3
"""The same for modulation ahead of time and for norm and RoPE as one function. Without these
terms a search never learned that one of them is worth less than predicted (see the log)."""
IN_PRECISION_SHARE = 0.3
"""The same for a weight format, and for an attention backend, in one precision: its kernels for
another are others. On development tables the fastest of 8 trials was 0.0% slower than the best
there is, 1.4% without (see the log)."""
NOISE = {"time": 0.03, "memory": 0.005}
"""One sigma of a repeated measurement."""
DIGITS = 9
"""Decimals that are kept of what was learned: logarithms' last bits differ between CPUs and C
libraries."""


def features_of(candidate: Candidate) -> tuple[str, ...]:
    """The terms that a candidate has: the offset and one per choice that changes how a step
    runs."""
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
    _known: dict[tuple[str, ...], tuple[float, float]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """Of terms that were asked for: thousands of candidates share some dozens of such tuples."""

    def sigma(self, feature: str) -> float:
        """Prior sigma of a term."""
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
        """Expected log-residual."""
        return self._moments(features_of(candidate))[0]

    def uncertainty(self, candidate: Candidate) -> float:
        """One sigma of the log-residual."""
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
        """As far as it holds for something else: terms there and here correlate by `weight` in
        [0, 1]."""
        covariance = [[weight**2 * value for value in row] for row in self.covariance]
        for name, i in self.index.items():
            covariance[i][i] += (1 - weight**2) * self.sigma(name) ** 2
        return Posterior(
            self.prior, self.index, tuple(weight * mean for mean in self.mean), _frozen(covariance)
        )


def _frozen(rows: Iterable[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in rows)


def fit(
    before: Posterior, noise: float, candidates: Sequence[Candidate], residuals: Sequence[float]
) -> Posterior:
    """What is known after `residuals` (natural logarithms) of `candidates`, and `before` them."""
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
        mean = [
            value + share / variance * surprise for value, share in zip(mean, shared, strict=True)
        ]
        covariance = [
            [value - share * other / variance for value, other in zip(row, shared, strict=True)]
            for row, share in zip(covariance, shared, strict=True)
        ]
    return Posterior(
        before.prior, index, tuple(round(value, DIGITS) for value in mean), _frozen(covariance)
    )


def time_doubt(one: Candidate, other: Candidate) -> float:
    """One sigma of what trials may yet teach about the ratio of two candidates' step times, as a
    logarithm.

    0 for candidates with the same terms: whatever is learned moves both alike.
    """
    prior = Posterior(PRIOR_TIME_DATASHEET)
    return math.sqrt(
        math.fsum(prior.sigma(name) ** 2 for name in {*features_of(one)} ^ {*features_of(other)})
    )


@dataclass(frozen=True)
class PriorResiduals:
    """What trials of another machine or other work taught the cost model of that machine and
    work."""

    residuals: tuple[tuple[Candidate, Residual], ...]
    weight: float
    """In [0, 1]: how much of it is believed to hold here."""


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
        """From what trials here differed from predictions by, and from `priors`, the most alike
        first.

        Priors may tell that steps take more memory than predicted, never that they take less:
        trials here tell that.
        """
        time = Posterior(PRIOR_TIME_MEASURED if rates_measured else PRIOR_TIME_DATASHEET)
        memory = Posterior(PRIOR_MEMORY)
        for prior_residuals in reversed(priors):
            time = _learned(
                time,
                "time",
                prior_residuals.residuals,
                [r.time for _, r in prior_residuals.residuals],
            )
            cautious = [max(0.0, r.memory) for _, r in prior_residuals.residuals]
            memory = _learned(memory, "memory", prior_residuals.residuals, cautious)
            time = time.tempered(prior_residuals.weight)
            memory = memory.tempered(prior_residuals.weight)
        return Calibration(
            time=_learned(time, "time", residuals, [r.time for _, r in residuals]),
            memory=_learned(memory, "memory", residuals, [r.memory for _, r in residuals]),
        )


def _learned(
    before: Posterior, what: str, pairs: Sequence[tuple[Candidate, Residual]], logs: Sequence[float]
) -> Posterior:
    return fit(before, NOISE[what], [candidate for candidate, _ in pairs], logs)


def residual_of(trial: TrialResult, prediction: Prediction) -> Residual | None:
    """How far a trial was from what was predicted for it before any calibration; what did not
    run teaches nothing."""
    if (
        trial.outcome not in ("ok", "oom")
        or not trial.median_step_seconds
        or not trial.peak_memory_bytes
    ):
        return None
    return Residual(
        time=_log_ratio(trial.median_step_seconds, prediction.step_seconds),
        memory=_log_ratio(trial.peak_memory_bytes, prediction.allocated_memory_bytes),
    )


def _log_ratio(measured: float, predicted: float) -> float:
    return min(MAX_RESIDUAL, max(-MAX_RESIDUAL, math.log(measured / predicted)))
