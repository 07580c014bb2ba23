"""Numbers in the units that people use."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from autotune.reporting.difference import difference_lines, differences
from autotune.reporting.page.build import build_page
from autotune.reporting.page.subjects import PlanSubject

from autotune.cli.terminal import err, out
from autotune.reporting.plan import (
    TRIAL_HEADER,
    full_settings_lines,
    prediction_lines,
    train_hint,
    trial_lines,
    variant_lines,
)
from autotune.reporting.run import after_training_lines
from autotune.reporting.text import (
    WIDTH,
    change_text,
    loss_text,
    memory_text,
    seconds_text,
    time_left_text,
    titled_command,
    with_command,
    wrapped,
)
from autotune.schema import Candidate, PhaseMemory, Prediction, TrialResult
from tests.reporting.page.pages import golden_plan, plan_subject, run_report


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (4e-5, "40 us"),
        (0.0, "0.000 s"),
        (0.5, "0.500 s"),
        (45, "45 s"),
        (61, "1 min 01 s"),
        (7265, "2 h 01 min"),
    ],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (0, ""), (0.2, "1 s left"), (59.5, "60 s left"), (185, "3 min 05 s left")],
)
def test_time_left_has_no_fractions(seconds, text):
    assert time_left_text(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(None, "-"), (12, "12 B"), (4096, "4 KiB"), (320 << 20, "320 MiB"), (3 << 29, "1.50 GiB")],
)
def test_sizes_read_well(num_bytes: float | None, text: str) -> None:
    assert memory_text(num_bytes) == text


def test_progress_that_nobody_reads_any_more_ends_nothing() -> None:
    code = (
        "from autotune.cli.terminal import err, out; [err.print('x' * 99) for _ in "
        "range(9999)]; "
        "out.print('done')"
    )
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=writer, check=False
    )
    os.close(writer)
    assert (process.returncode, process.stdout) == (0, b"done\n")


def test_no_control_character_of_a_stranger_reaches_the_terminal(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for console in (out, err):
        console.print("one \x1b[2J\x9b2J\u202e\udcff :cat: [red]\ntwo")
    printed = capfd.readouterr()
    assert printed.out == printed.err == "one ?[2J?2J?? :cat: [red]\ntwo\n"


def test_numbers_beyond_measure_get_no_hundred_digits() -> None:
    shown = [
        loss_text(1e99),
        change_text(1e99),
        change_text(-1e99, 1),
        memory_text(1e99),
        seconds_text(1e308),
    ]
    assert max(map(len, shown)) < 16
    assert (loss_text(0.12345), change_text(0.123), change_text(-0.123, 1)) == (
        "0.1235",
        "+12%",
        "-12.3%",
    )


def test_a_long_command_is_whole_on_its_own_line() -> None:
    assert with_command("train it with:", "autotune train a.yaml") == [
        "train it with: autotune train a.yaml"
    ]
    command = "autotune train " + "long/" * 20
    assert with_command("train it with:", command) == ["train it with:", f"    {command}"]


def test_a_titled_command_can_be_copied_from_its_lines() -> None:
    words = ["autotune weights convert", "a/" * 30, "b/" * 30, "--format comfyui"]
    lines = titled_command("for ComfyUI", words)
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) > 1
    assert shlex.split("\n".join(lines)[15:].replace("\\\n", "")) == shlex.split(" ".join(words))
    assert titled_command("curves", ["tensorboard --logdir", "out"]) == [
        "curves         tensorboard --logdir out"
    ]


def test_what_comes_after_planning_and_training_fits_a_terminal() -> None:
    plan, deep = golden_plan(), Path("a-folder/for-my-adapters/with-a-long-name")
    lines = train_hint(plan, deep / "plan.yaml").split("\n") + variant_lines(
        [plan, plan], deep / "plan.yaml"
    )
    trained = run_report(plan), deep, "tensorboard"
    lines += after_training_lines(*trained, has_page=True)
    assert not [line for line in lines if len(line) > WIDTH and str(deep) not in line]
    assert any(line.startswith("written to ") and line.endswith("plan.yaml") for line in lines)


def test_a_table_of_predictions_stays_aligned_beyond_100_gib() -> None:
    settings = golden_plan().frozen.settings
    predictions = [
        Prediction.model_construct(
            candidate=settings,
            step_seconds=1.0,
            run_memory_bytes=size,
            time_uncertainty=0.2,
            phases=(PhaseMemory.model_construct(name="train", run_memory_bytes=size),),
        )
        for size in (9 << 30, int(101.2 * 2**30), 2000 << 30)
    ]
    rows = [row for row in prediction_lines(predictions, 10 << 30)[2:] if row[:2].strip()]
    assert len({row.index(" GiB") for row in rows}) == 1
    assert any("101.2 GiB no: train" in row for row in rows)
    assert max(map(len, rows)) <= WIDTH


def test_each_trial_after_the_first_tells_what_it_changes() -> None:
    first = Candidate(
        micro_batch_size=8, checkpointed_blocks=0, modulation="ahead", norm_rope="fused"
    )
    trials = [
        TrialResult(
            candidate=candidate, outcome="ok", step_seconds=(0.5,), peak_memory_bytes=25 << 20
        )
        for candidate in (
            first,
            first.changed(modulation="resident"),
            first.changed(micro_batch_size=4, data_workers=0),
        )
    ]
    rows = [
        line for number, trial in enumerate(trials, 1) for line in trial_lines(number, trial, first)
    ]
    column = TRIAL_HEADER.index("settings")
    assert [row[column:] for row in rows] == [
        "checkpointed_blocks=0, modulation=ahead,",
        "norm_rope=fused",
        "as 1 but modulation=resident",
        "as 1",
    ]


def test_a_path_that_is_longer_than_a_line_stays_whole() -> None:
    path = "/home/" + "a-folder/" * 12 + "plan.yaml"
    lines = wrapped(f"what the only trial ran is written to {path} and can be trained", 4)
    assert lines == [
        "what the only trial ran is written to",
        f"    {path}",
        "    and can be trained",
    ]


def test_where_encoders_run_is_not_told_of_the_text_encoder_alone() -> None:
    plan = golden_plan()
    caching = plan.frozen.caching.changed(vae_device="cpu")
    plan = plan.changed(frozen=plan.frozen.changed(caching=caching))
    assert (
        full_settings_lines(plan)[-1] == "encoders       training device, as they are, VAE on cpu"
    )


def test_a_predicted_plan_beside_another_is_as_uncertain_as_it_says() -> None:
    measured = golden_plan()
    frozen = measured.frozen
    expected = frozen.expected.changed(
        evidence="predicted", time_uncertainty=0.62, step_seconds=3600.0
    )
    predicted = measured.changed(frozen=frozen.changed(expected=expected))
    found = differences(measured, predicted)
    (step,) = (line for line in difference_lines(found) if line.startswith("step "))
    assert f"{seconds_text(frozen.expected.step_seconds)} -> 1 h 00 min ±62% " in step
    assert [
        (one.first_uncertainty, one.second_uncertainty)
        for one in found
        if one.name == "run_seconds"
    ] == [(None, 0.62)]
    page = build_page([plan_subject(), PlanSubject.of_plan("predicted", predicted)], "1")
    assert ">1 h 00 min ±62%</td>" in page
