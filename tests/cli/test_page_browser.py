"""The journey through the page, in a real browser, with the server restarted in the middle.

Skipped without starlette, Chromium (Debian's package), playwright and axe-playwright-python.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.small import write_small

CHROMIUM = shutil.which("chromium")
pytest.importorskip("starlette", reason="starlette is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is missing")
pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here"),
]
ROOT = Path(__file__).parents[2]
RUN = "/run?folder=runs%2Fplan"
PAGES = ["/data", "/plan", "/plan?file=plan.yaml", "/train", RUN, "/results", "/machine"]
PAGES += ["/compare", "/import", "/records"]
WAIT_MS = 800_000  # on a busy machine


@contextmanager
def server(folder):
    """Serve the page from a process of its own; yield the address to open."""
    places = (str(ROOT), os.environ.get("PYTHONPATH"))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "autotune", "ui", str(folder), "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))},
    )
    told = ""
    while not told.endswith("}\n"):
        told += process.stdout.readline()
    try:
        yield json.loads(told)["address"]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_page(chromium, address, **options):
    page = chromium.new_context(viewport={"width": 1400, "height": 900}, **options).new_page()
    page.set_default_timeout(60_000)
    home, page.complaints = address.partition("/?")[0], []
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))

    def see(request):
        if not request.url.startswith((home, "data:")):
            page.complaints.append(f"asked for {request.url}")

    page.on("request", see)
    page.goto(address)
    page.home = home
    return page


def tab_to(page, text):
    for _ in range(200):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent.trim()") == text:
            return
    raise AssertionError(f"the keyboard does not reach {text!r}")


def finish(page):
    page.locator("main .state.finished").first.wait_for(timeout=WAIT_MS)


def test_the_whole_journey(chromium, tmp_path):
    write_small("qwen-image", tmp_path)
    with server(tmp_path) as address:
        page = open_page(chromium, address)
        caption = page.locator("textarea[name=caption]").first
        caption.fill("a <b>cat</b></textarea><script>window.hacked=1</script>")
        caption.press("Tab")
        page.locator(".saved").wait_for()
        assert "<script>" in (tmp_path / "images" / "00.txt").read_text()
        page.reload()
        assert page.locator("textarea[name=caption]").first.input_value().endswith("</script>")
        page.get_by_text("ready to train").or_(page.get_by_text("can be trained on")).wait_for()
        page.get_by_role("button", name="Undo").click()
        page.get_by_text("taken back").wait_for()

        page.get_by_role("link", name="Plan with these").click()  # from here by keyboard
        for name, value in (("model", "model"), ("resolution", "64"), ("num_steps", "30")):
            page.locator(f"#{name}").focus()
            page.keyboard.type(value)
        tab_to(page, "More wishes")
        page.keyboard.press("Enter")
        page.locator("#max_trials").focus()
        page.keyboard.type("2")
        page.locator("#search_seconds").focus()
        page.keyboard.type("600")
        tab_to(page, "Make the plan")
        assert "--max-trials 2" in page.locator("#command code").inner_text()
        page.keyboard.press("Enter")
        page.get_by_text("Train this plan").wait_for(timeout=WAIT_MS)
        page.locator("#preview_every").fill("15")
        tab_to(page, "Start training")
        page.keyboard.press("Enter")
        page.locator("main .state.running").wait_for()
        assert page.complaints == []
    with server(tmp_path) as address:  # the run has not noticed
        page = open_page(chromium, address)
        page.goto(f"{page.home}/train")
        page.get_by_role("link", name="runs/plan").click()
        finish(page)
        page.get_by_text("Promised against measured").wait_for()
        slider = page.locator(".slider input").first
        slider.focus()
        page.keyboard.press("End")
        share = "each => each.style.getPropertyValue('--share')"
        assert page.locator(".both").first.evaluate(share) == "100%"
        page.get_by_role("link", name="Sample and download").click()
        page.locator("#prompt").fill("a red circle")
        page.get_by_role("button", name="Sample", exact=True).click()
        finish(page)
        page.goto(f"{page.home}/results")
        pictures = page.locator(".previews img")
        assert [each.get_attribute("alt") for each in pictures.all()] == [
            f"a red circle, strength {strength}" for strength in ("0", "0.5", "1")
        ]
        page.get_by_role("button", name="Convert for ComfyUI").click()
        finish(page)
        with page.expect_download() as sent:
            page.get_by_role("link", name="Download").click()
        assert sent.value.suggested_filename.endswith("comfyui_lora_weights.safetensors")
        assert page.evaluate("window.hacked") is None
        assert page.complaints == []
        for width, scheme in ((390, "dark"), (390, "light"), (1400, "dark"), (1400, "light")):
            look_at_all(chromium, address, width, scheme)
        look_at_report(chromium, address, tmp_path / "runs" / "plan" / "report.html")


def test_a_card_shows_answer_and_command(chromium, tmp_path):
    with server(tmp_path) as address:
        page = open_page(chromium, address)
        page.goto(f"{page.home}/plan")
        page.locator("#model").fill("sdxl")
        page.locator("#hardware").select_option("nvidia-rtx-4090")
        page.get_by_text("sdxl should fit").wait_for()
        page.locator("#command code").get_by_text("nvidia-rtx-4090").wait_for()
        page.wait_for_load_state("networkidle")
        assert page.get_by_text("sdxl should fit").is_visible()
        assert page.complaints == []


DROP = """text => {
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([text], "mine.yaml"));
    document.body.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true }));
}"""


def test_a_file_is_dropped_anywhere(chromium, tmp_path):
    config = (ROOT / "tests" / "interop" / "configs" / "ai_toolkit.yaml").read_text()
    (tmp_path / "a.yaml").write_text("of another program: 1")
    with server(tmp_path) as address:
        page = open_page(chromium, address)
        page.goto(f"{page.home}/import")
        page.evaluate(DROP, config)
        page.locator("#command code").get_by_text("imported/mine.yaml").wait_for()
        assert page.complaints == []


def look_at_all(chromium, address, width, scheme):
    """Every page fits, complains of nothing, and axe finds nothing serious."""
    page = open_page(chromium, address, color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    for path in PAGES:
        page.goto(page.home + path)
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, (path, width)
    assert page.complaints == []
    page.context.close()
    page = open_page(chromium, address, color_scheme=scheme, bypass_csp=True)  # axe is a script
    page.set_viewport_size({"width": width, "height": 900})
    for path in PAGES:
        page.goto(page.home + path)
        page.wait_for_load_state("networkidle")
        page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        found = axe.Axe().run(page).response["violations"]
        serious = [each for each in found if each["impact"] in ("serious", "critical")]
        nodes = [
            (each["id"], [node["html"][:120] for node in each["nodes"][:3]]) for each in serious
        ]
        assert nodes == [], path
    page.context.close()


def look_at_report(chromium, address, file):
    """A run's own page asks for nothing, and its charts are read by keyboard."""
    page = open_page(chromium, address)
    page.complaints.clear()
    page.goto(file.as_uri())
    plot = page.locator(".subject > :not(details) .plot:visible").first
    readout = page.locator(".readout").first
    plot.focus()
    page.keyboard.press("Home")
    first = readout.inner_text()
    page.keyboard.press("End")
    assert readout.inner_text() != first
    assert [each for each in page.complaints if file.as_uri() not in each] == []
    page.context.close()
