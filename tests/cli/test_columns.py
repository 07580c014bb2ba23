"""Everything that is printed, with the longest realistic values, on a terminal of 80 columns."""

import contextlib
import importlib
import io
import re
from pathlib import Path
from typing import Literal, get_args, get_origin

import click
import pytest

from autotune import events
from autotune.cli import terminal
from autotune.cli.app import app
from autotune.cli.terminal import EventDisplay, PlainConsole
from autotune.demo.lesson import Demo
from autotune.interop.exporting import ExportedConfig
from autotune.interop.importing import Audit, import_config
from autotune.machine.doctor import Finding, findings, read_doctor_facts
from autotune.machine.probe import read_profile
from autotune.models.resolve import FetchedModel
from autotune.plan.candidate import TrialResult
from autotune.plan.plan import CheckResult
from autotune.plan.prediction import Estimate, Overheads, PhaseMemory, Prediction, SettingWorth
from autotune.plan.words import OUTCOMES, PHASES, label_of
from autotune.records import RecordSummary, Submission, Transfer
from autotune.search.comparison import ComparedGpu, Comparison
from autotune.weights.tensors import FileSummary, TensorSummary
from tests.interop.test_importing import CONFIGS
from tests.machine.fleet import machine
from tests.report.page.pages import golden_plan, run_report
from tests.report.test_machine import REPORT
from tests.report.test_text import long_plan

FOLDER = "/home/somebody/training-runs-of-this-autumn/black-forest-labs/FLUX.2-klein-base-9B"
MODEL = "black-forest-labs/FLUX.2-klein-base-9B-distilled-and-more-of-a-name"
GPU = "nvidia-rtx-5000-ada-generation-laptop-gpu"
DEVICE = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"
REASON = "word " * 29 + "end"
SIZE = 999 << 30


