"""A file as written on a card, the fastest that learns the same, and each difference alone."""

import re
from pathlib import Path

import pytest

from autotune.errors import InvalidInput
from autotune.exchange import audit
from autotune.plan.words import PHASES
from autotune.report.configs import audit_lines, audit_markdown
from tests.interop.test_importing import CONFIGS
from tests.train.small import write_model_and_images


def write_config(folder: Path, resolution: int) -> Path:
    model, _ = write_model_and_images(folder)
    text = (CONFIGS / "ai_toolkit.yaml").read_text()
    text = text.replace("name_or_path: Qwen/Qwen-Image", f"name_or_path: {model}")
    text = text.replace("resolution: [512, 768, 1024]", f"resolution: {resolution}")
    path = folder / "config.yaml"
    path.write_text(text)
    return path


@pytest.mark.slow
def test_an_audit_predicts_both(tmp_path):
    path = write_config(tmp_path, 256)
    dtype = "dtype: bf16\n        cache"
    attention = dtype.replace("cache", "attention_backend: sage\n        cache")
    path.write_text(path.read_text().replace(dtype, attention))
    found = audit(path, hardware="nvidia-rtx-4090")
    written = found.as_written.prediction.candidate
    total = found.as_written.workload.model.num_blocks
    assert (written.quantization, written.micro_batch_size) == ("torchao-fp8", 1)
    assert (written.checkpointed_blocks, written.swapped_blocks) == (total, round(total / 4))
    assert [one.partition(":")[0] for one in found.breaks] == ["attention sage"]
    assert found.fastest is not None
    assert found.fastest.step_seconds < found.as_written.step_seconds
    assert found.as_written.num_steps == found.fastest.num_steps == 3000
    assert found.as_written.workload == found.fastest.workload
    better = found.fastest.prediction.candidate
    changed = {name for name, value in better if getattr(written, name) != value}
    assert {one.knob for one in found.worth} <= changed
    assert found.worth[0].step_seconds_saved > 0
    text = audit_markdown(found)
    assert "| base model | in fp8 | not quantized |" in text
    phases = {PHASES[phase.name] for phase in found.as_written.prediction.phases}
    assert phases <= set(re.findall(r"^\| - (\w+) \|", text, re.M))
    assert "`train.ema_config.use_ema` (line 39)" in text


@pytest.mark.slow
def test_an_audit_measures_both(tmp_path):
    path = write_config(tmp_path, 64)
    found = audit(path, measure=True)
    assert found.fastest
    pairs = (found.as_written, found.measured_as_written), (found.fastest, found.measured_fastest)
    for estimate, trial in pairs:
        assert trial
        assert (trial.outcome, trial.candidate) == ("ok", estimate.prediction.candidate)
        predicted = estimate.prediction.allocated_memory_bytes
        assert trial.peak_memory_bytes == pytest.approx(predicted, rel=0.05)
    assert any(line.split()[:2] == ["measured", "step"] for line in audit_lines(found))
    with pytest.raises(InvalidInput, match="only this machine"):
        audit(path, measure=True, hardware="4090")
