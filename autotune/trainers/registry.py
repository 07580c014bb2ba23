"""The trainers whose configurations are read and written. To add one: its file, and one entry in
`OWN`.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from autotune.backends import load_entry_points
from autotune.errors import InvalidInput, suggest_nearest
from autotune.trainers.ai_toolkit import AI_TOOLKIT
from autotune.trainers.diffusers_scripts import DIFFUSERS
from autotune.trainers.musubi import MUSUBI
from autotune.trainers.onetrainer import ONETRAINER
from autotune.trainers.sd_scripts import SD_SCRIPTS
from autotune.trainers.simpletuner import SIMPLETUNER
from autotune.trainers.trainer import Trainer

ENTRY_POINTS = "autotune.trainers"
"""Group of the entry points that name a `Trainer` each."""
OWN = (AI_TOOLKIT, MUSUBI, SIMPLETUNER, DIFFUSERS, SD_SCRIPTS, ONETRAINER)


@cache
def trainers() -> Mapping[str, Trainer]:
    """All trainers by name: autotune's own tables, then those of other distributions."""
    found = {one.name: one for one in OWN}

    def add(entry: object) -> None:
        if not isinstance(entry, Trainer):
            raise TypeError(f"no Trainer: {entry!r}")
        if found.setdefault(entry.name, entry) is not entry:
            raise ValueError(f"there is already a trainer called {entry.name}")

    load_entry_points(ENTRY_POINTS, add)
    return MappingProxyType(found)


def get_trainer(name: str) -> Trainer:
    """The trainer called `name`. Raises InvalidInput if there is none."""
    if name not in trainers():
        raise InvalidInput(
            f"there is no trainer called {name!r}", hint=suggest_nearest(name, trainers())
        )
    return trainers()[name]
