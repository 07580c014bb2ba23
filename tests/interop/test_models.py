"""What each trainer means by its models, SDXL first of all: its own names of layers, kinds of
noise and defaults."""

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.api.plans import request_for
from autotune.errors import InvalidInput
from autotune.interop.exporting import export_plan
from autotune.interop.importing import ImportedConfig, read_config
from autotune.interop.trainer import get_trainer
from tests.interop.plans import plan_of


def read(folder: Path, name: str, content: str | dict[str, Any]) -> ImportedConfig:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_config(path)


def lost(config: ImportedConfig) -> dict[str, str]:
    return {line.key: line.meaning for line in config.not_carried}


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
