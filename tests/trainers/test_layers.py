"""The names of layers by which target sets are compared are those of the real models."""

import re

import pytest
import torch

from autotune.families.architecture import build_on_meta
from autotune.families.registry import FAMILIES
from autotune.trainers.layers import find_target_set, layers_of, linear_layers
from autotune.trainers.registry import trainers

KNOWN = sorted({known.family for trainer in trainers().values() for known in trainer.models})


@pytest.mark.parametrize("name", KNOWN)
def test_the_table_has_every_linear_layer_of_the_model(name: str) -> None:
    family = FAMILIES[name]
    model = build_on_meta(family, {**family.transformer_config, **family.tiny_config})
    names = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    assert linear_layers(family) == {re.sub(r"(_blocks)\.\d+\.", r"\1.0.", name) for name in names}


@pytest.mark.parametrize("name", KNOWN)
def test_a_target_set_is_found_by_its_layers(name: str) -> None:
    family = FAMILIES[name]
    for targets in family.target_sets:
        assert find_target_set(family, layers_of(family, targets)) == (targets, "")
    found, difference = find_target_set(family, layers_of(family, "attention") - {min(layers_of(family, "attention"))})
    assert found == "attention"
    assert difference.startswith("also adapts ")
