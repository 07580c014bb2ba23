"""Plans as other trainers' files: what is exact comes back, what is not is said, and nothing
needs more memory."""

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import InvalidInput
from autotune.interop.exporting import LOADING, compare, export_plan, inexpressible, values_of
from autotune.interop.importing import ImportedConfig, read_config
from autotune.interop.rules import Context, count_blocks
from autotune.interop.trainer import get_trainer, trainers
from autotune.models.registry import FAMILIES
from autotune.plan.plan import TrainingPlan
from autotune.plan.plan_file import write_plan
from tests.conftest import autotune_here
from tests.interop.plans import plan_of

PAIRS = [
    (trainer.name, name)
    for trainer in trainers().values()
    for name in {m.name: 0 for m in trainer.models}
]
MAIN = {
    **dict.fromkeys(("musubi", "sd-scripts"), "train.toml"),
    **dict.fromkeys(("simpletuner", "onetrainer"), "config.json"),
    **{"ai-toolkit": "train.yaml", "diffusers": "run.sh"},
}
EXACT = yaml.safe_load((Path(__file__).parent / "exact.yaml").read_text())


def exact_of(trainer: str, model: str) -> dict[str, Any]:
    """Values that a trainer can express exactly for a model."""
    plan = plan_of(model)
    defaults, total = (
        FAMILIES[plan.frozen.workload.model.family].defaults,
        plan.frozen.workload.model.num_blocks,
    )
    of_models = (own for names, own in EXACT[trainer].items() if model in names.split())
    changes = {**EXACT[trainer]["exact"], **next(of_models, {})}
    is_patterned = trainer == "simpletuner" and model.startswith(("qwen", "kandinsky5-video"))
    changes["checkpointed_blocks"] = total // 2 if is_patterned else total - 1
    if isinstance(share := changes.get("swapped_blocks"), float):
        changes["swapped_blocks"] = int(share * total)
    if changes["timestep_shift"] == "by_resolution" and defaults.shift_by_tokens is None:
        changes["timestep_shift"] = 3.0
    if defaults.training_guidance is None:
        changes.pop("guidance_scale", None)
    if model == "sdxl" and trainer != "onetrainer":
        changes["timestep_shift"] = 1.0
    if trainer in ("diffusers", "simpletuner", "onetrainer"):
        changes["targets"] = "attention"
    if trainer == "diffusers" and model == "sdxl":
        changes |= {"lora_alpha": 16.0, "caption": "a photo of sks"}
    return changes


def exported(
    tmp_path: Path, plan: TrainingPlan, trainer: str, **options: Any
) -> tuple[ImportedConfig, Any]:
    result = export_plan(plan, get_trainer(trainer), **options)
    for name, text in result.files.items():
        (tmp_path / name).write_text(text)
    return read_config(tmp_path / MAIN[trainer]), result


@pytest.mark.parametrize(("trainer", "model"), PAIRS)
def test_what_is_exact_comes_back_from_the_files_as_it_was(
    tmp_path: Path, trainer: str, model: str
) -> None:
    plan = plan_of(model, **exact_of(trainer, model))
    spec = plan.frozen.workload.model
    config, result = exported(tmp_path, plan, trainer)
    left = [one for one in result.differences if one.name not in LOADING]
    assert left == []
    assert (config.trainer, config.family, config.data) == (trainer, spec.family, "photos")
    assert config.model in (model, spec.name)
    context = Context(FAMILIES[spec.family], spec.num_blocks)
    planned = values_of(plan)
    again = {one.name for one in compare(planned, {**config.options, **config.pins}, context)}
    assert again - set(LOADING) - FROM_SCRIPT == set()
    assert [line for line in config.not_carried if line.line] == []


FROM_SCRIPT = {"allocator"}
"""What stands in the script that starts a trainer, and not in its configuration."""


