"""A training run's report as text: what was promised, what happened."""

from autotune.reporting.text import memory_text, seconds_text
from autotune.schema import RunReport


def report_lines(report: RunReport) -> list[str]:
    """Promise against reality, in a few lines."""
    return [
        f"{'':<14}{'planned':>12}{'measured':>12}",
        f"{'step time':<14}{seconds_text(report.expected_step_seconds):>12}"
        f"{seconds_text(report.measured_step_seconds):>12}{_change(report)}",
        f"{'peak memory':<14}{memory_text(report.expected_peak_memory_bytes):>12}"
        f"{memory_text(report.measured_peak_memory_bytes):>12}",
        f"{report.num_steps} steps in {seconds_text(report.total_seconds)}, {report.images_per_second:.2f} images/s; "
        f"loss {report.first_loss:.4f} -> {report.final_loss:.4f}",
    ]


def _change(report: RunReport) -> str:
    return f"  ({report.measured_step_seconds / report.expected_step_seconds - 1:+.0%})"
