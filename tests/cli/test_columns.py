"""Everything that is printed, with the longest realistic values, on a terminal of 80 columns."""

import ast
import contextlib
import importlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import autotune
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
from autotune.plan.candidate import Candidate, TrialResult
from autotune.plan.plan import CheckResult
from autotune.plan.prediction import (
    Estimate,
    JobTime,
    MemoryBreakdown,
    PhaseMemory,
    Prediction,
    SettingWorth,
    StepTime,
)
from autotune.plan.words import OUTCOMES, PHASES, label_of
from autotune.records import RecordSummary, Submission, Transfer
from autotune.report.text import folded, printable_lines
from autotune.search.comparison import ComparedGpu, Comparison
from autotune.weights.tensors import FileSummary, TensorSummary
from tests.interop.test_importing import CONFIGS
from tests.machine.fleet import machine
from tests.report.page.pages import golden_plan, run_report, steps_of
from tests.report.test_machine import REPORT
from tests.report.test_text import LONGEST, long_plan

FOLDER = "/home/somebody/training-runs-of-this-autumn/black-forest-labs/FLUX.2-klein-base-9B"
MODEL = "black-forest-labs/FLUX.2-klein-base-9B-distilled-and-more-of-a-name"
GPU = "nvidia-rtx-5000-ada-generation-laptop-gpu"
DEVICE = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"
REASON = "word " * 29 + "end"
SIZE = 999 << 30


def long_estimate() -> Estimate:
    sizes = dict.fromkeys(MemoryBreakdown.model_fields, SIZE)
    phase = {"run_memory_bytes": SIZE, "allocated_memory_bytes": SIZE, "breakdown": sizes}
    prediction = Prediction(
        candidate=Candidate(micro_batch_size=1, **LONGEST), allocated_memory_bytes=SIZE,
        run_memory_bytes=SIZE, host_memory_bytes=SIZE, step_seconds=5e3, images_per_second=1e-4,
        step_time=StepTime(**dict.fromkeys(StepTime.model_fields, 1e5)),
        phases=tuple(PhaseMemory.model_validate({"name": name, **phase}) for name in PHASES),
        memory_uncertainty=0.1, time_uncertainty=0.7,
    )  # fmt: skip
    return Estimate(
        hardware=DEVICE, budget_bytes=SIZE, fits=False, workload=LONG.frozen.workload,
        prediction=prediction, run_memory_bytes=SIZE, step_seconds=5e3, num_steps=10**6,
        job=JobTime(**dict.fromkeys(JobTime.model_fields, 1e6)), price_per_hour=99.9, cost=1e6,
    )  # fmt: skip


LONG = long_plan("predicted", 8)
LONG_NAME = LONG.frozen.workload.model.name
ESTIMATE = long_estimate()
COMPARISON = Comparison(
    model=MODEL, host_memory_bytes=SIZE, currency="USD", priced="2026",
    gpus=(
        ComparedGpu(
            gpu=GPU[:27], memory_gb=999, settings=ESTIMATE.prediction.candidate, num_steps=10**6,
            image_seconds=5e3, other_seconds=1e6, step_seconds=5e3, time_uncertainty=0.7,
            run_memory_bytes=SIZE,
        ),
        *[ComparedGpu(gpu=GPU, memory_gb=1, misfit="too small")] * 9,
    ),
)  # fmt: skip
RECORD = RecordSummary(
    name="0" * 64, measured_on="2026-11-27", device_name=DEVICE, family="qwen-image-edit-plus",
    work="1024px-1f-r16-attention-b4-exact-adamw-8bit-and-words", num_trials=512, step_seconds=5e3,
    settings=label_of(LONG.frozen.settings), peak_memory_bytes=SIZE, match="near",
    reasons=(REASON,),
)  # fmt: skip
TENSOR = "transformer.single_transformer_blocks.37.attn.to_out.0.lora_magnitude_vector.weight"
WEIGHTS = FileSummary(
    name=f"{TENSOR}.safetensors", size_bytes=SIZE, metadata={"ss_tag_frequency": REASON},
    tensors=(
        TensorSummary(
            name=TENSOR, dtype="F8_E4M3", shape=(18432, 3072), size_bytes=SIZE, num_nan=10**9,
            num_inf=10**9,
        ),
    ),
)  # fmt: skip
FETCHED = FetchedModel(
    name=MODEL, family="qwen-image-edit-plus", revision="a" * 40, size_bytes=SIZE,
    folder=Path(FOLDER) / ("b" * 40), num_verified=9999,
)  # fmt: skip
WORTH = SettingWorth(
    knob="selective_blocks", written=0, better=40,
    step_seconds_saved=99.9, run_memory_saved_bytes=SIZE,
)  # fmt: skip
CONFIGURATIONS = [
    import_config(path) for path in CONFIGS.iterdir() if not re.search("_(data|bnb)", path.name)
]
AUDITS = [
    Audit(
        config=config, as_written=ESTIMATE, breaks=(REASON,), fastest=ESTIMATE, worth=(WORTH,),
        in_trainer=ESTIMATE,
    )
    for config in CONFIGURATIONS
]  # fmt: skip
EXPORTED = ExportedConfig(
    trainer="sd-scripts", plan_digest="", differences=(), remarks=(REASON,),
    files={f"train_network_{number}.toml": "" for number in range(9)},
)  # fmt: skip
RUN = run_report(LONG).changed(warnings=(REASON,))
FACTS = read_doctor_facts(machine("wsl2-4090"))
PROFILE = read_profile(machine("wsl2-4090"))
TRANSFER = Transfer(num_new=10**6, num_present=10**6, refused=(REASON,), target=FOLDER)
BUG = {f"{name}.json": "line\n" * 10**5 for name in ("versions", "a-long-name-of-a-file")}
FINDINGS = (Finding(severity="warning", name="a", what=REASON, fix=REASON),)
SUBMISSION = Submission(key=f"profiles/{'k' * 60}", record="{}", pull_request=REASON)
DEMO = Demo(Path(FOLDER), Path(FOLDER))
PLAN = f"{FOLDER}/plan.yaml"

