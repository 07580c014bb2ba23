"""The candidates that a machine, family and workload admit; every other choice with the reason."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autotune.cost.calibration import time_doubt
from autotune.errors import InvalidInput, NothingFits
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.knob import Choices, Knob, TuningContext, gradient_capability
from autotune.knobs.registry import GRADIENT_TOLERANCES, KNOBS, require_choice
from autotune.knobs.settings import plain_choices
from autotune.machine.capabilities import host_floor_bytes
from autotune.plan.candidate import BLOCK_COUNTS, Candidate, Choice
from autotune.plan.plan import Rejected

if TYPE_CHECKING:
    from autotune.cost.predict import CostModel

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

TIE = 0.03  # by which time or memory may exceed the best and count as equal, as `MIN_GAIN`
MAX_STEP = 0.05  # in memory between neighbors on a frontier, as a share of all activations
NUM_STEPS = 30  # values of each number of blocks that are looked at: finer than `MAX_STEP`

KnobValue = tuple[str, str]  # a knob and one of its values, as text


@dataclass(frozen=True)
class SearchSpace:
    """Candidates to try: first one number of blocks each, until `expand_block_counts`."""

    candidates: tuple[Candidate, ...]
    choices: Mapping[str, tuple[Choice, ...]]
    """Admitted values by knob, and the value of each plain setting."""
    rejected: Mapping[str, tuple[Rejected, ...]]  # excluded values by knob, with reasons
    pinnable: Mapping[str, tuple[Choice, ...]]  # those among the excluded values that may be pinned

    def admits(self, candidate: Candidate) -> bool:
        """Tell if each of its values may be tried, or asked for, if not all together."""
        return all(
            getattr(candidate, name) in (*self.choices[name], *pinnable)
            for name, pinnable in self.pinnable.items()
        )

    @property
    def tried_choices(self) -> dict[str, tuple[Choice, ...]]:
        """Values that trials may have: the admitted, and what settled knobs are compared with."""
        compared = ((name, (value,)) for name, value in self._compared_choices().items())
        return {**self.choices, **{name: self.choices[name] + value for name, value in compared}}

    def without_rules(self, candidate: Candidate) -> Candidate:
        """Take the libraries' own way of each knob that a rule settles, where it may be tried."""
        return candidate.changed(**self._compared_choices())

    def drop_values(self, knob: str, dropped: Mapping[Choice, str]) -> SearchSpace:
        """Leave out some values of a knob, each with the reason."""
        left = tuple(each for each in self.candidates if getattr(each, knob) not in dropped)
        choices = tuple(choice for choice in self.choices[knob] if choice not in dropped)
        rejected = (*self.rejected[knob], *_with_reasons(dropped))
        return replace(
            self,
            candidates=left,
            choices={**self.choices, knob: choices},
            rejected={**self.rejected, knob: rejected},
        )

    def drop_block_swap(self, num_processes: int) -> SearchSpace:
        """Keep what several processes can use. Raises InvalidInput if blocks must be swapped."""
        why, numbers = "several processes shard the weights instead", self.choices["swapped_blocks"]
        if 0 not in numbers:
            what = f"blocks cannot be swapped with --gpus {num_processes}: {why}"
            raise InvalidInput(what, hint="leave one of them out")
        candidates = dict.fromkeys(each.changed(swapped_blocks=0) for each in self.candidates)
        swapped = {number: why for number in numbers if number}
        return replace(self, candidates=tuple(candidates)).drop_values("swapped_blocks", swapped)

    def keep_shardable(self) -> SearchSpace:
        """Keep the weights that several processes can shard; there may be no candidates."""
        formats, modulations = self.choices["quantization"], self.choices["modulation"]
        quantized = [name for name in formats if not WEIGHT_FORMATS[str(name)].can_shard]
        why = "the weights are sharded over the processes, and this format cannot be sharded"
        space = self.drop_values("quantization", dict.fromkeys(quantized, why))
        ahead = [value for value in modulations if value == "ahead"]
        why = (
            "when weights are sharded over processes, those that it is computed from are gathered "
            "only during a pass"
        )
        return space.drop_values("modulation", dict.fromkeys(ahead, why))

    def drop_beyond_host(self, cost: CostModel) -> SearchSpace:
        """Leave out what keeps more on the host than is left of it; if all does, keep the least."""
        host, number = cost.hardware.host, cost.parallel.num_processes
        room = host_room(host.memory_bytes, host.available_memory_bytes)
        fitting: list[Candidate] = []
        beyond: dict[Candidate, int] = {}
        for each in self.candidates:
            stays = not each.swapped_blocks and each.modulation != "ahead"
            if stays or (needed := number * cost.host_memory_bytes(each)) <= room:
                fitting.append(each)
            else:
                beyond[each] = needed
        if not fitting:  # whatever is pinned takes so much: then as little as can be
            least = min(beyond.values(), default=0)
            fitting = [each for each, needed in beyond.items() if needed == least]
        max_fitting = max((candidate.swapped_blocks for candidate in fitting), default=0)
        min_beyond = min((candidate.swapped_blocks for candidate in beyond), default=0)
        why = f"its weights take more system RAM than the {room / 2**30:.1f} GiB that are left"
        first = max(max_fitting + 1, min_beyond)
        dropped: dict[Choice, str] = {
            k: why for k in self.choices["swapped_blocks"] if beyond and int(k) >= first
        }
        return replace(self.drop_values("swapped_blocks", dropped), candidates=tuple(fitting))

    def _compared_choices(self) -> dict[str, Choice]:
        return {
            knob.name: knob.compared_with
            for knob in KNOBS
            if knob.compared_with is not None
            and knob.compared_with in self.pinnable.get(knob.name, ())
        }


