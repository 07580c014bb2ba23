"""What each knob is worth: the best candidate with each other value of it, compared with the
chosen settings.
"""

from dataclasses import dataclass
from xml.etree.ElementTree import Element

from autotune.knobs import KNOBS
from autotune.reporting.page.html import Child, h, table
from autotune.reporting.page.subjects import PlanSubject, Point
from autotune.reporting.plan import describe_changes
from autotune.reporting.text import memory_text
from autotune.schema import Choice

FULL_BAR_PX = 90
MAX_VALUES = 4
"""Values of a knob that are compared: of numbers of blocks there are many."""


@dataclass(frozen=True)
class Worth:
    """The best that is known with another value of a knob."""

    knob: str
    title: str
    value: str
    point: Point
    speed: float
    """Relative to the chosen settings by the same evidence."""
    memory_bytes: int

    @property
    def runs(self) -> bool:
        """Whether it ran, or is predicted to."""
        return self.point.kind in ("measured", "predicted")


def find_worths(subject: PlanSubject, points: list[Point]) -> list[Worth]:
    """For each knob and other value: by trials if one ran it, else by predictions; the fastest
    that fits, else the smallest. What matters most comes first."""
    batch, settings = subject.workload.effective_batch_size, subject.settings
    own = [
        t.median_step_seconds
        for t in subject.trials
        if t.candidate == settings and t.outcome == "ok"
    ]
    chosen_measured = batch / (own[0] or subject.expected.step_seconds) if own else None
    chosen_point = next(point for point in points if point.is_chosen)
    worths = []
    for knob in KNOBS:
        current = getattr(settings, knob.name)
        values = dict.fromkeys(getattr(point.candidate, knob.name) for point in points)
        for value in _compared(list(values), current):
            having = [point for point in points if getattr(point.candidate, knob.name) == value]
            runs = [p for p in having if p.kind == "measured"] or [
                p for p in having if p.kind == "predicted"
            ]
            best = max(runs, key=lambda p: p.images_per_second, default=None)
            best = best or min(having, key=lambda p: p.run_memory_bytes)
            is_measured = best.kind == "measured" and chosen_measured
            reference = chosen_measured if is_measured else chosen_point.images_per_second
            worths.append(
                Worth(
                    knob.name,
                    knob.title,
                    knob.describe(value, subject.workload),
                    best,
                    best.images_per_second / (reference or 1.0) - 1,
                    best.run_memory_bytes - chosen_point.run_memory_bytes,
                )
            )
    return sorted(worths, key=lambda worth: (not worth.runs, worth.speed))


def _compared(values: list[Choice], current: Choice) -> list[Choice]:
    others = [value for value in values if value != current]
    if all(isinstance(value, int) for value in values) and len(others) > MAX_VALUES:
        below = sorted(int(value) for value in others if int(value) < int(current))
        above = sorted(int(value) for value in others if int(value) > int(current))
        return list(dict.fromkeys((*below[-1:], *above[:1], *below[:1], *above[-1:])))
    return others


def worth_table(subject: PlanSubject, points: list[Point]) -> Element:
    """The comparison as a table with bars."""
    worths = find_worths(subject, points)
    if not worths:
        return h("p", "No other value of any knob was looked at.")
    rows = [
        (
            f"{worth.title}: {worth.value}",
            _speed_cell(worth),
            f"{'+' if worth.memory_bytes >= 0 else '-'}{memory_text(abs(worth.memory_bytes))}",
            worth.point.outcome,
            h("span", describe_changes(worth.point.candidate, subject.settings), class_="soft"),
        )
        for worth in worths
    ]
    head = ("instead", "speed", "run memory", "known how", "then the best differs by")
    caption = (
        "The best that is known with another value of one knob, the other knobs free, "
        "against the "
        "chosen settings"
    )
    return table(head, rows, caption=caption)


def _speed_cell(worth: Worth) -> Child:
    if not worth.runs:
        return "does not run" if worth.point.kind == "failed" else "does not fit"
    width = max(2, round(FULL_BAR_PX * min(1.0, abs(worth.speed))))
    bar = h(
        "span",
        class_="worth better" if worth.speed > 0 else "worth",
        style=f"width:{width}px",
        aria_hidden="true",
    )
    return h("span", bar, f"{worth.speed:+.0%}", class_="value")
