"""The search on simulated machines: finds what is good, never repeats, learns from failures,
ends."""

import dataclasses
import math
import random
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from autotune.cost.predict import CostModel
from autotune.errors import InvalidInput, NothingFits
from autotune.plan.candidate import Candidate, Outcome, TrialResult
from autotune.search import next as next_module
from autotune.search.next import (
    MAX_GROWTH,
    SAFE_SHARE,
    ResidualSearch,
    SearchLimits,
    best_seconds,
    memory_upper_bound,
)
from autotune.search.space import SearchSpace, build_search_space, expand_block_counts
from autotune.search.study import run_search
from autotune.search.winner import choose_winner, explain_choices, require_winner, score_trials
from tests import builders

GIB = 2**30
CAPABILITIES = (
    "attention.native",
    "attention._native_cudnn",
    "precision.bf16",
    "quantization.torchao-int8",
)
GPU = builders.hardware(*CAPABILITIES, budget_bytes=100 * GIB, compute_capability=(9, 0))
WORK = builders.workload(text_padding="exact")
ON_DEVICE = (
    ("swapped_blocks", "0"),
    ("selective_blocks", "0"),
    ("modulation", "resident"),
    ("norm_rope", "fused"),
)
"""Most of what follows is about other knobs."""
Machine = Callable[[Candidate], TrialResult]


@pytest.fixture(scope="module")
def cost() -> CostModel:
    """The real cost model of Qwen-Image at 512 px, traced once."""
    family = builders.context().family
    return CostModel.build(GPU, WORK, family, family.transformer_config)


@pytest.fixture(scope="module")
def space(cost: CostModel) -> SearchSpace:
    return space_of(cost)


@cache
def space_of(cost: CostModel) -> SearchSpace:
    return expand_block_counts(build_search_space(builders.context(GPU, WORK), ON_DEVICE), cost)


def machine(cost: CostModel, seed: int, wall_bytes: float = math.inf) -> Machine:
    """A hidden truth of another form than the cost model: biased, with interactions, a memory
    wall and 3% noise."""
    rng = random.Random(seed)
    names = ("none", "torchao-int8", "native", "_native_cudnn")
    speed = {name: rng.uniform(0.7, 1.4) for name in names}
    bias, clash, memory_bias = rng.uniform(0.65, 1.35), rng.uniform(0, 0.15), rng.uniform(0.9, 1.1)
    truth = {}
    for candidate in space_of(cost).candidates:
        predicted = cost.predict(candidate)
        time = predicted.step_seconds * bias
        time *= speed[candidate.quantization] * speed[candidate.attention]
        time *= 1 + clash * (candidate.micro_batch_size > 1) * (candidate.quantization != "none")
        memory = predicted.allocated_memory_bytes * memory_bias
        seconds = time * rng.gauss(1, 0.03) if memory <= wall_bytes else None
        truth[candidate] = builders.trial(candidate, seconds, int(memory))
    return truth.__getitem__


def search(
    cost: CostModel,
    run: Machine,
    max_trials: int = 8,
    budget_bytes: int = 100 * GIB,
    *,
    max_seconds: float = 60,
    space: SearchSpace | None = None,
    **options: Any,
) -> tuple[TrialResult, ...]:
    sampler = ResidualSearch(space or space_of(cost), cost, budget_bytes, **options)
    limits = SearchLimits(max_trials=max_trials, max_seconds=max_seconds)
    return run_search(sampler, run, limits, lambda result: None)


@pytest.mark.quick("0", "3")
@pytest.mark.parametrize("seed", range(8))
def test_eight_trials_come_close_to_the_exhaustive_best(
    cost: CostModel, space: SearchSpace, seed: int
) -> None:
    run = machine(cost, seed)
    exhaustive = min(run(c).median_step_seconds or math.inf for c in space.candidates)
    results = search(cost, run)
    found = best_seconds(results)
    assert len(results) <= 8
    assert found <= 1.10 * exhaustive


@pytest.mark.quick("stock")
@pytest.mark.parametrize(("stock_is", "ends_with"), [(0.8, "stock"), (1.2, "fused")])
def test_what_a_rule_settled_is_compared_once(
    cost: CostModel, stock_is: float, ends_with: str
) -> None:
    pins = (*ON_DEVICE[:-1], ("quantization", "none"))
    free = expand_block_counts(build_search_space(builders.context(GPU, WORK), pins), cost)

    def run(candidate: Candidate) -> TrialResult:
        expected = cost.predict(candidate.changed(norm_rope="fused"))
        seconds = expected.step_seconds * (stock_is if candidate.norm_rope == "stock" else 1.0)
        return builders.trial(candidate, seconds, expected.allocated_memory_bytes)

    results = search(cost, run, 20, max_seconds=math.inf, space=free)
    (compared_at,) = (
        number for number, result in enumerate(results) if result.candidate.norm_rope == "stock"
    )
    fastest = min(
        results[:compared_at], key=lambda result: result.median_step_seconds or math.inf
    ).candidate
    assert results[compared_at].candidate == fastest.changed(norm_rope="stock")
    winner = choose_winner(score_trials(results), "throughput")
    assert winner is not None
    assert winner.candidate.norm_rope == ends_with
    reasons = explain_choices(free, score_trials(results), winner, "throughput")
    (reason,) = (reason for reason in reasons if reason.knob == "norm_rope")
    loser = next(item for item in reason.rejected if item.choice in {"stock", "fused"})
    assert reason.chosen == ends_with
    assert "x the step time" in loser.reason


