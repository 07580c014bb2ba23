"""Plans as other trainers' files: what is exact comes back, what is not is said, and nothing needs more memory."""

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import InvalidInput
from autotune.families.registry import FAMILIES
from autotune.schema.plan import TrainingPlan
from autotune.schema.plan_file import write_plan
from autotune.trainers.exporting import LOADING, compare, export_plan, inexpressible, values_of
from autotune.trainers.importing import ImportedConfig, read_config
from autotune.trainers.registry import get_trainer, trainers
from autotune.trainers.rules import Context, count_blocks
from tests.conftest import autotune_here
from tests.trainers.plans import plan_of

PAIRS = [(trainer.name, family) for trainer in trainers().values() for family in {m.family: 0 for m in trainer.models}]
MAIN = {
    **{"ai-toolkit": "train.yaml", "musubi": "train.toml", "simpletuner": "config.json", "diffusers": "run.sh"},
    **{"sd-scripts": "train.toml", "onetrainer": "config.json"},
}
EXACT: dict[str, dict[str, Any]] = {
    "ai-toolkit": {
        **{"timestep_shift": 1.0, "quantization": "torchao-int8", "checkpointed_blocks": 59, "swapped_blocks": 15},
        **{
            "attention": "flash",
            "compile": "block",
            "lora_alpha": 8.0,
            "lora_dropout": 0.1,
            "targets": "attention+mlp",
        },
        **{"caption_dropout": 0.1, "trigger": "sks", "effective_batch_size": 8, "micro_batch_size": 2},
        **{"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 100, "allocator": "expandable"},
    },
    "musubi": {
        **{"quantization": "layerwise-fp8", "checkpointed_blocks": 59, "swapped_blocks": 16, "attention": "xformers"},
        **{"lr_scheduler": "cosine", "lr_warmup_steps": 50, "weighting_scheme": "sigma_sqrt", "compile": "block"},
        **{"targets": "all-linear", "effective_batch_size": 6, "micro_batch_size": 3, "timestep_shift": 2.2},
    },
    "simpletuner": {
        **{"quantization": "bnb-nf4", "checkpointed_blocks": 30, "swapped_blocks": 16, "attention": "_native_cudnn"},
        **{"lr_scheduler": "linear", "lr_warmup_steps": 50, "compile": "block", "caption_dropout": 0.2},
        **{"timestep_sampling": "uniform", "timestep_shift": "by_resolution", "max_grad_norm": 0.5},
    },
    "diffusers": {
        **{"quantization": "bnb-int8", "checkpointed_blocks": 59, "attention": "flash", "compile": "block"},
        **{"timestep_shift": 1.0, "weighting_scheme": "none", "caption": "a photo of sks", "resolution": 512},
    },
    "sd-scripts": {
        **{"quantization": "layerwise-fp8", "checkpointed_blocks": 56, "swapped_blocks": 18, "attention": "xformers"},
        **{"targets": "attention+mlp", "guidance_scale": 1.0, "timestep_shift": 3.1582, "caption_dropout": 0.05},
    },
    "onetrainer": {
        **{"quantization": "bnb-nf4", "checkpointed_blocks": 59, "swapped_blocks": 30, "attention": "_native_cudnn"},
        **{"timestep_shift": 2.2, "num_train_epochs": 100, "lr_scheduler": "constant_with_warmup"},
        **{"lr_warmup_steps": 100, "compile": "block", "max_grad_norm": 0.5},
    },
}
"""For each trainer, values that it can express exactly."""


def exported(tmp_path: Path, plan: TrainingPlan, trainer: str, **options: Any) -> tuple[ImportedConfig, Any]:
    result = export_plan(plan, get_trainer(trainer), **options)
    for name, text in result.files.items():
        (tmp_path / name).write_text(text)
    return read_config(tmp_path / MAIN[trainer]), result


@pytest.mark.parametrize(("trainer", "family"), PAIRS)
def test_what_is_exact_comes_back_from_the_files_as_it_was(tmp_path: Path, trainer: str, family: str) -> None:
    changes = dict(EXACT[trainer])
    if trainer == "diffusers" and family == "flux1-dev":
        changes["quantization"] = "none"
    if family.startswith("kandinsky5"):
        changes["checkpointed_blocks"] = min(changes["checkpointed_blocks"], 51)
        if changes["checkpointed_blocks"] == 30:
            changes["checkpointed_blocks"] = 26
        changes["swapped_blocks"] = min(changes.get("swapped_blocks", 0), 13)
        changes.pop("guidance_scale", None)
    if family == "flux1-dev":
        changes["checkpointed_blocks"] = {"simpletuner": 29}.get(trainer, 56)
        changes["targets"] = {"onetrainer": "attention", "ai-toolkit": "attention+mlp"}.get(
            trainer, changes.get("targets")
        )
        changes["targets"] = changes["targets"] or "attention"
    if changes.get("timestep_shift") == "by_resolution" and FAMILIES[family].defaults.shift_by_tokens is None:
        changes["timestep_shift"] = 3.0
    plan = plan_of(family, **changes)
    config, result = exported(tmp_path, plan, trainer)
    left = [one for one in result.differences if one.name not in LOADING]
    assert left == []
    assert (config.trainer, config.family, config.data) == (trainer, family, "photos")
    context = Context(FAMILIES[family], plan.frozen.workload.model.num_blocks)
    planned = values_of(plan)
    again = {one.name for one in compare(planned, {**config.options, **config.pins}, context)}
    assert again - set(LOADING) - FROM_SCRIPT == set()
    assert [line for line in config.not_carried if line.line] == []


FROM_SCRIPT = {"allocator"}
"""What stands in the script that starts a trainer, and not in its configuration."""


@pytest.mark.parametrize(("trainer", "family"), PAIRS)
@settings(max_examples=25, deadline=None)
@given(
    blocks=st.integers(0, 59),
    swapped=st.integers(0, 40),
    quantization=st.sampled_from(["none", "torchao-int8", "torchao-fp8", "layerwise-fp8", "bnb-int8", "bnb-nf4"]),
    attention=st.sampled_from(["native", "_native_flash", "_native_cudnn", "flash", "xformers"]),
)
def test_what_a_trainer_lacks_goes_to_a_neighbor_that_needs_no_more_memory(
    trainer: str, family: str, blocks: int, swapped: int, quantization: str, attention: str
) -> None:
    plan = plan_of(
        family, checkpointed_blocks=blocks, swapped_blocks=swapped, quantization=quantization, attention=attention
    )
    num_blocks, result = plan.frozen.workload.model.num_blocks, None
    with contextlib.suppress(InvalidInput):
        result = export_plan(plan, get_trainer(trainer))
    if result is None:
        return
    written = {one.name: one.written for one in result.differences}
    found = count_blocks(written.get("checkpointed_blocks", blocks), num_blocks)
    assert found >= min(blocks, num_blocks - 1)
    stored = {"none": 2.0, "bnb-nf4": 0.5}
    assert stored.get(written.get("quantization", quantization), 1.0) <= stored.get(quantization, 1.0)
    assert count_blocks(written.get("swapped_blocks", swapped), num_blocks) >= min(swapped, num_blocks)
    assert all(f"{one.name}: {one.planned} in the plan" in "".join(result.files.values()) for one in result.differences)


def test_strict_refuses_what_would_learn_otherwise_or_take_other_memory() -> None:
    plan = plan_of("qwen-image", timestep_shift=2.2, checkpointed_blocks=31)
    with pytest.raises(InvalidInput, match=re.escape("timestep_shift is 2.2 in the plan, 1 there")):
        export_plan(plan, get_trainer("ai-toolkit"), strict=True)
    loose = plan_of("qwen-image", timestep_shift=1.0, checkpointed_blocks=59, batch_memory="pinned")
    assert export_plan(loose, get_trainer("ai-toolkit"), strict=True).differences[0].kind == "loading"


@pytest.mark.parametrize(
    ("trainer", "family", "changes", "words"),
    [
        ("ai-toolkit", "kandinsky5-image-lite", {}, "has no training of kandinsky5-image-lite"),
        ("diffusers", "qwen-image-edit", {}, "has no training of qwen-image-edit"),
        ("diffusers", "qwen-image", {"swapped_blocks": 8}, "swapped_blocks would be 0, not 8"),
        ("musubi", "qwen-image", {"modulation": "ahead"}, "modulation would be resident, not ahead"),
        ("musubi", "qwen-image", {"norm_rope": "fused"}, "norm_rope would be stock, not fused"),
        (
            *("simpletuner", "qwen-image"),
            {"checkpointed_blocks": 20, "offloaded_inputs": 9},
            "offloaded_inputs would be 0, not 9",
        ),
        ("musubi", "qwen-image", {"quantization": "bnb-nf4"}, "nothing like quantization bnb-nf4"),
        ("diffusers", "flux1-dev", {"quantization": "bnb-nf4"}, "no quantization"),
        ("sd-scripts", "flux1-dev", {"targets": "attention"}, "one layer"),
    ],
)
def test_what_has_no_neighbor_is_refused_with_a_way_out(
    trainer: str, family: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        export_plan(plan_of(family, **changes), get_trainer(trainer))
    assert words in refused.value.message
    assert refused.value.hint


def test_blocks_that_keep_attention_recompute_everything_in_another_trainer() -> None:
    plan = plan_of("qwen-image", checkpointed_blocks=20, selective_blocks=10, norm_rope="stock")
    result = export_plan(plan, get_trainer("simpletuner"))
    written = {one.name: one.written for one in result.differences}
    assert written["selective_blocks"] == "0"
    assert count_blocks(written["checkpointed_blocks"], 60) >= 30


def test_a_search_for_a_trainer_keeps_what_it_can_express() -> None:
    choices = {
        **{"checkpointed_blocks": (59, 30, 15, 0), "swapped_blocks": (0, 8), "loader": ("safetensors", "mmap")},
        **{"quantization": ("none", "torchao-int8", "layerwise-fp8", "bnb-nf4"), "compile": ("off", "block")},
        **{"attention": ("native", "_native_flash", "flash"), "micro_batch_size": (1, 2, 4)},
    }

    def lacking(trainer: str) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for name, value in inexpressible(get_trainer(trainer), "qwen-image", 60, choices):
            found.setdefault(name, set()).add(value)
        return found

    assert lacking("musubi") == {
        **{"checkpointed_blocks": {"30", "15"}, "quantization": {"torchao-int8", "bnb-nf4"}},
        "attention": {"_native_flash"},
    }
    assert lacking("simpletuner") == {"quantization": {"layerwise-fp8"}}
    assert lacking("diffusers") == {
        **{"checkpointed_blocks": {"30", "15"}, "swapped_blocks": {"8"}},
        "quantization": {"torchao-int8", "layerwise-fp8"},
    }
    assert lacking("ai-toolkit") == {"checkpointed_blocks": {"30", "15"}, "quantization": {"layerwise-fp8", "bnb-nf4"}}


def test_texts_of_a_plan_run_nothing(tmp_path: Path) -> None:
    hostile = "$(touch pwned) `touch pwned` '; touch pwned; \" \\"
    plan = plan_of("qwen-image", data=hostile, caption=hostile, preview_prompts=(hostile,), timestep_shift=1.0)
    config, result = exported(tmp_path, plan, "diffusers")
    assert (config.data, config.options["caption"]) == (hostile, hostile)
    for trainer in ("ai-toolkit", "musubi", "simpletuner", "onetrainer"):
        config, _ = exported(tmp_path, plan, trainer)
        assert config.data == hostile
    assert result.files["run.sh"].count("touch pwned") == 9


def test_export_config_writes_files_and_replaces_none(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan, folder = tmp_path / "plan.yaml", tmp_path / "out"
    write_plan(plan, plan_of("qwen-image", checkpointed_blocks=31))
    asked = ("export-config", plan, "--to", "musubi", "-o", folder)
    done = autotune_here(capfd, *asked)
    assert done.returncode == 0, done.stderr
    assert "checkpointed_blocks: 31 in the plan, all there" in done.stdout
    assert {path.name for path in folder.iterdir()} == {"train.toml", "data.toml", "run.sh"}
    assert "--overwrite" in autotune_here(capfd, *asked).stderr
    assert autotune_here(capfd, *asked, "--overwrite", "--json").returncode == 0
    assert autotune_here(capfd, *asked, "--overwrite", "--strict").returncode == 2
