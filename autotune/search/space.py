"""The candidates that this machine, family and workload admit, and every choice that they don't, with the reason."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.errors import NothingFits
from autotune.knobs.base import Setting
from autotune.knobs.registry import KNOBS
from autotune.schema import Candidate, Choice, Rejected


@dataclass(frozen=True)
class SearchSpace:
    """All admissible candidates, the least demanding of memory first."""

    candidates: tuple[Candidate, ...]
    choices: Mapping[str, tuple[Choice, ...]]
    """Admitted values by knob."""
    rejected: Mapping[str, tuple[Rejected, ...]]
    """Excluded values by knob, with reasons."""


def search_space(setting: Setting) -> SearchSpace:
    """Enumerate what may be tried.

    Raises:
        NothingFits: some knob has no admissible value here.
    """
    per_knob = {knob.name: knob.choices(setting) for knob in KNOBS}
    for name, choices in per_knob.items():
        if not choices.admitted:
            reasons = "; ".join(f"{r.choice}: {r.reason}" for r in choices.rejected)
            raise NothingFits(
                f"no value of {name} can be used here ({reasons})", hint="run `autotune probe` and see why"
            )
    admitted = {name: choices.admitted for name, choices in per_knob.items()}
    rejected = {name: list(choices.rejected) for name, choices in per_knob.items()}
    candidates = []
    for values in itertools.product(*admitted.values()):
        candidate = Candidate.model_validate(dict(zip(admitted, values, strict=True)))
        conflicts = {knob.name: why for knob in KNOBS if (why := knob.conflict(candidate, setting))}
        if not conflicts:
            candidates.append(candidate)
        for name, why in conflicts.items():
            clash = Rejected(choice=getattr(candidate, name), reason=why)
            if clash not in rejected[name]:
                rejected[name].append(clash)
    return SearchSpace(tuple(candidates), admitted, {name: tuple(found) for name, found in rejected.items()})
