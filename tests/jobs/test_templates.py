"""The templates for clusters: they parse, resume, and name only options of `train` that exist."""

import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest
import yaml

from autotune.cli.app import app

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
        shell = shutil.which("bash") or "sh"
        subprocess.run([shell, "-n", file], check=True)
        calls = [call.split() for call in re.findall(r"\b(train plan\.yaml [^|\n]*)", text)]
        assert '"$status" -eq 75' in text
    train = app.commands["train"]
    known = {name for one in train.get_params(click.Context(train)) for name in one.opts}
    assert calls
    for call in calls:
        assert {word for word in call if word.startswith("--")} <= known
        assert "--resume" in call
