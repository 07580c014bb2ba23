"""Models as each trainer means them: names of layers, kinds of noise and defaults."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.errors import InvalidInput
from autotune.interop.importing import ImportedConfig, import_config
from autotune.interop.trainer import trainers
from autotune.models.adapter import LISTS, convolutions, find_target_set, layers_of, linear_layers
from autotune.models.family import build_on_meta
from autotune.models.registry import FAMILIES
from autotune.plan.request import PlanRequest
from autotune.search.request import complete
from tests.interop.test_importing import lost


def read(folder: Path, content: dict[str, Any]) -> ImportedConfig:
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return import_config(path)


def test_onetrainer_s_unet_has_its_settings(tmp_path):
    written = {"model_type": "STABLE_DIFFUSION_XL_10_BASE", "training_method": "LORA"}
    written["layer_filter"] = "attentions"
    own = {"unet": {"weight_dtype": "NFLOAT_4"}, "transformer": {"weight_dtype": "FLOAT_32"}}
    config = read(tmp_path, {**written, **own, "gradient_checkpointing": "OFF"})
    assert (config.pins["quantization"], config.pins["checkpointed_blocks"]) == ("bnb-nf4", "0")
    assert config.options["targets"] == "attention+mlp+proj"
    assert {"text_encoder.train", "text_encoder_2.train"} <= lost(config).keys()
    full = read(tmp_path, {**written, **own, "layer_filter": ""})
    assert "does not adapt" in lost(full)["layer_filter"]
    assert "conv1" in lost(full)["layer_filter"]


def test_targets_suit_the_trainer():
    for trainer, targets in (("sd-scripts", "attention+mlp+proj"), ("onetrainer", "attention")):
        assert complete(PlanRequest(model="sdxl", for_trainer=trainer)).targets == targets
    with pytest.raises(InvalidInput, match="cannot adapt the layers 'attention'") as told:
        complete(PlanRequest(model="flux1-dev", for_trainer="sd-scripts", targets="attention"))
    assert "attention+mlp" in str(told.value.hint)


KNOWN = sorted({known.family.name for trainer in trainers().values() for known in trainer.models})


def general_name(layer: str) -> str:
    """With 0 for the number of its block; a UNet's middle block has two unlike ones."""
    return layer if layer.startswith("mid_block.resnets.") else LISTS.sub(r"\1.0.", layer)


@pytest.mark.parametrize("name", KNOWN)
def test_layer_tables_are_whole(name):
    family = FAMILIES[name]
    model = build_on_meta(family, {**family.transformer_config, **family.tiny_config})
    for kind, layers in ((torch.nn.Linear, linear_layers), (torch.nn.Conv2d, convolutions)):
        names = {name for name, module in model.named_modules() if isinstance(module, kind)}
        names -= {name for name in names if "guidance_embed.guidance" in name}  # FLUX.2 dev's alone
        assert layers(family) == set(map(general_name, names))


@pytest.mark.parametrize("name", KNOWN)
def test_target_sets_are_found(name):
    family = FAMILIES[name]
    for targets in family.target_sets:
        named, difference = find_target_set(family, layers_of(family, targets))
        assert (layers_of(family, named), difference) == (layers_of(family, targets), "")
    attention = layers_of(family, "attention")
    found, difference = find_target_set(family, attention - {min(attention)})
    assert (found, difference[:12]) == ("attention", "also adapts ")
