"""A request with its model, data and job: what a planner works on."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.data.dataset import Dataset, read_split, slider_data
from autotune.data.items import make_options, tell_cut_captions
from autotune.errors import InvalidInput
from autotune.interop import exporting
from autotune.interop.trainer import get_trainer
from autotune.knobs import knob, registry, settings
from autotune.knobs.caching import PIN, caching_choices, parse_pins
from autotune.models import facts, resolve
from autotune.models.family import Family
from autotune.models.registry import find_published, get_family
from autotune.plan import hardware
from autotune.plan.file import job_from, load_plan
from autotune.plan.job import Job
from autotune.plan.plan import TrainingPlan
from autotune.plan.request import Pairs, PlanRequest
from autotune.plan.workload import ADAMW, OptimizerChoice, Workload
from autotune.search.space import SearchSpace, build_search_space
from autotune.train import folder
from autotune.train.workload import (
    check_format,
    check_job,
    check_overrides,
    describe_workload,
    require_even_shares,
)
from autotune.weights.files import BadWeights


def complete(request: PlanRequest) -> PlanRequest:
    """Return the request on top of what an earlier plan was made for, with what follows from it.
    Raises InvalidInput if it contradicts itself."""
    request.require_named()
    if ":" in request.optimizer_choice.name and request.optimizer_choice.name != ADAMW.name:
        settings.allow_optimizer(request.optimizer_choice.name)
    said = request
    if request.earlier is not None:
        before = load_plan(request.earlier)
        family = resolve.resolve_model(said.model_ref).family if said.model is not None else None
        request = request.over(before, dropped=_usual_before(before, family))
        expert = before.job.expert
        if family and expert in family.experts and "expert" not in said.given:
            request = request.changed(expert=expert)
    resolve.refuse_parts(request.model_ref, said.given)
    request = request.changed(
        study=request.study or ("search" if request.storage else None),
        interrupted="forgotten" if request.fresh else "resumed",
    )
    if request.for_trainer is None:
        return request
    trainer = get_trainer(request.for_trainer)
    family = resolve.resolve_model(request.model_ref).family
    choices = {"targets": tuple(family.target_sets)}
    lacking = exporting.inexpressible(trainer, family.name, None, choices)
    possible = [name for name in family.target_sets if ("targets", name) not in lacking]
    if request.targets in possible or not possible:
        return request
    if "targets" in said.given:
        what = f"{trainer.title} cannot adapt the layers {request.targets!r} of {family.name}"
        raise InvalidInput(what, hint=f"use --targets {' or '.join(possible)}")
    return request.changed(targets=possible[0])


def _usual_before(plan: TrainingPlan, family: Family | None) -> set[str]:
    """Name what a plan has by default of its family, if that becomes another's."""
    work = plan.frozen.workload
    if family is None or family.name == work.model.family:
        return set()
    before = get_family(work.model.family)
    usual = _usual_job(before, work.optimizer)
    found = {name for name, value in usual.items() if getattr(plan.job, name) == value}
    defaults, largest = before.defaults, work.largest_bucket
    are_usual = {
        "rank": work.rank == defaults.rank,
        "lora_alpha": work.rank == defaults.rank,
        "effective_batch_size": work.effective_batch_size == defaults.effective_batch_size,
        "resolution": work.resolution_px == defaults.resolution_px,
        "side_px": work.resolution_px == defaults.resolution_px,
        "num_frames": largest.num_frames == defaults.num_frames,
        "text_tokens": True,  # its own tokenizers count
    }
    return found | {name for name, is_usual in are_usual.items() if is_usual}


def _usual_job(family: Family, optimizer: OptimizerChoice) -> dict[str, Any]:
    defaults = family.defaults
    return {
        "learning_rate": settings.usual_learning_rate(optimizer, defaults.learning_rate),
        "weight_decay": defaults.weight_decay,
        "timestep_sampling": defaults.timestep_sampling,
        "timestep_shift": defaults.timestep_shift,
        "guidance_scale": defaults.training_guidance,
        "preview_steps": defaults.preview_steps,
    }


def split_pins(pairs: Pairs) -> tuple[Pairs, Pairs]:
    """Split pins into those of knobs and those of fields of `CachingSettings`."""
    knobs = tuple(pair for pair in pairs if not pair[0].startswith(PIN))
    return knobs, tuple((n.removeprefix(PIN), v) for n, v in pairs if n.startswith(PIN))


def space_for(request: PlanRequest, context: knob.TuningContext) -> SearchSpace:
    """Return what may be tried for `context`. Raises as `build_search_space` and `parse_pins`."""
    pins, exclusions = split_pins(request.pin_pairs), split_pins(request.exclusion_pairs)
    parse_pins(dict(pins[1]), context)
    space = build_search_space(context, pins[0], exclusions[0])
    return space.drop_block_swap(request.num_gpus) if request.num_gpus > 1 else space


