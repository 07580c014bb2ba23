"""One request on one machine, with all that follows from it before anything is tried."""

from dataclasses import dataclass, replace
from typing import Self

from autotune.cost.memory import ONE_PROCESS, Parallel
from autotune.cost.predict import CostModel
from autotune.errors import InvalidInput, NothingFits
from autotune.knobs.knob import TuningContext
from autotune.machine.energy import why_no_energy
from autotune.models.registry import find_published
from autotune.models.resolve import ResolvedModel, read_parts
from autotune.plan.base import digest_of
from autotune.plan.candidate import Choice
from autotune.plan.hardware import HardwareProfile, MemoryBudget, shares_host_memory
from autotune.plan.job import Job, ModelRef
from autotune.plan.workload import Workload
from autotune.search.alternatives import (
    drop_beyond_host,
    drop_block_swap,
    keep_shardable,
    min_required_bytes,
    suggest_relaxation,
)
from autotune.search.backend import PlannerBackend
from autotune.search.elsewhere import NoGpu
from autotune.search.mixtures import with_mixtures
from autotune.search.request import PlanRequest, ResolvedRequest
from autotune.search.space import SearchSpace, drop_values
from autotune.search.study import SearchLimits
from autotune.search.winner import ENERGY_HINT
from autotune.train.fit import KEY_NAMES
from autotune.train.processes import device_misfits


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
    """Cost model of one process, before any trial."""
    job: Job
    notes: tuple[str, ...] = ()
    """What the user should know about how the request was understood."""
    left_out: tuple[str, ...] = ()
    """What is wrong with files of the data folder, one line each."""

    @classmethod
    def build(
        cls,
        asked: PlanRequest | ResolvedRequest,
        hardware: HardwareProfile,
        backend: PlannerBackend,
    ) -> Self:
        """Resolve model and data, check parity, enumerate what may be tried, and build the cost
        model.

        Raises:
            InvalidInput: the model or the data cannot be used.
            NothingFits: the weights alone are too large in every format, or nothing can be tried on
                this machine.
        """
        needs_weights = backend.needs_weights
        if isinstance(asked, PlanRequest):
            asked = ResolvedRequest.build(asked, needs_weights=needs_weights)
        request, model, global_workload, job = asked.request, asked.model, asked.workload, asked.job
        if needs_weights:
            require_devices(asked, hardware)
        workload = global_workload.share(request.num_processes)
        budget = request.memory_budget or hardware.device.budget
        parallel = Parallel("ddp", request.num_processes)
        context = TuningContext(
            hardware, model.family, workload, parallel.budget_of_one(budget, hardware)
        )
        space = request.space(context)
        if request.is_local:
            checked = backend.check_parity(context, space.choices, model)
            if any(
                not each.available for each in checked.capabilities[len(hardware.capabilities) :]
            ):
                space = request.space(replace(context, hardware=checked))
            hardware = checked
        cost, space = _choose_strategy(request, model, workload, hardware, budget, space)
        _require_host_memory(space, cost)
        return cls(
            replace(request, model=job.model_ref),
            hardware,
            budget,
            global_workload,
            workload,
            space,
            cost,
            job,
            asked.notes,
            asked.dataset.problem_summary if asked.dataset else (),
        )

    @property
    def budget_bytes(self) -> int:
        """What training may take of one process's device, beside encoders that stay there."""
        return self.cost.training_budget.num_bytes

    @property
    def can_try(self) -> bool:
        """Whether trials run: the machine must be this one, and a trial has one device."""
        return self.request.is_local and self.cost.parallel.num_shards == 1

    @property
    def limits(self) -> SearchLimits:
        """When the search ends at the latest."""
        return SearchLimits(
            self.request.max_trials, self.request.search_seconds, self.job.num_steps
        )

    @property
    def identity(self) -> dict[str, str | None]:
        """Everything that must be equal for trials to count for the same search, by what people
        call it."""
        model = {**dict(self.workload.model), "name": ""}  # folders may be called differently
        work = {**self.workload.model_dump(mode="json"), "model": model}
        choices: dict[str, object] = {
            name: list(values) for name, values in self.space.choices.items()
        }
        keys = {KEY_NAMES.get(key, key): value for key, value in self.hardware.match_keys.items()}
        device, request = self.hardware.device.name, self.request
        own = {
            "device": device,
            "work": digest_of(work),
            "settings to choose from": digest_of(choices),
        }
        program = {"program that trains": request.overheads.program} if request.overheads else {}
        return {**keys, **own, **program, "processes": str(request.num_processes)}


