"""Which records count: match keys decide and are named, soft ones shade, libraries touch only
their own trials."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.share.warm_start import compare, compare_machine, usable_trials
from tests.builders import GIB, candidate, trial, workload
from tests.share.examples import TRIALS, machine, rate, record

FASTER = (rate("memory.bandwidth", 1.8e12), rate("matmul.bf16.4096x3072x3072", 1.5e14))
SLOWER = (rate("memory.bandwidth", 7.5e11), rate("matmul.bf16.4096x3072x3072", 1.25e14))
WITHIN = (rate("memory.bandwidth", 9.5e11), rate("matmul.bf16.4096x12288x3072", 1.45e14))


def test_the_same_machine_and_work_are_exact() -> None:
    found = compare(record(), machine(), workload())
    assert (found.kind, found.distance, found.reasons) == ("exact", 0.0, ())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"torch": "2.12.1"}, "torch version: 2.13 there, 2.12 here"),
        ({"memory_kind": "integrated"}, "memory kind: discrete there, integrated here"),
        ({"memory_model": "wsl"}, "operating system's memory model: linux there, wsl here"),
    ],
)
def test_a_hard_key_that_differs_decides_and_is_named(
    change: dict[str, object], named: str
) -> None:
    found = compare(record(), machine(**change), workload())
    assert (found.kind, found.distance, found.reasons[-1]) == ("none", math.inf, named)
    assert len(found.reasons) == 1


@pytest.mark.parametrize(
    ("capability", "there", "here", "counts"),
    [
        ((9, 0), "9.15.1", "9.20.0", False),  # native is cuDNN's kernel, and another version of it
        ((9, 0), "9.14.0", "9.15.1", False),  # native was flash, and is cuDNN's
        ((9, 0), "9.13.0", "9.14.0", True),  # flash both times
        ((8, 9), "9.15.1", "9.20.0", True),  # flash on every Ada card
    ],
)
def test_trials_of_native_count_while_the_kernel_behind_it_is_the_same(
    capability: tuple[int, int], there: str, here: str, counts: bool
) -> None:
    plain = trial(candidate(), 1.8, 42 * GIB)
    made = record(
        machine(compute_capability=capability, cudnn=there),
        trials=(plain,),
        settings=plain.candidate,
    )
    found = compare_machine(made, machine(compute_capability=capability, cudnn=here))
    assert (found.kind != "none") == counts
    assert counts or found.reasons == (f"trials on cudnn: {there} there, {here} here",)


@pytest.mark.parametrize(
    ("library", "quantization", "attention"),
    [
        ("torchao", "torchao-int8", "native"),
        ("flash_attn_3", "none", "flash-3"),
        ("cudnn", "none", "_native_cudnn"),
    ],
)
def test_a_library_of_another_version_takes_only_the_trials_that_used_it(
    library: str, quantization: str, attention: str
) -> None:
    plain = trial(candidate(), 2.0, 23 * GIB)
    using = trial(candidate(quantization=quantization, attention=attention), 1.9, 23 * GIB)
    made = record(settings=plain.candidate, trials=(using, plain))
    here = machine(**{library: "99.1"})
    found = compare_machine(made, here)
    assert found.kind == "near"
    assert any(reason.startswith(f"trials on {library}: ") for reason in found.reasons)
    assert usable_trials(made, here) == (plain,)
    alone = record(settings=using.candidate, trials=(using,))
    assert compare_machine(alone, here).kind == "none"


def test_more_memory_than_where_it_was_short_makes_a_prior() -> None:
    found = compare(record(machine(budget_bytes=20 * GIB)), machine(), workload())
    assert (found.kind, found.reasons) == ("near", ("memory budget: 0.83 times ours",))
    roomy = record(
        machine(budget_bytes=20 * GIB), trials=(trial(TRIALS[1].candidate, 1.8, 15 * GIB),)
    )
    assert compare(roomy, machine(), workload()).kind == "exact"
    assert compare(record(), machine(budget_bytes=20 * GIB), workload()).kind == "exact"


VERSIONS = st.sampled_from(["1.0", "2.0.1", None])


@settings(max_examples=25)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "torchao": VERSIONS,
            "name": st.sampled_from(["A", "B"]),
            "total_memory_bytes": st.sampled_from([None, 24 * GIB]),
            "power_limit_watts": st.sampled_from([None, 0.0, 100.0, 450.0]),
            "rates": st.sampled_from([(), FASTER, WITHIN]),
            "memory_kind": st.sampled_from(["discrete", "coherent"]),
        },
    ),
    st.booleans(),
)
def test_distance_tells_kind_and_is_the_same_both_ways(
    change: dict[str, object], other_work: bool
) -> None:
    here, there = machine(**change), machine()
    work = workload(rank=64) if other_work else workload()
    one = compare(record(there), here, work)
    two = compare(record(here, work), there, workload())
    assert one.kind == two.kind
    assert one.distance == pytest.approx(two.distance)
    assert (one.kind == "none") == math.isinf(one.distance)
    assert (one.kind == "exact") == (not one.reasons)
    assert one.distance >= 0
    assert set(usable_trials(record(there), here)) <= set(record().trials)


def test_what_other_work_on_a_machine_does_to_rates_makes_it_no_other_machine() -> None:
    assert compare(record(), machine(rates=SLOWER), workload()).kind == "near"
    assert compare(record(), machine(rates=SLOWER, noisy=True), workload()).kind == "exact"
    assert compare(record(), machine(rates=FASTER, noisy=True), workload()).kind == "near"