def test_on_shared_memory_trials_never_reach_far_beyond_what_has_run(
    cost: CostModel, space: SearchSpace
) -> None:
    run, budget = machine(cost, 3), 60 * GIB
    predicted = {c: cost.predict(c).run_memory_bytes for c in space.candidates}
    results = search(cost, run, 10, budget, ascending=True)
    for number, result in enumerate(results[1:], start=1):
        largest = max(
            predicted[earlier.candidate] for earlier in results[:number] if earlier.outcome == "ok"
        )
        # Predictions are corrected between the trials, by up to the simulated bias of 10% and what
        # is left uncertain.
        assert predicted[result.candidate] <= 1.25 * max(MAX_GROWTH * largest, SAFE_SHARE * budget)


@pytest.mark.slow
def test_blocks_are_swapped_only_as_far_as_memory_asks_and_not_at_first(cost: CostModel) -> None:
    """A block that stays on the device never makes a step slower."""
    free, budget = (
        expand_block_counts(build_search_space(builders.context(GPU, WORK)), cost),
        30 * GIB,
    )
    sampler = ResidualSearch(free, cost, budget)
    remaining = [scored.candidate for scored in sampler.remaining(())]
    alike = {candidate.changed(swapped_blocks=0) for candidate in remaining}
    siblings = defaultdict(list)
    for candidate in free.candidates:
        siblings[candidate.changed(swapped_blocks=0)].append(candidate)
    assert len(alike) == len(remaining), "of what differs in swapped blocks alone, one"
    assert any(candidate.swapped_blocks for candidate in remaining)
    for candidate in remaining:
        if candidate.swapped_blocks:
            fewer = [
                c
                for c in siblings[candidate.changed(swapped_blocks=0)]
                if c.swapped_blocks < candidate.swapped_blocks
            ]
            assert all(cost.predict(c).run_memory_bytes >= budget for c in fewer)
    first = sampler.next_candidate(())
    assert first is not None
    assert first.swapped_blocks == 0
    ran = builders.trial(first, 1.0, 20 * GIB)
    assert not [
        c for c in sampler.remaining((ran,)) if c.candidate.changed(swapped_blocks=0) == first
    ]


def test_no_candidate_is_tried_twice(cost: CostModel) -> None:
    tried = [result.candidate for result in search(cost, machine(cost, 1), max_trials=12)]
    assert len(set(tried)) == len(tried) >= 6


