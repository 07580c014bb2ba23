"""Exchange with other programs: their configurations, and their names of weights."""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from autotune.api import list_choices, plan
from autotune.data import media
from autotune.data.dataset import data_text, is_list
from autotune.errors import InvalidInput, NothingFits, suggest_nearest
from autotune.events import OnEvent, StatusChanged
from autotune.interop import exporting
from autotune.interop.importing import Audit, ImportedConfig, import_config
from autotune.interop.trainer import get_trainer
from autotune.knobs.caching import PIN, caching_in
from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import KNOBS, NAMES, why_not_on
from autotune.knobs.settings import plain_choices
from autotune.machine.probe import hardware_for
from autotune.models.family import build_on_meta
from autotune.models.resolve import read_parts, resolve_model
from autotune.plan import base, words
from autotune.plan.candidate import BLOCK_COUNTS, Candidate, Choice, count_blocks
from autotune.plan.file import load_plan, with_job
from autotune.plan.hardware import HardwareProfile
from autotune.plan.job import AdapterFormat, Job, ModelRef
from autotune.plan.plan import Reason, TrainingPlan
from autotune.plan.prediction import Estimate, SettingWorth
from autotune.plan.request import PlanRequest, make_request
from autotune.search.request import ResolvedRequest, complete
from autotune.search.space import SearchSpace
from autotune.system.files import write_text_atomic
from autotune.weights.adapters import NAME_MODEL, read_adapter, require_layers, write_adapter
from autotune.weights.files import read_header
from autotune.weights.names import NOT_READ_BY, find_class

# Settings that files seldom name.
UNNAMED = ("loader", "allocator", "data_workers", "batch_memory", "precision")
NOT_OF_PINS = ("path", "max_trials", "search_seconds", "pins")


def convert_weights(
    source: str | Path,
    target: str | Path,
    *,
    to: str = "diffusers",
    model: str | None = None,
    overwrite: bool = False,
) -> str | None:
    """Write an adapter under the names that another program loads: `diffusers`, `comfyui` or
    `kohya`. What it does and dtypes stay the same; in the first two, alpha becomes part of the
    values. Returns which program does not find the layers in this format, and what to do; a file
    that ComfyUI or diffusers would read in part is refused.

    `model` is the model of an adapter whose names do not tell it.

    Raises:
        InvalidInput: the format does not exist, `source` is no adapter or not of this model, or
            `target` is there and `overwrite` does not allow to replace it.
        BadWeights: `source` cannot be read.
    """
    source, target = Path(source), Path(target)
    if to not in get_args(AdapterFormat):
        hint = suggest_nearest(to, get_args(AdapterFormat))
        raise InvalidInput(f"there is no format {to!r}", hint=hint)
    if not overwrite:
        _require_absent(target, "file")
    read_header(source)
    if model:
        named = resolve_model(ModelRef.of(model))
        modules = dict(build_on_meta(named.family, named.config).named_modules())
        transformer: str | None = named.family.transformer_class
        adapter = read_adapter(source, modules, transformer)
        require_layers(source, adapter, modules)
    else:
        adapter = read_adapter(source)
        transformer = (adapter.info and adapter.info.transformer) or find_class(adapter.layers)
        if transformer == "" and not adapter.info:  # of no known class
            message = f"the names in {source} do not tell which model it is for"
            raise InvalidInput(message, hint=NAME_MODEL)
    write_adapter(target, adapter, to, transformer or None)  # type: ignore[arg-type]
    program, classes = NOT_READ_BY.get(to, ("", ()))  # type: ignore[call-overload]
    if transformer not in classes:
        return None
    return f"{program} does not find the layers in this file; for it: --format {program.lower()}"


@dataclass(frozen=True)
class PlanFromConfig:
    """A plan with another trainer's settings; `remarks` tell which it could not keep, and why."""

    plan: TrainingPlan
    remarks: tuple[str, ...]