def build_job(
    request: PlanRequest,
    model: resolve.ResolvedModel,
    dataset: Dataset | None,
    effective_batch_size: int,
) -> Job:
    """Build the job: the user's words, else the earlier plan's, else the family's defaults."""
    defaults = model.family.defaults
    num_images = len(dataset.items) if dataset else facts.USUAL_IMAGES
    usual = {
        "data": None,
        "num_steps": defaults.num_steps(num_images, effective_batch_size),
        "max_grad_norm": 1.0,
        "seed": 0,
        **_usual_job(model.family, request.optimizer_choice),
    }
    name = request.model_ref.name
    resolved = {
        "model": name.partition("@")[0] if model.revision and not model.file else name,
        "base": model.base,
        "expert": model.family.expert,
        "revision": model.revision,
        "num_frames": request.given.get("num_frames", defaults.num_frames),
    }
    job = job_from({**usual, **request.given_of(Job)}, resolved)
    epoch_size = dataset.epoch_size if dataset else facts.USUAL_IMAGES
    job = job.changed(num_steps=job.steps_on(epoch_size, effective_batch_size))
    check_job(job, model.family, request.optimizer_choice)
    for path in filter(None, (job.from_adapter, job.training_adapter)):
        if request.is_local and not Path(path).is_file():
            raise InvalidInput(f"there is no adapter {path}", hint="name its safetensors file")
    check_format(job.adapter_format, model, request)
    return job


@dataclass(frozen=True)
class ResolvedRequest:
    """A request with model, data and job: all that can be wrong whatever the machine."""

    request: PlanRequest
    model: resolve.ResolvedModel
    dataset: Dataset | None
    workload: Workload  # the work of all processes that train together
    job: Job
    notes: tuple[str, ...]

    @classmethod
    def build(
        cls,
        request: PlanRequest,
        *,
        needs_weights: bool = True,
        on_sound: Callable[[], object] | None = None,
    ) -> "ResolvedRequest":
        """Read what the request names; with `needs_weights`, also the headers of local weights.
        `on_sound` is called before torch is imported. Raises InvalidInput or InvalidPlan."""
        for pairs in (request.pin_pairs, request.exclusion_pairs):
            for name, value in split_pins(pairs)[0]:
                registry.require_choice(name, value)
        model, notes = resolve_request_model(request)
        family, defaults = model.family, model.family.defaults
        bucket = check_overrides(family, request)
        if needs_weights and model.folder is not None:
            resolve.check_weights(model)
        dataset = training = None
        if request.slider:
            split = slider_data(request.slider, bucket.width_px, bucket.height_px)
            dataset = training = split.training
        elif request.data:
            frames = request.given.get("num_frames", defaults.num_frames)
            options = make_options(request.given_of(Job), family, frames)
            split = read_split(request.data, options, request.validation, request.seed)
            dataset, training = split.whole, split.training
        usual, number = defaults.effective_batch_size, request.num_gpus
        batch = request.given.get("effective_batch_size", defaults.batch_for(number))
        if batch != request.given.get("effective_batch_size", usual):
            request = request.changed(effective_batch_size=batch)
            why = f"{number} GPUs cannot share the usual {usual} evenly; --batch-size sets another"
            notes = (*notes, f"an effective batch of {batch}: {why}")
        require_even_shares(batch, number)
        job = build_job(request, model, training, batch)
        folder.require_separate_output(job)
        if on_sound:
            on_sound()
        drops_captions = request.caption_dropout > 0
        workload = describe_workload(model, dataset, request, drops_captions=drops_captions)
        if dataset:
            notes = (*notes, *tell_cut_captions(dataset.items, family, model.config_folder))
        if dataset is None:
            assumed = f"without --data, {facts.USUAL_IMAGES} images with usual captions are assumed"
            notes = (*notes, assumed)
        elif model.config_folder is None:
            assumed = f"{workload.max_text_tokens} tokens a caption are assumed"
            notes = (*notes, f"without the model's files captions cannot be counted: {assumed}")
        return cls(request, model, dataset, workload, job, notes)

    def suited_to_trainer(self, profile: hardware.HardwareProfile) -> "ResolvedRequest":
        """Exclude what the trainer that is named cannot express, and add what its program takes."""
        trainer = get_trainer(str(self.request.for_trainer))
        context = knob.TuningContext(profile, self.model.family, self.workload)
        spec, space = self.model.spec, space_for(self.request, context)
        possible = {
            name: (*choices, *space.pinnable.get(name, ()))
            for name, choices in space.choices.items()
        }
        every = {**possible, **caching_choices(context)}
        lacking = exporting.inexpressible(trainer, spec.family, spec.num_blocks, every)
        overheads = exporting.overheads_for(trainer, self.job, self.workload, possible)
        request = self.request.changed(lacking=tuple(lacking), overheads=overheads)
        return replace(self, request=request)


def resolve_request_model(request: PlanRequest) -> tuple[resolve.ResolvedModel, tuple[str, ...]]:
    """Resolve the model, from the hub if captions must be counted or it is unknown."""
    known = find_published(request.model_ref.name) is not None
    has_items = request.is_local and request.data
    if not resolve.is_on_hub(request.model_ref) or (known and not has_items):
        return resolve.resolve_model(request.model_ref), ()
    try:
        return resolve.fetch_model(request.model_ref, weights=False), ()
    except BadWeights as error:
        if not known:
            raise
        note = f"captions are assumed to have the usual length: {error.message}"
        return resolve.resolve_model(request.model_ref), (note,)
