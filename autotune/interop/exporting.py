"""From a plan to another trainer's files. What the trainer lacks is found by reading them back."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from autotune.errors import InvalidInput
from autotune.interop.files import FILL_IN, MUSUBI_SWAP, WRITERS
from autotune.interop.importing import read_settings, value_text
from autotune.interop.rules import CannotExpress, ConfigValue, Context, Rule, Values, is_knob
from autotune.interop.trainer import KnownModel, Trainer
from autotune.knobs.caching import PIN, EncoderSize, caching_in
from autotune.models import adapter, registry
from autotune.models.family import Family
from autotune.plan import base, prediction, words
from autotune.plan.candidate import BLOCK_COUNTS, CachingSettings, Candidate, count_blocks
from autotune.plan.job import DataFields, Job
from autotune.plan.plan import TrainingPlan
from autotune.plan.request import PlanRequest
from autotune.plan.workload import Learning, ModelSpec, Workload

OF_WORKLOAD = tuple(name for name in Learning.model_fields if name not in ("quality", "objective"))
# Names that decide what is learned.
LEARNING = (
    *("resolution", *OF_WORKLOAD, *(name for name in DataFields.model_fields if name != "data")),
    *("num_steps", "learning_rate", "lr_scheduler", "lr_warmup_steps", "weight_decay"),
    *("max_grad_norm", "timestep_sampling", "timestep_shift", "guidance_scale"),
    *("weighting_scheme", "caption_dropout", "mask_floor"),
    *("expert", "from_adapter", "training_adapter", "validation", "keep_best"),
    *("optimizer", "optimizer_options"),
)
# Knobs of how files and batches are read: they change neither learning nor the device's memory.
LOADING = ("loader", "data_workers", "batch_memory")
Kind = Literal["learning", "settings", "loading"]
DIFFERENCE_KINDS: Mapping[Kind, str] = {
    "learning": "it will learn differently",
    "settings": "settings of the plan that it lacks, and what is written instead",
    "loading": "how files and batches are read is its own",
}
# Settings of autotune's executor alone, with others' value: any other needs less memory.
SPARING = {"modulation": "resident", "norm_rope": "stock", "caching.vae_device": "training"}


class Difference(base.Frozen):
    """One value of a plan that the exported files have otherwise."""

    name: str
    kind: Kind
    planned: str
    written: str


class ExportedConfig(base.Frozen):
    """A plan as another trainer's files."""

    trainer: str
    plan_digest: str
    files: dict[str, str]  # text of each file, by its name
    differences: tuple[Difference, ...]
    remarks: tuple[str, ...]  # what this trainer does otherwise with what is written


def values_of(plan: TrainingPlan) -> dict[str, Any]:
    """Return everything that a plan says, by the names that rules use."""
    frozen, job = plan.frozen, plan.job
    num_images = sum(bucket.num_items for bucket in frozen.workload.buckets)
    # Where folders count several times, an epoch there is shorter.
    is_same = job.num_steps == job.steps_on(num_images, frozen.workload.effective_batch_size)
    return {
        **{name: value for name, value in plan.job if name not in ("model", "revision")},
        **_workload_values(frozen.workload),
        **dict(frozen.settings),
        "optimizer_options": dict(frozen.workload.optimizer.options),
        **{PIN + name: value for name, value in frozen.caching},
        "num_gpus": frozen.hardware.num_processes,
        "num_images": num_images,
    } | ({} if is_same else {"num_train_epochs": None})


def _workload_values(workload: Workload) -> dict[str, Any]:
    frames = workload.largest_bucket.num_frames
    sizes = {"resolution": workload.resolution_px, "num_frames": frames}
    return {name: getattr(workload, name) for name in OF_WORKLOAD} | sizes