def plan_from_config(
    config: ImportedConfig, *, on_event: OnEvent = base.log_event, **options: Any
) -> PlanFromConfig:
    """Plan the training that a configuration describes, with its own settings pinned where the
    machine has them. `options` are those of `plan`, and go before what the configuration says.

    `autotune.plan(config.model, config.data, **config.options)` plans the same training with the
    fastest settings.

    Raises:
        InvalidInput, NothingFits: as `plan`.
    """
    asked: dict[str, Any] = {**config.options, **options}
    data, remarks = _folder_here(config.data), []
    if data is None and config.data is not None:
        fix = "name the data with `autotune train --data`"
        remarks.append(f"there is no folder {config.data} here: {fix}")
    without_pins = {name: value for name, value in asked.items() if name not in NOT_OF_PINS}
    num_blocks = resolve_model(ModelRef.of(config.model)).spec.num_blocks
    choices_of = partial(list_choices, config.model, None, **without_pins)
    pins, impossible = _possible_pins(config.pins, num_blocks, choices_of)
    asked["pins"] = {**pins, **dict(asked.get("pins", {}))}
    made = plan(config.model, data, on_event=on_event, **asked)
    for name, (value, why) in impossible.items():
        remarks.append(f"{name} is not {value} as in the file: {why}")
    return PlanFromConfig(made, tuple(remarks))


def audit(
    config: ImportedConfig | str | Path,
    *,
    hardware: str | HardwareProfile | None = None,
    measure: bool = False,
    on_event: OnEvent = base.log_event,
) -> Audit:
    """Predict another trainer's configuration on a card, in autotune and in its own program
    (`in_trainer`), and the fastest plan that learns the same; with `measure`, run both here, too.

    Raises:
        InvalidInput: as `import_config` and `plan`.

    Examples:
        >>> found = autotune.audit("train_lora.yaml", hardware="4090")
        >>> found.as_written.fits, found.fastest.step_seconds, found.worth[0].knob
    """
    if measure and hardware is not None:
        hint = "leave out --measure, or --hardware"
        raise InvalidInput("only this machine can be measured", hint=hint)
    read = config if isinstance(config, ImportedConfig) else import_config(config)
    from autotune.cost.estimate import estimate as estimate_candidate
    from autotune.cost.predict import CostModel
    from autotune.search.problem import PlannerBackend

    profile = hardware_for(hardware, on_event=on_event)
    asked = {"model": read.model, "data": _folder_here(read.data), "hardware": profile}
    options: dict[str, Any] = {**read.options, **asked}
    options.pop("learning_rate", None)  # that no plan takes, perhaps, and nothing here depends on
    request = make_request(PlanRequest, "audit", options)
    on_event(StatusChanged(text="predicting the file as written"))
    resolved = ResolvedRequest.build(complete(request), needs_weights=measure)
    model, steps = resolved.model, resolved.job.num_steps
    known = profile, resolved.workload, model.family, model.config, read_parts(model)
    cost = own_cost = CostModel.build(*known)
    # A search leaves compiling to its trials.
    ways = [{"compile": "block"}] if read.pins.get("compile") == "block" else []
    found_settings = []
    for pins in ({}, *ways):
        with suppress(NothingFits, *[InvalidInput] * bool(pins)):
            found_settings.append(plan(**options, pins=pins, on_event=on_event).frozen.settings)
    predict = partial(estimate_candidate, cost, num_steps=steps)
    made = min(found_settings, key=lambda one: predict(one).step_seconds, default=None)
    settings, breaks = settings_as_written(read.pins, cost.context, made)
    caching_pins: dict[str, str] = {}
    for name, value in ((key, x) for key, x in read.pins.items() if key.startswith(PIN)):
        wanted = {**caching_pins, name.removeprefix(PIN): value}
        try:
            own_cost, caching_pins = CostModel.build(*known, caching_pins=wanted), wanted
        except InvalidInput as error:
            breaks = (*breaks, error.message)
    predict_written = partial(estimate_candidate, own_cost, num_steps=steps)
    written, in_trainer = predict_written(settings), None
    if read.overheads is not None:
        caching = caching_in(read.pins)
        why = Reason(knob="caching", chosen=words.caching_text(caching), why="as in the file")
        theirs = cost.with_overheads(read.overheads, (caching, why))
        in_trainer = estimate_candidate(theirs, settings, num_steps=steps)
    found = Audit(
        config=read,
        as_written=written,
        in_trainer=in_trainer,
        breaks=breaks,
        fastest=None if made is None else predict(made),
        worth=() if made is None else _worth(predict_written, written, made),
    )
    if not measure:
        return found
    on_event(StatusChanged(text="running a few steps of both"))
    with PlannerBackend().trials(resolved.model, cost) as run:
        found = found.changed(measured_as_written=run(settings))
        return found if made is None else found.changed(measured_fastest=run(made))


