"""Control characters, what limits a run, and answers that fit a screen."""

import pytest

from autotune.cli.terminal import err, out
from autotune.plan.candidate import CachingSettings
from autotune.plan.prediction import StepTime
from autotune.report.configs import table_lines
from autotune.report.plan import explain_lines, plan_lines
from tests.report.page.pages import golden_plan


def test_control_characters_are_replaced(capfd):
    for console in (out, err):
        console.print("one \x1b[2J\x9b2J\u202e\udcff :cat: [red]\ntwo")
    printed = capfd.readouterr()
    assert printed.out == printed.err == "one ?[2J?2J?? :cat: [red]\ntwo\n"


def test_tables_break_cells_that_are_too_long():
    rows = [["a setting", "written", "memory"], ["x" * 50, "as before", "-1 GiB in training"]]
    first, second, *_ = lines = [*table_lines([*rows, ["", "y " * 50, ""]])]
    assert max(map(len, lines)) <= 80
    assert first.index("written") == second.index("as before") == lines[-1].index("y")


def test_the_largest_wait_limits_a_run():
    kinds = [name for name in StepTime.model_fields if name != "recompute_seconds"]
    time = StepTime(**dict.fromkeys(kinds, 1.0), recompute_seconds=0.0)
    waits = time.waits(data_seconds=1.0)
    assert sum(waits.values()) == len(kinds) + 1
    assert set(waits) == {"compute", "bandwidth", "transfer", "data", "host"}


LONGEST = {
    "checkpointed_blocks": 20,
    "selective_blocks": 20,
    "swapped_blocks": 40,
    "quantization": "int8-rotated",
    "attention": "_native_efficient",
}


def long_plan(evidence, number):
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
    assert max(len(answer), len(explain_lines(plan))) <= 15
    text = " ".join(" ".join(answer).split())
    assert plan.frozen.hardware.device_name in text
    assert ("±" in text, "such ranges" in text) == (False, evidence == "predicted")
