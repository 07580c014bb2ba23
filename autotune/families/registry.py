"""The families that autotune supports, by name. To add one: its file, and one line in this table."""

from collections.abc import Mapping
from types import MappingProxyType

from autotune.errors import InvalidInput, suggest_nearest
from autotune.families.base import Family
from autotune.families.flux1_dev import Flux1Dev
from autotune.families.kandinsky5 import Kandinsky5Image, Kandinsky5Video
from autotune.families.qwen_image import QwenImage
from autotune.families.qwen_image_edit import QwenImageEdit, QwenImageEditPlus

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for family in (
            QwenImage(),
            QwenImageEdit(),
            QwenImageEditPlus(),
            Flux1Dev(),
            Kandinsky5Image(),
            Kandinsky5Video(),
        )
    }
)


def get_family(name: str) -> Family:
    """The family called `name`. Raises InvalidInput if no family has that name."""
    if name not in FAMILIES:
        raise InvalidInput(f"there is no model family called {name!r}", hint=suggest_nearest(name, FAMILIES))
    return FAMILIES[name]
