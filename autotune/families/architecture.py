"""Building a family's transformer without weights, and what identifies its architecture."""

import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune import weights
from autotune.errors import InvalidInput, first_line
from autotune.families.base import Family
from autotune.runtime import lazy_module
from autotune.schema import ModelSpec, digest_of

if TYPE_CHECKING:
    import diffusers
    import torch
else:
    diffusers = lazy_module("diffusers")
    torch = lazy_module("torch")

CHECK_CONFIG = "check the config.json of what is trained, or update diffusers"


def public_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a constructor, without what diffusers notes about itself."""
    return {key: value for key, value in config.items() if not key.startswith("_")}


def build_spec(family: Family, config: Mapping[str, Any], name: str) -> ModelSpec:
    """What a plan records of a model called `name`. Raises InvalidInput as `build_on_meta`, or
    if it has no blocks.
    """
    return _build_spec(family, json.dumps(dict(config), default=dict)).changed(name=name)


@functools.lru_cache(maxsize=64)
def _build_spec(family: Family, config: str) -> ModelSpec:
    """Cached because it takes tenths of a second, and a command asks for it several times."""
    transformer = build_on_meta(family, json.loads(config))
    num_blocks = len(family.blocks(transformer))
    if not num_blocks:
        message = (
            f"the transformer's configuration builds a {family.transformer_class} without blocks"
        )
        raise InvalidInput(message, hint=CHECK_CONFIG)
    full = json.loads(json.dumps(public_config(transformer.config)))
    return ModelSpec(
        family=family.name,
        architecture=digest_of({"class": family.transformer_class, "config": full}),
        num_parameters=sum(parameter.numel() for parameter in transformer.parameters()),
        num_blocks=num_blocks,
        name=family.name,
    )


def build_on_meta(family: Family, config: Mapping[str, Any]) -> Any:
    """Build the transformer with all parameters and buffers on the meta device.

    Raises InvalidInput if the class refuses the configuration.
    """
    from diffusers.models.modeling_utils import no_init_weights

    getattr(
        diffusers, family.transformer_class
    )  # an error of this import would not be the configuration's
    try:
        with torch.device("meta"), weights.limit_tensors(), no_init_weights():
            return family.build_transformer(config)
    except Exception as error:  # classes raise anything for a configuration that makes no sense
        reason = first_line(error)
        raise InvalidInput(
            f"the transformer's configuration does not build a {family.transformer_class}: "
            f"{reason}",
            hint=CHECK_CONFIG,
        ) from error
