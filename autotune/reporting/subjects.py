"""What became of many runs of one plan, as a table of 80 columns."""

from collections.abc import Sequence
from pathlib import Path

from autotune.reporting.text import loss_text, wrapped
from autotune.schema import RunReport, SubjectRun


def subject_lines(runs: Sequence[SubjectRun]) -> list[str]:
    """Two lines for each: steps, losses and verdict; then the adapter's file, or why there is none."""
    lines = [f"{'subject':<26}{'steps':>9}{'loss':>10}{'held out':>10}  verdict"]
    for run in runs:
        if run.report is None:
            lines += [f"{run.name:<26}{'-':>9}{'-':>10}{'-':>10}  failed", *wrapped(f"  {run.error}", 4)]
            continue
        kept_loss = run.report.validation.kept_loss if run.report.validation else None
        held_out = "-" if kept_loss is None else loss_text(kept_loss)
        numbers = f"{run.report.num_steps:>9}{loss_text(run.report.final_loss):>10}{held_out:>10}"
        lines += [f"{run.name:<26}{numbers}  {_verdict(run.report)}", f"  {Path(run.output) / run.report.adapter}"]
        lines += [part for failure in run.report.failures for part in wrapped(f"  {failure}", 4)]
    failed = sum(run.report is None for run in runs)
    return [*lines, *([f"{failed} of {len(runs)} failed: the same command trains them alone"] if failed else [])]


def _verdict(report: RunReport) -> str:
    return "look at it" if report.failures else "learned"
