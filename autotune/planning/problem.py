"""One request on one machine, with all that follows from it before anything is tried."""

from dataclasses import dataclass, replace
from typing import Self

from autotune.cost import ONE_PROCESS, CostModel, Parallel
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
from autotune.knobs import TuningContext
from autotune.planning.alternatives import (
    LAST_RESORT,
    drop_beyond_host,
    keep_shardable,
    min_required_bytes,
    suggest_relaxation,
)
from autotune.planning.backend import PlannerBackend
from autotune.planning.request import PlanRequest, build_job, read_data
from autotune.schema import Choice, HardwareProfile, Job, MemoryBudget, Workload, digest_of
from autotune.search import SearchLimits, SearchSpace, drop_values
from autotune.training import KEY_NAMES, describe_workload, device_misfits, require_even_shares
from autotune.weights import BadWeights


@dataclass(frozen=True)
class PlanningProblem:
    """What a search works on."""

    request: PlanRequest
    hardware: HardwareProfile
    """The whole machine."""
    memory_budget: MemoryBudget
    """What all processes of a run may take of its device."""
    global_workload: Workload
    """The work of all processes that train together."""
    workload: Workload
    """The work of one process and its device."""
    space: SearchSpace
    cost: CostModel
    """Of one process, before any trial."""
    job: Job
    notes: tuple[str, ...] = ()
    """What the user should know about how the request was understood."""
    left_out: tuple[str, ...] = ()
    """What is wrong with files of the data folder, one line each."""

    @classmethod
    def build(cls, request: PlanRequest, hardware: HardwareProfile, backend: PlannerBackend) -> Self:
        """Resolve model and data, check parity, enumerate what may be tried, and build the cost model.

        Raises:
            InvalidInput: the model or the data cannot be used.
            NothingFits: the weights alone are too large in every format, or nothing can be tried on this machine.
        """
        model, notes = _resolve(request)
        if backend.needs_weights:
            _require_weights_and_gpu(model, hardware)
        dataset = read_data(request, model)
        drops_captions = request.drops_captions
        global_workload = describe_workload(model, dataset, request.workload_overrides, drops_captions=drops_captions)
        require_even_shares(global_workload, request.num_processes)
        workload = global_workload.share(request.num_processes)
        budget = request.memory_budget or hardware.device.budget
        if request.is_local:
            context = TuningContext(hardware, model.family, workload, budget)
            choices = request.space(context, also=LAST_RESORT).choices
            hardware = backend.check_parity(context, choices, model)
        cost, space = _choose_strategy(request, model, workload, hardware, _share_of_budget(request, hardware, budget))
        job = build_job(request, model, dataset, global_workload.effective_batch_size)
        return cls(
            replace(request, model=job.pinned_model),
            hardware,
            budget,
            global_workload,
            workload,
            space,
            cost,
            job,
            notes,
            dataset.problem_summary if dataset else (),
        )

    @property
    def budget_bytes(self) -> int:
        """What training may take of one process's device, beside encoders that stay there."""
        return self.cost.training_budget.num_bytes

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
        """Everything that must be equal for trials to count for the same search, by what people call it."""
        model = {**dict(self.workload.model), "name": ""}  # folders may be called differently
        work = {**self.workload.model_dump(mode="json"), "model": model}
        choices: dict[str, object] = {name: list(values) for name, values in self.space.choices.items()}
        keys = {KEY_NAMES.get(key, key): value for key, value in self.hardware.match_keys.items()}
        device, processes = self.hardware.device.name, str(self.request.num_processes)
        own = {"device": device, "work": digest_of(work), "settings to choose from": digest_of(choices)}
        return {**keys, **own, "processes": processes}


def list_choices(request: PlanRequest, hardware: HardwareProfile) -> SearchSpace:
    """What a search for the request could choose on this machine, and what it could not and why."""
    model, _ = _resolve(request)
    data, drops_captions = read_data(request, model), request.drops_captions
    workload = describe_workload(model, data, request.workload_overrides, drops_captions=drops_captions)
    return request.space(TuningContext(hardware, model.family, workload, request.memory_budget))


