"""What `plan` and `train` leave on a terminal of 80 columns: enough to decide, little enough to
read.
"""

import re
from pathlib import Path

import pytest

from autotune.cli import terminal
from autotune.cli.app import _with_loudness_first
from autotune.cli.output import Progress
from autotune.cli.plan import _ending
from autotune.cli.terminal import show_events
from autotune.knobs import TITLES
from autotune.reporting.run import step_text
from autotune.reporting.text import smoothed
from autotune.schema.candidate import Candidate
from autotune.schema.events import RunStarted, SearchSpaceBuilt, TrialFinished, TrialStarted
from autotune.schema.plan import TrainingPlan
from tests.cli.test_cli import autotune
from tests.planning.test_golden import FOLDER
from tests.reporting.page.pages import golden_plan, steps_of

GOLDEN = ("wall", "known", "measured")


def with_everything_unusual(plan: TrainingPlan) -> TrainingPlan:
    """A plan whose every setting differs from its default, with all notes that there are."""
    values = {
        name: 7 if isinstance(value, int) else "unusual" for name, value in plan.frozen.settings
    }
    frozen = plan.frozen
    caching = frozen.caching.changed(text_encoder_device="cpu")
    expected = frozen.expected.changed(host_memory_bytes=13 << 30)
    return plan.changed(
        frozen=frozen.changed(
            settings=Candidate.model_validate(values), forecast=None, caching=caching,
            expected=expected,
            advice=("an effective batch of 32 " + "is predicted to train more images per second " * 4,),
        )
    )  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_a_plan_ends_with_what_a_person_needs(name: str) -> None:
    plan = golden_plan(name)
    lines = _ending(plan, Path("plan.yaml"))
    text = "\n".join(lines)
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 80
    assert f"micro-batch {plan.frozen.settings.micro_batch_size} (x" in text
    assert f"{plan.frozen.expected.images_per_second:.2f} images/s (measured)" in text
    assert " are left" in text
    assert "reasons: autotune explain; a page with charts: autotune report" in text
    assert "train it with: autotune train plan.yaml" in text
    for setting, value in plan.frozen.settings:
        is_usual = value == Candidate.model_fields[setting].default
        if setting not in ("micro_batch_size", "checkpointed_blocks"):
            assert (f" {TITLES[setting]} " in text) is not is_usual, "defaults are not worth a line"


def test_the_most_unusual_plan_still_fits_a_screen() -> None:
    lines = _ending(with_everything_unusual(golden_plan()), Path("plan.yaml"))
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 80
    assert any("more: `autotune explain` shows all" in line for line in lines)


def test_more_memory_that_would_make_it_faster_is_named() -> None:
    plan = golden_plan("measured")
    forecast = plan.frozen.forecast
    assert forecast
    row = forecast.alternatives[0].changed(
        changes={"micro_batch_size": 1},
        run_memory_bytes=plan.frozen.hardware.budget_bytes + (2 << 30),
        step_seconds=plan.frozen.expected.step_seconds / 2,
    )
    frozen = plan.frozen.changed(forecast=forecast.changed(alternatives=(row,)))
    text = " ".join(" ".join(_ending(plan.changed(frozen=frozen), Path("plan.yaml"))).split())
    assert (
        "faster with 2.00 GiB more memory other settings are predicted to be 2.00x as fast" in text
    )


def test_verbose_tells_every_setting_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Progress, "is_verbose", True)
    plan = golden_plan()
    lines = _ending(plan, Path("plan.yaml"))
    assert all(any(line.startswith(title) for line in lines) for title in TITLES.values())
    assert all(
        any(line.startswith(f"{reason.knob} = ") for line in lines)
        for reason in plan.frozen.reasons
    )


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


@pytest.mark.parametrize(("max_trials", "num_finished"), [(3, 1), (1, 1), (2, 2)])
def test_the_bar_of_trials_tells_its_name_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch, max_trials: int, num_finished: int
) -> None:
    console = terminal.PlainConsole(stderr=True)
    console.size, console._force_terminal = (80, 25), True
    monkeypatch.setattr(terminal, "err", console)
    plan = golden_plan()
    with show_events() as show, console.capture():
        show(
            SearchSpaceBuilt(workload=plan.frozen.workload, num_candidates=9, max_trials=max_trials)
        )
        for _ in range(num_finished):
            show(TrialFinished(result=plan.frozen.trials[0].changed(wall_seconds=400.0)))
        show(TrialStarted(candidate=with_everything_unusual(plan).frozen.settings))
        with console.capture() as captured:
            console.print(show.progress.get_renderable())
    line = captured.get().splitlines()[-1]
    assert line.startswith("trials ")
    has_more = num_finished < max_trials
    assert ("1/3" in line, "≤ 0:13:20" in line) == (has_more, has_more)
    assert ("/" in line) is has_more, "beyond the limit nobody knows"
    assert "batch 7" in line
    assert "…" in line
    assert len(line) <= 80


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


def test_every_step_has_a_line_if_asked(capfd: pytest.CaptureFixture[str]) -> None:
    with show_events(every_step=True) as show:
        for step in steps_of(37):
            show(step)
    said_first, *lines = capfd.readouterr().err.splitlines()
    assert said_first == "training"
    assert len(lines) == 37


def test_a_step_of_an_older_autotune_names_no_epoch() -> None:
    assert step_text(steps_of(1)[0]).startswith("loss 1.0000")


def test_a_moving_average_starts_at_the_first_value_and_follows_slowly() -> None:
    assert smoothed([]) == []
    assert smoothed([2.0, 4.0]) == [2.0, 3.0]
    series = smoothed([1.0] * 50 + [2.0])
    assert series[:50] == pytest.approx([1.0] * 50)
    assert series[50] == pytest.approx(1.05)


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
