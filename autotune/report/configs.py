"""Text about other trainers' configurations: imported, exported, audited."""

import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from autotune.interop.exporting import DIFFERENCE_KINDS, ExportedConfig
from autotune.interop.importing import Audit, ConfigLine, ImportedConfig
from autotune.plan.candidate import TrialResult
from autotune.plan.prediction import Estimate, SettingWorth
from autotune.plan.words import (
    FORMATS,
    MEMORY,
    OUTCOMES,
    PHASES,
    TITLES,
    UNTOLD,
    setting_text,
    value_text,
)
from autotune.report import text as texts
from autotune.report.text import memory_text, range_text, rough_seconds, seconds_text, wrapped

MAX_VALUE = 40  # characters
SHORT = "the run is too short to pay back what is compiled before it"
SWAP = "block swap costs system RAM, and the time of copies that do not hide behind computing"
GROUPS = {
    "not_carried": "lost: it changes what is learned, or autotune does not know it",
    "carried": "carried over",
    "pinned": "settings for speed and memory, which autotune could choose",
    "decided": "decided by autotune",
}


def import_lines(config: ImportedConfig, *, tells_all: bool = True) -> list[str]:
    """Tell what becomes of every setting or, unless all is wanted, what is lost."""
    lines = [*wrapped(f"{config.path}: {config.trainer}, {config.model}", 4)]
    for name, title in GROUPS.items():
        group = getattr(config, name)
        if tells_all or name in ("not_carried", "pinned"):
            lines += ["", title, *_group(group)] if group else []
    lines += _remarks("whatever the file says", config.notes)
    if tells_all:
        return lines
    rest = f"{len(config.carried)} settings carry over, {len(config.decided)} are decided here"
    return [*lines, "", *wrapped(f"{rest}; each with its line: --verbose")]


def _remarks(title: str, remarks: Sequence[str]) -> list[str]:
    lines = [line for remark in remarks for line in wrapped(f"  {remark}", 4)]
    return ["", title, *lines] if lines else []


def _group(group: Sequence[ConfigLine]) -> list[str]:
    has_files = len({one.file for one in group if one.line}) > 1
    alike: dict[str, list[str]] = {}
    for one in group:
        value = one.value if len(one.value) <= MAX_VALUE else one.value[: MAX_VALUE - 3] + "..."
        where = f"{one.file}:{one.line}" if has_files else f"line {one.line}"
        text = f"{one.key}: {value} ({where if one.line else 'default'})"
        name, _, own = one.meaning.partition(" ")
        name = "caching" if name.startswith("caching.text_encoder_quantization") else name
        own = FORMATS.get(own, own) if name == "caching" else own
        meaning = setting_text(name, own) if name in TITLES else one.meaning
        alike.setdefault(meaning, []).append(text)
    return [
        line
        for meaning, settings in alike.items()
        for line in wrapped(f"  {', '.join(settings)} -> {meaning}", 4)
    ]


def export_lines(exported: ExportedConfig) -> list[str]:
    """Tell what the files of another trainer do otherwise than the plan."""
    lines = [f"files     {', '.join(exported.files)}"]
    for kind, title in DIFFERENCE_KINDS.items():
        these = [one for one in exported.differences if one.kind == kind]
        shown = [f"{one.name}: {one.planned} in the plan, {one.written} there" for one in these]
        lines += _remarks(title, shown)
    return lines + _remarks("it computes differently", exported.remarks)


def audit_lines(audit: Audit) -> list[str]:
    """Show the file as written, the fastest, and what each difference is worth."""
    config = audit.config
    lines = [f"{config.path} ({config.trainer}) on {audit.as_written.hardware}", _evidence(audit)]
    for title, rows, items in _sections(audit):
        lines += ["", *filter(None, [title]), *table_lines(rows)]
        lines += [f"  {name}{text}" for name, text in items]
    return [part for line in lines for part in wrapped(line, 4)]


