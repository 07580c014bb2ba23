"""Names of what a run writes into its output folder, for those who write and those who read it."""

import re

REPORT_FILE = "report.json"
PREVIEWS = "previews"
"""Folder of the samples that are made during training."""
PREVIEW_NAME = re.compile(r"step-(\d{1,9})-(\d{1,2})\.png")
"""Of a preview: the number of steps that had been taken, and which of the job's prompts it shows."""


def preview_file(step: int, number: int) -> str:
    """Where a preview lies, relative to the output folder."""
    return f"{PREVIEWS}/step-{step:06}-{number}.png"


def comparison_file(adapter: str, number: int) -> str:
    """Where the last picture of a prompt lies, `with` or `without` the adapter, relative to the output folder."""
    return f"{PREVIEWS}/{adapter}-{number}.png" if number else f"sample_{adapter}_adapter.png"
