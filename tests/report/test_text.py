"""Closed pipes, control characters, plans side by side, and whose each value is."""

import os
import subprocess
import sys

import pytest

from autotune.cli.terminal import err, out
from autotune.plan.file import with_job
from autotune.plan.prediction import StepTime
from autotune.report.plan import differences, origin_lines
from autotune.report.run import report_lines
from tests.plan.test_file import make_plan
from tests.report.page.pages import golden_plan, run_report


@pytest.mark.slow
def test_closed_pipes_end_nothing() -> None:
    code = "from autotune.cli.terminal import err, out; [err.print('x' * 99) for _ in range(9999)]"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", f"{code}; out.print('done')"]
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=writer, check=False)
    os.close(writer)
    assert (process.returncode, process.stdout) == (0, b"done\n")


def test_control_characters_are_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    for console in (out, err):
        console.print("one \x1b[2J\x9b2J\u202e\udcff :cat: [red]\ntwo")
    printed = capfd.readouterr()
    assert printed.out == printed.err == "one ?[2J?2J?? :cat: [red]\ntwo\n"


def test_predicted_differences_are_uncertain() -> None:
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


def test_the_largest_wait_limits_a_run() -> None:
    kinds = [name for name in StepTime.model_fields if name != "recompute_seconds"]
    time = StepTime(**dict.fromkeys(kinds, 1.0), recompute_seconds=0.0)
    waits = time.waits(data_seconds=1.0)
    assert sum(waits.values()) == len(kinds) + 1
    assert set(waits) == {"compute", "bandwidth", "transfer", "data", "host"}
    report = run_report(golden_plan()).changed(limited_by="data")
    assert "limited by data" in report_lines(report)


def test_changed_values_are_the_users() -> None:
    lines = origin_lines(with_job(make_plan(), learning_rate=3e-4, timestep_shift=2.2))
    ours = next(at for at, line in enumerate(lines) if line.startswith("we set"))
    assert any("learning rate 0.0003" in line for line in lines[:ours])
    assert any("shift 2.2" in line for line in lines[ours:])
