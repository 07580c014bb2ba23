"""Closed pipes, control characters, plans side by side, and whose each value is."""

import re
from pathlib import Path
from typing import get_args

import pytest

from autotune.api import list_models
from autotune.cli.terminal import err, out
from autotune.interop.importing import Audit, import_config
from autotune.plan.candidate import CachingSettings, Candidate, Outcome, TrialResult
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
from autotune.plan.words import PHASES, label_of
from autotune.records import RecordSummary
from autotune.report.configs import audit_lines, import_lines
from autotune.report.machine import data_report_lines, record_list_lines
from autotune.report.plan import (
    check_lines,
    difference_lines,
    differences,
    every_reason_lines,
    explain_lines,
    plan_lines,
    train_hint,
)
from autotune.report.predictions import comparison_lines, estimate_lines, model_lines
from autotune.report.run import missed_promises, report_lines, result_lines, trial_text
from autotune.report.text import range_text, rough_seconds, seconds_text
from autotune.search.comparison import ComparedGpu, Comparison
from tests.interop.test_importing import CONFIGS
from tests.report.page.pages import golden_plan, run_report
from tests.report.test_machine import REPORT


def test_control_characters_are_replaced(capfd):
    for console in (out, err):
        console.print("one \x1b[2J\x9b2J\u202e\udcff :cat: [red]\ntwo")
    printed = capfd.readouterr()
    assert printed.out == printed.err == "one ?[2J?2J?? :cat: [red]\ntwo\n"


def test_predicted_differences_are_uncertain():
    measured = golden_plan()
    expected = measured.frozen.expected.changed(
        evidence="predicted", time_uncertainty=0.62, step_seconds=3600.0
    )
    predicted = measured.changed(frozen=measured.frozen.changed(expected=expected))
    found = {one.name: one for one in differences(measured, predicted)}
    step = found["step_seconds"]
    assert (step.first, step.second) == (measured.frozen.expected.step_seconds, 3600.0)
    assert (step.first_uncertainty, step.second_uncertainty) == (None, 0.62)
    assert step.ratio == pytest.approx(3600.0 / measured.frozen.expected.step_seconds)


def test_the_largest_wait_limits_a_run():
    kinds = [name for name in StepTime.model_fields if name != "recompute_seconds"]
    time = StepTime(**dict.fromkeys(kinds, 1.0), recompute_seconds=0.0)
    waits = time.waits(data_seconds=1.0)
    assert sum(waits.values()) == len(kinds) + 1
    assert set(waits) == {"compute", "bandwidth", "transfer", "data", "host"}
    report = run_report(golden_plan()).changed(limited_by="data")
    assert "limited by data" in report_lines(report)
    assert max(map(len, result_lines(report))) <= 80


def test_what_missed_its_promise_is_told():
    plan = golden_plan()
    kept = run_report(plan).changed(
        measured_step_seconds=plan.frozen.expected.step_seconds,
        expected_run_memory_bytes=480 << 20,
        run_memory_bytes=481 << 20,
    )
    assert not missed_promises(kept)
    missed = missed_promises(kept.changed(run_memory_bytes=624 << 20))
    assert missed == ["run memory was 30% more than the plan promised"]
    assert f"warning: {missed[0]}" in report_lines(kept.changed(run_memory_bytes=624 << 20))


LONGEST = {
    "checkpointed_blocks": 20, "selective_blocks": 20, "swapped_blocks": 40,
    "quantization": "int8-rotated", "attention": "_native_efficient",
}  # fmt: skip


def long_plan(evidence, number):
    """A plan whose names and numbers are as long as they come."""
    frozen = golden_plan("measured").frozen
    strategy = "fsdp2" if number > 1 else "single"
    hardware = frozen.hardware.changed(
        device_name="NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        device_kind="cuda",
        num_processes=number,
        strategy=strategy,
        assumed=("flash_attn", "bitsandbytes") if evidence == "predicted" else (),
    )
    model = frozen.workload.model.changed(name="kandinskylab-community/Kandinsky-5.0-T2V-Lite")
    doubt = 0.68 if evidence == "predicted" else None
    expected = frozen.expected.changed(
        evidence=evidence, time_uncertainty=doubt, step_seconds=1234.5, host_memory_bytes=999 << 30
    )
    return golden_plan("measured").changed(
        frozen=frozen.changed(
            hardware=hardware,
            workload=frozen.workload.changed(model=model, effective_batch_size=8 * number),
            expected=expected,
            settings=frozen.settings.changed(**LONGEST),
            caching=CachingSettings(text_encoder_quantization="torchao-int8", vae_device="cpu"),
            advice=("1.82x by --quality compact: in int8, computed in int8, less exact",) * 2,
        )
    )


