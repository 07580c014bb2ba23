"""What follows from a request before anything is tried; and what the planner says of other requests
is predicted, and true of its own predictions."""

import math
import re
from contextlib import contextmanager
from dataclasses import replace

import pytest

from autotune.errors import InvalidInput, NothingFits
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.registry import KNOBS
from autotune.plan.candidate import PhasePeak
from autotune.search.problem import PlanningProblem, advise_choices
from autotune.search.space import build_search_space
from autotune.search.trials import ProcessTrialRunner
from autotune.search.winner import TIE
from autotune.train.fit import hardware_misfits
from autotune.train.prepare import prepare
from tests import builders
from tests.builders import trial
from tests.search.formula import GIB, FormulaCostModel
from tests.search.machines import CAPABILITIES, HARDWARE, make_plan, request, surroundings

pytestmark = pytest.mark.usefixtures("_by_formula")


@pytest.mark.parametrize(("budget_gib", "strategy"), [(9, "ddp"), (7, "ddp"), (5, "fsdp2")])
def test_models_are_sharded_if_needed(budget_gib, strategy, monkeypatch):
    """A step needs 8.1 GiB as int8, where the weights alone take 6, and 5.2 as nf4."""

    def weight_bytes(cost, candidate):
        whole = 6 * GIB * WEIGHT_FORMATS[candidate.quantization].bytes_per_parameter
        return int(whole / cost.parallel.num_shards)

    def formula(cost, candidate):  # if blocks could be swapped, it would cost nothing
        allocated, seconds = plain(cost, candidate)
        return allocated - GIB * candidate.swapped_blocks / 60, seconds

    plain = FormulaCostModel._formula
    monkeypatch.setattr(FormulaCostModel, "_formula", formula)
    monkeypatch.setattr(FormulaCostModel, "weight_bytes", weight_bytes)
    capabilities = (*CAPABILITIES, "quantization.torchao-int8", "quantization.bnb-nf4")
    hardware = builders.hardware(*capabilities, budget_bytes=budget_gib * GIB)
    asked = request(effective_batch_size=4, quality="compact", num_gpus=4, hardware="another")
    case, pinned = (
        PlanningProblem.build(each, hardware, surroundings())
        for each in (asked, asked.changed(pins={"swapped_blocks": "0"}))
    )
    assert case.cost.parallel.strategy == strategy
    assert case.space.candidates == pinned.space.candidates


def test_epochs_without_data_are_steps():
    asked = request(num_train_epochs=10, effective_batch_size=4, hardware="another")
    hardware = builders.hardware(*CAPABILITIES)
    assert PlanningProblem.build(asked, hardware, surroundings()).job.num_steps == 50


@pytest.mark.quick("1")
@pytest.mark.parametrize(("num_processes", "budget_gib"), [(1, 14), (4, 7.2)])
def test_named_relaxations_really_fit(num_processes, budget_gib):
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
def test_larger_batches_keep_settings_that_run(settings):
    """A batch of captions that differ in length needs a mask; swapped blocks have to recompute."""
    work = builders.workload(effective_batch_size=1)
    context = builders.context(HARDWARE, work)
    asked = []

    class Watched(FormulaCostModel):
        def predict(self, candidate):
            asked.append(candidate)
            return super().predict(candidate)

    device = HARDWARE.device.changed(budget_bytes=100 * 2**30)
    cost = Watched(HARDWARE.changed(device=device), work, context.family)
    best = builders.candidate(**settings)
    advise_choices(build_search_space(context), cost, best, 100.0)
    assert not [one for one in asked for knob in KNOBS if knob.why_not(one, context)]
    assert bool({*asked} - {best}) is ("swapped_blocks" in settings)


@pytest.mark.parametrize("excluded", [(), (("quantization", "bnb-nf4"),)])
def test_excluded_formats_are_not_advised(excluded):
    hardware = builders.hardware(*CAPABILITIES, "quantization.bnb-nf4")
    context = builders.context(hardware, builders.workload())
    cost = FormulaCostModel(hardware, context.workload, context.family)
    space = build_search_space(context, exclusions=excluded)
    advice = advise_choices(space, cost, builders.candidate(), 100.0)
    assert any("--quality compact" in line for line in advice) is not bool(excluded)