@pytest.mark.parametrize(("trainer", "model"), PAIRS)
@settings(max_examples=10)
@given(
    blocks=st.integers(0, 59),
    swapped=st.integers(0, 40),
    quantization=st.sampled_from(["none", "torchao-int8", "torchao-fp8", "bnb-nf4"]),
    attention=st.sampled_from(["native", "_native_flash", "_native_cudnn", "flash", "xformers"]),
)
def test_what_a_trainer_lacks_goes_to_a_neighbor_that_needs_no_more_memory(
    trainer: str, model: str, blocks: int, swapped: int, quantization: str, attention: str
) -> None:
    blocks = min(blocks, plan_of(model).frozen.workload.model.num_blocks)
    plan = plan_of(
        model,
        checkpointed_blocks=blocks,
        swapped_blocks=swapped,
        quantization=quantization,
        attention=attention,
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
    assert stored.get(written.get("quantization", quantization), 1.0) <= stored.get(
        quantization, 1.0
    )
    assert count_blocks(written.get("swapped_blocks", swapped), num_blocks) >= min(
        swapped, num_blocks
    )
    assert all(
        f"{one.name}: {one.planned} in the plan" in "".join(result.files.values())
        for one in result.differences
    )


def test_strict_refuses_what_would_learn_otherwise_or_take_other_memory() -> None:
    plan = plan_of("qwen-image", timestep_shift=2.2, checkpointed_blocks=31)
    with pytest.raises(InvalidInput, match=re.escape("timestep_shift is 2.2 in the plan, 1 there")):
        export_plan(plan, get_trainer("ai-toolkit"), strict=True)
    loose = plan_of("qwen-image", timestep_shift=1.0, checkpointed_blocks=59, batch_memory="pinned")
    assert (
        export_plan(loose, get_trainer("ai-toolkit"), strict=True).differences[0].kind == "loading"
    )


@pytest.mark.parametrize(
    ("trainer", "family", "changes", "words"),
    [
        ("ai-toolkit", "kandinsky5-image-lite", {}, "has no training of kandinsky5-image-lite"),
        ("diffusers", "qwen-image-edit", {}, "has no training of qwen-image-edit"),
        ("diffusers", "qwen-image", {"swapped_blocks": 8}, "swapped_blocks would be 0, not 8"),
        (
            "musubi",
            "qwen-image",
            {"modulation": "ahead"},
            "modulation would be resident, not ahead",
        ),
        ("musubi", "qwen-image", {"norm_rope": "fused"}, "norm_rope would be stock, not fused"),
        ("musubi", "qwen-image", {"quantization": "bnb-nf4"}, "nothing like quantization bnb-nf4"),
        (
            "diffusers",
            "flux1-dev",
            {"quantization": "bnb-nf4"},
            "nothing like quantization bnb-nf4",
        ),
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


def test_a_search_for_a_trainer_keeps_what_it_can_express() -> None:
    choices = {
        **{
            "checkpointed_blocks": (59, 30, 15, 0),
            "swapped_blocks": (0, 8),
            "loader": ("safetensors", "mmap"),
        },
        **{
            "quantization": ("none", "torchao-int8", "torchao-fp8", "bnb-nf4"),
            "compile": ("off", "block"),
        },
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
    assert lacking("simpletuner") == {}
    assert lacking("diffusers") == {
        **{"checkpointed_blocks": {"30", "15"}, "swapped_blocks": {"8"}},
        "quantization": {"torchao-fp8"},
    }
    assert lacking("ai-toolkit") == {
        "checkpointed_blocks": {"30", "15"},
        "quantization": {"bnb-nf4"},
    }


def test_texts_of_a_plan_run_nothing(tmp_path: Path) -> None:
    hostile = "$(touch pwned) `touch pwned` '; touch pwned; \" \\"
    plan = plan_of(
        "qwen-image", data=hostile, caption=hostile, preview_prompts=(hostile,), timestep_shift=1.0
    )
    config, result = exported(tmp_path, plan, "diffusers")
    assert (config.data, config.options["caption"]) == (hostile, hostile)
    for trainer in ("ai-toolkit", "musubi", "simpletuner", "onetrainer"):
        config, _ = exported(tmp_path, plan, trainer)
        assert config.data == hostile
    assert result.files["run.sh"].count("touch pwned") == 9


def test_export_config_writes_files_and_replaces_none(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
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