def export_config(
    plan: TrainingPlan | str | Path,
    to: str,
    output: str | Path | None = None,
    *,
    strict: bool = False,
    overwrite: bool = False,
) -> exporting.ExportedConfig:
    """Turn a plan into the files of another trainer (configuration, data sets, starting script),
    and write them to the folder `output`, if it is named.

    `to` is `ai-toolkit`, `musubi`, `simpletuner`, `diffusers`, `sd-scripts` or `onetrainer`. What
    that trainer lacks goes to its nearest setting that needs no more memory, which the head of the
    files says; with `strict`, differences that change learning or memory are refused.

    Raises:
        InvalidPlan: the file is not a valid plan.
        InvalidInput: the trainer lacks the model or a setting without such a neighbor (with
        `strict`: any setting), or a file exists and `overwrite` is not given.

    Examples:
        >>> exported = autotune.export_config("plan.yaml", "musubi", "for-musubi")
        >>> exported.files.keys(), exported.differences
    """
    made = load_plan(plan)
    if made.job.data is not None and is_list(made.job.data):
        raise InvalidInput(
            f"{data_text(made.job.data)}: this is a list of folders, and only a single folder can "
            "be exported",
            hint="name one folder as the plan's data, export, and add the others to the files",
        )
    folders = {name: getattr(made.job, name) for name in ("data", "control")}
    places = {
        name: str(Path(one).absolute()) if Path(one).is_dir() else one
        for name, one in folders.items()
        if one is not None
    }
    folder = Path(places.get("data", ""))
    found = _count_images(folder, made.job) if "data" in places and folder.is_dir() else {}
    exported = exporting.export_plan(with_job(made, **places), get_trainer(to), found, strict)
    if output is not None:
        folder = Path(output)
        for name in () if overwrite else exported.files:
            _require_absent(folder / name, "folder")
        for name, text in exported.files.items():
            write_text_atomic(folder / name, text)
    return exported


def _count_images(folder: Path, job: Job) -> dict[str, int]:
    control = media.locate_control(folder, Path(job.control)) if job.control else None
    contents = media.list_contents(folder, exclude=control)
    images = media.find_media(contents, clips=job.num_frames > 1)
    captions = media.find_captions(contents, images)
    counts = Counter(num_images=len(images))
    for one in images:
        line, file = captions.lines.find(one.name), captions.files.get(one.name)
        counts["subfolders"] += "/" in one.name
        counts["repeats"] += ((line and line.repeats) or one.folder_repeats) > 1
        is_text = file is None or file.suffix.lower() == ".txt"
        counts["captions"] += not is_text or bool(line and line.captions)
    return counts


def _require_absent(path: Path, kind: str) -> None:
    if path.exists():
        hint = f"name another {kind}, or allow it: --overwrite"
        raise InvalidInput(f"{path} is there already", hint=hint)


def _folder_here(data: str | None) -> str | None:
    return data if data is not None and Path(data).expanduser().is_dir() else None


