"""One request on one machine, with its search space and cost model, before anything is tried; and
advice: what would fit if nothing does, what a larger batch or other weights would gain."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self, get_args

from autotune.cost.memory import ONE_PROCESS, Parallel
from autotune.cost.predict import CostModel
from autotune.cost.traced_model import working_ahead
from autotune.errors import InvalidInput, NothingFits
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import KNOBS
from autotune.models.registry import find_published
from autotune.models.resolve import ResolvedModel, read_parts
from autotune.plan.base import digest_of
from autotune.plan.candidate import BLOCK_COUNTS, Candidate, Choice, TrialResult
from autotune.plan.hardware import KEY_NAMES, Capability, HardwareProfile, shares_host_memory
from autotune.plan.job import Job
from autotune.plan.prediction import Prediction
from autotune.plan.request import PlanRequest
from autotune.plan.words import setting_text
from autotune.plan.workload import Quality, Workload
from autotune.search import comparison
from autotune.search.gradient_checks import check_gradients
from autotune.search.next import SearchLimits, memory_upper_bound
from autotune.search.request import ResolvedRequest, space_for, split_pins
from autotune.search.space import SearchSpace, block_count_frontier, expand_block_counts, host_room
from autotune.search.trials import TrialFunction, rehearse_in_child_process, run_in_child_processes
from autotune.share.store import Machine
from autotune.share.warm_start import StoreMatches, find_matches
from autotune.system.version import __version__
from autotune.train.fit import device_misfits

GIB = 2**30
SMALLER = (0.75, 0.5, 0.25)  # shares of the resolution's side and of frames that are tried
SMALLER_RANKS = (1024, 256, 64, 16, 4)
LARGER_BATCHES = (2, 4)  # multiples of the effective batch that are tried
MIN_ADVISED_GAIN = 1.05  # factor of images per second from which a choice of the user is mentioned


@dataclass(frozen=True)
class PlannerBackend:
    """The side effects of planning, as functions: a test passes its own."""

    trials: Callable[
        [ResolvedModel, CostModel], contextlib.AbstractContextManager[TrialFunction]
    ] = run_in_child_processes
    find_matches: Callable[[Machine, Workload], StoreMatches] = find_matches
    """Looks up records for the machine and the work of one process."""
    autotune_version: str = __version__
    needs_weights: bool = True
    """False if trials do not read the model's files, which then need not be complete."""
    check_gradients: Callable[
        [TuningContext, Mapping[str, Sequence[Choice]], ResolvedModel], tuple[Capability, ...]
    ] = check_gradients
    rehearse: Callable[[ResolvedModel, CostModel, Candidate, float], TrialResult | None] = (
        rehearse_in_child_process
    )
    """Tries a winner for at most so many seconds of steps; None if that is not possible."""