def test_the_first_trial_is_the_fastest_that_surely_fits_or_the_smallest(
    cost: CostModel, space: SearchSpace
) -> None:
    predictions = {candidate: cost.predict(candidate) for candidate in space.candidates}
    safe_bytes = SAFE_SHARE * 100 * GIB
    safe = [each for each in predictions.values() if memory_upper_bound(each) <= safe_bytes]
    least = min(each.run_memory_bytes for each in predictions.values())
    roomy, tight = (
        ResidualSearch(space, cost, budget).next_candidate(())
        for budget in (100 * GIB, 3 * least // 2)
    )
    assert roomy is not None
    assert tight is not None
    assert predictions[roomy].step_seconds == min(each.step_seconds for each in safe)
    assert predictions[tight].run_memory_bytes == least


def test_out_of_memory_teaches_and_does_not_end_the_search(cost: CostModel) -> None:
    wall = 42 * GIB  # of a budget said to be 60: the prediction of what fits is wrong by a third
    results = search(cost, machine(cost, 2, wall_bytes=wall), max_trials=12, budget_bytes=60 * GIB)
    outcomes = [result.outcome for result in results]
    assert "ok" in outcomes
    assert "oom" in outcomes
    assert outcomes.count("oom") <= 4


def test_a_host_that_ran_out_bars_what_needs_more_of_the_host_and_nothing_else(
    cost: CostModel, space: SearchSpace
) -> None:
    plain = space.candidates[0].changed(checkpointed_blocks=59)
    some, many = (plain.changed(swapped_blocks=blocks) for blocks in (10, 50))
    wider = dataclasses.replace(space, candidates=(*space.candidates, some, many))
    sampler = ResidualSearch(wider, cost, 100 * GIB, objective="memory")

    def left(*results: TrialResult) -> set[Candidate]:
        return {scored.candidate for scored in sampler.remaining(results)}

    after = left(builders.trial(some, None, outcome="host_oom"))
    assert after == left() - {some, many}
    device_ran_out = left(builders.trial(some, None, outcome="oom"))
    assert len(device_ran_out) < len(after), "that bars whatever is as large"


@pytest.mark.parametrize("outcome", ["crash", "numerics", "oom", "host_oom", "spill"])
def test_search_survives_any_outcome_everywhere(cost: CostModel, outcome: Outcome) -> None:
    failing = {"seconds": None, "outcome": outcome, "message": "by design"}
    results = search(cost, lambda candidate: builders.trial(candidate, **failing))  # type: ignore[arg-type]
    assert {result.outcome for result in results} == {outcome}
    with pytest.raises(NothingFits, match="by design"):
        require_winner(score_trials(results), "throughput", lambda: "by asking less")


def test_search_ends_when_everything_is_tried(
    cost: CostModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(next_module, "MIN_TRIALS", 500)
    work = builders.workload(quality="exact", effective_batch_size=1)
    plain = builders.hardware("attention.native", "precision.bf16")
    narrow = expand_block_counts(build_search_space(builders.context(plain, work), ON_DEVICE), cost)
    narrow = dataclasses.replace(narrow, candidates=narrow.candidates[:10])
    results = search(cost, lambda candidate: builders.trial(candidate, 1.0), 500, space=narrow)
    assert len(results) == len(narrow.candidates)


def test_time_limit_ends_the_search_after_the_running_trial(cost: CostModel) -> None:
    assert len(search(cost, machine(cost, 0), 50, max_seconds=0)) == 1


def test_where_nothing_is_predicted_to_fit_nothing_is_tried(cost: CostModel) -> None:
    assert search(cost, lambda candidate: pytest.fail("tried"), budget_bytes=10 * GIB) == ()


def test_objectives_choose_the_fastest_or_the_smallest() -> None:
    fast = builders.trial(
        builders.candidate(micro_batch_size=4, checkpointed_blocks=0), seconds=1.0, memory=9 * GIB
    )
    small = builders.trial(builders.candidate(), seconds=2.0, memory=2 * GIB)
    failed = builders.trial(builders.candidate(micro_batch_size=2), seconds=None)
    scores = score_trials((failed, small, fast))
    assert choose_winner(scores, "throughput") == scores[2]
    assert choose_winner(scores, "memory") == scores[1]
    assert choose_winner(scores[:1], "throughput") is None


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        (("torchao-int8", 0, 1.029, 30), ("torchao-fp8", 0, 1.0, 20), "more exact"),
        (("none", 0, 1.029, 40), ("torchao-int8", 0, 1.0, 20), "more exact"),
        (("none", 4, 1.029, 20), ("none", 0, 1.0, 40), "smaller"),
        (("none", 4, 1.0, 20.5), ("none", 4, 1.0, 20, "_native_cudnn"), "simpler"),
        (("none", 0, 1.0, 40), ("none", 4, 1.031, 20), "faster, and no tie"),
    ],
)
def test_ties_go_to_what_is_more_exact_then_smaller_then_simpler(
    one: tuple, other: tuple, why: str
) -> None:  # type: ignore[type-arg]
    def trial(
        quantization: str, blocks: int, seconds: float, gib: float, attention: str = "native"
    ) -> TrialResult:
        settings = builders.candidate(
            quantization=quantization, checkpointed_blocks=blocks, attention=attention
        )
        return builders.trial(settings, seconds, int(gib * GIB))

    for both in ((trial(*one), trial(*other)), (trial(*other), trial(*one))):
        winner = choose_winner(score_trials(both), "throughput")
        assert winner
        assert winner.candidate == trial(*one).candidate, why


def test_what_won_elsewhere_is_tried_first_and_a_kept_promise_ends_the_search(
    cost: CostModel, space: SearchSpace
) -> None:
    winner = space.candidates[7]
    sampler = ResidualSearch(space, cost, 100 * GIB, first=(winner,))
    limits = SearchLimits(max_trials=8, max_seconds=60)
    results = run_search(sampler, machine(cost, 0), limits, lambda r: None, is_enough=bool)
    assert [result.candidate for result in results] == [winner]


def test_workers_at_the_same_time_try_different_combinations(
    cost: CostModel, space: SearchSpace
) -> None:
    run, sampler = machine(cost, 5), ResidualSearch(space, cost, 100 * GIB)
    results = [run(min(space.candidates, key=lambda c: cost.predict(c).run_memory_bytes))]
    taken: set[Candidate] = set()
    for _ in range(4):
        candidate = sampler.next_candidate(results, taken)
        assert candidate
        taken.add(candidate)
    assert len({(c.quantization, c.attention, c.micro_batch_size) for c in taken}) == 4


def test_pins_that_exclude_each_other_are_refused_with_the_reason() -> None:
    with pytest.raises(InvalidInput, match="block swap needs blocks that recompute"):
        build_search_space(
            builders.context(), pins=(("swapped_blocks", "59"), ("checkpointed_blocks", "0"))
        )