def build_search_space(
    context: TuningContext, pins: Sequence[KnobValue] = (), exclusions: Sequence[KnobValue] = ()
) -> SearchSpace:
    """Enumerate what may be tried: a pin leaves one value of a knob, an exclusion takes one away.
    Raises InvalidInput for values that are unknown or do not go together, NothingFits if a knob has
    none left."""
    for name, value in (*pins, *exclusions):
        require_choice(name, value)
    settings = {
        name: (_choose_setting(name, values, context, pins, exclusions),)
        for name, values in plain_choices(context).items()
    }
    pins = [(name, value) for name, value in pins if name not in settings]
    exclusions = [(name, value) for name, value in exclusions if name not in settings]
    per_knob = {knob.name: _right_choices(knob, context) for knob in KNOBS}
    for name, value in pins:
        per_knob[name] = _pin(name, value, _require_value(name, value, per_knob[name]))
    for name, value in exclusions:
        per_knob[name] = _exclude(value, _require_value(name, value, per_knob[name]))
    for name, choices in per_knob.items():
        if not choices.admitted:
            reasons = "; ".join(f"{choice}: {why}" for choice, why in choices.rejected.items())
            is_asked = any(knob == name for knob, _ in (*pins, *exclusions))
            hint = "run `autotune probe` and see why"
            if is_asked:
                hint = f"leave out what rules it out: an --exclude or --pin of {name}, or --for"
            raise NothingFits(f"no value of {name} can be used here ({reasons})", hint=hint)
    admitted = {name: choices.admitted for name, choices in per_knob.items()}
    candidates, conflicts = _enumerate(admitted, settings, context)
    if not candidates:  # what a rule settles yields to what is pinned
        settled = {name for name, _ in conflicts} - {name for name, _ in pins}
        admitted |= {name: (*admitted[name], *per_knob[name].pinnable) for name in settled}
        candidates, conflicts = _enumerate(admitted, settings, context)
    if not candidates:
        reasons = "; ".join(dict.fromkeys(conflict.reason for _, conflict in conflicts))
        what = f"the pinned values do not go together: {reasons}"
        raise InvalidInput(what, hint="leave out a --pin or an --exclude")
    rejected = {
        name: _with_reasons({**choices.rejected, **choices.pinnable})
        for name, choices in per_knob.items()
    }
    for name, conflict in conflicts:
        if conflict not in rejected[name]:
            rejected[name] += (conflict,)
    pinnable = {name: tuple(choices.pinnable) for name, choices in per_knob.items()}
    return SearchSpace(candidates, {**settings, **admitted}, rejected, pinnable)


