"""Lessons of trials for the cost model: log-residuals per knob, by Bayesian linear regression.

log(measured / predicted) = offset + a term for each choice of a candidate + noise, all with
Gaussian priors (Bishop, Pattern Recognition and Machine Learning, section 3.3). Residuals are
learned one after the other in plain arithmetic: libraries' last bits differ between CPUs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune.plan.candidate import MAX_RESIDUAL, Candidate, Residual, TrialResult
from autotune.plan.prediction import Prediction

OFFSET, DOUBLING, KEEPS_ATTENTION, SWAPS = "offset", "batch>", "keeps attention", "swaps"
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
# Of transfers, if a trial with swapped blocks was slower than expected: they can only overlap less
# than predicted, so that its format is not what is slow. Simulated plans for a card of 16 GB ended
# within 5% of the best in 88% instead of 78%, with levels by number of blocks in 52%.
SLOW_SWAP_SHARE = 2.0
SWAP_UNIT = 16  # int8 blocks that arrive per item of a micro-batch: log(2) of the swap term
# Of a format or backend in one precision: its kernels for another are others. On development tables
# the fastest of 8 trials was 0.0% slower than the best there is, 1.4% without.
IN_PRECISION_SHARE = 0.3
NOISE = {"time": 0.03, "memory": 0.005}  # one sigma of a repeated measurement
DIGITS = 9  # Decimals that are kept: logarithms' last bits differ between CPUs and C libraries.


def features_of(candidate: Candidate) -> tuple[tuple[str, float], ...]:
    """List a candidate's terms with their weights: the offset, and choices that change a step."""
    rare = {"compiles": candidate.compile != "off", KEEPS_ATTENTION: candidate.selective_blocks > 0}
    names = (
        *(name for name, does in rare.items() if does),
        OFFSET,
        f"quantization={candidate.quantization}",
        f"attention={candidate.attention}",
        f"precision={candidate.precision}",
        f"modulation={candidate.modulation}",
        f"norm_rope={candidate.norm_rope}",
        f"{IN_PRECISION}{candidate.precision},{candidate.quantization}",
        f"{IN_PRECISION}{candidate.precision},{candidate.attention}",
        f"recomputes={candidate.recomputed_blocks > 0}",
        # Sizes share the terms of the doublings up to them: all that 4 taught but one
        # term holds for 8, too.
        *(f"{DOUBLING}{2**n}" for n in range((candidate.micro_batch_size - 1).bit_length())),
    )
    # What arrives in a step, relative to what is computed meanwhile.
    num_bytes = 2 if candidate.quantization == "none" else 1
    arriving = num_bytes * candidate.swapped_blocks / candidate.micro_batch_size
    swaps = ((SWAPS, math.log1p(arriving / SWAP_UNIT)),) if arriving else ()
    return *((name, 1.0) for name in names), *swaps


@dataclass(frozen=True)
class Posterior:
    """Terms that residuals have told something about; all others keep their prior."""

    prior: float
    index: dict[str, int] = field(default_factory=dict)
    mean: tuple[float, ...] = ()
    covariance: tuple[tuple[float, ...], ...] = ()
    # Thousands of candidates share some dozens of such tuples.
    _known: dict[tuple[tuple[str, float], ...], tuple[float, float]] = field(
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

    def _moments(self, terms: tuple[tuple[str, float], ...]) -> tuple[float, float]:
        if (found := self._known.get(terms)) is None:
            known = [(self.index[name], weight) for name, weight in terms if name in self.index]
            new = [(name, weight) for name, weight in terms if name not in self.index]
            variance = sum((weight * self.sigma(name)) ** 2 for name, weight in new)
            variance += sum(a * b * self.covariance[i][j] for i, a in known for j, b in known)
            mean = sum(weight * self.mean[i] for i, weight in known)
            found = mean, math.sqrt(max(variance, 0.0))
            self._known[terms] = found
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
    for name in sorted({name for c in candidates for name, _ in features_of(c)}):
        index.setdefault(name, len(index))
    new = [name for name in index if name not in before.index]
    mean = [*before.mean, *[0.0] * len(new)]
    covariance = [[*row, *[0.0] * len(new)] for row in before.covariance]
    for name in new:
        covariance.append([0.0] * len(index))
        covariance[-1][index[name]] = before.sigma(name) ** 2
    for candidate, residual in zip(candidates, residuals, strict=True):
        terms = [(index[name], weight) for name, weight in features_of(candidate)]
        surprise = residual - math.fsum(weight * mean[i] for i, weight in terms)
        if candidate.swapped_blocks and surprise > 0:
            at = index[SWAPS]
            covariance[at][at] += (SLOW_SWAP_SHARE * before.prior) ** 2
        # Covariance of each term with this residual.
        shared = [math.fsum(weight * row[i] for i, weight in terms) for row in covariance]
        variance = math.fsum(weight * shared[i] for i, weight in terms) + noise**2
        for i, share in enumerate(shared):
            mean[i] += share / variance * surprise
            pairs = zip(covariance[i], shared, strict=True)
            covariance[i] = [value - share * other / variance for value, other in pairs]
    rounded = tuple(round(value, DIGITS) for value in mean)
    return Posterior(before.prior, index, rounded, tuple(map(tuple, covariance)))


def time_doubt(one: Candidate, other: Candidate) -> float:
    """Return one sigma of what trials may yet teach of the log-ratio of two step times."""
    prior = Posterior(PRIOR_TIME_DATASHEET)
    mine, theirs = dict(features_of(one)), dict(features_of(other))
    weights = {name: mine.get(name, 0.0) - theirs.get(name, 0.0) for name in {**mine, **theirs}}
    return math.sqrt(math.fsum((w * prior.sigma(name)) ** 2 for name, w in weights.items()))


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