@dataclass(frozen=True)
class PlanningProblem:
    """A job, the machine and the cost model that a search works on."""

    request: PlanRequest
    model: ResolvedModel
    hardware: HardwareProfile  # the whole machine
    global_workload: Workload  # the work of all processes that train together
    workload: Workload  # the work of one process and its device
    space: SearchSpace
    cost: CostModel  # cost model of one process, before any trial
    job: Job
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()  # what is wrong with files of the data folder, one line each
    check_seconds: float = 0.0  # of gradient checks, which are part of what a search takes

    @classmethod
    def build(
        cls,
        asked: PlanRequest | ResolvedRequest,
        hardware: HardwareProfile,
        backend: PlannerBackend,
    ) -> Self:
        """Resolve model and data, check gradients, enumerate what may be tried. Raises InvalidInput
        if model or data cannot be used, NothingFits if nothing can be tried."""
        needs_weights = backend.needs_weights
        if isinstance(asked, PlanRequest):
            asked = ResolvedRequest.build(asked, needs_weights=needs_weights)
        request, model, global_workload, job = asked.request, asked.model, asked.workload, asked.job
        if needs_weights:
            require_devices(asked, hardware)
        workload = global_workload.share(request.num_gpus)
        parallel = Parallel("ddp", request.num_gpus)
        share = parallel.budget_bytes(hardware.device)
        context = TuningContext(hardware, model.family, workload, share)
        space = space_for(request, context)
        started = time.monotonic()
        if request.is_local:
            verdicts = backend.check_gradients(context, space.choices, model)
            hardware = hardware.changed(capabilities=(*hardware.capabilities, *verdicts))
            if not all(verdict.available for verdict in verdicts):
                space = space_for(request, replace(context, hardware=hardware))
        check_seconds = round(time.monotonic() - started, 1)
        cost = CostModel.build(
            hardware,
            workload,
            model.family,
            model.config,
            read_parts(model),
            caching_pins=dict(split_pins(request.pin_pairs)[1]),
            caching_exclusions=split_pins(request.exclusion_pairs)[1],
            overheads=request.overheads,
            parallel=parallel if request.num_gpus > 1 else ONE_PROCESS,
        )
        untried, whole = space, cost

        def look_at(base: Candidate) -> None:
            block_count_frontier(base, untried.choices, whole)
            whole.host_memory_bytes(base)

        with working_ahead([partial(look_at, base) for base in space.candidates]):
            cost, space = _choose_strategy(request, cost, space)
            _require_host_memory(space, cost)
        return cls(
            request,
            model,
            hardware,
            global_workload,
            workload,
            space,
            cost,
            job,
            asked.notes,
            asked.dataset.problem_summary if asked.dataset else (),
            check_seconds,
        )

    @property
    def budget_bytes(self) -> int:
        return self.cost.budget_bytes

    @property
    def can_try(self) -> bool:
        """Tell if trials run: the machine must be this one, and a trial has one device."""
        return self.request.is_local and self.cost.parallel.num_shards == 1

    @property
    def limits(self) -> SearchLimits:
        request = self.request
        return SearchLimits(request.max_trials, request.search_seconds, self.job.num_steps)

    @property
    def identity(self) -> dict[str, str | None]:
        """All that must be equal for trials to count for the same search, in words."""
        model = {**dict(self.workload.model), "name": ""}  # folders may be called differently
        work = {**self.workload.model_dump(mode="json"), "model": model}
        choices = {name: list(values) for name, values in self.space.choices.items()}
        keys = {KEY_NAMES.get(key, key): value for key, value in self.hardware.match_keys.items()}
        request = self.request
        program = {"program that trains": request.overheads.program} if request.overheads else {}
        return {
            **keys,
            "device": self.hardware.device.name,
            "work": digest_of(work),
            "settings to choose from": digest_of(dict(choices)),
            **program,
            "processes": str(request.num_gpus),
        }


def _require_host_memory(space: SearchSpace, cost: CostModel) -> None:
    host = cost.hardware.host
    if shares_host_memory(cost.hardware.device.memory_kind) or not space.candidates:
        return
    smallest = min(
        space.candidates, key=lambda one: (one.swapped_blocks, one.modulation == "ahead")
    )
    number, there = cost.parallel.num_processes, host.available_memory_bytes
    needed = number * cost.host_memory_bytes(smallest)
    if needed > there:
        run = f"a run's {number} processes need" if number > 1 else "a run needs"
        raise NothingFits(
            f"{run} {needed / GIB:.1f} GiB of system RAM, {there / GIB:.1f} GiB are free",
            hint="close other programs, or take a computer with more (for a GPU by name: "
            "--host-memory)",
        )


def require_devices(resolved: ResolvedRequest, hardware: HardwareProfile) -> None:
    """Check by facts alone that the request can be tried here. Raises NothingFits if not."""
    request, model = resolved.request, resolved.model
    if model.folder is None and hardware.device.kind == "cpu":
        usual = (model.family, model.family.models[0])
        _, published = find_published(model.name) or usual
        raise comparison.NoGpu.build(model.family, published)
    if not request.is_local or request.num_gpus == 1:
        return
    if misfits := device_misfits(request.num_gpus, hardware):
        hint = "ask for fewer with --gpus, or see what is here with `autotune probe`"
        raise NothingFits(misfits[0], hint=hint)