def planned_seconds(budget_gib=20, host_gib=64, **changes):
    capabilities = (*CAPABILITIES, "quantization.torchao-int8", "quantization.bnb-nf4")
    made = builders.hardware(*capabilities, budget_bytes=budget_gib * GIB)
    host = {"memory_bytes": host_gib * GIB, "available_memory_bytes": host_gib * GIB * 9 // 10}
    asked = request(hardware="another", **changes)
    plan = make_plan(asked, made.changed(host=made.host.changed(**host)))
    return plan.frozen.expected.step_seconds


def seconds(*sizes, **changes):
    try:
        return planned_seconds(*sizes, **changes)
    except NothingFits:
        return math.inf


def test_short_system_ram_is_told(monkeypatch):
    resident = FormulaCostModel._formula

    def formula(cost, candidate):
        allocated, seconds = resident(cost, candidate)
        return allocated - GIB * candidate.swapped_blocks, seconds

    monkeypatch.setattr(FormulaCostModel, "_formula", formula)
    asked = {"quality": "exact", "resolution": (1536, 1536)}
    with pytest.raises(NothingFits, match="of system RAM") as short:
        planned_seconds(14, 8, **asked)
    (enough,) = re.findall(r"--host-memory (\d+)GiB", short.value.hint)
    assert planned_seconds(14, int(enough), **asked) > 0


@pytest.mark.parametrize("budget_gib", [11, 16])
def test_more_freedom_never_gives_slower_plan(budget_gib):
    """Of a looser floor, no pins, or more memory of device and host; but for the width of a tie."""
    free = seconds(budget_gib, quality="compact") / (1 + TIE)
    assert free <= seconds(budget_gib, quality="high")
    assert free <= seconds(budget_gib, quality="compact", pins=(("swapped_blocks", "0"),))
    assert free <= seconds(budget_gib - 2, quality="compact")
    assert free <= seconds(budget_gib, 24, quality="compact")
    assert free < math.inf


PROCESS_BYTES = GIB * 3 // 2
CACHING_BYTES = GIB // 2
"""What the text encoder takes beyond a step."""


def machine(budget_bytes):
    made = builders.hardware(*CAPABILITIES, kind="cpu", budget_bytes=budget_bytes)
    return made.changed(device=made.device.changed(memory_kind="host", compute_capability=None))


def backend():
    """Trials that are measured as on a CPU, and judged as by the real runner."""

    def measure(cost, candidate, *, confirms=False):
        tensors = int(1.01 * cost.predict_uncalibrated(candidate).allocated_memory_bytes)
        host = {"training": tensors + PROCESS_BYTES}
        host["caching"] = host["training"] + CACHING_BYTES
        phases = [
            PhasePeak(name=name, seconds=1.0, device_bytes=None, host_bytes=size)
            for name, size in host.items()
        ]
        seconds = 5 - 0.01 * tensors / GIB  # the larger, the faster
        measured = {"host_memory_bytes": host["training"], "wall_seconds": 1.0}
        measured["phases"] = tuple(phases) if confirms else ()
        result = trial(candidate, seconds, tensors, confirms=confirms, **measured)
        budget, kept = cost.budget_bytes, cost.resident_encoder_bytes
        how = {"budget_bytes": budget, "resident_bytes": kept}
        with ProcessTrialRunner(cost.hardware, None, cost.workload, **how) as runner:
            return runner.classify(candidate, result)

    @contextmanager
    def trials(model, cost):
        yield lambda candidate: measure(cost, candidate)

    def rehearse(model, cost, candidate, max_seconds):
        return measure(cost, candidate, confirms=True)

    return replace(surroundings(), trials=trials, rehearse=rehearse)


def test_plan_check_and_train_agree():
    fitting = []
    for eighths in range(19 * 8, 13 * 8, -16):
        hardware = machine(eighths * GIB // 8)
        try:
            plan = make_plan(request(max_trials=8), hardware, backend=backend())
        except NothingFits:
            fitting.append(False)
            continue
        fitting.append(True)
        assert plan.frozen.trials[-1].confirms
        assert plan.frozen.expected.run_memory_bytes <= hardware.device.budget_bytes
        assert hardware_misfits(plan, hardware) == ()  # what `check` asks
        with pytest.raises(InvalidInput, match="names no data"):  # `train` gets beyond the machine
            prepare(plan, hardware, resume=False)
    assert fitting == sorted(fitting, reverse=True)
    assert {True, False} == set(fitting)
