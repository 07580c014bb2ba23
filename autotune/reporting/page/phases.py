"""Memory of each phase of a run as bars: promised hollow, measured solid, the budget as a dashed
line.
"""

from collections.abc import Mapping
from xml.etree.ElementTree import Element

from autotune.reporting.page.html import Child, h
from autotune.reporting.text import memory_text
from autotune.schema import Expected, Forecast, PhasePeak, RunReport

PHASE_TITLES = {
    "load": "loading",
    "cache": "caching",
    "train": "training",
    "preview": "previews",
    "save": "saving",
}
"""Phases of a prediction by the names that rehearsals have."""
MAX_SCALE = 2.5
"""How many times the largest phase the budget may be and still be on the scale."""


def phase_bars(expected: Expected, forecast: Forecast | None, budget_bytes: int) -> Element:
    """What a plan promises of each phase."""
    measured = _measured(expected.phases, expected.process_memory_bytes)
    if measured:
        return _bars(measured, {}, budget_bytes, promised="measured in the rehearsal", solid="")
    if forecast and forecast.phases:
        predicted = {PHASE_TITLES.get(p.name, p.name): p.run_memory_bytes for p in forecast.phases}
        return _bars({}, predicted, budget_bytes, promised="predicted", solid="")
    return _bars(
        {},
        {"neediest phase": expected.run_memory_bytes},
        budget_bytes,
        promised="planned",
        solid="",
    )


def compared_phases(report: RunReport, process_bytes: int, budget_bytes: int) -> Element:
    """What a run took in each phase, beside what was promised."""
    measured = _measured(report.phases, process_bytes)
    promised = _measured(report.expected_phases, process_bytes)
    return _bars(measured, promised, budget_bytes, promised="promised", solid="measured")


def _measured(phases: tuple[PhasePeak, ...], process_bytes: int) -> dict[str, int]:
    """Device memory by phase; on a GPU with what the process takes besides the allocator's."""
    found = {
        p.name: p.host_bytes if p.device_bytes is None else p.device_bytes + process_bytes
        for p in phases
    }
    return {name: size for name, size in found.items() if size is not None}


def _bars(
    solid_bytes: Mapping[str, int],
    hollow_bytes: Mapping[str, int],
    budget_bytes: int,
    *,
    promised: str,
    solid: str,
) -> Element:
    largest = max([*solid_bytes.values(), *hollow_bytes.values(), 1])
    is_near = budget_bytes <= MAX_SCALE * largest
    scale = 1.05 * max(largest, budget_bytes if is_near else 0)
    names = dict.fromkeys((*solid_bytes, *hollow_bytes))
    is_pair = bool(solid_bytes and hollow_bytes)
    rows: list[Child] = []
    for name in names:
        values = [("bar", hollow_bytes.get(name)), ("bar solid", solid_bytes.get(name))]
        limit = (
            h("span", class_="limit", style=f"left:{100 * budget_bytes / scale:.1f}%")
            if is_near
            else None
        )
        track = h(
            "span",
            (_bar(style, size, scale) for style, size in values if size is not None),
            limit,
            class_="track",
        )
        words = " → ".join(memory_text(size) for _, size in values if size is not None)
        rows += [h("span", name), track, h("span", words)]
    order = (
        f"Hollow: {promised}; solid: {solid}. "
        if is_pair
        else f"{(promised or solid).capitalize()}. "
    )
    line = "The dashed line is" if is_near else "Far beyond the scale:"
    caption = f"{order}{line} the budget, {memory_text(budget_bytes)}."
    return h(
        "figure",
        h("figcaption", caption),
        h("div", *rows, class_="bars pair" if is_pair else "bars"),
    )


def _bar(style: str, size: int, scale: float) -> Element:
    return h("span", class_=style, style=f"width:{100 * size / scale:.1f}%")
