"""What `plan` and `train` leave on a terminal of 80 columns: enough to decide, little enough to
read."""

import re

import pytest

from autotune.cli.app import _with_loudness_first
from autotune.cli.terminal import show_events
from autotune.events import RunStarted
from autotune.report.text import smoothed
from tests.cli.test_cli import autotune
from tests.report.page.pages import FOLDER, golden_plan, steps_of


def test_training_shows_epoch_smoothed_loss_time_left_and_memory_against_the_promise(
    capfd: pytest.CaptureFixture[str],
) -> None:
    plan = golden_plan()
    steps = [step.changed(epoch=1 + (step.step - 1) // 30) for step in steps_of(100)]
    with show_events() as show:
        show(RunStarted(plan=plan))
        for step in steps:
            show(step)
    lines = capfd.readouterr().err.splitlines()
    assert any(line.startswith("the report") and line.endswith("output/report.html, from the first "
                                                               "preview on")
               for line in lines)  # fmt: skip
    shown = [line for line in lines if re.match(r"\d+/100 ", line)]
    assert len(shown) == 10
    assert max(map(len, lines)) <= 80
    loss = smoothed([step.loss for step in steps[:50]])[-1]
    promise = plan.frozen.expected.run_memory_bytes / 2**30
    assert f"epoch 2  loss {loss:.4f}  1.000 s/step  9.00/{promise:.2f} GiB  50 s left" in shown[4]


def test_spikes_and_the_loss_on_held_out_images_are_shown(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with show_events() as show:
        for step in steps_of(100):
            measured = (
                {"validation_loss": 0.24, "base_validation_loss": 0.25} if step.step == 37 else {}
            )
            show(step.changed(gradient_spikes=step.step // 40, **measured))
    lines = capfd.readouterr().err.splitlines()
    assert (
        "loss on held-out images after step 37: 0.2500 without the adapter, 0.2400 with it (-4.0%)"
        in lines
    )
    shown = [line for line in lines if re.match(r"\d+/100 ", line)]
    assert [" spike" in line for line in shown] == [False] * 3 + [True] * 7
    assert "  1 spike  " in shown[3]
    assert "  2 spikes" in shown[9]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["plan", "--quiet", "--model", "x"], ["--quiet", "plan", "--model", "x"]),
        (["train", "p", "--verbose"], ["--verbose", "train", "p"]),
        (["plan", "--", "--quiet"], ["plan", "--", "--quiet"]),
    ],
)
def test_quiet_and_verbose_may_stand_after_a_command(typed: list[str], meant: list[str]) -> None:
    assert _with_loudness_first(typed) == meant


def test_quiet_says_nothing_but_the_answer() -> None:
    done = autotune("explain", f"{FOLDER}/wall.yaml", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert "attention = " in done.stdout
    assert autotune("--quiet", "models", "--verbose").returncode == 2
