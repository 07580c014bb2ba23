"""Where this machine's profiles are kept between runs: under the user's cache folder, written atomically.

A file carries the digest of its profile, so a damaged one is noticed and measured again, never trusted.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import platformdirs
from pydantic import ValidationError

from autotune.errors import InvalidInput, suggest_nearest
from autotune.hardware.catalog import CatalogGpu, load_catalog, profile_of_gpu
from autotune.hardware.probing import ABOUT_RATES, measure_rates, probe, with_rates
from autotune.runtime import write_text_atomic
from autotune.schema import HardwareProfile, digest_of

POWER_TOLERANCE = 0.1
"""Share that a GPU's power limit may change by before its rates are measured again: laptops shift it all the time."""
SERIES = ("nvidia", "geforce", "rtx", "tesla")
"""Words that a GPU's name may go without."""
OTHER_CARDS = frozenset({"ti", "super"})
"""Words that make another card of one."""
NOT_KEPT = "rates are not kept for the next command"
"""How the note begins that says so."""


def cached_profile(
    *, index: int = 0, fresh: bool = False, on_progress: Callable[[str], None] | None = None
) -> HardwareProfile:
    """This machine's profile: facts and budget as they are now, rates from the last probe while they still hold.

    Rates are measured again when `fresh`, or when the saved file is absent, damaged, of another device or of another
    fingerprint, or when the GPU's power limit or the number of cores that train has changed. Where the cache folder
    cannot be written they are measured every time, and a note says so.

    Raises:
        InvalidInput: there is no such device, or AUTOTUNE_MEMORY_KIND is no kind of memory.
        AutotuneError: nobody says how much memory the host or the device has.
    """
    now = probe(index=index, on_progress=on_progress)
    path = profile_path(now)
    saved = None if fresh else _readable(path)
    if saved is not None and still_holds(saved, now):
        about_rates = (note for note in saved.notes if note.startswith(ABOUT_RATES))
        return with_rates(now, saved.rates, (*now.notes, *about_rates), saved.noisy)
    profile = measure_rates(now, on_progress or (lambda _: None))
    try:
        save_profile(profile, path)
    except OSError as error:  # what was measured is true all the same
        note = f"{NOT_KEPT}: the cache folder cannot be written ({error.strerror}); XDG_CACHE_HOME names another"
        return with_rates(profile, profile.rates, (*profile.notes, note), profile.noisy)
    return profile


def still_holds(saved: HardwareProfile, now: HardwareProfile) -> bool:
    """Whether rates saved earlier are true of the machine as it is now."""
    if not saved.rates or saved.fingerprint != now.fingerprint or saved.device.name != now.device.name:
        return False
    limits = (saved.device.power_limit_watts, now.device.power_limit_watts)
    cores = (saved.host.logical_cores, now.host.logical_cores)  # a container's may be a part of the host's
    same_power = None in limits or math.isclose(limits[0] or 0, limits[1] or 0, rel_tol=POWER_TOLERANCE)
    return same_power and (now.device.kind != "cpu" or cores[0] == cores[1])


def profile_path(profile: HardwareProfile) -> Path:
    """Where the profile of this device is kept."""
    device = profile.device
    return (
        platformdirs.user_cache_path("autotune") / "hardware" / f"{device.kind}-{device.index}-{device.file_name}.json"
    )


def save_profile(profile: HardwareProfile, path: Path) -> None:
    """Write the profile and its digest; readers see the old file or the whole new one."""
    text = json.dumps({"digest": digest_of(profile), "profile": profile.model_dump(mode="json")}, indent=1)
    write_text_atomic(path, text + "\n")


def load_profile(path: Path | str) -> HardwareProfile:
    """The profile in a file that `save_profile` wrote.

    Raises:
        InvalidInput: the file cannot be read, is damaged, was edited, or is from another version of autotune.
    """
    hint = "write a new one with `autotune probe`"
    try:
        content = json.loads(Path(path).read_text())
        profile = HardwareProfile.model_validate_json(json.dumps(content["profile"]))
        digest = content["digest"]
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", hint=hint) from error
    except (ValueError, KeyError, TypeError, RecursionError, ValidationError) as error:
        raise InvalidInput(f"{path} is no hardware profile of this autotune, or damaged", hint=hint) from error
    if digest != digest_of(profile):
        raise InvalidInput(f"{path} was damaged or edited: its digest does not match", hint=hint)
    return profile


def hardware_named(name_or_path: str) -> HardwareProfile:
    """The profile of a catalog GPU, by as much of its name as means it alone, or of a saved probe's file.

    Raises:
        InvalidInput: the catalog has no such GPU, or several, and there is no such file, or the file is damaged.
    """
    gpu = next((gpu for gpu in load_catalog() if name_or_path.lower() in (gpu.id, gpu.name.lower())), None)
    if gpu is None and Path(name_or_path).is_file():
        return load_profile(name_or_path)
    return profile_of_gpu(gpu or _meant(name_or_path))


def _meant(name: str) -> CatalogGpu:
    """The one GPU that a part of its name means: `4080`, `RTX 4080`, `4080_super`, `h200`.

    A card whose whole name it is, but for maker and series, goes before those that go on (`4080 super`). A Ti or a
    Super is meant only where it is said: who has a 4060 has another card than the 4060 Ti.
    """
    words = _words(name)
    whole = [gpu for gpu in load_catalog() if _words(gpu.id) == words]
    holding = [gpu for gpu in load_catalog() if words and set(words) <= set(_words(gpu.id))]
    found = whole or [gpu for gpu in holding if OTHER_CARDS.isdisjoint({*_words(gpu.id)} - {*words})]
    if len(found) == 1:
        return found[0]
    listing = "`autotune probe --list` shows the catalog"
    if found:
        names = ", ".join(gpu.id for gpu in found)
        raise InvalidInput(f"{name!r} may be any of {names}", hint=f"say which one; {listing}")
    others = ", ".join(gpu.id for gpu in holding)
    nearest = suggest_nearest(name, (gpu.id for gpu in load_catalog()), listing)
    near = f"another card is {others}; {listing}" if others else nearest
    raise InvalidInput(f"no hardware called {name!r}: neither a catalog name nor a saved profile", hint=near)


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[\s_-]+", name.lower()) if word and word not in SERIES]


def _readable(path: Path) -> HardwareProfile | None:
    try:
        return load_profile(path)
    except InvalidInput:
        return None
