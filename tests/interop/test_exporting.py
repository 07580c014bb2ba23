"""Exact settings come back from other files, others are told; nothing needs more memory."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings, strategies as st

from autotune.errors import InvalidInput
from autotune.exchange import audit, export_config
from autotune.interop.exporting import LEARNING, LOADING, compare, export_plan, values_of
from autotune.interop.importing import import_config
from autotune.interop.rules import Context
from autotune.interop.trainer import get_trainer, trainers
from autotune.models.registry import FAMILIES
from autotune.plan.candidate import count_blocks
from autotune.plan.job import Job
from autotune.train.folder import CHANGEABLE_FIELDS
from tests.interop.plans import plan_of
from tests.interop.test_importing import CONFIGS
from tests.train.small import write_model_and_images

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


def exact_of(trainer, model):
    spec = plan_of(model).frozen.workload.model
    defaults, total = FAMILIES[spec.family].defaults, spec.num_blocks
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
    return changes


def exported(tmp_path, plan, trainer, **options):
    result = export_plan(plan, get_trainer(trainer), **options)
    for name, text in result.files.items():
        (tmp_path / name).write_text(text)
    return import_config(tmp_path / MAIN[trainer]), result


@pytest.mark.quick("qwen-image", "sdxl", "flux1-dev")
@pytest.mark.parametrize(("trainer", "model"), PAIRS)
def test_exact_plans_come_back(tmp_path, trainer, model):
    plan = plan_of(model, **exact_of(trainer, model))
    spec = plan.frozen.workload.model
    config, result = exported(tmp_path, plan, trainer)
    own_schedule = ("timestep_sampling", "timestep_shift") if "ideogram" in model else ()
    untold = (*LOADING, *(own_schedule if trainer == "simpletuner" else ()))
    assert [one for one in result.differences if one.name not in untold] == []
    assert (config.trainer, config.family, config.data) == (trainer, spec.family, "photos")
    assert config.model in (model, spec.name)
    context = Context(FAMILIES[spec.family], spec.num_blocks)
    planned = values_of(plan)
    again = {one.name for one in compare(planned, {**config.options, **config.pins}, context)}
    assert again <= {*untold, "allocator"}  # which stands in the script that starts a trainer
    assert [line for line in config.not_carried if line.line] == []


@pytest.mark.quick("qwen-image", "sdxl")
@pytest.mark.parametrize(("trainer", "model"), PAIRS)
@settings(max_examples=5)
@given(
    blocks=st.integers(0, 59),
    swapped=st.integers(0, 40),
    quantization=st.sampled_from(["none", "torchao-int8", "torchao-fp8", "bnb-nf4"]),
    attention=st.sampled_from(["native", "_native_flash", "_native_cudnn", "flash", "xformers"]),
)
def test_neighbors_need_no_more_memory(trainer, model, blocks, swapped, quantization, attention):
    total = plan_of(model).frozen.workload.model.num_blocks
    planned = {"checkpointed_blocks": min(blocks, total), "swapped_blocks": swapped}
    plan = plan_of(model, quantization=quantization, attention=attention, **planned)
    try:
        result = export_plan(plan, get_trainer(trainer))
    except InvalidInput:
        return
    written = {one.name: one.written for one in result.differences}
    for name, top in (("checkpointed_blocks", total - 1), ("swapped_blocks", total)):
        there = count_blocks(written.get(name, planned[name]), total)
        assert there >= min(planned[name], top)
    bits = {"bnb-nf4": 4, "torchao-int8": 8, "torchao-fp8": 8, "none": 16}
    assert bits[written.get("quantization", quantization)] <= bits[quantization]
    text = "".join(result.files.values())
    assert all(f"{one.name}: {one.planned} in the plan" in text for one in result.differences)


@pytest.mark.parametrize(
    ("trainer", "key", "value"),
    [
        ("simpletuner", '"musubi_blocks_to_swap": ', 41),  # 38 light ones and 3 heavy ones
        ("sd-scripts", "blocks_to_swap = ", 20),  # 10 heavy ones and 20 light ones
        ("onetrainer", '"offload_fraction": ', 0.51675),
    ],
)
def test_swapped_blocks_weigh_as_much(trainer, key, value):
    plan = plan_of("flux1-dev", swapped_blocks=18, targets="attention+mlp")
    text = "".join(export_plan(plan, get_trainer(trainer)).files.values())
    assert f"{key}{value}" in text


def test_data_files_are_ones_that_load():
    clips = export_plan(plan_of("wan-2.1", num_frames=81), get_trainer("simpletuner"))
    first, _ = json.loads(clips.files["multidatabackend.json"])
    assert (first["dataset_type"], first["crop_aspect"]) == ("video", "preserve")
    large = export_plan(
        plan_of("sdxl", resolution=1280, targets="attention+mlp+proj"), get_trainer("sd-scripts")
    )
    assert "max_bucket_reso = 2560" in large.files["data.toml"]
    chroma = export_plan(plan_of("chroma", targets="attention+mlp"), get_trainer("sd-scripts"))
    assert "apply_t5_attn_mask = true" in chroma.files["train.toml"]
    assert "guidance_scale = 0.0" in chroma.files["train.toml"]


def test_strict_refuses_differences():
    plan = plan_of("qwen-image", timestep_shift=2.2, checkpointed_blocks=31)
    with pytest.raises(InvalidInput, match=r"shift is 2\.2 in the plan, 1 there"):
        export_plan(plan, get_trainer("ai-toolkit"), strict=True)
    loose = plan_of("qwen-image", timestep_shift=1.0, checkpointed_blocks=59, batch_memory="pinned")
    export_plan(loose, get_trainer("ai-toolkit"), strict=True)


def test_what_a_folder_loses_is_told(tmp_path):
    (tmp_path / "10_dog").mkdir()
    for name in ("a.png", "a.txt", "10_dog/b.png", "10_dog/b.caption"):
        (tmp_path / name).touch()
    plan = plan_of("qwen-image", shuffle_tags=2, validation="10%", data=str(tmp_path))
    told = {one.name for one in export_config(plan, "ai-toolkit").differences}
    assert told == {"repeats", "captions", "shuffle_tags", "validation", "timestep_shift"}
    assert "subfolders" in {one.name for one in export_config(plan, "musubi").differences}
    with pytest.raises(InvalidInput) as refused:
        export_config(plan, "ai-toolkit", strict=True)
    assert "--shuffle-tags, --timestep-shift, --validation" in refused.value.hint


def test_adapters_beside_trained_one_are_told():
    plan = plan_of("qwen-image", from_adapter="a.safetensors", training_adapter="b.safetensors")
    told = {one.name: one.kind for one in export_plan(plan, get_trainer("ai-toolkit")).differences}
    assert told.keys() >= {"from_adapter", "training_adapter"}
    assert {told["from_adapter"], told["training_adapter"]} == {"learning"}
    # Steps are compared with epochs; a seed differs by design.
    assert Job.model_fields.keys() - CHANGEABLE_FIELDS - {"num_train_epochs", "seed"} <= {*LEARNING}


@pytest.mark.parametrize(
    ("trainer", "family", "changes", "words"),
    [
        ("ai-toolkit", "chroma", {}, "for ai-toolkit: a model that autotune has"),
        ("diffusers", "qwen-image", {"swapped_blocks": 8}, "swapped_blocks would be 0, not 8"),
        ("musubi", "qwen-image", {"modulation": "ahead"}, "modulation would be resident"),
        ("musubi", "qwen-image", {"quantization": "bnb-nf4"}, "like quantization bnb-nf4"),
        ("sd-scripts", "flux1-dev", {"targets": "attention"}, "one layer"),
    ],
)
def test_inexpressible_plans_are_refused(trainer, family, changes, words):
    with pytest.raises(InvalidInput, match=words):
        export_plan(plan_of(family, **changes), get_trainer(trainer))


def test_texts_run_nothing(tmp_path):
    hostile = "$(touch pwned) `touch pwned` '; touch pwned; \" \\"
    texts = {"data": hostile, "caption": hostile, "preview_prompts": (hostile,)}
    plan = plan_of("qwen-image", **texts, timestep_shift=1.0)
    config, result = exported(tmp_path, plan, "diffusers")
    assert (config.data, config.options["caption"]) == (hostile, hostile)
    for trainer in ("ai-toolkit", "musubi", "simpletuner", "onetrainer"):
        config, _ = exported(tmp_path, plan, trainer)
        assert config.data == hostile
    assert result.files["run.sh"].count("touch pwned") == 9


@pytest.mark.slow
def test_an_audit_predicts_both(tmp_path):
    path, (model, _) = tmp_path / "config.yaml", write_model_and_images(tmp_path)
    text = (CONFIGS / "ai_toolkit.yaml").read_text()
    text = text.replace("name_or_path: Qwen/Qwen-Image", f"name_or_path: {model}")
    text = text.replace("resolution: [512, 768, 1024]", "resolution: 256")
    dtype = "dtype: bf16\n        cache"
    attention = dtype.replace("cache", "attention_backend: sage\n        cache")
    swapped = "layer_offloading: true"
    both = f"compile: true\n        block_compile: true\n        {swapped}"
    assert swapped in text
    path.write_text(text.replace(dtype, attention).replace(swapped, both))
    found = audit(path, hardware="nvidia-rtx-4090")
    written = found.as_written.prediction.candidate
    total = found.as_written.workload.model.num_blocks
    assert (written.quantization, written.micro_batch_size) == ("torchao-fp8", 1)
    assert (written.checkpointed_blocks, written.swapped_blocks) == (total, round(total / 4))
    assert {one.partition(":")[0] for one in found.breaks} == {"attention sage", "compile block"}
    assert found.fastest.step_seconds < found.as_written.step_seconds
    assert found.as_written.num_steps == found.fastest.num_steps == 3000
    assert found.as_written.workload == found.fastest.workload
    better = found.fastest.prediction.candidate
    changed = {name for name, value in better if getattr(written, name) != value}
    assert {one.knob for one in found.worth} <= changed - {"optimizer"}
    assert found.worth[0].step_seconds_saved > 0
