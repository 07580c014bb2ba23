"""Builds HTML from nested calls. Every text and every value of an attribute is escaped: none can
become markup.

h("p", "Loss ", h("b", loss), class_="note")
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from xml.etree.ElementTree import Element, tostring

from autotune.errors import InvalidInput
from autotune.reporting.text import printable_lines

MIN_STACKED = 5
"""Cells of a row from which it is too wide for a narrow screen."""

Child = Element | str | int | float | None | Iterable["Child"]


def h(tag: str, *children: Child, **attributes: str | int | float | None) -> Element:
    """An element. `class_` stands for class, other underscores for hyphens; attributes that are
    None are left out.
    """
    element = Element(tag)
    for name, value in attributes.items():
        if value is not None:
            element.set(name.removesuffix("_").replace("_", "-"), printable_lines(str(value)))
    _append(element, children)
    return element


def _append(element: Element, children: Iterable[Child]) -> None:
    for child in children:
        if isinstance(child, Element):
            element.append(child)
        elif isinstance(child, str | int | float):
            text = printable_lines(str(child))
            if len(element):
                element[-1].tail = (element[-1].tail or "") + text
            else:
                element.text = (element.text or "") + text
        elif child is not None:
            _append(element, child)


def data_attribute(value: object) -> str:
    """A value for an attribute that the page's script reads back as JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def image_source(content: bytes, kind: str) -> str:
    """The `src` of an image whose bytes are in the page."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def table(head: Sequence[str], rows: Iterable[Iterable[Child]], *, caption: str) -> Element:
    """A table whose rows, if they are of many cells, are written below each other on a narrow
    screen, and that scrolls by itself otherwise. The first cell of a row names it."""
    lines = [
        h(
            "tr",
            h("th", first, scope="row"),
            (h("td", cell, data_label=name) for cell, name in zip(rest, head[1:], strict=True)),
        )
        for first, *rest in map(list, rows)
    ]
    whole = h(
        "table",
        h("caption", caption),
        h("thead", h("tr", (h("th", cell, scope="col") for cell in head))),
        h("tbody", lines),
    )
    style = "scroll stacks" if len(head) >= MIN_STACKED else "scroll"
    return h("div", whole, class_=style, tabindex=0, role="region", aria_label=caption)


def document(title: str, *body: Child) -> str:
    """The whole page. Its policy lets it ask for nothing and run no script but its own, in which
    plotly is once.

    Raises:
        InvalidInput: the extra `report` is not installed.
    """
    style, script = _asset("page.css"), f"{_plotly_script()}\n{_asset('page.js')}"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src "
        f"'sha256-{digest}'"
    )
    head = h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", **{"http-equiv": "Content-Security-Policy", "content": policy}),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="color-scheme", content="light dark"),
        h("title", title),
        _raw("style", style),
    )
    page = h("html", head, h("body", h("main", *body), _raw("script", script)), lang="en")
    return f"<!DOCTYPE html>\n{tostring(page, encoding='unicode', method='html')}\n"


def _raw(tag: str, text: str) -> Element:
    """An element whose text is written as it is: of style and script no character is escaped."""
    element = Element(tag)
    element.text = text
    return element


def has_plotly() -> bool:
    """Whether the extra `report` is installed, without which no page can be written."""
    return find_spec("plotly") is not None


def _plotly_script() -> str:
    """What draws the charts, some 4.8 MB of it."""
    if not has_plotly():
        hint = "install it: pip install 'lora-autotune[report]'"
        raise InvalidInput("charts are drawn by plotly, which is not installed", hint=hint)
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


@cache
def _asset(name: str) -> str:
    return (files("autotune.reporting.page") / name).read_text(encoding="utf-8")
