"""`autotune import-config` as a user runs it, and plans that keep the settings of a
configuration."""

from pathlib import Path
from typing import Any

import pytest

from autotune.api.plans import list_choices
from autotune.errors import InvalidInput
from autotune.interop.exporting import SPARING
from autotune.plan.plan_file import read_plan
from tests.conftest import autotune_here
from tests.interop.test_importing import CONFIGS
from tests.train.small import write_model_and_images


def test_a_plan_keeps_the_settings_of_a_file_where_it_can(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, _ = write_model_and_images(tmp_path)
    text = (CONFIGS / "ai_toolkit.yaml").read_text()
    for old, new in (
        ("name_or_path: Qwen/Qwen-Image", f"name_or_path: {model}"),
        ("resolution: [512, 768, 1024]", "resolution: 64"),
        (
            "dtype: bf16\n        cache",
            "dtype: bf16\n        attention_backend: sage\n        cache",
        ),
    ):
        assert old in text
        text = text.replace(old, new)
    config, plan = tmp_path / "config.yaml", tmp_path / "plan.yaml"
    config.write_text(text)
    done = autotune_here(
        capfd, "import-config", config, "-o", plan, "--hardware", "nvidia-rtx-4090"
    )
    assert done.returncode == 0, done.stderr
    assert "there is no folder photos here" in " ".join(done.stderr.split())
    assert "attention is not sage as in the file: " in " ".join(done.stderr.split())
    made = read_plan(plan)
    settings = made.frozen.settings
    assert (settings.micro_batch_size, settings.quantization, settings.compile) == (
        1,
        "torchao-fp8",
        "off",
    )
    assert settings.checkpointed_blocks == made.frozen.workload.model.num_blocks - 1
    assert (made.frozen.workload.rank, made.frozen.workload.effective_batch_size) == (32, 4)
    assert (made.job.num_steps, made.job.caption_dropout, made.job.trigger) == (3000, 0.05, "sks")


def test_a_search_for_another_trainer_chooses_from_what_it_can_express(tmp_path: Path) -> None:
    model, _ = write_model_and_images(tmp_path)
    asked: dict[str, Any] = {"hardware": "nvidia-rtx-4090", "resolution": 64}
    everything = list_choices(str(model), **asked).choices
    space = list_choices(str(model), **asked, for_trainer="musubi")
    blocks = everything["checkpointed_blocks"]
    assert len(blocks) > 2
    assert set(space.choices["checkpointed_blocks"]) == {min(blocks), max(blocks)}
    assert "torchao-int8" in everything["quantization"]
    assert "torchao-int8" not in space.choices["quantization"]
    assert space.choices["loader"] == everything["loader"]
    knobs = SPARING.keys() & space.choices.keys()
    assert len(knobs) == len(SPARING) - 1  # one is of caching
    assert {name: space.choices[name] for name in knobs} == {
        name: (SPARING[name],) for name in knobs
    }
    assert space.choices["selective_blocks"] == (0,)
    with pytest.raises(InvalidInput, match="there is no trainer called 'kohya'"):
        list_choices(str(model), **asked, for_trainer="kohya")