def _enumerate(
    admitted: Mapping[str, tuple[Choice, ...]],
    settings: Mapping[str, tuple[Choice]],
    context: TuningContext,
) -> tuple[tuple[Candidate, ...], list[tuple[str, Rejected]]]:
    candidates = []
    conflicts: dict[tuple[str, Choice, str], None] = {}
    fixed = {knob.name: admitted[knob.name] for knob in KNOBS if not knob.is_composed}
    composed = [knob.name for knob in KNOBS if knob.is_composed]
    plain = {name: value for name, (value,) in settings.items()}
    plain |= {name: min(map(int, admitted[name])) for name in composed}

    def first_possible(name: str, chosen: Mapping[str, Choice]) -> Candidate | None:
        for value in admitted[name]:
            candidate = Candidate.model_validate({**chosen, name: value})
            against = {knob.name: knob.why_not(candidate, context) for knob in KNOBS}
            found = {knob: why for knob, why in against.items() if why}
            if not found:
                return candidate
            for knob, why in found.items():
                conflicts[knob, getattr(candidate, knob), why] = None
        return None

    for values in itertools.product(*fixed.values()):
        candidate, chosen = None, plain | dict(zip(fixed, values, strict=True))
        for name in composed:  # each as far as those before it let it go
            candidate = first_possible(name, chosen)
            if candidate is None:
                break
            chosen[name] = getattr(candidate, name)
        if candidate:
            candidates.append(candidate)
    reasons = [(name, Rejected(choice=value, reason=why)) for name, value, why in conflicts]
    return tuple(candidates), reasons


def _with_reasons(reasons: Mapping[Choice, str]) -> tuple[Rejected, ...]:
    return tuple(Rejected(choice=choice, reason=why) for choice, why in reasons.items())


def _choose_setting(
    name: str,
    values: Sequence[Choice],
    context: TuningContext,
    pins: Sequence[KnobValue],
    exclusions: Sequence[KnobValue],
) -> Choice:
    """The pinned value, or the first that is not excluded and computes the same here."""
    wrong = _wrong_values(name, values, context)
    pinned = [value for pin, value in pins if pin == name]
    left = [
        value
        for value in values
        if value not in wrong
        and (name, str(value)) not in exclusions
        and (not pinned or str(value) == pinned[0])
    ]
    if left:
        return left[0]
    if pinned:
        hint = f"values: {', '.join(map(str, values))}"
        raise InvalidInput(f"{name} cannot be {pinned[0]} here", hint=hint)
    reasons = "; ".join(f"{value}: {wrong.get(value, 'ruled out')}" for value in values)
    hint = f"leave out an --exclude of {name}, or --for; or run `autotune probe` and see why"
    raise NothingFits(f"no value of {name} can be used here ({reasons})", hint=hint)


def _wrong_values(name: str, values: Iterable[Choice], context: TuningContext) -> dict[Choice, str]:
    wrong = {}
    for value in values if name in GRADIENT_TOLERANCES else ():
        if rule := GRADIENT_TOLERANCES[name](value):
            capability = gradient_capability(name, rule.checked_choice)
            if why := context.hardware.lacks.get(capability):
                wrong[value] = why
    return wrong


def _right_choices(knob: Knob, context: TuningContext) -> Choices:
    choices = knob.choices_for_family(context)
    wrong = _wrong_values(knob.name, (*choices.admitted, *choices.pinnable), context)
    admitted = tuple(choice for choice in choices.admitted if choice not in wrong)
    pinnable = {choice: why for choice, why in choices.pinnable.items() if choice not in wrong}
    if not admitted and pinnable:  # slower, but right
        admitted = (next(iter(pinnable)),)
        pinnable.pop(admitted[0])
    return Choices(admitted, {**choices.rejected, **wrong}, pinnable)