def export_plan(
    plan: TrainingPlan, trainer: Trainer, found: Values = MappingProxyType({}), strict: bool = False
) -> ExportedConfig:
    """Write files of another trainer that do what the plan says, as nearly as it can. `found` are
    numbers of images in its folder: all, and by names of `unread`. Raises InvalidInput if it would
    need more memory; if `strict`, also if learning or memory differed."""
    spec = plan.frozen.workload.model
    known = known_model(trainer, spec.family, spec)
    trainer, context = trainer.for_model(known), Context(known.family, spec.num_blocks)
    planned = {**values_of(plan), **found}
    # blocks that keep what attention computed recompute everything there: less memory
    recomputed = planned["checkpointed_blocks"] + planned["selective_blocks"]
    needed = {**planned, "checkpointed_blocks": recomputed, "selective_blocks": 0}
    hint = f"make a plan that it can express: autotune plan --from PLAN --for {trainer.name}"
    if plan.frozen.expected.evidence == "predicted":
        hint += f" --hardware {plan.frozen.hardware.device_name!r}"
    try:
        written = write_settings(trainer, known, needed, context)
        published = registry.find_published(plan.job.model)
        weights = plan.job.model if published is None else published[1].hub_id
        written |= dict.fromkeys(trainer.weights_keys[:1], weights)
        read, lines = read_settings(trainer, _as_settings(written), context)
        for need in _find_needs(needed, read, spec.num_blocks):
            raise CannotExpress(need)
    except CannotExpress as error:
        message = f"{trainer.title} cannot do what the plan says: {error}"
        raise InvalidInput(message, hint=hint) from error
    unread = [
        Difference(name=name, kind="learning", planned=f"{found[name]} {where}", written=there)
        for name, (where, there) in trainer.unread.items()
        if found.get(name)
    ]
    differences = (*unread, *compare(planned, read, context))
    lost = [f"{x.key}: {x.meaning}" for kind, x in lines if kind == "not_carried" and x.line]
    stored = str(read.get("quantization", "none"))
    overheads = trainer.overheads_of(written, known).text(stored)
    notes = trainer.holding(trainer.notes, written)
    remarks = tuple(dict.fromkeys((*lost, *notes, overheads)))
    binding = [one for one in differences if one.kind != "loading"]
    if strict and binding:
        first = f"{binding[0].name} is {binding[0].planned} in the plan, {binding[0].written} there"
        message = f"{trainer.title} would differ: {first} ({len(binding)} in all)"
        learned = {one.name for one in binding if one.kind == "learning"}
        if asked := learned & PlanRequest.model_fields.keys():  # `--from` keeps them
            options = ", ".join(sorted(map(_option_of, asked)))
            hint = f"plan anew without {options}, or with the value there"
        elif learned:
            hint = "make one folder that holds each image once, with its NAME.txt"
        raise InvalidInput(message, hint=f"leave --strict out, or {hint}")
    if known.prefix:
        own, usual = known.prefix
        written = {re.sub(f"^{re.escape(usual)}", own, key): v for key, v in written.items()}
    head = "".join(f"# {line}\n" for line in _head_lines(plan, trainer, differences, remarks))
    return ExportedConfig(
        trainer=trainer.name,
        plan_digest=plan.digest,
        files=dict(WRITERS[trainer.name](trainer.title, written, head)),
        differences=differences,
        remarks=remarks,
    )


def _option_of(name: str) -> str:
    metadata = PlanRequest.model_fields[name].metadata
    flags = (one.flag for one in metadata if isinstance(one, base.Option) and one.flag)
    return next(flags, f"--{name.replace('_', '-')}")


def _find_needs(planned: Values, read: Values, num_blocks: int) -> Iterator[str]:
    for name in BLOCK_COUNTS:
        own, there = (count_blocks(values.get(name, 0), num_blocks) for values in (planned, read))
        if there < own:
            yield f"{name} would be {there}, not {own}: more memory"
    formats = (str(values.get("quantization", "none")) for values in (planned, read))
    bits, bits_there = ({"none": 16, "bnb-nf4": 4}.get(each, 8) for each in formats)
    if bits_there > bits:
        yield f"with this model it has no weight format like quantization {planned['quantization']}"
    caching, caching_there = map(caching_in, (planned, read))
    encoders = EncoderSize(7 << 30, element_bytes=2, vae_bytes=0)  # of a usual size
    if encoders.device_bytes(caching_there) > encoders.device_bytes(caching):
        yield f"it encodes captions otherwise than {words.caching_text(caching)}: more memory"
    for name, usual in SPARING.items():
        if (own := planned[name]) != usual:
            yield f"{name} would be {usual}, not {own}: more memory"


