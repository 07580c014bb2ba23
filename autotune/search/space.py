"""The candidates that this machine, family and workload admit, and every choice that they don't, with the reason."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.errors import InvalidInput, NothingFits
from autotune.knobs import KNOBS, Choices, Knob, TuningContext, parity_capability
from autotune.schema import Candidate, Choice, Rejected

Wish = tuple[str, str]
"""A knob and one of its values, as text."""


@dataclass(frozen=True)
class SearchSpace:
    """All admissible candidates, the least demanding of memory first."""

    candidates: tuple[Candidate, ...]
    choices: Mapping[str, tuple[Choice, ...]]
    """Admitted values by knob."""
    rejected: Mapping[str, tuple[Rejected, ...]]
    """Excluded values by knob, with reasons."""
    on_request: Mapping[str, tuple[Choice, ...]]
    """Those among the excluded values that may be pinned."""


def search_space(
    context: TuningContext, pins: Sequence[Wish] = (), exclusions: Sequence[Wish] = (), *, also: str | None = None
) -> SearchSpace:
    """Enumerate what may be tried; `pins` leave one value of a knob, `exclusions` take one away.

    `also` names a knob of which the values on request are tried, too.

    Raises:
        InvalidInput: there is no such knob or value, or what is left of them does not go together.
        NothingFits: some knob has no admissible value here.
    """
    per_knob = {knob.name: _that_learn_the_same(knob, context) for knob in KNOBS}
    if also is not None:
        offered, usual = per_knob[also].on_request, per_knob[also].admitted
        per_knob[also] = Choices((*offered, *usual), per_knob[also].rejected)
    for name, value in pins:
        per_knob[name] = _pinned(name, value, _known(name, value, per_knob))
    for name, value in exclusions:
        per_knob[name] = _excluding(value, _known(name, value, per_knob))
    for name, choices in per_knob.items():
        if not choices.admitted:
            reasons = "; ".join(f"{choice}: {why}" for choice, why in choices.rejected.items())
            asked = any(wish == name for wish, _ in (*pins, *exclusions))
            hint = f"leave out an --exclude or --pin of {name}" if asked else "run `autotune probe` and see why"
            raise NothingFits(f"no value of {name} can be used here ({reasons})", hint=hint)
    admitted = {name: choices.admitted for name, choices in per_knob.items()}
    rejected = {name: _with_reasons({**one.rejected, **one.on_request}) for name, one in per_knob.items()}
    candidates = []
    clashes: dict[str, None] = {}
    for values in itertools.product(*admitted.values()):
        candidate = Candidate.model_validate(dict(zip(admitted, values, strict=True)))
        conflicts = {knob.name: why for knob in KNOBS if (why := knob.conflict(candidate, context))}
        if not conflicts:
            candidates.append(candidate)
        clashes |= dict.fromkeys(conflicts.values())
        for name, why in conflicts.items():
            clash = Rejected(choice=getattr(candidate, name), reason=why)
            if clash not in rejected[name]:
                rejected[name].append(clash)
    if not candidates:
        raise InvalidInput(
            f"what is pinned does not go together: {'; '.join(clashes)}", hint="leave out a --pin or an --exclude"
        )
    on_request = {name: tuple(choices.on_request) for name, choices in per_knob.items()}
    excluded = {name: tuple(found) for name, found in rejected.items()}
    return SearchSpace(tuple(candidates), admitted, excluded, on_request)


def _with_reasons(reasons: Mapping[Choice, str]) -> list[Rejected]:
    return [Rejected(choice=choice, reason=why) for choice, why in reasons.items()]


def _that_learn_the_same(knob: Knob, context: TuningContext) -> Choices:
    """The knob's choices less those whose gradients were found to be others than the reference's on this machine."""
    choices = knob.choices(context)
    capabilities = {
        capability.name: capability.reason for capability in context.hardware.capabilities if not capability.available
    }
    usable = (*choices.admitted, *choices.on_request)
    wrong = {
        choice: capabilities[name]
        for choice in usable
        if (parity := knob.parity(choice))
        and (name := parity_capability(knob.name, parity.checked_choice)) in capabilities
    }
    return Choices(
        admitted=tuple(choice for choice in choices.admitted if choice not in wrong),
        rejected={**choices.rejected, **wrong},
        on_request={choice: why for choice, why in choices.on_request.items() if choice not in wrong},
    )


def without(space: SearchSpace, knob: str, dropped: Mapping[Choice, str]) -> SearchSpace:
    """The space without some values of a knob, each with the reason."""
    return replace(
        space,
        candidates=tuple(candidate for candidate in space.candidates if getattr(candidate, knob) not in dropped),
        choices={**space.choices, knob: tuple(choice for choice in space.choices[knob] if choice not in dropped)},
        rejected={**space.rejected, knob: (*space.rejected[knob], *_with_reasons(dropped))},
    )


def _known(name: str, value: str, per_knob: Mapping[str, Choices]) -> Choices:
    if name not in per_knob:
        raise InvalidInput(f"there is no knob called {name!r}", hint=f"knobs: {', '.join(per_knob)}")
    choices = per_knob[name]
    named = {str(choice) for choice in (*choices.admitted, *choices.rejected, *choices.on_request)}
    if value not in named:
        raise InvalidInput(f"{name} has no value {value!r} here", hint=f"values: {', '.join(sorted(named))}")
    return choices


def _pinned(name: str, value: str, choices: Choices) -> Choices:
    refused = next((why for choice, why in choices.rejected.items() if str(choice) == value), None)
    if refused:
        raise InvalidInput(f"{name} cannot be {value} here: {refused}", hint="see `autotune plan --list-knobs`")
    usable = (*choices.admitted, *choices.on_request)
    kept = tuple(choice for choice in usable if str(choice) == value)
    others = {choice: f"{name} is pinned to {value}" for choice in usable if str(choice) != value}
    return Choices(kept, {**choices.rejected, **others})


def _excluding(value: str, choices: Choices) -> Choices:
    kept = tuple(choice for choice in choices.admitted if str(choice) != value)
    gone = {choice: "excluded by the user" for choice in choices.admitted if str(choice) == value}
    return Choices(kept, {**choices.rejected, **gone}, choices.on_request)