def _choose_strategy(
    request: PlanRequest, cost: CostModel, space: SearchSpace
) -> tuple[CostModel, SearchSpace]:
    """The weights are sharded only if no device is predicted to hold them all."""
    number = request.num_gpus
    if number == 1:
        space = expand_block_counts(_drop_too_heavy(request, space, cost), cost)
        within = space.drop_beyond_host(cost)
        if len(within.candidates) < len(space.candidates):
            _require_host_for_swap(request, space, within, cost)
        return cost, within
    space = expand_block_counts(space, cost).drop_beyond_host(cost)
    with contextlib.suppress(NothingFits):
        light, budget = _drop_too_heavy(request, space, cost), cost.budget_bytes
        fitting = [each for each in light.candidates if cost.weight_bytes(each) <= budget]
        if fitting and min_required_bytes(fitting, cost) <= budget:
            return cost, light
    plain, why = space.keep_shardable(), None
    if cost.workload.adapter == "dora":
        why = "DoRA cannot be trained on weights sharded over them"
    elif not plain.candidates:
        why = "quantized weights cannot be sharded over them"
    if why:
        what = f"nothing fits on each of {number} devices, and {why}"
        raise NothingFits(what, hint=hint_to_fit(request, space, cost))
    cost = cost.with_parallel(Parallel("fsdp2", number))
    return cost, _drop_too_heavy(request, plain, cost)


def _drop_too_heavy(request: PlanRequest, space: SearchSpace, cost: CostModel) -> SearchSpace:
    budget = cost.budget_bytes
    sizes: dict[str, int] = {}
    for candidate in space.candidates:
        size = cost.weight_bytes(candidate)
        sizes[candidate.quantization] = min(size, sizes.get(candidate.quantization, size))
    limit = f"a run may take {budget / GIB:.1f} GiB"
    dropped: dict[Choice, str] = {
        name: f"its weights alone need {size / GIB:.1f} GiB, {limit}"
        for name, size in sizes.items()
        if size > budget
    }
    if len(dropped) == len(sizes):
        smallest = min(sizes, key=lambda name: sizes[name])
        what = f"{cost.workload.model.name} as {smallest}: {dropped[smallest]}"
        raise NothingFits(what, hint=hint_to_fit(request, space, cost))
    return space.drop_values("quantization", dropped)


def min_required_bytes(
    candidates: Sequence[Candidate], cost: CostModel, *, cautious: bool = False
) -> float:
    """Find the least memory of any candidate; `cautious` as before a first trial."""
    # Memory grows with the micro-batch and with every block that keeps its activations.
    smallest = min(candidate.micro_batch_size for candidate in candidates)
    deepest = max(candidate.checkpointed_blocks for candidate in candidates)
    least = smallest, deepest
    safest = [c for c in candidates if (c.micro_batch_size, c.checkpointed_blocks) == least]
    predictions = [cost.predict(candidate) for candidate in safest or candidates]
    if cautious:
        return min(map(memory_upper_bound, predictions))
    return min(prediction.run_memory_bytes for prediction in predictions)


def _require_host_for_swap(
    request: PlanRequest, space: SearchSpace, within: SearchSpace, cost: CostModel
) -> None:
    def fitting(candidates: Sequence[Candidate]) -> Iterator[Prediction]:
        predictions = map(cost.predict, candidates)
        return (each for each in predictions if each.run_memory_bytes <= cost.budget_bytes)

    if any(fitting(within.candidates)):
        return
    needed = min((each.host_memory_bytes for each in fitting(space.candidates)), default=0)
    if not needed:
        return
    host = cost.hardware.host
    room = host_room(host.memory_bytes, host.available_memory_bytes)
    sizes = (GIB << exponent for exponent in range(4, 12))
    enough = min((s for s in sizes if host_room(s, int(0.9 * s)) > needed), default=needed)
    size = f"{enough / GIB:.0f} GiB"
    more = "plan for" if cost.hardware.origin == "catalog" else "close other programs, or use"
    raise NothingFits(
        f"the settings that fit the GPU swap blocks to {needed / GIB:.1f} GiB of system RAM; a run "
        f"may take {room / GIB:.1f} GiB",
        hint=f"{more} a computer with {size} of it (for a GPU by name: "
        f"--host-memory {size.replace(' ', '')}); or {hint_to_fit(request, within, cost)}",
    )


