"""The page in a real browser: it draws, asks for nothing, and is used by keyboard.

Skipped without Chromium (Debian's package), playwright and axe-playwright-python.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.report.page import build_page, points_of
from tests.report.page.pages import golden_plan, plan_subject, run_subject
from tests.report.page.test_page import hostile_plan

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here")
PAGES = {
    "plan": [plan_subject()], "both": [plan_subject("measured"), run_subject()],
    "hostile": [hostile_plan(), run_subject(prompt="<img src=x onerror='window.hacked=1'>")],
}  # fmt: skip


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

        def open_page(name: str, **options: Any) -> Any:
            file = tmp_path / "report.html"
            file.write_text(build_page(PAGES[name], "0.1.0"), encoding="utf-8")
            page = chromium.new_page(**options)
            page.set_default_timeout(120_000)  # on a busy machine
            page.complaints, page.requests = [], []
            page.on("console", lambda message: page.complaints.append(message.text))
            page.on("pageerror", lambda error: page.complaints.append(str(error)))
            page.on("request", lambda request: page.requests.append(request.url))
            page.goto(file.as_uri())
            return page

        yield open_page
        chromium.close()


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1400, "light")])
def test_page_draws_and_asks_nothing(opened, name, width, scheme):
    page = opened(name, viewport={"width": width, "height": 900}, color_scheme=scheme)
    for plot in page.locator(".subject > :not(details) .plot:visible").all():
        plot.focus()
        page.keyboard.press("Home")
    assert page.evaluate("window.hacked") is None
    assert page.complaints == []
    assert [url for url in page.requests[1:] if not url.startswith("data:")] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    back = page.evaluate("document.querySelector('.main-svg').style.background")
    assert back == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 24, 29)")
    page = opened(name, color_scheme=scheme, bypass_csp=True)  # axe is a script of its own
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is missing")
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    found = axe.Axe().run(page).response["violations"]
    assert [each["id"] for each in found if each["impact"] in ("serious", "critical")] == []


def test_charts_are_used_by_keyboard(opened):
    page = opened("plan")
    readout = page.locator(".readout").first
    page.locator(".plot").first.focus()
    page.keyboard.press("Home")
    first = readout.inner_text()
    page.keyboard.press("ArrowRight")
    assert readout.inner_text() != first
    page.keyboard.press("End")
    largest = max(point.run_memory_bytes for point in points_of(golden_plan()))
    assert f"{largest / 2**30:.2f} GiB" in readout.inner_text()
    page = opened("both")
    page.locator(".slider input").focus()
    page.keyboard.press("End")
    share = "each => each.style.getPropertyValue('--share')"
    assert page.locator(".both").evaluate(share) == "100%"
