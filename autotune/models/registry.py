"""The families that autotune supports, by name. To add one: its file, and one line in this
table; or, from another distribution, an entry point in the group `autotune.families` that names
the class or an instance."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from autotune.errors import InvalidInput, suggest_nearest
from autotune.models.family import Family, PublishedModel
from autotune.models.flux1 import Chroma, Flux1Dev, Flux1Kontext
from autotune.models.flux2 import Flux2Dev, Flux2Klein
from autotune.models.kandinsky5 import Kandinsky5Image, Kandinsky5Video
from autotune.models.krea2 import Krea2
from autotune.models.ltx2 import LTX2
from autotune.models.qwen_image import QwenImage, QwenImage21, QwenImageEdit, QwenImageEditPlus
from autotune.models.sd35 import StableDiffusion35
from autotune.models.sdxl import StableDiffusionXL
from autotune.models.wan import Wan21, Wan22, Wan22HighNoise
from autotune.models.z_image import ZImage
from autotune.system.process import reveal_packages

ENTRY_POINTS = "autotune.families"


class Families(Mapping[str, Family]):
    """Families by name: autotune's own, then those of other distributions, which are loaded at
    the first look-up."""

    def __init__(self, *own: Family) -> None:
        self._families = {family.name: family for family in own}
        self._is_complete = False

    def __getitem__(self, name: str) -> Family:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def add(self, family: Family) -> None:
        """Add a family to this process. Trials run in others: what a plan is to train needs an
        entry point.

        Raises:
            TypeError: it is no family.
            ValueError: there is another one of its name, or of its pipelines, by which folders are
                recognized.
        """
        if not isinstance(family, Family):
            raise TypeError(f"not a Family: {family!r}")
        index = {**family.pipeline_config, "_class_name": family.pipeline_class}
        if any(
            family.name == other.name or other.is_pipeline(index)
            for other in self._families.values()
        ):
            raise ValueError(
                f"there is already a family {family.name}, or one with a {family.pipeline_class}"
            )
        self._families[family.name] = family

    def _all(self) -> Mapping[str, Family]:
        if not self._is_complete:
            self._is_complete = True
            load_entry_points(
                ENTRY_POINTS, lambda found: self.add(found() if isinstance(found, type) else found)
            )
        return self._families


FAMILIES = Families(
    QwenImage(),
    QwenImageEdit(),
    QwenImageEditPlus(),
    Flux1Dev(),
    Flux1Kontext(),
    Kandinsky5Image(),
    Kandinsky5Video(),
    ZImage(),
    StableDiffusionXL(),
    Flux2Klein(),
    Flux2Dev(),
    Wan21(),
    Wan22(),
    Wan22HighNoise(),
    Krea2(),
    Chroma(),
    QwenImage21(),
    StableDiffusion35(),
    LTX2(),
)


def find_published(name: str, expert: str | None = None) -> tuple[Family, PublishedModel] | None:
    """The published model of that name or hub id, with its family as it trains `expert`; by its
    family's name the first one. Raises InvalidInput if it has no such expert."""
    known = ((family, each) for family in FAMILIES.values() for each in family.models)
    found = next(
        (found for found in known if name in (found[1].name or found[0].name, found[1].hub_id)),
        None,
    )
    return found and (found[0].with_expert(expert), found[1])


def get_family(name: str) -> Family:
    """The family called `name`. Raises InvalidInput if no family has that name."""
    if name not in FAMILIES:
        raise InvalidInput(
            f"there is no model family called {name!r}", hint=suggest_nearest(name, FAMILIES)
        )
    return FAMILIES[name]


def load_entry_points(group: str, add: Callable[[Any], None]) -> dict[str, str]:
    """Give each entry point of a group to `add`; returns the version of each distribution that
    added any.

    What is broken costs a warning, not the command.
    """
    found: dict[str, str] = {}
    for point in entry_points(group=group):
        reveal_packages()
        try:
            add(point.load())
        except Exception as error:
            warnings.warn(f"{point.value} adds nothing to autotune: {error}", stacklevel=2)
        else:
            found |= {point.dist.name: point.dist.version} if point.dist else {}
    return found
