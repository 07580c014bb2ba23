"""Other trainers' configurations, understood, as text."""

from collections.abc import Sequence

from autotune.interop.exporting import DIFFERENCE_KINDS, ExportedConfig
from autotune.interop.importing import ConfigLine, ImportedConfig
from autotune.report.text import wrapped

MAX_VALUE = 40
"""Characters of a value that are shown."""


def import_lines(config: ImportedConfig) -> list[str]:
    """What becomes of every setting, in groups, with the line that each is on."""
    lines = [*wrapped(f"{config.path}: {config.trainer}, {config.model}", 4)]
    for title, group in (
        (
            "not carried over, though it changes what is learned or is not understood",
            config.not_carried,
        ),
        ("carried over", config.carried),
        ("settings, to be pinned or judged", config.pinned),
        ("decided by autotune", config.decided),
    ):
        lines += ["", title, *_group(group)] if group else []
    notes = [line for note in config.notes for line in wrapped(f"  {note}", 4)]
    return [*lines, "", "whatever is set", *notes] if notes else lines


def _group(group: Sequence[ConfigLine]) -> list[str]:
    """One line for each meaning of one part of a file: those that mean the same stand together."""
    files = {one.file for one in group if one.line}
    lines = []
    for meaning in dict.fromkeys(one.meaning for one in group):
        alike = [one for one in group if one.meaning == meaning]
        settings = ", ".join(_setting_text(one, len(files) > 1) for one in alike)
        lines += wrapped(f"  {settings} -> {meaning}", 4)
    return lines


def _setting_text(one: ConfigLine, name_file: bool) -> str:
    value = one.value if len(one.value) <= MAX_VALUE else one.value[: MAX_VALUE - 3] + "..."
    where = f"{one.file}:{one.line}" if name_file else f"line {one.line}"
    return f"{one.key}: {value} ({where if one.line else 'default'})"


def export_lines(exported: ExportedConfig) -> list[str]:
    """What the files of another trainer do otherwise than the plan."""
    lines = [f"files     {', '.join(exported.files)}"]
    for kind, title in DIFFERENCE_KINDS.items():
        these = [one for one in exported.differences if one.kind == kind]
        shown = [f"  {one.name}: {one.planned} in the plan, {one.written} there" for one in these]
        lines += (
            ["", title, *(line for text in shown for line in wrapped(text, 4))] if these else []
        )
    remarks = [line for remark in exported.remarks for line in wrapped(f"  {remark}", 4)]
    return [*lines, "", "it computes differently", *remarks] if remarks else lines
