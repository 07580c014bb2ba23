"""The search finds what is good, never repeats, learns and ends; what it leaves out never wins."""

import dataclasses
import math
import operator
import random
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from autotune.cost.predict import CostModel
from autotune.errors import NothingFits
from autotune.plan.candidate import Candidate, TrialResult
from autotune.search.next import MAX_GROWTH, SAFE_SHARE, ResidualSearch, SearchLimits, best_seconds
from autotune.search.space import Mixtures, build_search_space, expand_block_counts, frontier
from autotune.search.study import run_search
from autotune.search.winner import Score, choose_winner, require_winner, score_trials
from tests import builders
from tests.search import machines

GIB = 2**30
CAPABILITIES = (*machines.CAPABILITIES, "quantization.torchao-int8")
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
def cost():
    """The real cost model of Qwen-Image at 512 px, traced once."""
    family = builders.context().family
    return CostModel.build(GPU, WORK, family, family.transformer_config)


@pytest.fixture(scope="module")
def space(cost):
    return space_of(cost)


@cache
def space_of(cost):
    return expand_block_counts(build_search_space(builders.context(GPU, WORK), ON_DEVICE), cost)


def machine(cost, seed, wall_bytes=math.inf):
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
    cost, run, max_trials=8, budget_bytes=100 * GIB, *, max_seconds=60, space=None, **options
):
    sampler = ResidualSearch(space or space_of(cost), cost, budget_bytes, **options)
    limits = SearchLimits(max_trials=max_trials, max_seconds=max_seconds)
    return run_search(sampler, run, limits, lambda result: None)


@pytest.mark.quick("3")
@pytest.mark.parametrize("seed", range(8))
def test_eight_trials_come_close(cost, space, seed):
    run = machine(cost, seed)
    exhaustive = min(run(c).median_step_seconds or math.inf for c in space.candidates)
    results = search(cost, run)
    found = best_seconds(results)
    assert len(results) <= 8
    assert found <= 1.10 * exhaustive


@pytest.mark.quick("stock")
@pytest.mark.parametrize(("stock_is", "ends_with"), [(0.8, "stock"), (1.2, "fused")])
def test_what_rule_settled_is_compared_once(cost, stock_is, ends_with):
    pins = (*ON_DEVICE[:-1], ("quantization", "none"))
    free = expand_block_counts(build_search_space(builders.context(GPU, WORK), pins), cost)

    def run(candidate):
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
    assert winner.candidate.norm_rope == ends_with


def test_shared_memory_grows_in_steps(cost, space):
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


def test_no_candidate_is_tried_twice(cost):
    tried = [result.candidate for result in search(cost, machine(cost, 1), max_trials=12)]
    assert len(set(tried)) == len(tried) >= 6


def test_running_out_teaches(cost):
    wall = 42 * GIB  # of a budget said to be 60: the prediction of what fits is wrong by a third
    results = search(cost, machine(cost, 2, wall_bytes=wall), max_trials=12, budget_bytes=60 * GIB)
    outcomes = [result.outcome for result in results]
    assert "ok" in outcomes
    assert "oom" in outcomes
    assert outcomes.count("oom") <= 5


def test_short_hosts_bar_host_users(cost, space):
    plain = space.candidates[0].changed(checkpointed_blocks=59)
    some, many = (plain.changed(swapped_blocks=blocks) for blocks in (10, 50))
    wider = dataclasses.replace(space, candidates=(*space.candidates, some, many))
    sampler = ResidualSearch(wider, cost, 100 * GIB, objective="memory")

    def left(*results):
        return {scored.candidate for scored in sampler.remaining(results)}

    after = left(builders.trial(some, None, outcome="host_oom"))
    assert after == left() - {some, many}
    device_ran_out = left(builders.trial(some, None, outcome="oom"))
    assert len(device_ran_out) < len(after), "that bars whatever is as large"


@pytest.mark.parametrize("outcome", ["crash", "numerics", "oom", "host_oom", "spill"])
def test_search_survives_any_outcome_everywhere(cost, outcome):
    failing = {"seconds": None, "outcome": outcome, "message": "by design"}
    results = search(cost, lambda candidate: builders.trial(candidate, **failing))
    assert {result.outcome for result in results} == {outcome}
    with pytest.raises(NothingFits, match="by design"):
        require_winner(score_trials(results), "throughput", lambda: "by asking less")


def test_hopeless_searches_try_nothing(cost):
    assert search(cost, lambda candidate: pytest.fail("tried"), budget_bytes=10 * GIB) == ()


scored = st.builds(
    Score,
    st.builds(
        builders.candidate,
        quantization=st.sampled_from(["none", "torchao-int8", "torchao-fp8"]),
        attention=st.sampled_from(["native", "_native_cudnn"]),
        swapped_blocks=st.sampled_from([0, 4]),
        checkpointed_blocks=st.integers(0, 9),
    ),
    st.sampled_from([1.0, 1.029, 1.031, 1.5]),
    st.sampled_from([20 * GIB, int(20.5 * GIB), 21 * GIB, 40 * GIB]),
    st.sampled_from([None, None, "oom"]),
    st.sampled_from([4 * GIB, 5 * GIB, 6 * GIB, 7 * GIB]),
)


@settings(max_examples=200)
@given(st.lists(scored, max_size=12), st.sampled_from(["throughput", "memory"]))
def test_winners_pass_every_rule_in_order(scores, objective):
    names = ("step_seconds", "peak_memory_bytes", "host_memory_bytes")
    time, memory, host = map(operator.attrgetter, names)

    def error(one):
        return {"none": 0, "torchao-int8": 1, "torchao-fp8": 2}[one.candidate.quantization]

    def complexity(one):
        changed = one.candidate.differences(builders.candidate())
        return len(changed.keys() - {"checkpointed_blocks"})

    first, second = (time, memory) if objective == "throughput" else (memory, time)
    last = [(complexity, 0, 0), (second, 0.03, 0)]
    rules = [(first, 0.03, 0), (host, 0, 2 * GIB), (error, 0, 0)]
    left = [score for score in scores if not score.failure]
    for key, share, more in rules + (last if first is time else last[::-1]):
        left = [one for one in left if key(one) <= (1 + share) * min(map(key, left)) + more]
    best = min(left, key=lambda one: (first(one), second(one)), default=None)
    assert choose_winner(scores, objective) == best


points = st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=1, max_size=60)


def mixtures_of(pairs):
    num_bytes, seconds = np.array(pairs).T
    return Mixtures(np.arange(4 * len(pairs)).reshape(-1, 4), num_bytes, seconds)


@given(points)
def test_frontier_holds_exactly_what_nothing_beats(pairs):
    kept = frontier(mixtures_of(pairs))
    found = set(zip(kept.num_bytes, kept.seconds, strict=True))
    wanted = {
        (a, b)
        for a, b in pairs
        if not any((x <= a and y <= b) and (x, y) != (a, b) for x, y in pairs)
    }
    assert found == wanted
    assert len(kept.num_bytes) == len(found)
