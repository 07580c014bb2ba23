"""One question on one machine, with all that follows from it before anything is tried."""

from dataclasses import dataclass, replace

from autotune.cost import Parallel, Predictor
from autotune.errors import InvalidInput, NothingFits
from autotune.families import (
    ResolvedModel,
    check_weights,
    fetch_model,
    is_family_name,
    is_on_hub,
    read_parts,
    resolve_model,
)
from autotune.hardware import with_budget
from autotune.knobs import TuningContext
from autotune.planning.alternatives import WHERE_NOTHING_FITS, least_bytes, relaxation, shareable, within_host
from autotune.planning.backend import PlannerBackend
from autotune.planning.request import PlanRequest, build_job, read_data
from autotune.schema import Choice, HardwareProfile, Job, Workload, digest_of
from autotune.search import SearchLimits, SearchSpace, drop_values
from autotune.training import KEY_NAMES, describe_workload, require_even_shares
from autotune.weights import BadWeights


@dataclass(frozen=True)
class PlanningProblem:
    """What a search works on."""

    request: PlanRequest
    hardware: HardwareProfile
    """The whole machine."""
    global_workload: Workload
    """Of all processes that train together."""
    workload: Workload
    """Of one process and its device."""
    space: SearchSpace
    cost: Predictor
    job: Job
    notes: tuple[str, ...] = ()
    """What the user should know of how the question was understood."""
    left_out: tuple[str, ...] = ()
    """What is wrong with files of the data folder, if anything."""

    @property
    def device_profile(self) -> HardwareProfile:
        """One process's device, without what stays on it beside training."""
        return self.cost.hardware

    @property
    def budget_bytes(self) -> int:
        """What training may take there."""
        return self.device_profile.device.budget_bytes

    @property
    def can_try(self) -> bool:
        """Whether trials run: the machine must be this one, and a trial has one device."""
        return self.request.is_local and self.cost.parallel.strategy != "fsdp2"

    @property
    def limits(self) -> SearchLimits:
        """When the search ends at the latest."""
        return SearchLimits(self.request.max_trials, self.request.search_seconds, self.job.num_steps)

    @property
    def identity(self) -> dict[str, str | None]:
        """All that must be equal where trials count for the same search, by what people call it."""
        model = {**dict(self.workload.model), "name": ""}  # folders may be called differently
        work = {**self.workload.model_dump(mode="json"), "model": model}
        choices: dict[str, object] = {name: list(values) for name, values in self.space.choices.items()}
        keys = {KEY_NAMES.get(key, key): value for key, value in self.hardware.match_keys.items()}
        device, processes = self.hardware.device.name, str(self.request.num_processes)
        own = {"device": device, "work": digest_of(work), "settings to choose from": digest_of(choices)}
        return {**keys, **own, "processes": processes}

    def relaxation(self) -> str:
        """What to ask instead where nothing fits."""
        return relaxation(self.request, self.space, self.cost)


def build_problem(request: PlanRequest, hardware: HardwareProfile, backend: PlannerBackend) -> PlanningProblem:
    """Resolve model and data, enumerate what may be tried and learns the same, and build the cost model.

    Raises:
        InvalidInput: the model or the data cannot be used.
        NothingFits: the weights alone are too large in every storage, or nothing can be tried here.
    """
    model, notes = _resolved(request)
    if backend.needs_weights:
        _require_weights_and_room(model, hardware)
    dataset = read_data(request, model)
    whole = describe_workload(model, dataset, request.workload_overrides, drops_captions=request.drops_captions)
    require_even_shares(whole, request.num_processes)
    workload = whole.share(request.num_processes)
    if request.is_local:
        context = TuningContext(hardware, model.family, workload)
        hardware = backend.prove(context, request.space(context, also=WHERE_NOTHING_FITS).choices, model)
    cost, space = _strategy(request, model, workload, _of_one_process(request, hardware))
    job = build_job(request, model, dataset, whole.effective_batch_size)
    left_out = dataset.problem_summary if dataset else ()
    pinned = replace(request, model=job.pinned_model)
    return PlanningProblem(pinned, hardware, whole, workload, space, cost, job, notes, left_out)


def _resolved(request: PlanRequest) -> tuple[ResolvedModel, tuple[str, ...]]:
    """The model; from the hub come its tokenizers, where there are captions to count, and unknown architectures."""
    known = is_family_name(request.model)
    if not is_on_hub(request.model) or (known and not (request.is_local and request.path("data"))):
        return resolve_model(request.model), ()
    try:
        return fetch_model(request.model, weights=False), ()
    except BadWeights as error:
        if not known:
            raise
        note = f"captions are assumed to have the usual length: {error.message}"
        return resolve_model(request.model), (note,)


