"""Plans that keep the settings of another trainer's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.api.plans import list_choices, plan
from autotune.errors import InvalidInput
from autotune.events import OnEvent, ignore_event
from autotune.interop.exporting import BLOCKS
from autotune.interop.importing import ImportedConfig
from autotune.interop.rules import count_blocks
from autotune.models.resolve import resolve_model
from autotune.plan.job import ModelRef
from autotune.plan.plan import TrainingPlan

if TYPE_CHECKING:
    from autotune.search.space import SearchSpace


@dataclass(frozen=True)
class PlanFromConfig:
    """A plan made from another trainer's configuration, with its settings where this is possible.

    Example:
        >>> made = autotune.plan_from_config(autotune.import_config("train_lora.yaml"))
        >>> made.plan.frozen.settings, made.remarks
    """

    plan: TrainingPlan
    remarks: tuple[str, ...]
    """What of the configuration the plan could not keep, and why."""


def plan_from_config(
    config: ImportedConfig, *, on_event: OnEvent = ignore_event, **options: Any
) -> PlanFromConfig:
    """Plan the training that a configuration describes, with its own settings pinned where the
    machine has them.

    `autotune.plan(config.model, config.data, **config.options)` plans the same training with the
    fastest settings.

    Args:
        config: from `import_config`.
        on_event: listener to progress.
        options: as for `plan`; they go before what the configuration says.

    Raises:
        InvalidInput, NothingFits: as `plan`.

    Example:
        >>> made = autotune.plan_from_config(autotune.import_config("train_lora.yaml"), hardware="4090")
        >>> made.remarks
    """
    asked: dict[str, Any] = {**config.options, **options}
    remarks = []
    data = config.data
    if data is not None and not Path(data).expanduser().is_dir():
        remarks.append(
            f"there is no folder {data} here: name the data with `autotune train --data`"
        )
        data = None
    pins, impossible = _possible_pins(config, asked)
    made = plan(
        config.model,
        data,
        on_event=on_event,
        **{**asked, "pins": {**pins, **dict(asked.get("pins", {}))}},
    )
    remarks += [
        f"{name} is not {value} as in the file: {why}" for name, (value, why) in impossible.items()
    ]
    return PlanFromConfig(made, tuple(remarks))


def _possible_pins(
    config: ImportedConfig, options: Any
) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """The settings of a configuration that can be pinned here, and why the others cannot."""
    limits = ("path", "record", "max_trials", "search_seconds", "pins")
    asked = {name: value for name, value in options.items() if name not in limits}
    num_blocks = resolve_model(ModelRef.of(config.model)).spec.num_blocks
    space = list_choices(config.model, None, **asked)
    pins: dict[str, str] = {}
    impossible: dict[str, tuple[str, str]] = {}
    for name, written in config.pins.items():
        value = str(count_blocks(written, num_blocks)) if name in BLOCKS else written
        value, why = _nearest(space, name, value) if name in space.pinnable else (value, "")
        if why:
            impossible[name] = (value, why)
        else:
            pins[name] = value
    while pins:
        try:
            list_choices(config.model, None, **{**asked, "pins": pins})
        except InvalidInput as error:
            name, value = pins.popitem()
            impossible[name] = (value, error.message)
        else:
            break
    return pins, impossible


def _nearest(space: SearchSpace, name: str, value: str) -> tuple[str, str]:
    """A value that can be pinned, and why there is none: of numbers of blocks the next that
    needs no more memory."""
    usable: Mapping[str, Any] = {
        str(choice): choice for choice in (*space.choices[name], *space.pinnable[name])
    }
    if value in usable:
        return value, ""
    if name in BLOCKS:
        higher = sorted((choice for choice in usable.values() if choice >= int(value)), key=int)
        return str(higher[0] if higher else max(usable.values())), ""
    reasons = {str(one.choice): one.reason for one in space.rejected[name]}
    return value, reasons.get(value, "no such value here")
