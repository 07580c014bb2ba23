"""One self-contained HTML page about plans, records and runs. Pure: objects in, text out.

All text is untrusted (names, prompts, reasons come from files), so markup is only built by `html.h`, which escapes it.
Charts are SVG: no charting library, whose script (4.6 MiB for plotly) would be in every page and be written anew at
each preview of a run; and its charts could be read neither by keyboard nor without script.
"""

from typing import TYPE_CHECKING

from autotune.runtime import lazy_exports

if TYPE_CHECKING:
    from autotune.reporting.page.build import build_page
    from autotune.reporting.page.subjects import (
        Comparison,
        Picture,
        PlanSubject,
        PreviewPicture,
        RunSubject,
        Subject,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
