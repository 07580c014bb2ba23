"""Settings of another trainer's configuration as pins of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autotune.errors import InvalidInput
from autotune.interop.exporting import BLOCKS
from autotune.interop.importing import ImportedConfig
from autotune.interop.rules import count_blocks
from autotune.models.resolve import resolve_model
from autotune.plan.job import ModelRef

if TYPE_CHECKING:
    from autotune.search.space import SearchSpace


def possible_pins(
    config: ImportedConfig, asked: Mapping[str, Any], choices_of: Callable[..., SearchSpace]
) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """Return the settings of a configuration that can be pinned here, and the others with the
    reason. `choices_of` is `list_choices`; `asked` are its arguments."""
    num_blocks = resolve_model(ModelRef.of(config.model)).spec.num_blocks
    space = choices_of(config.model, None, **asked)
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
            choices_of(config.model, None, **{**asked, "pins": pins})
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
