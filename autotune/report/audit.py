"""An audit as text, or as Markdown for a thread. Pure."""

from collections.abc import Sequence

from autotune.interop.auditing import Audit
from autotune.plan.prediction import Estimate
from autotune.plan.trial import TrialResult
from autotune.report.text import memory_text, seconds_text, uncertainty_text, wrapped

BROKEN = "not as in the file, because it does not run there"
PREDICTED = "Predicted by autotune's cost model; nothing has run."
MEASURED = "Predicted by autotune's cost model, and measured in a few steps of its own executor."


def audit_lines(audit: Audit) -> list[str]:
    """The file as written, the fastest that learns the same, and what each difference is worth."""
    config = audit.config
    lines = [
        f"{config.path} ({config.trainer}) on {audit.as_written.hardware}",
        _evidence(audit),
        "",
    ]
    lines += _table(_comparison(audit), (16, 18, 18, 18))
    lines += ["", f"in {config.trainer}: {config.overheads.text}"] if config.overheads else []
    lines += ["", BROKEN, *(f"  {one}" for one in audit.breaks)] if audit.breaks else []
    if audit.worth:
        lines += [
            "",
            "what each change is worth alone",
            *_table(_worth(audit), (22, 16, 16, 10, 12)),
        ]
    lines += ["", "not carried over, so not compared"] if config.not_carried else []
    lines += [
        f"  line {one.line}: {one.key}: {one.meaning}" for one in config.not_carried if one.line
    ]
    return [part for line in lines for part in wrapped(line, 4)]


def audit_markdown(audit: Audit) -> str:
    """The same as tables for pasting into a thread."""
    config = audit.config
    lines = [
        f"**{config.trainer}: {config.model} on {audit.as_written.hardware}**",
        "",
        _evidence(audit),
        "",
    ]
    lines += _markdown_table(_comparison(audit))
    lines += ["", f"In {config.trainer}: {config.overheads.text}."] if config.overheads else []
    if audit.worth:
        lines += ["", "What each change is worth alone:", "", *_markdown_table(_worth(audit))]
    lines += (
        ["", f"{BROKEN.capitalize()}:", "", *(f"- {one}" for one in audit.breaks)]
        if audit.breaks
        else []
    )
    lost = [
        f"- `{one.key}` (line {one.line}): {one.meaning}" for one in config.not_carried if one.line
    ]
    return (
        "\n".join(
            [*lines, *(["", "Not carried over, so not compared:", "", *lost] if lost else [])]
        )
        + "\n"
    )


def _evidence(audit: Audit) -> str:
    return PREDICTED if audit.measured_as_written is None else MEASURED


def _columns(audit: Audit) -> list[tuple[str, Estimate | None, TrialResult | None]]:
    """What stands beside each other: its title, what is predicted of it, and what was measured."""
    written = ("as written", audit.as_written, audit.measured_as_written)
    fastest = ("fastest", audit.fastest, audit.measured_fastest)
    if audit.in_trainer is None:
        return [written, fastest]
    return [
        (f"in {audit.config.trainer}", audit.in_trainer, None),
        ("in autotune", *written[1:]),
        fastest,
    ]


def _comparison(audit: Audit) -> list[list[str]]:
    columns = _columns(audit)
    titles = [
        "seconds per step",
        "images/s",
        "run memory",
        "of the budget",
        "neediest phase",
        "the job",
        "fits",
    ]
    predicted = [_column(estimate) for _, estimate, _ in columns]
    rows = [["", *(title for title, _, _ in columns)]]
    rows += [list(row) for row in zip(titles, *predicted, strict=True)]
    rows += _phases([estimate for _, estimate, _ in columns])
    if audit.measured_as_written is None:
        return rows
    trials = [_measured(trial) for _, _, trial in columns]
    return [
        *rows,
        *(
            [title, *values]
            for title, *values in zip(("measured s/step", "step memory"), *trials, strict=True)
        ),
    ]


def _phases(estimates: Sequence[Estimate | None]) -> list[list[str]]:
    """Peak memory of each phase, of each estimate."""
    columns = [
        {}
        if one is None
        else {phase.name: memory_text(phase.run_memory_bytes) for phase in one.prediction.phases}
        for one in estimates
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    return [[f"- {name}", *(column.get(name, "-") for column in columns)] for name in names]


def _measured(trial: TrialResult | None) -> tuple[str, str]:
    if trial is None or trial.median_step_seconds is None:
        return ("-" if trial is None else trial.outcome, "-")
    return f"{trial.median_step_seconds:.3f}", memory_text(trial.peak_memory_bytes)


def _column(estimate: Estimate | None) -> list[str]:
    if estimate is None:
        return ["nothing fits", *["-"] * 6]
    prediction = estimate.prediction
    doubt = uncertainty_text(prediction.time_uncertainty)
    neediest = max(prediction.phases, key=lambda phase: phase.run_memory_bytes)
    return [
        f"{estimate.step_seconds:.3f}{doubt}",
        f"{prediction.images_per_second:.2f}",
        memory_text(prediction.run_memory_bytes),
        memory_text(estimate.budget_bytes),
        neediest.name,
        f"{seconds_text(estimate.job.total_seconds)}{doubt}",
        "yes" if estimate.fits else f"no: {neediest.name}",
    ]


def _worth(audit: Audit) -> list[list[str]]:
    rows = [["setting", "as written", "instead", "s/step", "memory"]]
    for one in audit.worth:
        memory = f"{'-' if one.run_memory_saved_bytes > 0 else '+'}{memory_text(abs(one.run_memory_saved_bytes))}"
        rows.append(
            [one.knob, str(one.written), str(one.better), f"{-one.step_seconds_saved:+.3f}", memory]
        )
    rows.append(["sum of these", "", "", f"{-audit.sum_of_step_seconds_saved:+.3f}", ""])
    return [*rows, ["all together", "", "", f"{-audit.step_seconds_saved:+.3f}", ""]]


def _table(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    padded = (
        [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)] for row in rows
    )
    return ["  " + " ".join(cells).rstrip() for cells in padded]


def _markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]
