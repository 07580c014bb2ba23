"""The families that autotune knows, by name. Adding one: its file, and one line here."""

from collections.abc import Mapping
from types import MappingProxyType

from autotune.errors import InvalidInput
from autotune.families.base import Family
from autotune.families.qwen_image import QwenImage

FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in (QwenImage(),)})


def family_named(name: str) -> Family:
    """The family called `name`.

    Raises:
        InvalidInput: no family has that name.
    """
    if name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise InvalidInput(f"there is no model family called {name!r}", hint=f"known families: {known}")
    return FAMILIES[name]
