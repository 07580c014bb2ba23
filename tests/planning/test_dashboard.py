"""optuna-dashboard opens the study that a plan leaves behind, and shows what a person
understands.
"""

import json
import subprocess
import sys
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optuna
import pytest

from autotune.schema.candidate import Candidate
from autotune.schema.trial import TrialResult
from autotune.search.study import CONSTRAINT, OBJECTIVE
from tests.api.test_metrics_server import free_port
from tests.planning.machines import HARDWARE, answer, make_plan, request, surroundings, wait_until

pytestmark = [
    pytest.mark.usefixtures("_by_formula"),
    pytest.mark.skipif(
        find_spec("optuna_dashboard") is None, reason="optuna-dashboard is not installed"
    ),
]


def run(candidate: Candidate) -> TrialResult:
    """Larger batches run out of memory."""
    if candidate.micro_batch_size > 1:
        return TrialResult(
            candidate=candidate, outcome="oom", message="memory ran out in the first step"
        )
    return answer(candidate)


def test_the_dashboard_shows_settings_outcomes_and_seconds(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    plan = make_plan(request("portraits", storage=url), HARDWARE, backend=surroundings(run))
    port = free_port()

    def get(path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answered:
            return json.load(answered)

    def is_up() -> bool:
        try:
            return bool(get("/api/studies"))
        except OSError:
            return False

    command = [
        sys.executable,
        "-c",
        "from optuna_dashboard._cli import main; main()",
        url,
        "--port",
        str(port),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until(is_up)
            (listed,) = get("/api/studies")["study_summaries"]
            shown = get(f"/api/studies/{listed['study_id']}")
        finally:
            server.terminate()
    assert listed["study_name"] == "portraits"
    assert shown["objective_names"] == [OBJECTIVE] == ["seconds per step"]
    trials = [trial for trial in shown["trials"] if trial["params"]]
    assert len(trials) == len([trial for trial in plan.frozen.trials if not trial.confirms])
    assert {param["name"] for param in trials[0]["params"]} == {*Candidate.model_fields}
    attributes = [{each["key"]: each["value"] for each in trial["user_attrs"]} for trial in trials]
    assert {each["outcome"] for each in attributes} == {"ok", "oom"}
    for trial, told in zip(trials, attributes, strict=True):
        ran = told["outcome"] == "ok"
        assert trial["state"] == "Complete"
        assert trial["constraints"] == [0.0 if ran else 1.0]
        assert (trial["values"] == ["inf"]) is not ran
        assert told["settings"].startswith("batch ")
        assert ("why" in told) is not ran
    study = optuna.load_study(study_name="portraits", storage=url)
    assert all(
        trial.constraints[CONSTRAINT] == trial.constraints["0"]
        for trial in study.trials
        if trial.params
    )
