"""Audits: the file as it is written on a card, the fastest that learns the same, and each
difference alone."""

import json
import re
from pathlib import Path

import pytest

from autotune.api.audits import audit
from autotune.interop.auditing import Audit
from autotune.report.configs import audit_lines, audit_markdown
from tests.conftest import autotune_here
from tests.interop.test_importing import CONFIGS
from tests.train.small import write_model_and_images


def write_config(folder: Path, *changes: tuple[str, str]) -> Path:
    model, _ = write_model_and_images(folder)
    text = (CONFIGS / "ai_toolkit.yaml").read_text()
    for old, new in (
        ("name_or_path: Qwen/Qwen-Image", f"name_or_path: {model}"),
        ("resolution: [512, 768, 1024]", "resolution: 256"),
        *changes,
    ):
        assert old in text
        text = text.replace(old, new)
    path = folder / "config.yaml"
    path.write_text(text)
    return path


@pytest.mark.slow
def test_an_audit_predicts_both(tmp_path: Path) -> None:
    path = write_config(
        tmp_path,
        (
            "dtype: bf16\n        cache",
            "dtype: bf16\n        attention_backend: sage\n        cache",
        ),
    )
    found = audit(path, hardware="nvidia-rtx-4090")
    written = found.as_written.prediction.candidate
    num_blocks = found.as_written.workload.model.num_blocks
    assert (written.quantization, written.micro_batch_size) == ("torchao-fp8", 1)
    assert (written.checkpointed_blocks, written.swapped_blocks) == (
        num_blocks,
        round(num_blocks / 4),
    )
    assert [one.partition(":")[0] for one in found.breaks] == ["attention sage"]
    assert found.fastest is not None
    assert found.fastest.step_seconds < found.as_written.step_seconds
    assert found.as_written.num_steps == found.fastest.num_steps == 3000
    assert found.as_written.workload == found.fastest.workload
    better = found.fastest.prediction.candidate
    assert {one.knob for one in found.worth} <= {
        name for name, value in better if getattr(written, name) != value
    }
    assert found.worth[0].step_seconds_saved > 0
    text = audit_markdown(found)
    assert "| quantization | torchao-fp8 | none |" in text
    assert {phase.name for phase in found.as_written.prediction.phases} <= set(
        re.findall(r"^\| - (\w+) \|", text, re.M)
    )
    assert "`train.ema_config.use_ema` (line 39)" in text


@pytest.mark.slow
def test_an_audit_measures_both(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = write_config(tmp_path, ("resolution: 256", "resolution: 64"))
    done = autotune_here(capfd, "audit", config, "--measure", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    for name in ("as_written", "fastest"):
        predicted, measured = told[name]["prediction"], told[f"measured_{name}"]
        assert measured["outcome"] == "ok"
        assert measured["candidate"] == predicted["candidate"]
        assert measured["peak_memory_bytes"] == pytest.approx(
            predicted["allocated_memory_bytes"], rel=0.05
        )
    lines = audit_lines(Audit.model_validate_json(done.stdout))
    assert any(line.split()[:2] == ["measured", "s/step"] for line in lines)
    assert (
        "| all together |"
        in autotune_here(capfd, "audit", config, "--hardware", "4090", "--markdown").stdout
    )
    elsewhere = autotune_here(capfd, "audit", config, "--measure", "--hardware", "4090")
    assert elsewhere.returncode == 2
    assert "only this machine" in elsewhere.stderr