def longest(kind, **known):
    """An object, or what a field of one may be, with large numbers and long texts but these."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return max(inner, key=len)
    if origin is tuple:
        return (longest(inner[0]),)
    if origin is dict or kind in PLAIN:
        return PLAIN.get(kind, {})
    if inner:  # of a union the first
        return longest(inner[0])
    fields = {name: field.annotation for name, field in kind.model_fields.items()}
    made = {name: longest(of) for name, of in fields.items() if name not in known}
    return kind.model_validate({**made, **known})


PLAIN = {int: SIZE, float: 99_999.9, str: REASON, bool: False, Path: Path(FOLDER)}
LONG = long_plan("predicted", 8)
THEIRS = longest(Overheads, program="ai-toolkit", kept=())
FOREIGN = LONG.changed(frozen=LONG.frozen.changed(overheads=THEIRS))
LOST = "export-config refuses it"
LONG_NAME = LONG.frozen.workload.model.name
SETTINGS = LONG.frozen.settings
FORETOLD = longest(
    Prediction,
    candidate=SETTINGS,
    phases=tuple(longest(PhaseMemory, name=name) for name in PHASES),
    memory_uncertainty=0.1,
    time_uncertainty=0.7,
)
ESTIMATE = longest(Estimate, hardware=DEVICE, prediction=FORETOLD, workload=LONG.frozen.workload)
UNFIT = ComparedGpu(gpu=GPU, memory_gb=1, misfit="too small")
FIT = longest(
    ComparedGpu, gpu=GPU[:27], memory_gb=999, settings=SETTINGS, time_uncertainty=0.7, misfit=""
)
COMPARISON = longest(
    Comparison, model=MODEL, gpus=(FIT, *[UNFIT] * 9), currency="USD", priced="2026"
)
RECORD = longest(
    RecordSummary,
    name="0" * 64,
    measured_on="2026-11-27",
    device_name=DEVICE,
    family="qwen-image-edit-plus",
    work="1024px-1f-r16-attention-b4-exact-adamw-8bit-and-words",
    num_trials=512,
    settings=label_of(dict(SETTINGS)),
    match="near",
)
TENSOR = "transformer.single_transformer_blocks.37.attn.to_out.0.lora_magnitude_vector.weight"
WEIGHTS = longest(
    FileSummary,
    name=f"{TENSOR}.safetensors",
    metadata={"ss_tag_frequency": REASON},
    tensors=(longest(TensorSummary, name=TENSOR, dtype="F8_E4M3", shape=(18432, 3072)),),
)
FETCHED = longest(FetchedModel, name=MODEL, family="qwen-image-edit-plus", revision="a" * 40)
WORTH = longest(SettingWorth, knob="selective_blocks", written=0, better=40)
AUDITED = "as_written", "fastest", "in_trainer"
CONFIGURATIONS = [
    import_config(path) for path in CONFIGS.iterdir() if not re.search("_(data|bnb)", path.name)
]
AUDITS = [
    longest(Audit, config=config, worth=(WORTH,), **dict.fromkeys(AUDITED, ESTIMATE))
    for config in CONFIGURATIONS
]
FILES = {f"train_network_{number}.toml": "" for number in range(9)}
EXPORTED = longest(ExportedConfig, trainer="sd-scripts", differences=(), files=FILES)
RUN = run_report(LONG).changed(warnings=(REASON,))
FACTS = read_doctor_facts(machine("wsl2-4090"))
PROFILE = read_profile(machine("wsl2-4090"))
TRANSFER = longest(Transfer, target=FOLDER)
BUG = "autotune.report.bug"
TEXTS = {f"{name}.json": "line\n" * 10**5 for name in ("versions", "a-long-name-of-a-file")}
FINDINGS = (longest(Finding),)
SUBMISSION = longest(Submission, key=f"profiles/{'k' * 60}", record="{}")
DEMO = Demo(Path(FOLDER), Path(FOLDER))
PLAN = f"{FOLDER}/plan.yaml"

CASES = {
    "probe": [
        ("", {"autotune.probe": PROFILE, "autotune.doctor": findings(FACTS)}, "RTX 4090"),
        ("--list", {}, "nvidia-rtx-3080-laptop-8gb"),
        ("--verbose", {"autotune.probe": PROFILE, "autotune.doctor": ()}, PROFILE.device.name),
    ],
    "doctor": [("", {"autotune.doctor": FINDINGS}, REASON)],
    "bug-report": [("-o bug.zip", {f"{BUG}.bug_report": TEXTS, f"{BUG}.write_archive": 0}, "bug")],
    "models": [("", {}, "qwen-image"), ("--hardware 4090", {}, "qwen-image")],
    "fetch": [("--model m", {"autotune.fetch": FETCHED}, f"{MODEL}@{'a' * 40} --data FOLDER")],
    "estimate": [("--model m", {"autotune.estimate": ESTIMATE}, DEVICE)],
    "compare": [("--model m", {"autotune.compare": COMPARISON}, MODEL)],
    "plan": [
        (f"--model m --hardware h -o {PLAN}{more}", {"autotune.plan": made}, value)
        for made, more, value in ((LONG, "", PLAN), (LONG, " --verbose", PLAN), (FOREIGN, "", LOST))
    ],
    "check": [
        (f"{PLAN} --hardware {GPU}", {"autotune.check": CheckResult(fits=fits, misfits=why)}, seen)
        for fits, why, seen in ((False, (REASON,), REASON), (True, (), PLAN))
    ],
    "explain": [(f"{PLAN}{all_}", {"autotune.load_plan": LONG}, "") for all_ in ("", " --all")],
    "diff": [("a b", {"autotune.load_plan": [golden_plan(), LONG]}, LONG_NAME)],
    "report": [(f"{FOLDER}", {"autotune.report": Path(FOLDER) / "report.html"}, FOLDER)],
    "train": [
        (f"p --output {FOLDER}{more}", {"autotune.train": RUN, "autotune.load_plan": LONG}, FOLDER)
        for more in ("", " --verbose")
    ],
    "sample": [("RUN --prompt x", {"autotune.sample": [Path(FOLDER) / "a.png"]}, FOLDER)],
    "data check": [("DIR", {"autotune.check_data": REPORT.changed(folder=FOLDER)}, FOLDER)],
    "data caption": [
        (f"{FOLDER} --trigger x", {"autotune.training.caption_data": {"a.png": REASON}}, REASON)
    ],
    "data undo": [(FOLDER, {"autotune.data.captions.undo_edit": REASON}, REASON)],
    "import-config": [
        (f"FILE{more}", {"autotune.import_config": config}, "")
        for config in CONFIGURATIONS
        for more in ("", " --verbose")
    ],
    "export-config": [("PLAN --to x -o y", {"autotune.export_config": EXPORTED}, REASON)],
    "audit": [("FILE", {"autotune.audit": audit}, DEVICE) for audit in AUDITS],
    "profiles push": [("URL", {"autotune.records.push": TRANSFER}, REASON)],
    "profiles pull": [("URL", {"autotune.records.pull": TRANSFER}, FOLDER)],
    "profiles submit": [(f"-o {FOLDER}", {"autotune.records.submit": SUBMISSION}, FOLDER)],
    "profiles list": [("", {"autotune.records.list_records": [RECORD]}, RECORD.work)],
    "profiles prune": [("", {"autotune.records.prune": [REASON]}, REASON)],
    "profiles verify": [("", {"autotune.records.verify": (9, [REASON])}, REASON)],
    "weights inspect": [("f", {"autotune.weights.tensors.inspect_weights": WEIGHTS}, REASON)],
    "weights convert": [
        (f"IN {FOLDER}/o.st", {"autotune.exchange.convert_weights": REASON}, REASON)
    ],
    "demo": [
        (f"--quick --output {FOLDER}", {"autotune.demo.lesson.make_demo": DEMO}, f"ui {FOLDER}")
    ],
}


def commands(command, path=""):
    below = getattr(command, "commands", None)
    if below is None:
        yield path.strip()
    for name, each in (below or {}).items():
        yield from commands(each, f"{path} {name}")


def test_every_command_is_rendered():
    assert {*commands(app)} == {*CASES, "ui"}  # which tells an address and a warning


@pytest.fixture
def screen(monkeypatch):
    shown = io.StringIO()
    for name in ("out", "err"):
        console = PlainConsole(stderr=name == "err")
        console._force_terminal, console._color_system = True, None
        console.width, console.file = 80, shown
        monkeypatch.setattr(terminal, name, console)
    return shown


def require_whole(text, *values):
    """Fail if a line is wider, unless it is one word, or if a value is cut or broken."""
    assert [line for line in text.splitlines() if len(line) > 80 and " " in line.strip()] == []
    assert "…" not in text
    for value in values:
        assert value in " ".join(text.replace("\\\n", " ").split()), text


@pytest.mark.parametrize(
    ("words", "answers", "value"),
    [(f"{name} {words}", *rest) for name, cases in CASES.items() for words, *rest in cases],
)
def test_no_answer_is_wider_or_cut(screen, monkeypatch, words, answers, value):
    for name, answer in answers.items():
        many = iter(answer) if name.endswith("load_plan") and isinstance(answer, list) else None
        home, _, function = name.rpartition(".")
        told = lambda *_, answer=answer, many=many, **__: next(many) if many else answer  # noqa: E731
        monkeypatch.setattr(importlib.import_module(home), function, told, raising=False)
    loud = ["--verbose"] * ("--verbose" in words)
    monkeypatch.setattr("autotune.cli.output.Progress.is_verbose", bool(loud))
    with contextlib.suppress(click.exceptions.Exit):
        app.main([*loud, *words.replace("--verbose", "").split()], standalone_mode=False)
    require_whole(screen.getvalue(), value)


TRIAL = longest(TrialResult, candidate=SETTINGS, confirms=False, phases=())
COUNTS = {"step": 99_999, "num_steps": 100_000, "epoch": 12_000, "gradient_spikes": 30}
SHARES = {"loss": 0.1234, "gradient_norm": 0.1, "gpu_utilization": 0.97, "seconds": 1234.5}
EVENTS = [
    events.PhaseStarted(name=f"loading the transformer of {MODEL}"),
    events.StatusChanged(text=f"fetching {MODEL}"),
    events.Progressed(name="counting NaN and infinite values", done=10**5, total=10**6),
    *(events.Notice(text=REASON, level=level) for level in ("note", "warning")),
    events.SearchSpaceBuilt(workload=LONG.frozen.workload, num_candidates=10**5, max_trials=999),
    events.RecordsMatched(kind="near", num_records=10**4, refused=(REASON,) * 9),
    events.RunStarted(plan=LONG),
    events.TrialStarted(candidate=SETTINGS),
    *(events.TrialFinished(result=TRIAL.changed(outcome=outcome)) for outcome in OUTCOMES),
    events.TrialFinished(result=TRIAL.changed(outcome="ok", confirms=True)),
    longest(events.StepFinished, **COUNTS, **SHARES, validation_loss=0.1, base_validation_loss=0.2),
    events.PreviewsWritten(step=99_999),
]


@pytest.mark.parametrize("is_verbose", [False, True])
def test_no_event_is_wider_or_cut(screen, is_verbose):
    assert {type(event) for event in EVENTS} == {*events.Event.__subclasses__()}
    for event in EVENTS:
        bar = terminal._bar()
        show = EventDisplay(bar, is_verbose=is_verbose)
        show.promised_bytes, show.max_trials = 14 << 30, 999
        show(event)
        terminal.err.print(bar.get_renderable())
        text = screen.getvalue()
        told = event.text if isinstance(event, (events.Notice, events.StatusChanged)) else ""
        require_whole(text, *told.split())
        screen.seek(screen.truncate(0))
