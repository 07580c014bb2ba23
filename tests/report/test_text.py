"""Closed pipes, control characters, plans side by side, and whose each value is."""

import os
import subprocess
import sys

import pytest

from autotune.cli.terminal import err, out
from autotune.events import CandidatesPredicted
from autotune.plan.file import with_job
from autotune.plan.prediction import Prediction, StepTime
from autotune.report.plan import differences, job_text, origin_lines, prediction_lines
from autotune.report.run import missed_promises, report_lines
from tests.plan.test_file import make_plan
from tests.report.page.pages import golden_plan, run_report


@pytest.mark.slow
def test_closed_pipes_end_nothing():
    code = "from autotune.cli.terminal import err, out; [err.print('x' * 99) for _ in range(9999)]"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", f"{code}; out.print('done')"]
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=writer, check=False)
    os.close(writer)
    assert (process.returncode, process.stdout) == (0, b"done\n")


def test_control_characters_are_replaced(capfd):
    for console in (out, err):
        console.print("one \x1b[2J\x9b2J\u202e\udcff :cat: [red]\ntwo")
    printed = capfd.readouterr()
    assert printed.out == printed.err == "one ?[2J?2J?? :cat: [red]\ntwo\n"


def test_predicted_differences_are_uncertain():
    measured = golden_plan()
    expected = measured.frozen.expected.changed(
        evidence="predicted", time_uncertainty=0.62, step_seconds=3600.0
    )
    predicted = measured.changed(frozen=measured.frozen.changed(expected=expected))
    found = {one.name: one for one in differences(measured, predicted)}
    step = found["step_seconds"]
    assert (step.first, step.second) == (measured.frozen.expected.step_seconds, 3600.0)
    assert (step.first_uncertainty, step.second_uncertainty) == (None, 0.62)
    assert step.ratio == pytest.approx(3600.0 / measured.frozen.expected.step_seconds)


def test_the_largest_wait_limits_a_run():
    kinds = [name for name in StepTime.model_fields if name != "recompute_seconds"]
    time = StepTime(**dict.fromkeys(kinds, 1.0), recompute_seconds=0.0)
    waits = time.waits(data_seconds=1.0)
    assert sum(waits.values()) == len(kinds) + 1
    assert set(waits) == {"compute", "bandwidth", "transfer", "data", "host"}
    report = run_report(golden_plan()).changed(limited_by="data")
    assert "limited by data" in report_lines(report)


def test_what_missed_its_promise_is_told():
    plan = golden_plan()
    kept = run_report(plan).changed(
        measured_step_seconds=plan.frozen.expected.step_seconds,
        expected_run_memory_bytes=480 << 20,
        run_memory_bytes=481 << 20,
    )
    assert not missed_promises(kept)
    missed = missed_promises(kept.changed(run_memory_bytes=624 << 20))
    assert missed == ["run memory was 30% more than the plan promised"]
    assert f"warning: {missed[0]}" in report_lines(kept.changed(run_memory_bytes=624 << 20))


def test_epochs_are_told_as_steps_and_time():
    plan = with_job(golden_plan(), data="photos")
    asked = plan.changed(job=plan.job.changed(num_train_epochs=10))
    assert job_text(asked) == f"10 epochs, {job_text(plan)}"


def test_predictions_show_the_chosen_among_the_faster():
    frozen = golden_plan().frozen
    assert frozen.forecast is not None
    settings, step_time = frozen.settings, frozen.forecast.step_time
    fast = tuple(
        Prediction(
            candidate=settings.changed(checkpointed_blocks=number),
            allocated_memory_bytes=1 << 30,
            run_memory_bytes=1 << 30,
            host_memory_bytes=1 << 30,
            phases=(),
            step_seconds=1.0 + number,
            step_time=step_time,
            images_per_second=1.0,
            memory_uncertainty=0.0,
            time_uncertainty=0.0,
        )
        for number in range(9)
    )
    chosen = fast[7].candidate
    event = CandidatesPredicted(predictions=fast, budget_bytes=1 << 40, chosen=chosen)
    assert sum(" chosen " in line for line in prediction_lines(event)) == 1


def test_changed_values_are_the_users():
    lines = origin_lines(with_job(make_plan(), learning_rate=3e-4, timestep_shift=2.2))
    ours = next(at for at, line in enumerate(lines) if line.startswith("we set"))
    assert any("learning rate 0.0003" in line for line in lines[:ours])
    assert any("shift 2.2" in line for line in lines[ours:])
