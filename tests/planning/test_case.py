"""What follows from a question before anything is tried."""

import contextlib
from dataclasses import replace

import pytest

from autotune.errors import NothingFits
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.plan.candidate import Candidate
from autotune.search.problem import PlanningProblem, drop_beyond_host
from autotune.train.workload import WorkloadOverrides
from tests import builders
from tests.planning.formula import GIB, FormulaCostModel, by_formula
from tests.planning.machines import CAPABILITIES, request, surroundings

pytestmark = pytest.mark.usefixtures("_by_formula")


@pytest.mark.parametrize(("budget_gib", "strategy"), [(9, "ddp"), (7, "ddp"), (5, "fsdp2")])
def test_the_model_is_sharded_only_if_it_fits_a_device_in_no_weight_format(
    budget_gib: int, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step needs 8.1 GiB as int8, where the weights alone take 6, and 5.2 as nf4."""

    def weight_bytes(cost: FormulaCostModel, candidate: Candidate) -> int:
        whole = 6 * GIB * WEIGHT_FORMATS[candidate.quantization].bytes_per_parameter
        return int(
            whole / (cost.parallel.num_processes if cost.parallel.strategy == "fsdp2" else 1)
        )

    monkeypatch.setattr(FormulaCostModel, "weight_bytes", weight_bytes)
    capabilities = (*CAPABILITIES, "quantization.torchao-int8", "quantization.bnb-nf4")
    hardware = builders.hardware(*capabilities, budget_bytes=budget_gib * GIB)
    workload_overrides = replace(
        request().workload_overrides, effective_batch_size=4, quality="compact"
    )
    case = PlanningProblem.build(
        request(workload_overrides=workload_overrides, num_processes=4, is_local=False),
        hardware,
        surroundings(),
    )
    assert case.cost.parallel.strategy == strategy


def test_only_as_many_blocks_are_swapped_as_the_host_has_room_for() -> None:
    """By formula each takes a GiB of it; 48 are available, and 4 are left to it."""
    with by_formula(num_blocks=50):
        case = PlanningProblem.build(request(), builders.hardware(*CAPABILITIES), surroundings())
    deep = case.space.candidates[0].changed(checkpointed_blocks=49, selective_blocks=0)
    every = tuple(deep.changed(swapped_blocks=number) for number in range(50))
    space = drop_beyond_host(replace(case.space, candidates=every), case.cost)
    assert [candidate.swapped_blocks for candidate in space.candidates] == list(range(44))
    refused = [item for item in space.rejected["swapped_blocks"] if "of the host" in item.reason]
    assert [item.choice for item in refused] == [49, 48, 47, 46, 45, 44]
    too_many = replace(case.space, candidates=every[45:])  # as if fewer were excluded
    assert drop_beyond_host(too_many, case.cost).candidates == every[45:46]


def test_a_host_that_is_too_small_for_any_run_is_told_whatever_the_gpu_holds() -> None:
    roomy = builders.hardware(*CAPABILITIES)
    small = roomy.changed(host=roomy.host.changed(available_memory_bytes=GIB // 2))
    with pytest.raises(
        NothingFits, match=r"a run needs 1\.0 GiB of the host's memory, 0\.5 GiB are available"
    ):
        PlanningProblem.build(request(is_local=False), small, surroundings())


ONE_EACH = WorkloadOverrides(size_px=(256, 256), effective_batch_size=8)
"""Work that 8 processes can share."""


@pytest.mark.parametrize(("number", "fits"), [(8, False), (4, True), (1, True)])
def test_a_host_must_hold_what_each_of_its_processes_needs(number: int, fits: bool) -> None:
    """By formula each process takes a GiB of it."""
    roomy = builders.hardware(*CAPABILITIES)
    small = roomy.changed(host=roomy.host.changed(available_memory_bytes=5 * GIB))
    asked = request(workload_overrides=ONE_EACH, num_processes=number, is_local=False)
    expected = pytest.raises(
        NothingFits, match=r"a run's 8 processes need 8\.0 GiB of the host's memory, 5\.0 GiB"
    )
    with contextlib.nullcontext() if fits else expected:
        PlanningProblem.build(asked, small, surroundings())


def test_what_processes_keep_on_their_host_is_counted_for_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By this formula, modulation ahead takes 10 GiB of it for each process; 44 of 48
    may be taken."""
    each = {True: 10 * GIB, False: GIB}
    monkeypatch.setattr(
        FormulaCostModel, "host_memory_bytes", lambda _, one: each[one.modulation == "ahead"]
    )
    several = request(workload_overrides=ONE_EACH, num_processes=8, is_local=False)
    usual = replace(several, num_processes=4)
    offloads = []
    for asked in (several, usual):
        space = PlanningProblem.build(asked, builders.hardware(*CAPABILITIES), surroundings()).space
        offloads.append(any(candidate.modulation == "ahead" for candidate in space.candidates))
    assert offloads == [False, True]