def known_model(trainer: Trainer, family: str, model: ModelSpec | None = None) -> KnownModel:
    """Find a trainer's model by name, else by size, else its first, else raise InvalidInput."""
    of_family = [one for one in trainer.models if one.family.name == family]
    if not of_family:
        names = ", ".join(dict.fromkeys(one.name for one in trainer.models))
        key = family.replace("-", "").partition(".")[0]  # as they write LTX-2.3's: ltx2
        why = next((f": {why}" for why, words in trainer.refuses.items() if key in words), "")
        message = f"autotune neither predicts nor writes {family} for {trainer.title}{why}"
        raise InvalidInput(message, hint=f"it has {names}")
    if model is None:
        return of_family[0]
    name = model.name.lower().rpartition("/")[2]

    def likeness(one: KnownModel) -> tuple[bool, bool]:
        is_named = name in (one.name, one.published.hub_id.lower().rpartition("/")[2])
        return is_named, one.published.num_parameters == model.num_parameters

    return max(of_family, key=likeness)


def write_settings(
    trainer: Trainer, known: KnownModel, values: Values, context: Context, *, is_whole: bool = True
) -> dict[str, Any]:
    """Return values by the trainer's keys, without what it cannot express unless whole."""
    written = {**trainer.defaults, **trainer.fixed, **known.keys}
    values = {**values, "data": values.get("data") or FILL_IN}
    for rule in trainer.rules:
        with suppress(*[] if is_whole else [CannotExpress]):
            written |= _write(rule, values, context)
    return {k: value for k, value in written.items() if value is not None and k not in known.lacks}


def _write(rule: Rule, values: Values, context: Context) -> Values:
    alpha, frames = values.get("lora_alpha"), values.get("num_frames")
    if alpha is not None and alpha % 1 == 0:  # some parsers take none with a point
        alpha = int(alpha)
    frames = None if frames == 1 else frames  # one makes no clip
    return rule.write({**values, "lora_alpha": alpha, "num_frames": frames}, context)


def _as_settings(written: Values) -> dict[str, ConfigValue]:
    return {key: ConfigValue(key, value, line=1) for key, value in written.items()}


