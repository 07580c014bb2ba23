"""Adds to the site what is made of the code: README as its first page, the page "Will it fit?", the
plan's JSON Schema and llms.txt."""

import json
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Section
from mkdocs.structure.pages import Page

from autotune.plan.plan import TrainingPlan

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Pages of the repository that lie outside of docs/, by their addresses in the site.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def on_config(config: MkDocsConfig) -> None:
    """Take address and description from the one place that has them."""
    config.repo_url = PROJECT["urls"]["Repository"]
    config.site_description = PROJECT["description"]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that are not files of docs/."""
    made = {name: (ROOT / source).read_text() for source, name in OUTSIDE.items()}
    fit_page = runpy.run_path(str(Path(__file__).with_name("fit_page.py")))
    made["will-it-fit.html"] = fit_page["render"]()
    made["matrix.md"] = fit_page["matrix"]()
    made["plan.schema.json"] = json.dumps(TrainingPlan.model_json_schema(), indent=1)
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at where the site has what the repository has elsewhere."""
    for source, name in OUTSIDE.items():
        markdown = re.sub(rf"\]\((?:\.\./)?{source}", f"]({name}", markdown)
    markdown = markdown.replace("](docs/", "](")
    return re.sub(r"\]\(\.\./", f"]({config.repo_url}/blob/main/", markdown)


def on_nav(nav: Any, config: MkDocsConfig, files: Files) -> None:
    """Write llms.txt: the site's pages as a list that a language model reads."""
    lines = [f"# {config.site_name}", "", f"> {PROJECT['description']}", ""]
    for entry in nav.items:
        pages = entry.children if isinstance(entry, Section) else [entry]
        lines += [f"## {entry.title or 'Start'}", ""]
        for page in pages:
            heading = re.search("^# (.+)", page.file.content_string, re.MULTILINE)
            lines.append(f"- [{heading[1] if heading else page.title}]({page.url})")
        lines.append("")
    files.append(File.generated(config, "llms.txt", content="\n".join(lines)))