@pytest.mark.parametrize("evidence", ["measured", "predicted"])
@pytest.mark.parametrize("number", [1, 8])
def test_answers_fit_a_screen(evidence, number):
    plan = long_plan(evidence, number)
    answer = plan_lines(plan)
    assert len(answer) <= 15
    lines = [*answer, *train_hint(plan, Path("plan.yaml")).splitlines()]
    explained = explain_lines(plan)
    assert len(explained) <= 15
    assert max(map(len, (*lines, *explained, *every_reason_lines(plan)))) <= 80
    text = " ".join(" ".join(lines).split())
    assert plan.frozen.hardware.device_name in text
    assert ("±" in text, "such ranges" in text) == (False, evidence == "predicted")


def test_no_answer_is_wider():
    gpu = "nvidia-rtx-5000-ada-generation-laptop-gpu"
    plans = [long_plan(evidence, 8) for evidence in ("measured", "predicted")]
    settings = Candidate(micro_batch_size=1, **LONGEST)
    work = plans[0].frozen.workload
    sizes = dict.fromkeys(MemoryBreakdown.model_fields, 999 << 30)
    phase = {"run_memory_bytes": 999 << 30, "allocated_memory_bytes": 999 << 30, "breakdown": sizes}
    prediction = Prediction(
        candidate=settings, allocated_memory_bytes=999 << 30, run_memory_bytes=999 << 30,
        host_memory_bytes=999 << 30, step_seconds=5e3, images_per_second=1e-4,
        step_time=StepTime(**dict.fromkeys(StepTime.model_fields, 1e5)),
        phases=tuple(PhaseMemory.model_validate({"name": name, **phase}) for name in PHASES),
        memory_uncertainty=0.1, time_uncertainty=0.7,
    )  # fmt: skip
    seconds = dict.fromkeys(JobTime.model_fields, 1e6)
    found = Estimate(
        hardware="NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", budget_bytes=999 << 30,
        fits=False, workload=work, prediction=prediction, run_memory_bytes=999 << 30,
        step_seconds=5e3, num_steps=10**6, job=JobTime(**seconds), price_per_hour=99.9, cost=1e6,
    )  # fmt: skip
    figures = {"step_seconds": 5e3, "time_uncertainty": 0.7, "run_memory_bytes": 999 << 30}
    compared = ComparedGpu(
        gpu=gpu[:27], memory_gb=999, settings=settings, num_steps=10**6, image_seconds=5e3,
        other_seconds=1e6, **figures,
    )  # fmt: skip
    nowhere = ComparedGpu(gpu=gpu, memory_gb=1, misfit="too small")
    comparison = Comparison(
        model="black-forest-labs/FLUX.2-klein-base-9B-distilled-and-more-of-a-name",
        gpus=(compared, *[nowhere] * 9), host_memory_bytes=999 << 30, currency="USD", priced="2026",
    )  # fmt: skip
    worth = SettingWorth(
        knob="selective_blocks", written=0, better=40,
        step_seconds_saved=99.9, run_memory_saved_bytes=999 << 30,
    )  # fmt: skip
    row = RecordSummary(
        name="0" * 64, measured_on="2026-11-27", device_name=found.hardware, family="qwen-image",
        work="1024px-1f-r16-attention-b4-exact", settings=label_of(settings), num_trials=512,
        step_seconds=5e3, peak_memory_bytes=999 << 30, match="near", reasons=("word " * 30,),
    )  # fmt: skip
    files = [path for path in CONFIGS.iterdir() if not re.search("_(data|bnb)", path.name)]
    configs = [*map(import_config, files)]
    views = [
        estimate_lines(found),
        comparison_lines(comparison),
        difference_lines(differences(*plans, price_per_hour=99.9)),
        difference_lines(differences(golden_plan(), plans[1])),
        check_lines(CheckResult(fits=False, misfits=("long " * 30,)), "plan.yaml", gpu),
        report_lines(run_report(plans[0])),
        data_report_lines(REPORT.changed(folder="photos " * 20, enlarged=("long name.png",) * 9)),
        record_list_lines([row]),
        model_lines(list_models()),
        *(import_lines(config) for config in configs),
    ]
    views += [
        audit_lines(
            Audit(
                config=config, as_written=found, breaks=("word " * 30,), fastest=found,
                worth=(worth,), in_trainer=found,
            )
        )
        for config in configs
    ]  # fmt: skip
    lines = [line for view in views for line in view]
    assert [line for line in lines if len(line) > 80] == []
    assert label_of(settings).split()[-1] in " ".join(lines)


def test_trial_is_told_in_one_line():
    candidate = golden_plan().frozen.settings
    for outcome in get_args(Outcome):
        trial = TrialResult(
            candidate=candidate,
            outcome=outcome,
            step_seconds=(12345.6,),
            peak_memory_bytes=999 << 30,
            confirms=outcome == "ok",
        )
        assert len(trial_text(10, 40, trial)) <= 80


def test_ranges_name_their_unit_once():
    assert range_text(9.2, 0.25, rough_seconds) == "8.5 to 11 s"
    assert range_text(57.0, 1.0, rough_seconds) == "42 s to 1.8 min"
    assert range_text(9.2, None, seconds_text) == "9.200 s"
    assert [*map(rough_seconds, (0.012, 89.0, 95.0, 36000.0))] == [
        "0.012 s",
        "89 s",
        "1.6 min",
        "10 h",
    ]
