"""The session in docs/python.md runs as it stands."""

import re
from pathlib import Path
from typing import Any

import pytest

import autotune

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
def test_docs_session_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    session: dict[str, Any] = {}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), session)
    printed = capsys.readouterr().out
    assert "GiB may be used" in printed
    assert "native ok" in printed or "ok 0." in printed
    assert session["report"].plan_digest == session["plan"].digest
    assert session["picture"].is_file()
    assert "no-such-folder" in printed.splitlines()[-1]
    assert autotune.load_plan("plan.yaml") == session["plan"]
