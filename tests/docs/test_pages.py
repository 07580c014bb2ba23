"""The guides say what the code says: commands parse, links lead somewhere, tables are current."""

import json
import re
import runpy
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest
import yaml

from autotune.api import list_models
from autotune.cli.app import app
from autotune.report.text import memory_text

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
SYNTAX = re.compile(r"^ {4}(?:\$ )?(autotune .*)$", re.MULTILINE)


def words_of(line):
    line = re.split(r"\s{2,}|\s[#|>]|\s&&", line)[0]
    return shlex.split(re.sub(r"\.\.\.|[`\[\]]", "", line))[1:]


def parse(words):
    command = app
    context = command.make_context("autotune", list(words))
    while hasattr(command, "commands"):
        rest = [*context._protected_args, *context.args]
        if not rest:
            return
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def test_readme_shows_what_is_predicted():
    (flux,) = (one for one in list_models("4090") if one.name == "flux1-dev")
    needed = memory_text(flux.prediction.run_memory_bytes)
    assert f"    VRAM           up to {needed} of " in PAGES[0].read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_documentation_is_understood(page):
    text = re.sub(r"\s*\\\n\s*", " ", page.read_text())  # continued lines are joined
    for line in SYNTAX.findall(text):
        if "," not in line.split("  ", maxsplit=1)[0] and " PLAN|" not in line:  # no list
            parse(words_of(line))


@pytest.mark.parametrize("name", ["compatibility", "evidence", "levers", "reference"])
def test_generated_pages_are_current(name):
    page = runpy.run_path(str(DOCS / "site" / f"{name}.py"))
    assert page["PAGE"].read_text() == page["markdown"](), f"python docs/site/{name}.py"


@pytest.fixture(scope="module")
def fit_page():
    return runpy.run_path(str(DOCS / "site" / "fit_page.py"))["render"]()


def test_page_fit_answers_from_disk_alone(fit_page):
    assert len(fit_page.encode()) < 2 << 20
    assert not re.search(r"(?:src|href)=|https?://|fetch\(", fit_page)
    data = json.loads(re.findall(r'"application/json" id="data">(.*)</script>', fit_page)[0])
    assert set(data["models"]) == {model.name for model in list_models()}
    by_size = data["models"]["flux1-dev"]["found"]
    found = {size: known["nvidia-rtx-4090"] for size, known in by_size.items()}
    assert found["usual"]["memory_bytes"] <= data["gpus"]["nvidia-rtx-4090"]["memory_bytes"]
    assert found["768"]["image"] != found["usual"]["image"]


@pytest.mark.slow
def test_page_fit_answers_in_a_browser(fit_page, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is missing")
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("there is no chromium here")
    (tmp_path / "fit.html").write_text(fit_page)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page, errors, asked = browser.new_context(offline=True).new_page(), [], []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{(tmp_path / 'fit.html').as_uri()}#model=flux1-dev&gpu=nvidia-rtx-4090&ram=64")
        assert "It should fit" in page.inner_text("#answer")
        assert axe.Axe().run(page).response["violations"] == []
        page.select_option("#model", "minimax-h3")
        page.select_option("#ram", "16")
        assert "need more system RAM" in page.inner_text("#answer")
        for model in page.eval_on_selector_all("#model option", "each => each.map(o => o.value)"):
            page.select_option("#model", model)
            told = page.inner_text("main")
            assert not re.search("undefined|NaN|null|Infinity", told), (model, told)
            parse(words_of(page.inner_text("pre")))
        assert (errors, len(asked)) == ([], 1)
        browser.close()


def test_every_link_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), (page.name, target)


def test_documented_variables_are_the_codes():
    name = r"\bAUTOTUNE_[A-Z_]+\b"
    listed = set(re.findall(name, (DOCS / "environment.md").read_text()))
    code = [file.read_text() for file in (ROOT / "autotune").rglob("*.py")]
    assert listed == {found for text in code for found in re.findall(name, text)}


FORMS = sorted((ROOT / ".github").rglob("*.yml"))


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.stem)
def test_forms_and_workflows_are_whole(file):
    content = yaml.safe_load(file.read_text())
    for job in content.get("jobs", {}).values():
        for step in job["steps"]:
            assert step.keys() & {"uses", "run"}
            assert list not in map(type, step.get("with", {}).values())
            subprocess.run(["bash", "-n"], input=step.get("run", ""), text=True, check=True)
    for part in content.get("body", ()):
        assert part["attributes"]["label"].strip()


TEMPLATES = sorted((Path(__file__).parents[2] / "containers" / "examples").iterdir())


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.name)
def test_templates_parse_and_resume(file):
    text = file.read_text()
    if file.suffix == ".yaml":
        manifest = yaml.safe_load(text)
        (container,) = manifest["spec"]["template"]["spec"]["containers"]
        calls = [container["command"][1:]]
        assert manifest["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [75]
    else:
        subprocess.run(["bash", "-n", file], check=True)
        calls = [call.split() for call in re.findall(r"\b(train plan\.yaml [^|\n]*)", text)]
        assert '"$status" -eq 75' in text
    train = app.commands["train"]
    known = {name for one in train.get_params(click.Context(train)) for name in one.opts}
    assert calls
    for call in calls:
        assert {word for word in call if word.startswith("--")} <= known
        assert "--resume" in call
