"""The search on simulated machines: finds what is good, never repeats, learns from failures, ends."""

import math
import random
from collections.abc import Callable

import pytest

from autotune.errors import NothingFits
from autotune.schema import Candidate, Outcome, TrialResult
from autotune.search.rough_prior import rough_memory_bytes, rough_step_seconds
from autotune.search.sampler import ResidualSampler
from autotune.search.space import SearchSpace, search_space
from autotune.search.study import Limits, run_search
from autotune.search.winner import fallbacks_of, reasons_for, winner_of
from tests import builders

GIB = 2**30


def machine(seed: int, wall_bytes: float = math.inf) -> Callable[[Candidate], TrialResult]:
    """A hidden truth that is not the prior's form: interactions, a memory wall, 3% noise."""
    rng = random.Random(seed)
    speed = {name: rng.uniform(0.8, 1.6) for name in ("none", "torchao-int8", "native", "_native_flash")}
    gain, recompute = rng.uniform(0.02, 0.4), rng.uniform(0.2, 0.5)

    def run(candidate: Candidate) -> TrialResult:
        share = candidate.checkpointed_blocks / 60
        memory = 4 * GIB + candidate.micro_batch_size * (1 - 0.9 * share) * 2 * GIB
        memory += 10 * GIB if candidate.quantization == "none" else 5 * GIB
        if memory > wall_bytes:
            return builders.trial(candidate, seconds=None)
        time = (1 + recompute * share) * (1 + gain / candidate.micro_batch_size)
        time *= speed[candidate.quantization] * speed[candidate.attention] * rng.gauss(1, 0.03)
        return builders.trial(candidate, seconds=time, memory=int(memory))

    return run


def search(run: Callable[[Candidate], TrialResult], max_trials: int = 8) -> tuple[SearchSpace, tuple[TrialResult, ...]]:
    setting = builders.setting(work=builders.workload(text_padding="exact", quality="high"))
    space = search_space(setting)
    sampler = ResidualSampler(space, rough_step_seconds(setting.workload), rough_memory_bytes(setting.workload))
    limits = Limits(max_trials=max_trials, max_seconds=60)
    return space, run_search(space, sampler, run, limits, lambda result: None)


@pytest.mark.parametrize("seed", range(6))
def test_eight_trials_come_close_to_the_exhaustive_best(seed: int) -> None:
    space, results = search(machine(seed))
    exhaustive = min(machine(seed)(c).median_step_seconds or math.inf for c in space.candidates)
    found = winner_of(results, "throughput").median_step_seconds or math.inf
    assert len(results) <= 8
    assert found <= 1.15 * exhaustive


def test_no_candidate_is_tried_twice_and_the_first_is_the_safest() -> None:
    _, results = search(machine(1), max_trials=12)
    tried = [result.candidate for result in results]
    assert len(set(tried)) == len(tried)
    assert tried[0].micro_batch_size == 1
    assert tried[0].checkpointed_blocks == 59
    assert tried[0].quantization == "torchao-int8"


def test_out_of_memory_teaches_and_does_not_end_the_search() -> None:
    _, results = search(machine(2, wall_bytes=15 * GIB), max_trials=12)
    outcomes = [result.outcome for result in results]
    assert "ok" in outcomes[:1]
    best = winner_of(results, "throughput")
    assert best.outcome == "ok"
    assert outcomes.count("oom") <= 6


@pytest.mark.parametrize("outcome", ["crash", "timeout", "numerics", "unsupported", "oom", "spill"])
def test_search_survives_any_outcome_everywhere(outcome: Outcome) -> None:
    _, results = search(lambda c: builders.trial(c, seconds=None, outcome=outcome, message="by design"))
    assert results
    assert {result.outcome for result in results} == {outcome}
    with pytest.raises(NothingFits, match="by design"):
        winner_of(results, "throughput")


def test_search_ends_when_everything_is_tried() -> None:
    setting = builders.setting(
        builders.hardware("attention.native", "precision.bf16"),
        builders.workload(quality="exact", effective_batch_size=1),
    )
    space = search_space(setting)
    sampler = ResidualSampler(space, rough_step_seconds(setting.workload), rough_memory_bytes(setting.workload))
    results = run_search(
        space, sampler, machine(0), Limits(max_trials=50, max_seconds=60, min_trials=50), lambda r: None
    )
    assert len(results) == len(space.candidates) == 5


def test_time_limit_ends_the_search_after_the_running_trial() -> None:
    setting = builders.setting()
    space = search_space(setting)
    sampler = ResidualSampler(space, rough_step_seconds(setting.workload), rough_memory_bytes(setting.workload))
    results = run_search(space, sampler, machine(0), Limits(max_trials=50, max_seconds=0), lambda r: None)
    assert len(results) == 1


def test_masks_exclude_backends_that_refuse_them_with_the_reason() -> None:
    space = search_space(builders.setting(work=builders.workload(text_padding="masked")))
    flash = [c for c in space.candidates if c.attention == "_native_flash"]
    assert flash
    assert all(c.micro_batch_size == 1 for c in flash)
    assert any("refuses masks" in rejected.reason for rejected in space.rejected["attention"])


def test_every_rejected_choice_has_a_reason_and_every_knob_is_explained() -> None:
    space, results = search(machine(3))
    winner = winner_of(results, "throughput")
    for reason in reasons_for(space, results, winner, "throughput"):
        assert reason.chosen == getattr(winner.candidate, reason.knob)
        named = {rejected.choice for rejected in reason.rejected} | {reason.chosen}
        assert named >= set(space.choices[reason.knob])
        assert all(rejected.reason for rejected in reason.rejected)


def test_objectives_choose_the_fastest_or_the_smallest() -> None:
    fast = builders.trial(builders.candidate(micro_batch_size=4, checkpointed_blocks=0), seconds=1.0, memory=9 * GIB)
    small = builders.trial(builders.candidate(), seconds=2.0, memory=2 * GIB)
    failed = builders.trial(builders.candidate(micro_batch_size=2), seconds=None)
    assert winner_of((failed, small, fast), "throughput") == fast
    assert winner_of((failed, small, fast), "memory") == small


def test_fallbacks_need_less_and_less_memory() -> None:
    _, results = search(machine(4), max_trials=12)
    winner = winner_of(results, "throughput")
    memory = {result.candidate: result.peak_memory_bytes or 0 for result in results}
    ladder = [winner.peak_memory_bytes or 0, *(memory[c] for c in fallbacks_of(results, winner))]
    assert ladder == sorted(ladder, reverse=True)
    assert len(set(ladder)) == len(ladder)


def test_a_machine_without_any_attention_backend_fits_nothing() -> None:
    with pytest.raises(NothingFits, match="attention"):
        search_space(builders.setting(builders.hardware("precision.bf16")))
