"""This machine's profiles, saved in the user's cache folder between runs.

A file holds the digest of its profile, so that a damaged one is detected and measured again, never
trusted.
"""

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from autotune.errors import InvalidInput
from autotune.machine.catalog import gpu_named, is_gpu_name, profile_of_gpu
from autotune.machine.probing import RATE_NOTES, measure_rates, probe
from autotune.plan.base import digest_of
from autotune.plan.hardware import HardwareProfile
from autotune.system.files import cache_path, read_bounded, write_text_atomic

MAX_PROFILE_BYTES = 4 << 20

POWER_TOLERANCE = 0.1
"""Share by which a GPU's power limit may change before its rates are measured again: laptops
change it constantly."""
NOT_SAVED = "rates are not saved for the next command"
"""How the note about that begins."""


def cached_profile(
    *,
    index: int | None = None,
    fresh: bool = False,
    on_progress: Callable[[str], None] | None = None,
    on_facts: Callable[[HardwareProfile], None] = lambda facts: None,
) -> HardwareProfile:
    """This machine's profile: facts and budget as they are now, rates from the last probe while
    they are valid.

    Rates are measured again if `fresh`, or if the saved file is absent, damaged or of another
    device, or if the match keys, the GPU's power limit or the number of cores that train have
    changed. If the cache folder cannot be written, they are measured every time, with a note.
    `on_facts` gets the profile before any rate is measured: what it raises saves that time.

    Raises:
        InvalidInput: there is no such device, or AUTOTUNE_MEMORY_KIND is no kind of memory.
        AutotuneError: no source reports how much memory the host or the device has.
    """
    now = probe(index=index, on_progress=on_progress)
    on_facts(now)
    path = profile_path(now)
    saved = None
    with contextlib.suppress(InvalidInput):  # absent or damaged
        saved = None if fresh else load_profile(path)
    if saved is not None and has_valid_rates(saved, now):
        notes = (note for note in saved.notes if note.startswith(RATE_NOTES))
        return now.changed(rates=saved.rates, notes=(*now.notes, *notes), noisy=saved.noisy)
    profile = measure_rates(now, on_progress or (lambda _: None))
    try:
        save_profile(profile, path)
    except OSError as error:  # the rates are valid all the same
        note = (
            f"{NOT_SAVED}: the cache folder cannot be written ({error.strerror}); "
            "XDG_CACHE_HOME "
            "names another"
        )
        return profile.changed(notes=(*profile.notes, note))
    return profile


def has_valid_rates(saved: HardwareProfile, now: HardwareProfile) -> bool:
    """Whether the saved rates hold for the machine as it is now."""
    if (
        not saved.rates
        or saved.match_keys != now.match_keys
        or saved.device.name != now.device.name
    ):
        return False
    limits = (saved.device.power_limit_watts, now.device.power_limit_watts)
    cores = (
        saved.host.logical_cores,
        now.host.logical_cores,
    )  # a container may have a part of the host's
    same_power = None in limits or math.isclose(
        limits[0] or 0, limits[1] or 0, rel_tol=POWER_TOLERANCE
    )
    return same_power and (now.device.kind != "cpu" or cores[0] == cores[1])


def profile_path(profile: HardwareProfile) -> Path:
    """Where the profile of this device is saved."""
    device = profile.device
    return cache_path("hardware", f"{device.kind}-{device.index}-{device.file_name}.json")


def save_profile(profile: HardwareProfile, path: Path) -> None:
    """Write the profile and its digest, atomically."""
    data = profile.model_dump(mode="json")
    write_text_atomic(
        path, json.dumps({"digest": digest_of(data), "profile": data}, indent=1) + "\n"
    )


def load_profile(path: Path | str) -> HardwareProfile:
    """The profile in a file that `save_profile` wrote.

    Raises:
        InvalidInput: the file cannot be read, is damaged, was edited, or is from an incompatible
            version of autotune.
    """
    hint = "write a new one with `autotune probe`"
    try:
        content = json.loads(read_bounded(Path(path), MAX_PROFILE_BYTES))
        if content["digest"] != digest_of(
            content["profile"]
        ):  # as written: an older profile has other fields
            raise InvalidInput(
                f"{path} was damaged or edited: its digest does not match", hint=hint
            )
        return HardwareProfile.model_validate_json(json.dumps(content["profile"]))
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", hint=hint) from error
    except (ValueError, KeyError, TypeError, RecursionError, ValidationError) as error:
        raise InvalidInput(
            f"{path} is damaged, or not a hardware profile that this autotune can read", hint=hint
        ) from error


def hardware_named(name_or_path: str) -> HardwareProfile:
    """The profile of a catalog GPU, by any part of its name that identifies it, or in a saved
    probe's file.

    Raises:
        InvalidInput: no GPU of the catalog or several match and there is no such file, or the file
            is damaged.
    """
    if not is_gpu_name(name_or_path) and Path(name_or_path).is_file():
        return load_profile(name_or_path)
    return profile_of_gpu(gpu_named(name_or_path))
