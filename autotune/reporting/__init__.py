"""Turns results into text. Pure: objects in, text out."""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.reporting.audit import audit_lines, audit_markdown
    from autotune.reporting.cards import model_card
    from autotune.reporting.configs import export_lines, import_lines
    from autotune.reporting.machine import (
        catalog_view,
        comparison_lines,
        data_report_lines,
        elsewhere_lines,
        estimate_text,
        fetched_lines,
        findings_view,
        model_lines,
        profile_view,
        weights_lines,
    )
    from autotune.reporting.page import (
        Comparison,
        Picture,
        PreviewPicture,
        RunSubject,
        Subject,
        build_page,
        has_plotly,
    )
    from autotune.reporting.plan import (
        TRIAL_HEADER,
        check_lines,
        difference_lines,
        differences,
        explain_lines,
        full_settings_lines,
        job_line,
        knob_lines,
        note_text,
        origin_lines,
        plan_lines,
        prediction_lines,
        records_lines,
        train_hint,
        trial_lines,
        user_values_line,
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
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