def _of_one_process(request: PlanRequest, hardware: HardwareProfile) -> HardwareProfile:
    """Each process has a device of its own, but on CPU they share the memory."""
    if request.num_processes == 1:
        return hardware
    from autotune.training import device_misfits

    if request.is_local and (misfits := device_misfits(request.num_processes, hardware)):
        raise NothingFits(misfits[0], hint="ask for fewer with --gpus, or see what is here with `autotune probe`")
    if hardware.device.kind != "cpu":
        return hardware
    return with_budget(hardware, hardware.device.budget_bytes // request.num_processes)


def _strategy(
    request: PlanRequest, model: ResolvedModel, workload: Workload, hardware: HardwareProfile
) -> tuple[Predictor, SearchSpace]:
    """The cost model of one device, and what it admits.

    The weights are shared out over the processes only where no device is predicted to hold them all.
    """
    number = request.num_processes
    replicated = Parallel("ddp", number) if number > 1 else Parallel()
    cost = _cost_beside_kept(request, model, workload, hardware, replicated)
    context = TuningContext(cost.hardware, model.family, workload)
    space = request.space(context)
    if number == 1 and not _fits(space, cost, cautious=request.is_local):
        wider = within_host(request.space(context, also=WHERE_NOTHING_FITS), cost)
        space = wider if _fits(wider, cost) else space
    if number > 1:
        why = "several processes share the weights out instead"
        space = drop_values(space, "swapped_blocks", {k: why for k in space.choices["swapped_blocks"] if k})
        if not space.candidates:
            raise InvalidInput(f"blocks cannot be swapped with --gpus {number}: {why}", hint="leave one of them out")
    try:
        lighter = _without_too_heavy(request, space, cost)
        if number == 1 or _fits(lighter, cost):
            return cost, lighter
    except NothingFits:
        if number == 1:
            raise
    plain = shareable(space)
    if not plain.candidates:
        what = f"on each of {number} devices nothing fits, and weights must be plain to be shared out over them"
        raise NothingFits(what, hint=relaxation(request, space, cost))
    cost = _cost_beside_kept(request, model, workload, hardware, Parallel("fsdp2", number))
    return cost, _without_too_heavy(request, plain, cost)


def list_choices(request: PlanRequest, hardware: HardwareProfile) -> SearchSpace:
    """What a search for the question could choose on this machine, and what it could not and why."""
    model, _ = _resolved(request)
    data, drops = read_data(request, model), request.drops_captions
    workload = describe_workload(model, data, request.workload_overrides, drops_captions=drops)
    return request.space(TuningContext(hardware, model.family, workload))


def _fits(space: SearchSpace, cost: Predictor, *, cautious: bool = False) -> bool:
    """Whether anything is predicted to fit, `cautious` as a search is before it tries anything."""
    budget = cost.hardware.device.budget_bytes
    light = [candidate for candidate in space.candidates if cost.weight_bytes(candidate) <= budget]
    return bool(light) and least_bytes(light, cost, cautious=cautious) <= budget


def _cost_beside_kept(
    request: PlanRequest, model: ResolvedModel, workload: Workload, hardware: HardwareProfile, parallel: Parallel
) -> Predictor:
    """The cost model, of the machine without what stays on it beside training."""
    known = (model.family, model.config, read_parts(model), request.caching_pins)
    return beside_kept(Predictor(hardware, workload, *known, parallel))


def beside_kept(cost: Predictor) -> Predictor:
    """The same cost model, of the machine without what stays on it beside training."""
    if not cost.resident_encoder_bytes:
        return cost
    hardware = cost.hardware
    reduced = cost.beside(with_budget(hardware, max(0, hardware.device.budget_bytes - cost.resident_encoder_bytes)))
    reduced.caching = cost.caching  # chosen with all of the memory
    return reduced


def _without_too_heavy(request: PlanRequest, space: SearchSpace, cost: Predictor) -> SearchSpace:
    """Leave out storages whose weights alone exceed the budget: nothing about them needs to be traced or tried."""
    budget = cost.hardware.device.budget_bytes
    sizes: dict[str, int] = {}
    for candidate in space.candidates:
        size = cost.weight_bytes(candidate)
        sizes[candidate.quantization] = min(size, sizes.get(candidate.quantization, size))
    dropped: dict[Choice, str] = {
        name: f"its weights alone need {size / 2**30:.1f} GiB, a run may take {budget / 2**30:.1f} GiB"
        for name, size in sizes.items()
        if size > budget
    }
    if len(dropped) == len(sizes):
        least = min(dropped, key=lambda name: sizes[str(name)])
        hint = relaxation(request, space, cost)
        raise NothingFits(f"{cost.workload.model.name} as {least}: {dropped[least]}", hint=hint)
    return drop_values(space, "quantization", dropped)


def _require_weights_and_room(model: ResolvedModel, hardware: HardwareProfile) -> None:
    if model.folder is not None:
        check_weights(model)
    elif hardware.device.kind == "cpu":
        spec = model.spec
        raise NothingFits(
            f"{spec.name} ({spec.num_parameters / 1e9:.1f}B parameters) cannot be tried here: this machine has no GPU",
            hint=f"plan for a GPU by name: autotune plan --model {model.family.name} --hardware nvidia-rtx-4090 "
            "(all: autotune probe --list)",
        )
