"""The families that autotune supports. To add one: its file, and one line in this table; or an
entry point in the group `autotune.families` that names the class or an instance."""

import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points

from autotune.errors import InvalidInput, match_names, suggest_nearest
from autotune.models.anima import Anima
from autotune.models.facts import PublishedModel
from autotune.models.family import Family
from autotune.models.flux import Chroma, Flux1Dev, Flux1Kontext, Flux2Dev, Flux2Klein, Flux3
from autotune.models.ideogram4 import Ideogram4
from autotune.models.kandinsky5 import Kandinsky5Image, Kandinsky5Video
from autotune.models.krea2 import Krea2
from autotune.models.ltx2 import LTX2
from autotune.models.minimax_h3 import MiniMaxH3
from autotune.models.qwen_image import QwenImage, QwenImage21, QwenImageEdit, QwenImageEditPlus
from autotune.models.stable_diffusion import StableDiffusion35, StableDiffusionXL
from autotune.models.wan import Wan21, Wan22, Wan22HighNoise, Wan22ImageHighNoise
from autotune.models.z_image import ZImage
from autotune.system.process import reveal_packages

ENTRY_POINTS = "autotune.families"
LISTING = "`autotune models` lists all"
UNTOLD = ("diffusers",)  # of repositories: which program their files are for
FORMAT_WORDS = ("fp8", "bf16", "fp16", "gguf", "safetensors")
MAX_MEANT = 4  # more models that have a word in common are none that was meant


class Families(Mapping[str, Family]):
    """Families by name; those of other distributions are loaded at the first look-up."""

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
        """Add a family to this process. Trials run in others, and need an entry point. Raises
        ValueError if another family has its name or its pipelines, which folders are known by.
        """
        if not isinstance(family, Family):
            raise TypeError(f"not a Family: {family!r}")
        name, index = family.name, {**family.pipeline_config, "_class_name": family.pipeline_class}
        if any(name == other.name or other.is_pipeline(index) for other in self._families.values()):
            what = f"a family {name}, or one with a {family.pipeline_class}"
            raise ValueError(f"there is already {what}")
        self._families[name] = family

    def _all(self) -> Mapping[str, Family]:
        if self._is_complete:
            return self._families
        self._is_complete = True
        for point in entry_points(group=ENTRY_POINTS):
            reveal_packages()
            try:
                found = point.load()
                self.add(found() if isinstance(found, type) else found)
            except Exception as error:  # what is broken costs a warning, not the command
                warnings.warn(f"{point.value} adds nothing to autotune: {error}", stacklevel=2)
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
    Wan22ImageHighNoise(),
    Krea2(),
    Chroma(),
    QwenImage21(),
    StableDiffusion35(),
    LTX2(),
    Anima(),
    MiniMaxH3(),
    Ideogram4(),
    Flux3(),
)


def find_published(name: str, expert: str | None = None) -> tuple[Family, PublishedModel] | None:
    """Find the one published model of that name, alias or hub id, and its family for `expert`."""
    known = _published_names()
    same = match_names(name, known)[0]
    if not same:  # what a repository is called without its owner
        repositories = {key: (names[1].partition("/")[2],) for key, names in known.items()}
        same = match_names(name, repositories, UNTOLD)[0]
    for family in FAMILIES.values():
        for model in family.models:
            if same == [model.name]:
                return family.with_expert(expert), model
    return None


def _published_names() -> dict[str, tuple[str, ...]]:
    return {
        model.name: (
            model.name,
            model.hub_id,
            *(alias for alias, name in family.aliases.items() if name == model.name),
        )
        for family in FAMILIES.values()
        for model in family.models
    }


def explain_unknown(name: str) -> InvalidInput:
    """Return the error for a name that is no published model's: it names what may be meant."""
    same, alike = match_names(name, _published_names(), (*UNTOLD, *FORMAT_WORDS))
    models = {family.name: [model.name for model in family.models] for family in FAMILIES.values()}
    meant = same or [
        next(each for each in names if each in alike)
        for names in models.values()
        if not {*names}.isdisjoint(alike)
    ]
    if 0 < len(meant) <= MAX_MEANT:
        what = f"{name!r} may be {' or '.join(meant)}"
        hint = f"{'name one of them' if meant[1:] else f'--model {meant[0]}'}; {LISTING}"
        return InvalidInput(what, hint=hint)
    tuned = match_names(name, {family.name: family.fine_tunes for family in FAMILIES.values()})[1]
    if tuned:
        what = f"{name!r} is a fine-tune of {tuned[0]}, whose weights come as a file"
        hint = f"name the file, or plan for what it was made of: --model {tuned[0]}"
        return InvalidInput(what, hint=hint)
    known = [each for names in models.values() for each in names]
    hint = suggest_nearest(name, known, f"{LISTING}; or a hub id, owner/name")
    return InvalidInput(f"there is no model called {name!r}", hint=hint)


def get_family(name: str) -> Family:
    """Return the family called `name`. Raises InvalidInput if no family has that name."""
    if name in FAMILIES:
        return FAMILIES[name]
    if found := find_published(name):
        return found[0]
    raise explain_unknown(name)