CASES: dict[str, list[tuple[str, dict[str, Any], str]]] = {
    "probe": [
        ("", {"autotune.probe": PROFILE, "autotune.doctor": findings(FACTS)}, "RTX 4090"),
        ("--list", {}, "nvidia-rtx-3080-laptop-8gb"),
        ("--verbose", {"autotune.probe": PROFILE, "autotune.doctor": ()}, PROFILE.device.name),
    ],
    "doctor": [("", {"autotune.doctor": FINDINGS}, REASON)],
    "bug-report": [(f"-o {FOLDER}/bug.zip", {"autotune.report.bug.bug_report": BUG}, FOLDER)],
    "models": [("", {}, "qwen-image"), ("--hardware 4090", {}, "qwen-image")],
    "fetch": [("--model m", {"autotune.fetch": FETCHED}, f"{MODEL}@{'a' * 40} --data FOLDER")],
    "estimate": [("--model m", {"autotune.estimate": ESTIMATE}, DEVICE)],
    "compare": [("--model m", {"autotune.compare": COMPARISON}, MODEL)],
    "plan": [
        (f"--model m --hardware h -o {PLAN}{more}", {"autotune.plan": LONG}, PLAN)
        for more in ("", " --verbose")
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
}  # fmt: skip


def commands(command: Any, path: str = "") -> Iterator[str]:
    below = getattr(command, "commands", None)
    if below is None:
        yield path.strip()
    for name, each in (below or {}).items():
        yield from commands(each, f"{path} {name}")


def test_every_command_is_rendered():
    assert {*commands(app)} == {*CASES, "ui"}  # which tells an address and a warning


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    shown = io.StringIO()
    for name in ("out", "err"):
        console = PlainConsole(stderr=name == "err")
        console._force_terminal, console._color_system = True, None
        console.width, console.file = 80, shown
        monkeypatch.setattr(terminal, name, console)
    return shown


def require_whole(text: str, *values: str) -> None:
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


STEP = steps_of(90, 1000)[-1].changed(
    step=99_999, num_steps=100_000, epoch=12_000, gpu_utilization=0.97, gradient_spikes=30,
    overflowed_gradients=12, seconds=1234.5, memory_bytes=15 << 30, validation_loss=0.1234,
    base_validation_loss=0.2345,
)  # fmt: skip
EVENTS = [
    events.PhaseStarted(name=f"loading the transformer of {MODEL}"),
    events.StatusChanged(text=f"fetching {MODEL}"),
    events.Progressed(name="counting NaN and infinite values", done=10**5, total=10**6),
    *(events.Notice(text=REASON, level=level) for level in ("note", "warning")),
    events.SearchSpaceBuilt(workload=LONG.frozen.workload, num_candidates=10**5, max_trials=999),
    events.RecordsMatched(kind="near", num_records=10**4, refused=(REASON,) * 9),
    events.RunStarted(plan=LONG),
    events.TrialStarted(candidate=LONG.frozen.settings),
    *(
        events.TrialFinished(
            result=TrialResult(
                candidate=LONG.frozen.settings, outcome=outcome, step_seconds=(12345.6,),
                peak_memory_bytes=SIZE, confirms=outcome == "ok", message=REASON,
            )
        )
        for outcome in OUTCOMES
    ),
    events.CandidatesPredicted(predictions=(), budget_bytes=SIZE),
    STEP,
    events.PreviewsWritten(step=99_999),
]  # fmt: skip


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


PACKAGE = Path(autotune.__file__).parent
VALUES = (FOLDER, MODEL, DEVICE, "999.00 GiB")


def messages() -> Iterator[str]:
    """Every sentence of the source but docstrings, with long values in place of what varies."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                number = iter(range(99))
                yield "".join(
                    part.value if isinstance(part, ast.Constant) else VALUES[next(number) % 4]
                    for part in node.values
                )


@pytest.mark.slow
def test_every_sentence_is_folded_between_words():
    for text in {*messages()}:
        lines = folded(text).split("\n")
        assert [line for line in lines if len(line) > 80 and " " in line.strip()] == []
        assert " ".join(lines).split() == printable_lines(text).split()
