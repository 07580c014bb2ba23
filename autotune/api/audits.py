"""`audit`: what another trainer's configuration costs on a card, and what it could gain there."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.api.configs import import_config
from autotune.api.doors import make_request
from autotune.api.machines import hardware_for
from autotune.api.plans import complete, plan
from autotune.errors import InvalidInput, NothingFits
from autotune.events import OnEvent, StatusChanged, ignore_event
from autotune.interop.auditing import Audit, SettingWorth
from autotune.interop.exporting import BLOCKS
from autotune.interop.importing import ImportedConfig
from autotune.interop.rules import count_blocks
from autotune.knobs.caching import PIN, describe_caching
from autotune.knobs.knob import TuningContext
from autotune.knobs.registry import KNOBS, NAMES, why_not_on
from autotune.knobs.settings import plain_choices
from autotune.models.resolve import read_parts
from autotune.plan.candidate import CachingSettings, Candidate
from autotune.plan.hardware import HardwareProfile
from autotune.plan.job import ModelRef
from autotune.plan.plan import Reason
from autotune.plan.prediction import Estimate
from autotune.plan.request import PlanRequest

if TYPE_CHECKING:
    from autotune.cost.predict import CostModel

UNNAMED = ("loader", "allocator", "data_workers", "batch_memory", "precision")
"""Settings that files seldom name."""


def audit(
    config: ImportedConfig | str | Path,
    *,
    hardware: str | HardwareProfile | None = None,
    measure: bool = False,
    on_event: OnEvent = ignore_event,
) -> Audit:
    """Predict another trainer's configuration on a card as it is written, and the fastest plan that
    learns the same.

    Settings are compared as autotune's executor takes them; `in_trainer` is the file in its own
    program, by what that keeps on the card and how it holds the adapter.

    Args:
        config: from `import_config`, or the configuration's file.
        hardware: as for `plan`; None for this machine.
        measure: also run a few steps of both on this machine, which takes the model's files.
        on_event: listener to progress.

    Raises:
        InvalidInput: as `import_config` and `plan`.

    Example:
        >>> found = autotune.audit("train_lora.yaml", hardware="4090")
        >>> found.as_written.fits, found.step_seconds_saved, found.worth[0].knob
    """
    if measure and hardware is not None:
        raise InvalidInput(
            "only this machine can be measured", hint="leave out --measure, or --hardware"
        )
    read = config if isinstance(config, ImportedConfig) else import_config(config)
    from autotune.cost.estimate import estimate as estimate_candidate  # mistakes are told by now
    from autotune.cost.predict import CostModel
    from autotune.search.request import ResolvedRequest

    profile = hardware_for(hardware, on_event=on_event)
    options: dict[str, Any] = {
        **read.options,
        "model": read.model,
        "data": read_folder(read.data),
        "hardware": profile,
    }
    request = make_request(PlanRequest, "audit", options)
    on_event(StatusChanged(text="predicting the file as written"))
    resolved = ResolvedRequest.build(complete(request), needs_weights=measure)
    model, workload = resolved.model, resolved.workload
    cost = CostModel.build(profile, workload, model.family, model.config, read_parts(model))
    made = None
    with suppress(NothingFits):
        made = plan(**options, on_event=on_event).frozen.settings
    written, breaks = _as_written(read, cost.context, made)
    steps = resolved.job.num_steps
    as_written = estimate_candidate(cost, written, num_steps=steps)
    in_trainer = None
    if read.overheads is not None:
        theirs = cost.with_overheads(read.overheads, _caching_of(read))
        in_trainer = estimate_candidate(theirs, written, num_steps=steps)
    fastest = None if made is None else estimate_candidate(cost, made, num_steps=steps)
    worth = () if made is None else _worth(cost, as_written, made)
    found = Audit(
        config=read,
        as_written=as_written,
        in_trainer=in_trainer,
        breaks=breaks,
        fastest=fastest,
        worth=worth,
    )
    return _measured(found, resolved.request.model_ref, cost, on_event) if measure else found


def _caching_of(config: ImportedConfig) -> tuple[CachingSettings, Reason]:
    """How the trainer encodes captions: as the file says, else as they are."""
    written = {
        name.removeprefix(PIN): value for name, value in config.pins.items() if name.startswith(PIN)
    }
    streamed = written.pop("text_encoder_streamed", "") == "True"
    caching = CachingSettings.model_validate({**written, "text_encoder_streamed": streamed})
    return caching, Reason(knob="caching", chosen=describe_caching(caching), why="as in the file")


def _measured(found: Audit, model: ModelRef, cost: CostModel, on_event: OnEvent) -> Audit:
    """The audit with a trial of both on this machine."""
    from autotune.search.problem import PlannerBackend

    on_event(StatusChanged(text="running a few steps of both"))
    with PlannerBackend().trials(model, cost) as run:
        written = run(found.as_written.prediction.candidate)
        fastest = None if found.fastest is None else run(found.fastest.prediction.candidate)
    return found.changed(measured_as_written=written, measured_fastest=fastest)


def read_folder(data: str | None) -> str | None:
    """The folder of a configuration, if it is on this machine."""
    return data if data is not None and Path(data).expanduser().is_dir() else None


def _as_written(
    config: ImportedConfig, context: TuningContext, made: Candidate | None
) -> tuple[Candidate, tuple[str, ...]]:
    """The settings of a file, and what of them does not work on the card.

    What the file does not name, and no other trainer tunes, is as in the plan that was made, if one
    was.
    """
    total, hardware = context.workload.model.num_blocks, context.hardware
    usual = Candidate(micro_batch_size=1, checkpointed_blocks=total)
    written, breaks = (
        usual if made is None else usual.changed(**{name: getattr(made, name) for name in UNNAMED}),
        [],
    )
    knobs, plain = {knob.name: knob for knob in KNOBS}, plain_choices(context)
    for name, names in NAMES.items():
        if (value := config.pins.get(name)) is None:
            continue
        choice = count_blocks(value, total) if name in BLOCKS else value if names else int(value)
        why = why_not_on(name, choice, hardware)
        if name in knobs:
            here = knobs[name].choices(context)
            why = why or (here.rejected.get(choice) if len(here.admitted) == 1 else None)
        elif choice not in plain[name]:
            why = why or "it cannot be had here"
        if why is None and names and choice not in names:
            why = "autotune knows no such value"
        changed = written if why else written.changed(**{name: choice})
        if why is None and name in knobs:
            why = knobs[name].why_not(changed, context)
        if why:
            breaks.append(f"{name} {choice}: {why}")
        else:
            written = changed
    return written, tuple(breaks)


def _worth(cost: CostModel, as_written: Estimate, better: Candidate) -> tuple[SettingWorth, ...]:
    """Each setting that differs, changed alone; those that cannot go without another are left
    out."""
    from autotune.cost.estimate import estimate as estimate_candidate

    written = as_written.prediction.candidate
    found = []
    for name, value in better:
        own = getattr(written, name)
        if own == value:
            continue
        with suppress(InvalidInput):
            changed = estimate_candidate(
                cost, written.changed(**{name: value}), num_steps=as_written.num_steps
            )
            before, after = as_written.prediction, changed.prediction
            found.append(
                SettingWorth(
                    knob=name,
                    written=own,
                    better=value,
                    step_seconds_saved=before.step_seconds - after.step_seconds,
                    run_memory_saved_bytes=before.run_memory_bytes - after.run_memory_bytes,
                )
            )
    return tuple(sorted(found, key=lambda one: -one.step_seconds_saved))
