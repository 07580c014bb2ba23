"""What each trainer means by its models, SDXL first of all: its own names of layers, kinds of
noise and defaults.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from autotune.api.plans import request_for
from autotune.errors import InvalidInput
from autotune.families.registry import FAMILIES
from autotune.interop.exporting import export_plan
from autotune.interop.importing import ImportedConfig, read_config
from autotune.interop.targets import layers_of, original_name, peft_names
from autotune.interop.trainer import get_trainer
from tests.interop.plans import plan_of

TOML = """
pretrained_model_name_or_path = "pony.safetensors"
network_module = "networks.lora"
network_dim = 32
learning_rate = 1e-4
mixed_precision = "bf16"
sdpa = true
"""


def read(folder: Path, name: str, content: str | dict[str, Any]) -> ImportedConfig:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_config(path)


def lost(config: ImportedConfig) -> dict[str, str]:
    return {line.key: line.meaning for line in config.not_carried}


def test_an_sdxl_file_of_sd_scripts_trains_its_text_encoders_unless_it_says_otherwise(
    tmp_path: Path,
) -> None:
    config = read(tmp_path, "train.toml", TOML)
    assert (config.family, config.model, config.pins["attention"]) == ("sdxl", "sdxl", "native")
    assert config.options["targets"] == "attention+mlp+proj"
    sampled = ("timestep_sampling", "timestep_shift", "weighting_scheme")
    assert [config.options[name] for name in sampled] == ["uniform", 1.0, "none"]
    assert "text encoders are trained" in lost(config)["network_train_unet_only"]
    assert any("sdxl_train_network.py" in line.meaning for line in config.carried)
    alone = read(
        tmp_path, "train.toml", TOML + "network_train_unet_only = true\nmin_snr_gamma = 5\n"
    )
    assert "network_train_unet_only" not in lost(alone)
    assert alone.options["weighting_scheme"] == "min_snr"
    odd = read(
        tmp_path,
        "train.toml",
        TOML + 'min_snr_gamma = 1\nnetwork_args = ["conv_dim=8", "down_lr_weight=sine"]\n',
    )
    assert "limit is 5" in lost(odd)["min_snr_gamma"]
    assert "conv1, conv2" in lost(odd)["network_args"]
    assert "down_lr_weight: autotune has no such argument" in lost(odd)["network_args"]


def test_the_gui_s_file_for_sdxl_is_told_from_that_for_older_models(tmp_path: Path) -> None:
    gui = {
        "LoRA_type": "Standard",
        "pretrained_model_name_or_path": "model.safetensors",
        "text_encoder_lr": 0,
    }
    config = read(tmp_path, "gui.json", {**gui, "sdxl": True})
    assert (config.trainer, config.family) == ("sd-scripts", "sdxl")
    assert "network_train_unet_only" not in lost(config)
    with pytest.raises(InvalidInput, match="does not know"):
        read(tmp_path, "gui.json", {**gui, "sdxl": False})
    with pytest.raises(InvalidInput, match="does not know"):
        read(
            tmp_path,
            "run.sh",
            "accelerate launch train_network.py --network_module networks.lora\n",
        )


def test_captions_that_are_dropped_are_not_cached_by_sd_scripts() -> None:
    plan = plan_of("sdxl", targets="attention+mlp+proj", timestep_shift=1.0, caption_dropout=0.1)
    text = export_plan(plan, get_trainer("sd-scripts")).files["train.toml"]
    assert "cache_latents = true" in text
    assert "cache_text_encoder_outputs" not in text


def test_onetrainer_s_file_for_sdxl_has_its_settings_under_the_unet(tmp_path: Path) -> None:
    written = {
        "model_type": "STABLE_DIFFUSION_XL_10_BASE",
        "training_method": "LORA",
        "layer_filter": "attentions",
    }
    own = {"unet": {"weight_dtype": "NFLOAT_4"}, "transformer": {"weight_dtype": "FLOAT_32"}}
    config = read(tmp_path, "config.json", {**written, **own, "gradient_checkpointing": "OFF"})
    assert (config.pins["quantization"], config.pins["checkpointed_blocks"]) == ("bnb-nf4", "0")
    assert config.options["targets"] == "attention+mlp+proj"
    assert {"text_encoder.train", "text_encoder_2.train"} <= lost(config).keys()
    full = read(tmp_path, "config.json", {**written, **own, "layer_filter": ""})
    assert "does not adapt" in lost(full)["layer_filter"]
    assert "conv1" in lost(full)["layer_filter"]


def test_onetrainer_s_own_choice_of_z_image_s_layers_is_a_pattern(tmp_path: Path) -> None:
    pattern = "^(?=.*attention)(?!.*refiner).*,^(?=.*feed_forward)(?!.*refiner).*"
    written = {
        "model_type": "Z_IMAGE",
        "training_method": "LORA",
        "layer_filter": pattern,
        "layer_filter_regex": True,
    }
    config = read(tmp_path, "config.json", written)
    assert (config.family, config.options["targets"]) == ("z-image", "attention+mlp")
    assert "also adapts attention.to_k" in lost(config)["layer_filter_regex"]


@pytest.mark.parametrize(
    ("family", "flavor", "model"),
    [
        *(
            ("qwen_image", None, "qwen-image-2512"),
            ("qwen_image", "edit-v3", "qwen-image-edit-2511"),
        ),
        *(
            ("flux2", None, "flux2-klein-9b"),
            ("z_image", None, "z-image-turbo"),
            ("krea2", "raw", "krea-2"),
        ),
        *(("wan", "ti2v-5b-2.2", "wan-2.2"), ("sdxl", "base-1.0", "sdxl")),
    ],
)
def test_a_flavor_that_is_not_named_is_simpletuner_s_own(
    tmp_path: Path, family: str, flavor: str | None, model: str
) -> None:
    named = {} if flavor is None else {"model_flavour": flavor}
    assert read(tmp_path, "config.json", {"model_family": family, **named}).model == model
    with pytest.raises(InvalidInput, match="does not know"):
        read(tmp_path, "config.json", {"model_family": family, "model_flavour": "another"})


def test_simpletuner_refuses_steps_beside_its_default_of_one_epoch() -> None:
    written = json.loads(
        export_plan(plan_of("qwen-image"), get_trainer("simpletuner")).files["config.json"]
    )
    assert (written["max_train_steps"], written["num_train_epochs"]) == (2000, 0)


def test_layers_go_by_the_names_of_the_code_that_is_trained(tmp_path: Path) -> None:
    klein = FAMILIES["flux2-klein"]
    assert {original_name(klein, layer) for layer in layers_of(klein, "attention")} == {
        *(
            "double_blocks.0.img_attn.qkv",
            "double_blocks.0.img_attn.proj",
            "double_blocks.0.txt_attn.qkv",
        ),
        *("double_blocks.0.txt_attn.proj", "single_blocks.0.linear1", "single_blocks.0.linear2"),
    }
    yaml = (
        "config:\n  process:\n  - type: sd_trainer\n    model: {arch: krea2}\n    network: "
        "{type: "
        "lora, linear: 8}\n"
    )
    config = read(tmp_path, "config.yaml", yaml)
    assert config.options["targets"] == "attention+mlp"
    assert (
        "does not adapt" in lost(config)["network.network_kwargs.only_if_contains"]
    )  # the blocks that fuse the text


def test_a_name_that_other_layers_share_is_written_for_each_block() -> None:
    names = peft_names(FAMILIES["krea-2"], "attention")
    assert "transformer_blocks.27.attn.to_q" in names
    assert not {"attn.to_q", "to_q"} & set(names)
    klein = peft_names(FAMILIES["flux2-klein"], "attention")
    assert "attn.to_q" in klein
    assert "single_transformer_blocks.23.attn.to_out" in klein


@pytest.mark.parametrize(
    ("trainer", "model", "changes", "words"),
    [
        ("sd-scripts", "sdxl", {}, "--targets attention+mlp+proj"),
        (
            "ai-toolkit",
            "sdxl",
            {"quantization": "torchao-int8"},
            "no weight format like quantization torchao-int8",
        ),
        ("ai-toolkit", "flux1-dev", {"swapped_blocks": 8}, "swapped_blocks would be 0, not 8"),
        ("diffusers", "sdxl", {"quantization": "bnb-nf4"}, "nothing like quantization bnb-nf4"),
        ("musubi", "krea-2", {"swapped_blocks": 27}, "swaps no more than 26 blocks"),
        ("onetrainer", "wan-2.1", {}, "has no training of wan-2.1"),
    ],
)
def test_what_a_model_s_script_lacks_is_refused(
    trainer: str, model: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInput, match=re.escape(words)):
        export_plan(plan_of(model, timestep_shift=1.0, **changes), get_trainer(trainer))


def test_captions_in_files_are_said_not_to_be_read_by_diffusers_scripts() -> None:
    result = export_plan(plan_of("krea-2", timestep_shift=1.0), get_trainer("diffusers"))
    assert "--instance_prompt FILL-IN" in result.files["run.sh"]
    assert any(".txt" in remark for remark in result.remarks)


def test_a_shift_by_resolution_is_not_given_to_a_model_without_one(tmp_path: Path) -> None:
    config = read(
        tmp_path, "config.json", {"model_family": "z_image", "flow_schedule_auto_shift": True}
    )
    assert "timestep_shift" not in config.options
    assert "family's usual" in lost(config)["flow_schedule_auto_shift"]


def test_a_plan_for_a_trainer_adapts_layers_that_it_can_adapt() -> None:
    assert (
        request_for("sdxl", None, {"for_trainer": "sd-scripts"}).workload_overrides.targets
        == "attention+mlp+proj"
    )
    assert (
        request_for("sdxl", None, {"for_trainer": "onetrainer"}).workload_overrides.targets
        == "attention"
    )
    with pytest.raises(InvalidInput, match="cannot adapt the layers 'attention'") as told:
        request_for("flux1-dev", None, {"for_trainer": "sd-scripts", "targets": "attention"})
    assert "attention+mlp" in str(told.value.hint)
