"""The names of layers by which target sets are compared are those of the real models."""

import pytest
import torch

from autotune.interop.rules import LISTS, convolutions, find_target_set, layers_of, linear_layers
from autotune.interop.trainer import trainers
from autotune.models.family import build_on_meta
from autotune.models.registry import FAMILIES

KNOWN = sorted({known.family.name for trainer in trainers().values() for known in trainer.models})


def general_name(layer: str) -> str:
    """A layer's name with 0 for the number of its block; a UNet's middle block has two unlike
    ones."""
    return layer if layer.startswith("mid_block.resnets.") else LISTS.sub(r"\1.0.", layer)


@pytest.mark.parametrize("name", KNOWN)
def test_the_table_has_every_linear_layer_of_the_model(name: str) -> None:
    family = FAMILIES[name]
    model = build_on_meta(family, {**family.transformer_config, **family.tiny_config})
    names = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    assert linear_layers(family) == set(map(general_name, names))
    names = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Conv2d))
    assert convolutions(family) == set(map(general_name, names))


@pytest.mark.parametrize("name", KNOWN)
def test_a_target_set_is_found_by_its_layers(name: str) -> None:
    family = FAMILIES[name]
    for targets in family.target_sets:
        named, difference = find_target_set(family, layers_of(family, targets))
        assert (layers_of(family, named), difference) == (layers_of(family, targets), "")
    found, difference = find_target_set(
        family, layers_of(family, "attention") - {min(layers_of(family, "attention"))}
    )
    assert found == "attention"
    assert difference.startswith("also adapts ")
