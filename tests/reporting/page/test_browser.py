"""The page in a real browser: it draws, asks for nothing, is used by keyboard, and has no serious
barrier.

Needs Chromium (Debian's package) and playwright; axe-core comes with axe-playwright-python. Skipped
without them.
"""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from autotune.reporting.page.build import build_page
from autotune.reporting.page.charts import SYMBOLS
from autotune.reporting.page.subjects import Subject, points_of

from tests.reporting.page.pages import plan_subject, run_subject
from tests.reporting.page.test_page import chosen_of, hostile_plan

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")
VIEWS = [(width, scheme) for width in (390, 1400) for scheme in ("light", "dark")]
PAGES = {
    "plan": [plan_subject()],
    "run": [run_subject()],
    "both": [plan_subject("measured"), run_subject()],
}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page that was opened from disk, with all that it complained about and asked for."""

    def __init__(
        self, browser: Any, folder: Path, subjects: list[Subject], width: int, scheme: str
    ) -> None:
        file = folder / "report.html"
        file.write_text(build_page(subjects, "0.1.0"), encoding="utf-8")
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=False
        )
        self.context.set_default_timeout(120_000)  # on a busy machine
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())

    @property
    def outside(self) -> list[str]:
        return [url for url in self.requests[1:] if not url.startswith("data:")]


@pytest.fixture
def opened(chromium: Any, tmp_path: Path) -> Iterator[Any]:
    contexts = []

    def open_page(subjects: list[Subject], width: int = 1400, scheme: str = "light") -> Opened:
        one = Opened(chromium, tmp_path, subjects, width, scheme)
        contexts.append(one.context)
        return one

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_it_draws_fits_and_asks_for_nothing(
    opened: Any, name: str, width: int, scheme: str
) -> None:
    shown = opened(PAGES[name], width, scheme)
    assert shown.complaints == []
    assert shown.outside == []
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= width, (
        "nothing is scrolled sideways"
    )
    back = shown.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 24, 29)")
    sizes = shown.page.locator("h1, p, td, .plot text").evaluate_all(
        "all => all.map(each => parseFloat(getComputedStyle(each).fontSize))"
    )
    assert min(sizes) >= 12


CENTERS = """trace => {
    const boxes = [...document.querySelectorAll('.scatterlayer .trace')[trace].querySelectorAll('.point')].map(
        mark => mark.getBoundingClientRect());
    return boxes.map(box => [box.x + box.width / 2, box.y + box.height / 2]);
}"""


def test_marks_stand_where_their_numbers_say(opened: Any) -> None:
    points = points_of(plan_subject())
    page = opened([plan_subject()]).page
    traces = page.evaluate(
        "document.querySelector('.plot > div').data.map(trace => trace.marker?.symbol)"
    )
    by_kind = [
        [p for p in points if p.kind == kind] for kind in ("failed", "predicted", "measured")
    ]
    assert traces == [
        None,
        *(SYMBOLS[kind][0] for kind in ("failed", "predicted", "measured", "chosen")),
    ]
    placed = []
    for trace, found in enumerate([*by_kind, [chosen_of(points)]], 1):
        placed += list(zip(found, page.evaluate(CENTERS, trace), strict=True))
    assert len(placed) == len(points) + 1
    for axis, value in ((0, lambda p: p.run_memory_bytes), (1, lambda p: -p.images_per_second)):
        places = [center[axis] for _, center in sorted(placed, key=lambda pair: value(pair[0]))]
        assert places == pytest.approx(sorted(places), abs=0.6)
        assert places[-1] > places[0] + 50


def test_a_chart_is_read_by_keyboard_and_by_pointer(opened: Any) -> None:
    subject = plan_subject()
    page = opened([subject]).page
    plot, readout, label = (
        page.locator(".plot").first,
        page.locator(".readout").first,
        page.locator(".hovertext").first,
    )
    plot.focus()
    page.keyboard.press("Home")
    first = readout.inner_text()
    assert "".join(label.text_content().split()) == "".join(first.split()), (
        "all of it stands at the mark, too"
    )
    page.keyboard.press("ArrowRight")
    second = readout.inner_text()
    assert second != first
    page.keyboard.press("ArrowLeft")
    assert readout.inner_text() == first
    page.keyboard.press("End")
    largest = max(points_of(subject), key=lambda point: point.run_memory_bytes)
    assert f"{largest.run_memory_bytes / 2**30:.2f} GiB" in readout.inner_text()
    ((left, top),) = page.evaluate(CENTERS, 4)
    page.mouse.move(left, top)
    page.locator(".readout", has_text="the chosen settings").first.wait_for()
    assert f"{chosen_of(points_of(subject)).images_per_second:.3g} images/s" in readout.inner_text()
    for _ in points_of(subject):
        page.keyboard.press("ArrowLeft")
    assert readout.inner_text() == first, "arrow keys go on from where the pointer was"


def test_a_curve_is_read_at_every_step(opened: Any) -> None:
    page = opened([run_subject()]).page
    page.locator(".plot").first.focus()
    for key, words in (
        ("Home", "step 1: smoothed loss 1.0000"),
        ("End", "step 100: "),
        ("ArrowLeft", "step 99: "),
    ):
        page.keyboard.press(key)
        assert page.locator(".readout").first.inner_text().startswith(words)


def test_charts_follow_the_scheme_and_the_width_and_are_drawn_when_unfolded(opened: Any) -> None:
    page = opened([run_subject()], 1400, "light").page
    back = (
        "[...document.querySelectorAll('.plot')].map(each => "
        "each.querySelector('.main-svg')?.style.background)"
    )
    assert {*page.evaluate(back)} - {None} == {"rgb(255, 255, 255)"}
    page.evaluate("document.querySelector('details').open = true")
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 900})
    until = (
        time.monotonic() + 120
    )  # playwright's own waiting takes an eval, which the page's policy forbids
    while {*page.evaluate(back)} != {"rgb(20, 24, 29)"} and time.monotonic() < until:
        page.wait_for_timeout(50)
    assert {*page.evaluate(back)} == {"rgb(20, 24, 29)"}
    assert page.evaluate("document.querySelector('.main-svg').clientWidth") < 390


def test_on_a_phone_a_tap_reads_and_a_drag_scrolls_the_page(chromium: Any, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(build_page([plan_subject()], "0.1.0"), encoding="utf-8")
    context = chromium.new_context(
        viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True
    )
    context.set_default_timeout(60_000)
    page = context.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    page.locator(".plot").first.scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    ((left, top),) = page.evaluate(CENTERS, 4)
    page.touchscreen.tap(left, top)
    page.locator(".readout", has_text="images/s with").first.wait_for()
    touch, before = context.new_cdp_session(page), page.evaluate("scrollY")
    for kind, tops in (
        ("Start", [top]),
        *(("Move", [top - 20 * each]) for each in range(1, 9)),
        ("End", []),
    ):
        points = [{"x": left, "y": each} for each in tops]
        touch.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": points})
        page.wait_for_timeout(20)
    page.wait_for_timeout(500)
    scrolled = page.evaluate("scrollY") - before
    context.close()
    assert scrolled > 50


def test_without_script_it_still_tells_what_matters(chromium: Any, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(build_page([run_subject()], "0.1.0"), encoding="utf-8")
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    text = page.locator("main").inner_text()
    context.close()
    for words in (
        "finished: 100 steps",
        "step 1: smoothed loss 1.0000",
        "9.00 GiB held",
        "Promised against measured",
    ):
        assert words in text


def test_the_slider_uncovers_by_keyboard(opened: Any) -> None:
    page = opened([run_subject()]).page
    slider, both = page.locator(".slider input"), page.locator(".both")
    slider.focus()
    page.keyboard.press("End")
    assert both.evaluate("each => each.style.getPropertyValue('--share')") == "100%"
    page.keyboard.press("ArrowLeft")
    assert both.evaluate("each => each.style.getPropertyValue('--share')") == "99%"


def test_hostile_text_runs_nothing(opened: Any) -> None:
    shown = opened([hostile_plan(), run_subject(prompt="<img src=x onerror='window.hacked=1'>")])
    for plot in shown.page.locator(".plot").all():
        plot.focus()
        shown.page.keyboard.press("Home")
    assert shown.page.evaluate("window.hacked") is None
    assert shown.complaints == []
    assert shown.outside == []


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_barrier(
    chromium: Any, tmp_path: Path, name: str, scheme: str
) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
    )
    file = tmp_path / "report.html"
    file.write_text(build_page(PAGES[name], "0.1.0"), encoding="utf-8")
    context = chromium.new_context(
        color_scheme=scheme, bypass_csp=True
    )  # axe is a script that the page does not know
    context.set_default_timeout(120_000)
    page = context.new_page()
    page.goto(file.as_uri())
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    found = axe.Axe().run(page).response["violations"]
    context.close()
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    assert [(each["id"], each["nodes"][0]["html"][:200]) for each in serious] == []
