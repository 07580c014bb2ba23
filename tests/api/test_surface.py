"""The front door: what `import autotune` offers, and that the commands ask for nothing else."""

import operator
import re
from pathlib import Path

import click
import pytest

import autotune
import autotune.records
from autotune.cli.app import app
from autotune.errors import AutotuneError


def test_commands_have_few_options():
    def names(command):
        parameters = command.get_params(click.Context(command))
        own = {name for one in parameters for name in one.opts if name.startswith("--")}
        return own.union(*map(names, getattr(command, "commands", {}).values()))

    assert len(names(app) - {"--help"}) <= 110


ON_4090 = {"model": "qwen-image", "hardware": "4090"}
TEXTS = ("a\udcff", "\ud800", "\0", "x" * 5000)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *(("load_plan", {"plan": text}) for text in TEXTS),
        *(("estimate", {**ON_4090, "hardware": text}) for text in TEXTS),
        *(("import_config", {"path": text}) for text in TEXTS),
        *(("records.pull", {"url": text}) for text in TEXTS),
        *(("check_data", {"data": text}) for text in TEXTS),
        *(("plan", {**ON_4090, "path": text}) for text in TEXTS[1:]),
        *(("plan", {**ON_4090, "host_memory": number}) for number in (0, -1, 2**63)),
        ("plan", {**ON_4090, "num_gpus": 2**62}),
        ("plan", {**ON_4090, "pins": 3}),
        ("estimate", {**ON_4090, "micro_batch_size": 2**62}),
        ("train", {"data": 3}),
    ],
)
def test_any_argument_ends_in_typed_error(name, given):
    with pytest.raises(AutotuneError) as caught:
        operator.attrgetter(name)(autotune)(**given)
    assert f"{caught.value}{caught.value.hint}".encode()


PAGE = Path(__file__).parents[2] / "docs" / "python.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
def test_docs_session_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    session = {}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), session)
    printed = capsys.readouterr().out
    assert "GiB may be used" in printed
    assert "native ok" in printed or "ok 0." in printed
    assert session["report"].plan_digest == session["plan"].digest
    assert session["picture"].is_file()
    assert "no-such-folder" in printed.splitlines()[-1]
    assert autotune.load_plan("plan.yaml") == session["plan"]