def table_lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lay out a table that fits a terminal: cells of its widest columns are broken."""
    widths = [max(1, *map(len, column)) for column in zip(*rows, strict=True)]
    while sum(widths) + 2 * len(widths) > texts.WIDTH:
        widths[widths.index(max(widths))] -= 1
    for row in rows:
        cells = map(textwrap.wrap, row, widths)
        for parts in zip_longest(*cells, fillvalue=""):
            yield "".join(f"  {part:<{w}}" for part, w in zip(parts, widths, strict=True)).rstrip()


def audit_markdown(audit: Audit) -> str:
    """Show an audit as Markdown, to paste into a thread."""
    config = audit.config
    title = f"**{config.trainer}: {config.model} on {audit.as_written.hardware}**"
    lines = [title, "", _evidence(audit)]
    for title, rows, items in _sections(audit):
        lines += ["", f"{title[0].upper()}{title[1:]}:"] if title else []
        table = [f"| {' | '.join(row)} |" for row in rows]
        lines += ["", *table[:1], *["|" + "---|" * len(row) for row in rows[:1]], *table[1:]]
        lines += [f"- `{name}`{text}" if name else f"- {text}" for name, text in items]
    return "\n".join(lines) + "\n"


def _evidence(audit: Audit) -> str:
    if audit.measured_as_written is None:
        return "Predicted; nothing has run."
    return "Predicted, and measured in a few steps of autotune."


def _sections(audit: Audit) -> Iterator[tuple[str, list[list[str]], list[tuple[str, str]]]]:
    config = audit.config
    yield "", _comparison(audit), []
    if config.overheads:
        text = config.overheads.text(audit.as_written.prediction.candidate.quantization)
        yield f"what differs in {config.trainer}", [], [("", text)]
    if audit.breaks:
        breaks = [("", one) for one in audit.breaks]
        yield "not as in the file, because it does not run there", [], breaks
    if audit.worth:
        rows = _worth(audit)
        remarks = [SWAP] * any(row[0] == TITLES["swapped_blocks"] for row in rows)
        fastest, written = audit.fastest, audit.as_written
        if fastest and fastest.job.total_seconds > written.job.total_seconds:
            remarks.append(SHORT)
        yield "what each change is worth alone", rows, [("", one) for one in remarks]
    own = (one for one in config.not_carried if one.line)
    if lost := [(one.key, f" (line {one.line}): {one.meaning}") for one in own]:
        yield "not carried over, so not compared", [], lost


def _comparison(audit: Audit) -> list[list[str]]:
    written = ("as written", audit.as_written, audit.measured_as_written)
    columns: list[tuple[str, Estimate | None, TrialResult | None]] = [written]
    if audit.in_trainer is not None:
        theirs = (f"in {audit.config.trainer}", audit.in_trainer, None)
        columns = [theirs, ("in autotune", *written[1:])]
    columns.append(("fastest", audit.fastest, audit.measured_fastest))
    facts = [_facts(estimate) for _, estimate, _ in columns]
    if audit.measured_as_written is not None:
        facts = [own | _measured(trial) for own, (_, _, trial) in zip(facts, columns, strict=True)]
    names = dict.fromkeys(name for own in facts for name in own)
    rows = [[name, *(own.get(name, "-") for own in facts)] for name in names]
    return [["", *(title for title, _, _ in columns)], *rows]


def _facts(estimate: Estimate | None) -> dict[str, str]:
    if estimate is None:
        return {"fits": "nothing fits"}
    prediction = estimate.prediction
    doubt = prediction.stated_time_uncertainty
    neediest = max(prediction.phases, key=lambda phase: phase.run_memory_bytes).name
    times = {
        "a step": estimate.step_seconds,
        "an image": 1 / prediction.images_per_second,
        "the run": estimate.job.total_seconds,
    }
    return {
        "fits": "yes" if estimate.fits else f"no: {PHASES[neediest]}",
        **{name: range_text(took, doubt, rough_seconds) for name, took in times.items()},
        "memory": memory_text(prediction.run_memory_bytes),
        "of at most": memory_text(estimate.budget_bytes),
        **{f"- {PHASES[one.name]}": memory_text(one.run_memory_bytes) for one in prediction.phases},
        MEMORY["cpu"]: memory_text(prediction.host_memory_bytes),
    }


def _measured(trial: TrialResult | None) -> dict[str, str]:
    if trial is None or trial.median_step_seconds is None:
        return {"measured step": "-" if trial is None else OUTCOMES[trial.outcome]}
    seconds, memory = seconds_text(trial.median_step_seconds), memory_text(trial.peak_memory_bytes)
    return {"measured step": seconds, "its memory": memory}


def _worth(audit: Audit) -> list[list[str]]:
    rows = [["setting", "as written", "instead", "a step", "memory"]]
    made = audit.fastest and audit.fastest.prediction.candidate
    told = set()
    for one in audit.worth:
        written, better = (value_text(one.knob, value) for value in (one.written, one.better))
        told.add(one.knob)
        if one.knob == "checkpointed_blocks":
            told.add("selective_blocks")
            keeping = made.selective_blocks if made else 0
            both = [better] * bool(one.better or not keeping)
            more = [f"{keeping} but for attention"] * bool(keeping)
            better = ", ".join([*both, *more])
        seconds, memory = _saved_text(one.step_seconds_saved), _memory_text(one)
        rows.append([TITLES.get(one.knob, one.knob), written, better, seconds, memory])
    if audit.fastest is not None:
        for name, better in audit.fastest.prediction.candidate:
            written = getattr(audit.as_written.prediction.candidate, name)
            if name in TITLES and name not in {*told, *UNTOLD} and written != better:
                values = (value_text(name, value) for value in (written, better))
                rows.append([TITLES[name], *values, "not alone", ""])
    alone = sum(one.step_seconds_saved for one in audit.worth)
    together = audit.as_written.step_seconds - (audit.fastest or audit.as_written).step_seconds
    for title, seconds_saved in (("sum of these", alone), ("all together", together)):
        rows.append([title, "", "", _saved_text(seconds_saved), ""])
    return rows


def _memory_text(one: SettingWorth) -> str:
    def text(saved: int) -> str:
        return f"{'-' if saved > 0 else '+'}{memory_text(abs(saved))}" if saved else "same"

    if one.run_memory_saved_bytes or not one.training_memory_saved_bytes:
        return text(one.run_memory_saved_bytes)
    return f"{text(one.training_memory_saved_bytes)} in training"


def _saved_text(seconds: float) -> str:
    return f"{-seconds:+.2f} s" if round(seconds, 2) else "same"