def hint_to_fit(request: PlanRequest, space: SearchSpace, cost: CostModel) -> str:
    """Say what to ask for if nothing fits; each is predicted to fit, all else as asked."""
    needed = min_required_bytes(space.candidates, cost, cautious=request.is_local)
    found = [f"{option} ({_amount(need)})" for option, need in _fitting_relaxations(request, cost)]
    memory = f"a device on which a run may take {_amount(needed)} (--max-memory, if you set one)"
    if found:
        return f"predicted to fit: {', or '.join(found)}; or take {memory}"
    return f"nothing smaller that was looked at is predicted to fit; take {memory}"


def _fitting_relaxations(request: PlanRequest, cost: CostModel) -> Iterator[tuple[str, float]]:
    """Yield the first looser wish of each kind that is predicted to fit, and what it needs."""
    work, family, largest = cost.workload, cost.family, cost.workload.largest_bucket
    qualities = get_args(Quality)[get_args(Quality).index(work.quality) + 1 :]
    kinds = {"quality": {name: work.changed(quality=name) for name in qualities}}
    if largest.num_frames > 1:
        fewer = {family.whole_frames(int(share * largest.num_frames)) for share in SMALLER}
        clips = {number: largest.changed(num_frames=number) for number in sorted(fewer)[::-1]}
        kinds["frames"] = {f"{n}": work.changed(buckets=(clip,)) for n, clip in clips.items()}
    kinds["resolution"] = {}
    step = family.size_multiple_px
    for share in SMALLER:
        sides = (largest.width_px, largest.height_px)
        width, height = (int(side * share) // step * step for side in sides)
        if min(width, height) > 0:
            bucket = largest.changed(width_px=width, height_px=height)
            side = max(1, round(work.resolution_px * share))
            smaller = work.changed(buckets=(bucket,), resolution_px=side)
            kinds["resolution"]["x".join(map(str, dict.fromkeys((width, height))))] = smaller
    if work.effective_batch_size > 1:
        smallest = work.changed(effective_batch_size=1)
        kinds["batch-size"] = {f"{cost.parallel.num_processes}": smallest}
    ranks = [rank for rank in SMALLER_RANKS if rank < work.rank]
    kinds["rank"] = {f"{rank}": work.changed(rank=rank) for rank in ranks}
    relaxed = [
        [(f"--{kind} {value}", request, changed) for value, changed in values.items()]
        for kind, values in kinds.items()
        if values
    ]
    asked = (("--pin", request.pin_pairs), ("--exclude", request.exclusion_pairs))
    if named := [word for word, pairs in asked if pairs]:
        free = request.changed(pins=(), exclusions=())
        relaxed.append([(f"without {' and '.join(named)}", free, work)])
    with working_ahead([partial(_required_bytes, *ways[0][1:], cost) for ways in relaxed]):
        for ways in relaxed:
            for option, other, changed in ways:
                with contextlib.suppress(InvalidInput, NothingFits):  # a pin may not go with it
                    needed, budget_bytes = _required_bytes(other, changed, cost)
                    if needed <= budget_bytes:
                        yield option, needed
                        break


def _required_bytes(request: PlanRequest, workload: Workload, cost: CostModel) -> tuple[float, int]:
    number = cost.parallel.num_processes
    pins = dict(split_pins(request.pin_pairs)[1])
    keeps = pins and cost.resident_encoder_bytes
    own = CostModel.build(
        cost.hardware,
        workload,
        cost.family,
        cost.model.config,
        cost.model.parts,
        caching=(cost.caching, cost.caching_reason) if keeps else None,
        caching_pins=pins,
        caching_exclusions=split_pins(request.exclusion_pairs)[1],
        overheads=cost.overheads,
        parallel=cost.parallel,
    )
    space = space_for(request, own.context)
    smallest = min(candidate.micro_batch_size for candidate in space.candidates)
    sizes = space.choices["micro_batch_size"]
    larger: dict[Choice, str] = {size: "needs more" for size in sizes if size != smallest}
    space = expand_block_counts(space.drop_values("micro_batch_size", larger), own)
    ways = {own.parallel: space}
    if number > 1:
        together = replace(own.parallel, strategy="ddp")
        ways = {together: space, replace(together, strategy="fsdp2"): space.keep_shardable()}
    needed = []
    for parallel, admitted in ways.items():
        if admitted.candidates:
            alone = own.with_parallel(parallel)
            within = admitted.drop_beyond_host(alone).candidates
            needed.append(min_required_bytes(within, alone, cautious=request.is_local))
    return min(needed), own.budget_bytes


def _amount(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"


def advise_choices(
    space: SearchSpace, cost: CostModel, best: Candidate, step_seconds: float
) -> tuple[str, ...]:
    """Say what a larger batch and a looser quality would gain, all else as in `best`."""
    work, number = cost.workload, cost.parallel.num_processes
    effective, found = work.effective_batch_size, []
    batches = [best.changed(micro_batch_size=effective * factor) for factor in LARGER_BATCHES]
    looser = _looser_formats(space, cost) if cost.overheads is None else ()  # or not its own
    products = [name for name in looser if WEIGHT_FORMATS[str(name)].product_dtype]
    if products and not best.swapped_blocks:  # then weights are not what memory lacks most
        looser = products
    formats = [best.changed(quantization=name) for name in looser]

    def predict_all(base: Candidate) -> list[Prediction]:
        if any(knob.why_not(base, cost.context) for knob in KNOBS):
            return []
        return list(map(cost.predict, _fastest_first(base, space, cost)))

    with working_ahead([partial(predict_all, base) for base in (*formats, *batches)]):
        predicted = {base: predict_all(base) for base in (*formats, *batches)}
    for bases in (formats, batches):
        best_gain, chosen = MIN_ADVISED_GAIN, best
        for base in bases:
            for prediction in predicted[base]:
                candidate = prediction.candidate
                images = max(effective, candidate.micro_batch_size)
                gain = images / prediction.step_seconds / (effective / step_seconds)
                if prediction.run_memory_bytes <= cost.budget_bytes and gain > best_gain:
                    best_gain, chosen = gain, candidate
        if chosen is best:
            continue
        option = f"--batch-size {chosen.micro_batch_size * number}, which changes what is learned"
        if bases is formats:
            stored = setting_text("quantization", chosen.quantization)
            option = f"--quality compact: {stored}, less exact"
        found.append(f"{best_gain:.2f}x by {option}")
    step_time = cost.predict(best).step_time
    if step_time.limited_by(0.0) == "host" and "block" in space.pinnable["compile"]:
        share = step_time.overhead_seconds / step_seconds
        found.append(f"{share:.0%} of a step waits for launches: try --pin compile=block")
    return tuple(found)


def _fastest_first(base: Candidate, space: SearchSpace, cost: CostModel) -> Iterable[Candidate]:
    # What keeps all and swaps nothing is the fastest: if it fits, other mixtures need no traces.
    plain = base.changed(**dict.fromkeys(BLOCK_COUNTS, 0))
    admits = all(0 in space.choices[name] for name in BLOCK_COUNTS)
    if admits and cost.predict(plain).run_memory_bytes <= cost.budget_bytes:
        return (plain,)
    return block_count_frontier(base, space.choices, cost)


def _looser_formats(space: SearchSpace, cost: CostModel) -> list[Choice]:
    (knob,) = (knob for knob in KNOBS if knob.name == "quantization")
    compact = replace(cost.context, workload=cost.workload.changed(quality="compact"))
    barred, admitted = knob.choices(cost.context).rejected, knob.choices(compact).admitted
    told = {one.choice: one.reason for one in space.rejected.get(knob.name, ())}
    return [name for name in admitted if name in barred and told.get(name) == barred[name]]