def compare(planned: Values, read: Values, context: Context) -> tuple[Difference, ...]:
    """List differences of what is read back from the plan, those of learning first."""
    assumed, found = _assumed(context.family), []
    for name in dict.fromkeys((*LEARNING, "save_dtype", *filter(is_knob, planned))):
        own, other = planned.get(name), read.get(name, assumed.get(name))
        if name == "num_steps" and (epochs := read.get("num_train_epochs")) is not None:
            steps = -(-epochs * planned.get("num_images", 1) // planned["effective_batch_size"])
            other = own if planned.get("num_train_epochs") == epochs else steps
        if not is_equal(name, own, other, context):
            ours: Kind = "loading" if name in LOADING else "settings"
            kind: Kind = "learning" if name in LEARNING else ours
            planned_text, written = (value_text(x, "not set") for x in (own, other))
            found.append(Difference(name=name, kind=kind, planned=planned_text, written=written))
    return tuple(found)


def _assumed(family: Family) -> dict[str, Any]:
    fields = {**Candidate.model_fields, **Job.model_fields}
    its_own = ("learning_rate", "weight_decay", "max_grad_norm", "timestep_shift", "seed")
    known = {name: field.default for name, field in fields.items() if not field.is_required()}
    return {
        **{name: value for name, value in known.items() if name not in (*its_own, "preview_steps")},
        **{PIN + name: value for name, value in CachingSettings()},
        **{"adapted_blocks": "all", "adapter": "lora"},
        **dict.fromkeys(("lora_dropout", "ema_decay", "preserve_prior", "lokr_factor"), 0),
        "optimizer_options": {},
        "guidance_scale": family.defaults.training_guidance,
    }


def is_equal(name: str, own: Any, other: Any, context: Context) -> bool:
    """Tell if two values of a name mean the same, as checkpointing the last block or not does."""
    if name in BLOCK_COUNTS and other is not None:
        top = (context.num_blocks or 1) - (name == "checkpointed_blocks")
        return min(context.blocks(own), top) == min(context.blocks(other), top)
    if name == "targets" and own is not None and other is not None:
        return adapter.layers_of(context.family, own) == adapter.layers_of(context.family, other)
    are_numbers = isinstance(own, float | int) and isinstance(other, float | int)
    if are_numbers and not isinstance(own, bool):
        return bool(abs(own - other) <= 1e-6 * max(abs(own), abs(other)))
    return own == other or str(own) == str(other)


def _head_lines(
    plan: TrainingPlan, trainer: Trainer, differences: Iterable[Difference], remarks: Iterable[str]
) -> Iterator[str]:
    expected, assumed = plan.frozen.expected, plan.frozen.overheads
    is_planned_for = assumed is not None and assumed.program == trainer.name
    whose = f"As {trainer.title} takes memory, it" if is_planned_for else "autotune's own executor"
    seconds, gib = f"{expected.step_seconds:.3f} s", f"{expected.run_memory_bytes / 2**30:.2f} GiB"
    yield f"Written by autotune for {trainer.title}, keys as of {trainer.version}, from the plan"
    yield plan.digest
    yield f"{whose} is expected to take {seconds} a step and {gib} ({expected.evidence})."
    for kind, title in DIFFERENCE_KINDS.items():
        these = [one for one in differences if one.kind == kind]
        yield from [f"{title[0].upper()}{title[1:]}:"] if these else []
        yield from (f"  {one.name}: {one.planned} in the plan, {one.written} here" for one in these)
    yield "It computes differently:"
    yield from (f"  {remark}" for remark in remarks)


Choices = Mapping[str, tuple[Any, ...]]  # values of each knob that a search may take


def overheads_for(
    trainer: Trainer, job: Job, workload: Workload, choices: Choices, *, is_exported: bool = True
) -> prediction.Overheads:
    """Return what a trainer takes of a device with its files for a job, whatever is chosen; by
    default with options that `export-config` adds."""
    known = known_model(trainer, workload.model.family, workload.model)
    table, context = trainer.for_model(known), Context(known.family, workload.model.num_blocks)
    first = {name: values[0] for name, values in choices.items()}
    values = {**_assumed(context.family), **first, **JOB, **dict(job), **_workload_values(workload)}
    written = write_settings(table, known, values, context, is_whole=False)
    added = MUSUBI_SWAP if is_exported and trainer.name == "musubi" else {}
    return table.overheads_of({**written, **added}, known)


def inexpressible(
    trainer: Trainer, family: str, num_blocks: int | None, choices: Choices
) -> tuple[tuple[str, str], ...]:
    """Find values of knobs that a trainer cannot express: exclusions for a search that suits it."""
    known = known_model(trainer, family)
    trainer, context = trainer.for_model(known), Context(known.family, num_blocks)
    usual = _assumed(context.family)
    first = {name: values[0] for name, values in choices.items()}

    def is_written(rule: Rule, name: str, value: Any) -> bool:
        try:
            own = _write(rule, {**JOB, **usual, **first, name: value}, context)
        except CannotExpress:
            return False
        written = {key: v for key, v in own.items() if v is not None and key not in known.lacks}
        alone = replace(trainer, rules=(rule,))
        values, lines = read_settings(alone, _as_settings(written), context)
        is_lost = any(kind == "not_carried" for kind, _ in lines)
        return not is_lost and is_equal(name, value, values.get(name, usual.get(name)), context)

    missing = []
    for name in choices.keys() - set(LOADING):
        rules = [rule for rule in trainer.rules if name in rule.names]
        for value in choices[name]:
            is_usual = bool(rules) or is_equal(name, value, usual.get(name), context)
            if not is_usual or not all(is_written(rule, name, value) for rule in rules):
                missing.append((name, str(value)))
    return tuple(missing)


JOB: Values = {"effective_batch_size": 1 << 16, "num_gpus": 1}  # any micro-batch size divides it
