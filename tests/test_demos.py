"""The journey of every family, start to end, as a user walks it: a minute each."""

import json

import pytest

from autotune.models.registry import FAMILIES
from autotune.plan.file import load_plan
from tests.conftest import autotune
from tests.small import write_small


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"qwen-image"}))  # the journey's
def test_every_family_walks_the_whole_journey(tmp_path, family):
    plan, result = tmp_path / "plan.yaml", tmp_path / "result"
    options = ("--steps", 60, "--search-time", 600, "--run-output", result, "-o", plan)
    for command in (("plan", *write_small(family, tmp_path), *options), ("train", plan)):
        process = autotune(*command)
        assert process.returncode == 0, process.stderr
    assert load_plan(plan).frozen.expected.evidence == "measured"
    report = json.loads((result / "report.json").read_text())
    assert report["verdict"]["num_unmoved"] == report["verdict"]["num_not_finite"] == 0
    assert report["verdict"]["adapter_loss"] < report["verdict"]["base_loss"]
    assert (result / "sample_with_adapter.png").is_file()