def _require_value(name: str, value: str, choices: Choices) -> Choices:
    values = {str(choice) for choice in (*choices.admitted, *choices.rejected, *choices.pinnable)}
    if value not in values:
        hint = f"values: {', '.join(sorted(values))}"
        raise InvalidInput(f"{name} has no value {value!r} here", hint=hint)
    return choices


def _pin(name: str, value: str, choices: Choices) -> Choices:
    refused = next((why for choice, why in choices.rejected.items() if str(choice) == value), None)
    if refused:
        what = f"{name} cannot be {value} here: {refused}"
        raise InvalidInput(what, hint="see `autotune plan --list`")
    usable = (*choices.admitted, *choices.pinnable)
    pinned = tuple(choice for choice in usable if str(choice) == value)
    others = {choice: f"{name} is pinned to {value}" for choice in usable if choice not in pinned}
    return Choices(pinned, {**choices.rejected, **others})


def _exclude(value: str, choices: Choices) -> Choices:
    # if a rule had settled on the value, those that may be pinned are tried instead
    admitted = tuple(choice for choice in choices.admitted if str(choice) != value)
    pinnable = {choice: why for choice, why in choices.pinnable.items() if str(choice) != value}
    known = (*choices.admitted, *choices.pinnable, *choices.rejected)
    excluded = {choice: "excluded by the user" for choice in known if str(choice) == value}
    rejected = {**choices.rejected, **excluded}
    return Choices(admitted, rejected, pinnable) if admitted else Choices(tuple(pinnable), rejected)


@dataclass(frozen=True)
class Mixtures:
    """Predicted mixtures of one setting of the other knobs."""

    numbers: Integers  # (mixtures, 3): numbers of blocks in the order of `BLOCK_COUNTS`
    num_bytes: Floats
    seconds: Floats

    def __getitem__(self, chosen: Any) -> Mixtures:
        return Mixtures(self.numbers[chosen], self.num_bytes[chosen], self.seconds[chosen])


def expand_block_counts(space: SearchSpace, cost: CostModel) -> SearchSpace:
    """Put in place of each candidate its mixtures of numbers of blocks."""
    found: dict[Candidate, None] = {}
    for base in space.candidates:
        found.update(dict.fromkeys(block_count_frontier(base, space.choices, cost)))
    cost.prepare(found)
    return replace(space, candidates=tuple(found))


def block_count_frontier(
    base: Candidate, choices: Mapping[str, Sequence[Any]], cost: CostModel
) -> list[Candidate]:
    """Find mixtures worth trying of one setting of the other knobs, among `choices`."""
    plain = base.changed(**dict.fromkeys(BLOCK_COUNTS, 0))
    admitted = {
        name: _without_conflict(name, choices[name], base, cost.context) for name in BLOCK_COUNTS
    }
    passes = _passes(admitted, cost.workload.model.num_blocks)
    swapped = _spread(admitted["swapped_blocks"])
    can_swap = swapped[None] <= passes[:, :1] + passes[:, 1:2]
    at, column = np.nonzero(can_swap)
    numbers = np.concatenate([passes[at], swapped[column][:, None]], axis=1)
    num_bytes, seconds = cost.predict_block_counts(plain, numbers)
    # What is swapped takes memory of the host: of two as fast, the frontier keeps that with less.
    charged = seconds * (1 + TIE * numbers[:, 2] / max(1, cost.workload.model.num_blocks))
    everything = Mixtures(numbers, num_bytes, charged)
    step = MAX_STEP * cost.activation_bytes(plain)
    kept = _drop_beaten([_thin(frontier(group), step) for group in _by_means(everything)], plain)
    same = {name: value for name, value in plain if name not in BLOCK_COUNTS}
    # All is valid; to validate it again would take most of the time.
    return [
        Candidate.model_construct(None, **same, **dict(zip(BLOCK_COUNTS, row, strict=True)))
        for group in kept
        for row in group.numbers.tolist()
    ]


