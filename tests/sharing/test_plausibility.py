"""What physics forbids is named; what real machines measured is never refused."""

import pytest

from autotune.hardware.catalog import load_catalog
from autotune.schema.plan import Expected
from autotune.schema.trial import TrialResult
from autotune.sharing.plausibility import find_impossibilities
from autotune.sharing.record import Record
from tests.builders import GIB, candidate, trial, workload
from tests.sharing.examples import machine, plan, rate, record

INT8 = candidate(quantization="torchao-int8")
LESS = candidate(quantization="torchao-int8", checkpointed_blocks=1)


def claiming(*trials: TrialResult, **changes: object) -> Record:
    """A record that promises what its first trial says."""
    first = trials[0]
    seconds, memory = first.median_step_seconds or 1.0, first.peak_memory_bytes or 1
    expected = Expected(
        evidence="measured",
        step_seconds=abs(seconds) or 1.0,
        images_per_second=4 / (abs(seconds) or 1.0),
        peak_memory_bytes=memory,
        process_memory_bytes=0,
    )
    values = {**dict(record()), "settings": first.candidate, "trials": trials, "expected": expected}
    return Record.model_validate(values | changes)


def test_true_records_are_believed() -> None:
    assert find_impossibilities(record()) == ()
    assert find_impossibilities(claiming(trial(INT8, 1.0, 21 * GIB))) == ()


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (claiming(trial(INT8, 0.001, 21 * GIB)), "faster than the device's peak allows"),
        (claiming(trial(INT8, 0.1, 21 * GIB)), "faster than the device's peak allows"),
        (claiming(trial(INT8, 2.0, 10 * GIB)), "less than its weights"),
        (claiming(trial(candidate(), 2.0, 22 * GIB)), "less than its weights"),
        (claiming(trial(INT8, 2.0, 40 * GIB)), "more than the device has"),
        (claiming(trial(INT8, 2.0, 21 * GIB, step_seconds=(2.0, 0.0, 2.0))), "took no time"),
        (claiming(trial(INT8, 2.0, 21 * GIB, step_seconds=(2.0, -1.0, 2.0))), "took no time"),
        (claiming(trial(INT8, 2.0, 21 * GIB), TrialResult(candidate=INT8, outcome="ok")),
        "no times"),
        # something else ran meanwhile
        (claiming(trial(INT8, 1.5, 21 * GIB), trial(LESS, 4.0, 21 * GIB)), None),
        (
            claiming(
                trial(INT8, 2.0, 23 * GIB),
                trial(LESS, 2.0, 20 * GIB),
                machine=record(machine(total_memory_bytes=None)).machine,
            ),
            None,
        ),
        (claiming(trial(INT8, 2.0, int(19.5 * GIB)), expected=record().expected),
        "promises a peak"),
        (
            claiming(trial(INT8, 2.0, 21 * GIB),
            expected=record().expected.model_copy(update={"step_seconds": 0.5})),
            "promises a step time",
        ),
    ],
)  # fmt: skip
def test_what_no_device_can_do_is_named(made: Record, named: str | None) -> None:
    if named is None:
        assert find_impossibilities(made) == ()
    else:
        assert any(named in reason for reason in find_impossibilities(made))


def test_an_unknown_gpu_is_measured_against_the_fastest_known() -> None:
    unheard = record(machine(name="NVIDIA Future 9", total_memory_bytes=None)).machine
    assert find_impossibilities(claiming(trial(INT8, 0.5, 21 * GIB), machine=unheard)) == ()
    assert find_impossibilities(claiming(trial(INT8, 1e-4, 21 * GIB), machine=unheard))


@pytest.mark.parametrize("gpu", load_catalog(), ids=lambda gpu: gpu.id)
def test_a_run_at_half_the_peak_is_believed_on_every_gpu(gpu) -> None:
    """6.5 PFLOP is what a step of 4 images of 1,024 tokens through 20 billion parameters really
    takes, about.
    """
    here = machine(
        name=gpu.name, total_memory_bytes=gpu.memory_bytes, budget_bytes=gpu.memory_bytes
    )
    work = workload()
    flops = 6 * work.model.num_parameters / 2 * 1100 * work.effective_batch_size
    reading = 3 * 4 * work.model.num_parameters / (gpu.memory_gb_per_second * 1e9)
    seconds = max(flops / (0.5e12 * gpu.training_tflops), reading)
    ran = trial(INT8, seconds, int(0.95 * gpu.memory_bytes))
    reasons = find_impossibilities(claiming(ran, machine=record(here).machine))
    assert not [reason for reason in reasons if "faster" in reason or "more than" in reason]


@pytest.mark.parametrize(
    ("name", "value"), [("memory.bandwidth", 9e12), ("matmul.bf16.4096x3072x3072", 9e15)]
)
def test_rates_that_would_cover_for_false_trials_are_named(name: str, value: float) -> None:
    assert f"its rate {name} is above the device's peak" in find_impossibilities(
        record(machine(rates=(rate(name, value),)))
    )


def test_a_record_full_of_trials_is_judged_quickly() -> None:
    many = tuple(
        trial(candidate(quantization="torchao-int8", checkpointed_blocks=i), 2.0, 21 * GIB)
        for i in range(512)
    )
    assert find_impossibilities(claiming(*many)) == ()
    assert plan().frozen.trials