def _resolve(request: PlanRequest) -> tuple[ResolvedModel, tuple[str, ...]]:
    """The model; from the hub come its tokenizers, if there are captions to count, and unknown architectures."""
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


def _require_weights_and_gpu(model: ResolvedModel, hardware: HardwareProfile) -> None:
    if model.folder is not None:
        check_weights(model)
    elif hardware.device.kind == "cpu":
        spec = model.spec
        raise NothingFits(
            f"{spec.name} ({spec.num_parameters / 1e9:.1f}B parameters) cannot be tried here: this machine has no GPU",
            hint=f"plan for a GPU by name: autotune plan --model {model.family.name} --hardware nvidia-rtx-4090 "
            "(all: autotune probe --list)",
        )


def _share_of_budget(request: PlanRequest, hardware: HardwareProfile, budget: MemoryBudget) -> MemoryBudget:
    """What one process may take: each has a device of its own, but on CPU they share the memory."""
    number = request.num_processes
    if number > 1 and request.is_local and (misfits := device_misfits(number, hardware)):
        raise NothingFits(misfits[0], hint="ask for fewer with --gpus, or see what is here with `autotune probe`")
    return budget.changed(num_bytes=budget.num_bytes // number) if hardware.device.kind == "cpu" else budget


def _choose_strategy(
    request: PlanRequest, model: ResolvedModel, workload: Workload, hardware: HardwareProfile, budget: MemoryBudget
) -> tuple[CostModel, SearchSpace]:
    """The cost model of one process, and what may be tried.

    The weights are sharded over the processes only if no device is predicted to hold them all.
    """
    number = request.num_processes
    cost = CostModel.build(
        hardware,
        workload,
        model.family,
        model.config,
        read_parts(model),
        memory_budget=budget,
        caching_pins=request.caching_pins,
        parallel=Parallel("ddp", number) if number > 1 else ONE_PROCESS,
    )
    space = request.space(cost.context)
    if number == 1:
        if not _fits(space, cost, cautious=request.is_local):
            wider = drop_beyond_host(request.space(cost.context, also=LAST_RESORT), cost)
            space = wider if _fits(wider, cost) else space
        return cost, _drop_too_heavy(request, space, cost)
    space = _without_block_swap(space, number)
    try:
        lighter = _drop_too_heavy(request, space, cost)
        if _fits(lighter, cost):
            return cost, lighter
    except NothingFits:
        pass
    plain = keep_shardable(space)
    if not plain.candidates:
        what = f"nothing fits on each of {number} devices, and quantized weights cannot be sharded over them"
        raise NothingFits(what, hint=suggest_relaxation(request, space, cost))
    cost = cost.with_parallel(Parallel("fsdp2", number))
    return cost, _drop_too_heavy(request, plain, cost)


def _without_block_swap(space: SearchSpace, num_processes: int) -> SearchSpace:
    why = "several processes shard the weights instead"
    dropped: dict[Choice, str] = {number: why for number in space.choices["swapped_blocks"] if number}
    space = drop_values(space, "swapped_blocks", dropped)
    if not space.candidates:
        what = f"blocks cannot be swapped with --gpus {num_processes}: {why}"
        raise InvalidInput(what, hint="leave one of them out")
    return space


def _fits(space: SearchSpace, cost: CostModel, *, cautious: bool = False) -> bool:
    """Whether anything is predicted to fit, `cautious` as a search is before its first trial."""
    budget = cost.training_budget.num_bytes
    light = [candidate for candidate in space.candidates if cost.weight_bytes(candidate) <= budget]
    return bool(light) and min_required_bytes(light, cost, cautious=cautious) <= budget


def _drop_too_heavy(request: PlanRequest, space: SearchSpace, cost: CostModel) -> SearchSpace:
    """Leave out weight formats whose weights alone exceed the budget: they need not be traced or tried."""
    budget = cost.training_budget.num_bytes
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
        smallest = min(sizes, key=lambda name: sizes[name])
        hint = suggest_relaxation(request, space, cost)
        raise NothingFits(f"{cost.workload.model.name} as {smallest}: {dropped[smallest]}", hint=hint)
    return drop_values(space, "quantization", dropped)