def _without_conflict(
    name: str, numbers: Sequence[int], base: Candidate, context: TuningContext
) -> Integers:
    deep = {"checkpointed_blocks": context.workload.model.num_blocks - 1}
    tried = base.changed(**{**dict.fromkeys(BLOCK_COUNTS, 0), **deep, name: 1})
    is_barred = any(knob.why_not(tried, context) for knob in KNOBS)
    kept = [number for number in sorted(numbers) if not (number and is_barred)]
    return np.array(kept, dtype=np.int64)


def _passes(admitted: Mapping[str, Integers], num_blocks: int) -> Integers:
    """(passes, 2): numbers of checkpointed and selective blocks that leave the last block alone."""
    levels = [_spread(admitted[name]) for name in BLOCK_COUNTS[:2]]
    whole, selective = (grid.ravel() for grid in np.meshgrid(*levels, indexing="ij"))
    rest = num_blocks - 1 - levels[0]  # with which all but the last block recompute
    is_admitted = np.isin(rest, admitted["selective_blocks"])
    whole = np.concatenate([whole, levels[0][is_admitted]])
    selective = np.concatenate([selective, rest[is_admitted]])
    passes = np.unique(np.stack([whole, selective], axis=1), axis=0)
    fits = passes.sum(axis=1) < max(num_blocks, 1 + whole.min())
    return np.compress(fits, passes, axis=0)


def _spread(numbers: Integers) -> Integers:
    at = np.unique(np.round(np.linspace(0, len(numbers) - 1, NUM_STEPS)).astype(np.int64))
    chosen: Integers = numbers[at]
    return chosen


def _by_means(mixtures: Mixtures) -> Iterator[Mixtures]:
    whole, selective, swapped = (mixtures.numbers > 0).T
    means = (whole | selective) + 2 * selective + 4 * swapped
    for value in np.unique(means):
        yield mixtures[means == value]


def frontier(mixtures: Mixtures) -> Mixtures:
    """Keep those that no other beats in memory and time, by growing memory."""
    ordered = mixtures[np.lexsort((mixtures.seconds, mixtures.num_bytes))]
    before = np.minimum.accumulate(np.concatenate([[np.inf], ordered.seconds[:-1]]))
    return ordered[ordered.seconds < before]


def _thin(found: Mixtures, step_bytes: float) -> Mixtures:
    """Keep, from the largest on, the smallest within a step of the last, or else the next."""
    at = len(found.num_bytes) - 1
    chosen = [at]
    while at > 0:
        within = int(np.searchsorted(found.num_bytes, found.num_bytes[at] - step_bytes))
        at = min(within, at - 1)
        chosen.append(at)
    return found[chosen]


def _drop_beaten(groups: Sequence[Mixtures], plain: Candidate) -> list[Mixtures]:
    """Drop what another group beats in memory and, beyond doubt of their ratio, in time."""
    first = [
        plain.changed(**dict(zip(BLOCK_COUNTS, map(int, group.numbers[0]), strict=True)))
        for group in groups
    ]
    left = []
    for one, group in zip(first, groups, strict=True):
        beaten = np.zeros(len(group.seconds), dtype=bool)
        for other, rival in zip(first, groups, strict=True):
            if other is not one:
                within = rival.num_bytes[None] <= group.num_bytes[:, None]
                best = np.where(within, rival.seconds[None], np.inf).min(axis=1)
                beaten |= best * np.exp(time_doubt(one, other)) < group.seconds
        left.append(group[~beaten])
    return left


def host_room(total_bytes: int, available_bytes: int) -> int:
    """Return the bytes that a run may take of a host's memory."""
    return available_bytes - host_floor_bytes("integrated", total_bytes, available_bytes)