def _require_host_memory(space: SearchSpace, cost: CostModel) -> None:
    """Raise NothingFits if the host is too small for any run, whatever the device holds."""
    host, kind = cost.hardware.host, cost.hardware.device.memory_kind
    if shares_host_memory(kind) or not space.candidates:
        return
    smallest = min(
        space.candidates, key=lambda one: (one.swapped_blocks, one.modulation == "ahead")
    )
    number, there = cost.parallel.num_processes, host.available_memory_bytes
    needed = number * cost.host_memory_bytes(smallest)
    if needed > there:
        run = f"a run's {number} processes need" if number > 1 else "a run needs"
        raise NothingFits(
            f"{run} {needed / 2**30:.1f} GiB of the host's memory, {there / 2**30:.1f} GiB are "
            "available",
            hint=(
                "close other programs, or use a host with more memory (for a GPU by name: "
                "--host-memory)"
            ),
        )


def require_devices(resolved: ResolvedRequest, hardware: HardwareProfile) -> None:
    """Whether the request can be tried on this machine at all, by facts alone: no rate need be
    measured for that.

    Raises:
        NothingFits: a published model asks for a GPU, or more processes for more GPUs than there
            are.
        InvalidInput: nothing tells the energy that is the objective.
    """
    request, model = resolved.request, resolved.model
    if model.folder is None and hardware.device.kind == "cpu":
        _, published = find_published(ModelRef.of(request.model).name) or (
            model.family,
            model.family.models[0],
        )
        raise NoGpu.build(model.family, published)
    if not request.is_local:
        return
    if request.num_processes > 1 and (misfits := device_misfits(request.num_processes, hardware)):
        raise NothingFits(
            misfits[0], hint="ask for fewer with --gpus, or see what is here with `autotune probe`"
        )
    workload = resolved.workload.share(request.num_processes)
    if workload.objective == "energy" and (reason := why_no_energy(hardware.device)):
        raise InvalidInput(
            f"the energy of {hardware.device.name} cannot be measured: {reason}", hint=ENERGY_HINT
        )


def _choose_strategy(
    request: PlanRequest,
    model: ResolvedModel,
    workload: Workload,
    hardware: HardwareProfile,
    budget: MemoryBudget,
    space: SearchSpace,
) -> tuple[CostModel, SearchSpace]:
    """The cost model of one process, and what of `space` may be tried; `budget` is of all
    processes.

    The weights are sharded only if no device is predicted to hold them all.
    """
    number = request.num_processes
    together = Parallel("ddp", number)
    cost = CostModel.build(
        hardware,
        workload,
        model.family,
        model.config,
        read_parts(model),
        memory_budget=together.budget_of_one(budget, hardware),
        caching_pins=request.caching_pins,
        caching_exclusions=request.caching_exclusions,
        overheads=request.overheads,
        parallel=together if number > 1 else ONE_PROCESS,
    )
    if number == 1:
        return cost, drop_beyond_host(
            with_mixtures(_drop_too_heavy(request, space, cost), cost), cost
        )
    space = drop_beyond_host(drop_block_swap(with_mixtures(space, cost), number), cost)
    try:
        lighter = _drop_too_heavy(request, space, cost)
        if _fits(lighter, cost):
            return cost, lighter
    except NothingFits:
        pass
    if workload.adapter == "dora":
        what = (
            f"nothing fits on each of {number} devices, and DoRA cannot be trained on weights "
            "sharded over them"
        )
        raise NothingFits(what, hint=suggest_relaxation(request, space, cost))
    plain = keep_shardable(space)
    if not plain.candidates:
        what = (
            f"nothing fits on each of {number} devices, and quantized weights cannot be "
            "sharded "
            "over them"
        )
        raise NothingFits(what, hint=suggest_relaxation(request, space, cost))
    cost = cost.with_parallel(Parallel("fsdp2", number))
    return cost, _drop_too_heavy(request, plain, cost)


def _fits(space: SearchSpace, cost: CostModel) -> bool:
    """Whether anything is predicted to fit."""
    budget = cost.training_budget.num_bytes
    light = [candidate for candidate in space.candidates if cost.weight_bytes(candidate) <= budget]
    return bool(light) and min_required_bytes(light, cost) <= budget


def _drop_too_heavy(request: PlanRequest, space: SearchSpace, cost: CostModel) -> SearchSpace:
    """Leave out weight formats whose weights alone exceed the budget: they need not be traced or
    tried."""
    budget = cost.training_budget.num_bytes
    sizes: dict[str, int] = {}
    for candidate in space.candidates:
        size = cost.weight_bytes(candidate)
        sizes[candidate.quantization] = min(size, sizes.get(candidate.quantization, size))
    dropped: dict[Choice, str] = {
        name: (
            f"its weights alone need {size / 2**30:.1f} GiB, a run may take "
            f"{budget / 2**30:.1f} "
            "GiB"
        )
        for name, size in sizes.items()
        if size > budget
    }
    if len(dropped) == len(sizes):
        smallest = min(sizes, key=lambda name: sizes[name])
        hint = suggest_relaxation(request, space, cost)
        raise NothingFits(
            f"{cost.workload.model.name} as {smallest}: {dropped[smallest]}", hint=hint
        )
    return drop_values(space, "quantization", dropped)