def settings_as_written(
    pins: Mapping[str, str], context: TuningContext, made: Candidate | None
) -> tuple[Candidate, tuple[str, ...]]:
    """Return a file's settings, and those that do not work on the card. Settings that `pins`
    leave out and no other trainer tunes are those of the plan that was made."""
    total, hardware = context.workload.model.num_blocks, context.hardware
    knobs, plain = {knob.name: knob for knob in KNOBS}, plain_choices(context)
    written, breaks = Candidate(micro_batch_size=1, checkpointed_blocks=total), []
    written = written.changed(optimizer=plain["optimizer"][0])
    if made is not None:
        written = written.changed(**{name: getattr(made, name) for name in UNNAMED})
    for name, names in NAMES.items():
        if (value := pins.get(name)) is None:
            continue
        choice = (
            count_blocks(value, total) if name in BLOCK_COUNTS else value if names else int(value)
        )
        why = why_not_on(hardware.device.kind, hardware.lacks, name, choice)
        if name in knobs:
            here = knobs[name].choices(context)
            why = why or (here.rejected.get(choice) if len(here.admitted) == 1 else None)
        elif choice not in plain[name]:
            why = why or "it is not available here"
        if names and choice not in names:
            why = why or "autotune knows no such value"
        changed = written if why else written.changed(**{name: choice})
        why = why or next(filter(None, (each.why_not(changed, context) for each in KNOBS)), None)
        if why:
            breaks.append(f"{name} {choice}: {why}")
        else:
            written = changed
    return written, tuple(breaks)


def _possible_pins(
    wanted: Mapping[str, str], num_blocks: int, choices_of: Callable[..., SearchSpace]
) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    space = choices_of()
    pins: dict[str, str] = {}
    impossible: dict[str, tuple[str, str]] = {}
    # Of pins that don't go together the last one leaves: compiling saves time alone.
    for name, written in sorted(wanted.items(), key=lambda one: one[0] == "compile"):
        value, why = str(count_blocks(written, num_blocks)) if name in BLOCK_COUNTS else written, ""
        if name in space.pinnable:
            usable: tuple[Any, ...] = (*space.choices[name], *space.pinnable[name])
            if name in BLOCK_COUNTS:  # the next that needs no more memory
                value = str(min((n for n in usable if n >= int(value)), default=max(usable)))
            elif value not in map(str, usable):
                reasons = {str(one.choice): one.reason for one in space.rejected[name]}
                why = reasons.get(value, "no such value here")
        if why:
            impossible[name] = (value, why)
        else:
            pins[name] = value
    possible: dict[str, str] = {}
    for is_caching in (False, True):
        own = {name: value for name, value in pins.items() if name.startswith(PIN) == is_caching}
        while own:
            try:
                choices_of(pins={**possible, **own})
                break
            except InvalidInput as error:
                name, value = own.popitem()
                impossible[name] = (value, error.message)
        possible |= own
    return possible, impossible


def _worth(
    estimate: Callable[[Candidate], Estimate], as_written: Estimate, better: Candidate
) -> tuple[SettingWorth, ...]:
    # Of each that differs alone; those that cannot go without another, or do nothing, are left out.
    before, found = as_written.prediction, []
    written = before.candidate
    values = better.differences(written).items()
    changes: dict[str, dict[str, Choice]] = {name: {name: value} for name, value in values}
    if "checkpointed_blocks" in changes:
        changes["checkpointed_blocks"] |= changes.pop("selective_blocks", {})
    for name, change in changes.items():
        with suppress(InvalidInput):
            after = estimate(written.changed(**change)).prediction
            seconds = before.step_seconds - after.step_seconds
            saved = before.run_memory_bytes - after.run_memory_bytes
            in_training = before.training.run_memory_bytes - after.training.run_memory_bytes
            if round(seconds, 3) or saved or in_training:
                one = SettingWorth(
                    knob=name,
                    written=getattr(written, name),
                    better=change[name],
                    step_seconds_saved=seconds,
                    run_memory_saved_bytes=saved,
                    training_memory_saved_bytes=in_training,
                )
                found.append(one)
    return tuple(sorted(found, key=lambda one: -one.step_seconds_saved))
