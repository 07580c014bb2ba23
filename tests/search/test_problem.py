"""What follows from a request before anything is tried; and what the planner says of other requests
is predicted, and true of its own predictions."""

import re

import pytest

from autotune.errors import NothingFits
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.registry import KNOBS
from autotune.plan.candidate import Candidate
from autotune.plan.prediction import Prediction
from autotune.plan.workload import WorkloadRequest
from autotune.search.problem import PlanningProblem, advise_larger_batch
from autotune.search.space import build_search_space
from tests import builders
from tests.search.formula import GIB, FormulaCostModel
from tests.search.machines import CAPABILITIES, HARDWARE, make_plan, request, surroundings

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
    case = PlanningProblem.build(
        request(effective_batch_size=4, quality="compact", num_gpus=4, hardware="another"),
        hardware,
        surroundings(),
    )
    assert case.cost.parallel.strategy == strategy


def test_a_host_that_is_too_small_for_any_run_is_told_whatever_the_gpu_holds() -> None:
    roomy = builders.hardware(*CAPABILITIES)
    small = roomy.changed(host=roomy.host.changed(available_memory_bytes=GIB // 2))
    with pytest.raises(
        NothingFits, match=r"a run needs 1\.0 GiB of the host's memory, 0\.5 GiB are available"
    ):
        PlanningProblem.build(request(hardware="another"), small, surroundings())


ONE_EACH = WorkloadRequest(resolution=(256, 256), effective_batch_size=8)
"""Work that 8 processes can share."""


def test_what_processes_keep_on_their_host_is_counted_for_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By this formula, modulation ahead takes 10 GiB of it for each process; 44 of 48
    may be taken."""
    each = {True: 10 * GIB, False: GIB}
    monkeypatch.setattr(
        FormulaCostModel, "host_memory_bytes", lambda _, one: each[one.modulation == "ahead"]
    )
    several = request(**ONE_EACH.given, num_gpus=8, hardware="another")
    usual = several.changed(num_gpus=4)
    offloads = []
    for asked in (several, usual):
        space = PlanningProblem.build(asked, builders.hardware(*CAPABILITIES), surroundings()).space
        offloads.append(any(candidate.modulation == "ahead" for candidate in space.candidates))
    assert offloads == [False, True]


@pytest.mark.quick("1")
@pytest.mark.parametrize(("num_processes", "budget_gib"), [(1, 14), (4, 7.2)])
def test_every_relaxation_that_is_named_really_fits(num_processes: int, budget_gib: float) -> None:
    hardware = builders.hardware(
        *CAPABILITIES, "quantization.torchao-int8", budget_bytes=int(budget_gib * 2**30)
    )
    tight = request(
        resolution=(2048, 2048),
        quality="exact",
        effective_batch_size=4 * num_processes,
        num_gpus=num_processes,
        hardware="another",
    )
    with pytest.raises(NothingFits) as caught:
        make_plan(tight, hardware)
    hint = caught.value.hint
    named = dict(re.findall(r"--(quality|resolution|batch-size|rank) (\w+)", hint))
    assert named, hint
    fields = {"quality": str, "resolution": int, "batch-size": int, "rank": int}
    for option, value in named.items():
        name = "effective_batch_size" if option == "batch-size" else option
        make_plan(tight.changed(**{name: fields[option](value)}), hardware)


@pytest.mark.parametrize("settings", [{"attention": "flash"}, {"swapped_blocks": 40}])
def test_a_larger_batch_is_predicted_only_with_settings_that_run(
    settings: dict[str, object],
) -> None:
    """A batch of captions that differ in length needs a mask; swapped blocks have to recompute."""
    work = builders.workload(effective_batch_size=1)
    context = builders.context(HARDWARE, work)
    asked: list[Candidate] = []

    class Watched(FormulaCostModel):
        def predict(self, candidate: Candidate) -> Prediction:
            asked.append(candidate)
            return super().predict(candidate)

    device = HARDWARE.device.changed(budget_bytes=100 * 2**30)
    cost = Watched(HARDWARE.changed(device=device), work, context.family)
    advise_larger_batch(build_search_space(context), cost, builders.candidate(**settings), 100.0)  # type: ignore[arg-type]
    assert not [one for one in asked for knob in KNOBS if knob.why_not(one, context)]
    assert bool(asked) is ("swapped_blocks" in settings)
