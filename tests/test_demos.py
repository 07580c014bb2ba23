"""The demo of every family, start to end, as a user runs it: a minute each, so only when asked
for.
"""

import json
from pathlib import Path

import pytest

from autotune.families.registry import FAMILIES
from autotune.schema.plan_file import read_plan
from tests.conftest import autotune


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name != "qwen-image"]
)  # which the journey walks
def test_every_family_walks_the_whole_journey(tmp_path: Path, family: str) -> None:
    process = autotune("demo", "--model", family, "--output", tmp_path / "demo")
    assert process.returncode == 0, process.stderr
    assert read_plan(tmp_path / "demo" / "plan.yaml").frozen.expected.evidence == "measured"
    report = json.loads((tmp_path / "demo" / "result" / "report.json").read_text())
    assert report["verdict"]["num_unmoved"] == report["verdict"]["num_not_finite"] == 0
    assert report["verdict"]["adapter_loss"] < report["verdict"]["base_loss"]
    assert (tmp_path / "demo" / "result" / "sample_with_adapter.png").is_file()
