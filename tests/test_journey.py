"""The product as a user meets it: commands with their exit status and output."""

import json
import re
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from autotune.knobs.registry import KNOBS
from autotune.models.registry import FAMILIES
from autotune.plan.file import load_plan, save_plan, seal
from autotune.plan.plan import FrozenPart
from autotune.report.run import LOG_FILE
from autotune.search.winner import TIE
from tests.conftest import autotune, autotune_here
from tests.small import write_small


def test_commands_print_only_their_own_words(journey):
    # A busy machine keeps no promise about time, and the run says so.
    own = re.sub("warning: steps took .*", "", journey.printed)
    for foreign in ("Warning", "warning:", "Traceback", "W1", "Loading"):
        assert foreign not in own


def test_plan_holds_its_trials(journey):
    tried = [trial for trial in journey.plan.frozen.trials if not trial.confirms]
    assert len(tried) == 2
    assert not [trial.message for trial in tried if trial.outcome != "ok"]
    assert all(trial.step_seconds and trial.peak_memory_bytes for trial in tried)
    fastest = min(tried, key=lambda trial: trial.median_step_seconds or 0)
    assert len(fastest.step_seconds) >= 3  # the hopeless end early
    assert len({trial.candidate for trial in tried}) == len(tried)


def test_plan_chose_the_fastest(journey):
    frozen = journey.plan.frozen
    lasting = [trial for trial in frozen.trials if trial.outcome == "ok" and trial.confirms]
    confirmed = {trial.candidate: trial.median_step_seconds for trial in lasting}
    assert confirmed[frozen.settings] <= (1 + TIE) * min(confirmed.values())
    assert frozen.expected.step_seconds == confirmed[frozen.settings]
    assert {reason.knob for reason in frozen.reasons} >= {*(knob.name for knob in KNOBS), "caching"}


def test_adapter_has_diffusers_keys_and_moved(journey):
    with safe_open(journey.result / "pytorch_lora_weights.safetensors", "pt") as file:
        names = set(file.keys())
        ups = [file.get_tensor(name) for name in names if ".lora_B." in name]
    key = re.compile(
        r"transformer\.transformer_blocks\.\d+\.attn\.(to|add)_\w+(\.0)?\.lora_[AB]\.weight"
    )
    assert all(map(key.fullmatch, names))
    assert all(torch.isfinite(up).all() and up.any() for up in ups)


def test_report_compares_promise_and_reality(journey):
    report = json.loads((journey.result / "report.json").read_text())
    logged = (journey.result / LOG_FILE).read_text().splitlines()
    assert "INFO trained 60 steps in " in logged[-1]
    assert report["plan_digest"] == journey.plan.digest
    assert report["num_steps"] == journey.plan.job.num_steps
    promised_bytes = pytest.approx(report["expected_peak_memory_bytes"], rel=0.02)
    assert report["measured_peak_memory_bytes"] == promised_bytes
    # On the same fresh noise: the losses of steps differ mostly by their noise.
    assert report["verdict"]["adapter_loss"] < report["verdict"]["base_loss"]


LEAKS = r"""
'/mnt/Tante Emma/x', C:\Users\Anne B\day.png, photos/uncle/a.webp, a portrait.safetensors, Somebody
password: hunter22, ghp_abcdefgh, 0123abcdef4f2c1a3b, 0.5 s/step"""


def test_bug_report_holds_nothing_private(capfd, journey, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_PASSPHRASE", "abcdefghij")
    monkeypatch.setenv("HOME", "/home/somebody")
    result = Path(shutil.copytree(journey.result, tmp_path / "result"))
    with (result / LOG_FILE).open("a") as log:
        log.write(f"{LEAKS}\nread https://me:word@host/x?y=z of /home/a/beach.jpg, abcdefghij\n")
    (tmp_path / "key").write_text("a private key")
    (result / "metrics.jsonl").unlink()
    (result / "metrics.jsonl").symlink_to(tmp_path / "key")
    archive = tmp_path / "bug.zip"
    process = autotune_here(capfd, "bug-report", result, "-o", archive)
    assert process.returncode == 0, process.stderr
    with zipfile.ZipFile(archive) as file:
        texts = {name: file.read(name).decode() for name in file.namelist()}
    everything = "\n".join(texts.values())
    captions = {path.read_text() for path in Path(journey.plan.job.data).glob("*.txt")}
    private = captions | {
        *("a private key", "word@", "y=z", "beach", "abcdefghij", str(journey.folder)),
        *("Emma", "Anne", "uncle", "portrait", "Somebody", "hunter", "ghp_", "4f2c1a3b"),
    }
    assert [each for each in private if each in everything] == []
    plan = json.loads(texts["plan.json"])
    assert plan["digest"] == journey.plan.digest
    assert plan["frozen"]["workload"]["model"]["family"] == "qwen-image"
    assert "0.5 s/step" in texts["run.log"]
    assert {"versions.json", "machine.json", "report.json", "run.log"} < set(texts)


def test_every_phase_takes_what_plan_promises(journey):
    """Within a tenth, since other tests run; `benchmarks/run_memory.py` holds quiet runs to 5%."""
    report = json.loads((journey.result / "report.json").read_text())
    promised, taken = (
        {phase["name"]: phase["host_bytes"] for phase in report[key]}
        for key in ("expected_phases", "phases")
    )
    assert set(promised) == set(taken) == {"caching", "loading", "training", "previews", "saving"}
    ratios = {name: round(promised[name] / taken[name], 3) for name in taken}
    assert all(0.9 <= ratio <= 1.12 for ratio in ratios.values()), ratios


def test_foreign_plan_is_refused_with_difference(capfd, journey, tmp_path):
    frozen = journey.plan.frozen.model_dump(mode="json")
    frozen["hardware"]["match_keys"]["compute_capability"] = "9.0"
    foreign = tmp_path / "foreign.yaml"
    save_plan(seal(journey.plan.job, FrozenPart.model_validate_json(json.dumps(frozen))), foreign)
    for command in (("train", foreign, "--output", tmp_path / "out"), ("check", foreign)):
        process = autotune_here(capfd, *command)
        assert process.returncode == 4
        assert "compute capability: the plan was made with 9.0" in process.stdout + process.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", ["doctor", "probe", "sample RUN --prompt x --steps 1", "demo"])
def test_no_command_imports_from_current_folder(journey, words):
    """The journey's own plan and run stand in the same folder."""
    process = autotune(*words.replace("RUN", str(journey.result)).split(), folder=journey.hostile)
    assert process.returncode == 0, process.stderr


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
