"""Turns results into text. Pure: objects in, text out."""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.reporting.audit import audit_lines, audit_markdown
    from autotune.reporting.cards import model_card
    from autotune.reporting.comparison import comparison_lines, elsewhere_lines
    from autotune.reporting.configs import export_lines, import_lines
    from autotune.reporting.data import data_report_lines
    from autotune.reporting.difference import difference_lines, differences
    from autotune.reporting.estimate import estimate_text
    from autotune.reporting.hardware import catalog_view, findings_view, profile_view
    from autotune.reporting.models import fetched_lines, model_lines
    from autotune.reporting.origins import origin_lines, user_values_line
    from autotune.reporting.page.build import build_page
    from autotune.reporting.page.html import has_plotly
    from autotune.reporting.page.subjects import (
        Comparison,
        Picture,
        PlanSubject,
        PreviewPicture,
        RunSubject,
        Subject,
    )
    from autotune.reporting.plan import (
        TRIAL_HEADER,
        check_lines,
        explain_lines,
        full_settings_lines,
        job_line,
        knob_lines,
        note_text,
        plan_lines,
        prediction_lines,
        records_lines,
        train_hint,
        trial_lines,
        variant_lines,
        workload_lines,
    )
    from autotune.reporting.records import record_list_lines
    from autotune.reporting.run import (
        PAGE_FILE,
        after_training_lines,
        report_lines,
        step_text,
        validation_text,
    )
    from autotune.reporting.text import (
        printable,
        printable_lines,
        smooth,
        time_left_text,
        with_command,
        wrapped,
    )
    from autotune.reporting.weights import weights_lines
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
