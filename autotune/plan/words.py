"""Words that people read for a plan's names, as the trainers that they know have them.

The names themselves are what `--pin` and the plan's file take.
"""

from collections.abc import Iterable, Mapping

from autotune.plan.candidate import BLOCK_COUNTS, CachingSettings, Candidate, Choice
from autotune.system.files import read_table

_WORDS = read_table("plan/words.yaml")
TITLES: Mapping[str, str] = _WORDS["titles"]
VALUES: Mapping[str, Mapping[Choice, str]] = _WORDS["values"]
FORMATS = VALUES["quantization"]
PHASES: Mapping[str, str] = _WORDS["phases"]
PARTS: Mapping[str, str] = _WORDS["parts"]
OUTCOMES: Mapping[str, str] = _WORDS["outcomes"]
MEMORY: Mapping[str, str] = _WORDS["memory"]
USUAL_SETTINGS: Mapping[str, Choice] = Candidate(
    micro_batch_size=1, checkpointed_blocks=0
).model_dump(exclude={"micro_batch_size"})
UNTOLD = ("allocator", "data_workers", "batch_memory")  # no two candidates are compared for them
# Settings that other trainers have, too, in the order in which they are told.
MAIN = ("quantization", *BLOCK_COUNTS, "attention", "compile", "precision")


def value_text(name: str, value: Choice, num_blocks: int | None = None) -> str:
    """Put a knob's value in words, to follow its title: `59 of 60 blocks`, or `in int8`."""
    if name in BLOCK_COUNTS and isinstance(value, int) and value:
        of = f" of {num_blocks}" if num_blocks is not None else ""
        return f"{value}{of} block{'s' * ((num_blocks or value) > 1)}"
    return VALUES.get(name, {}).get(value, str(value))


def setting_text(name: str, value: Choice, num_blocks: int | None = None) -> str:
    """Put a setting in words: `block swap 12 of 60 blocks`, or `base model in int8`."""
    return f"{TITLES.get(name, name)} {value_text(name, value, num_blocks)}"


def unusual_settings(
    settings: Mapping[str, Choice], names: Iterable[str] = TITLES, num_blocks: int | None = None
) -> list[str]:
    """Put the settings of these knobs in words that are not the usual ones."""
    unusual = {name for name, value in USUAL_SETTINGS.items() if settings[name] != value}
    return [setting_text(name, settings[name], num_blocks) for name in names if name in unusual]


def label_of(settings: Mapping[str, Choice]) -> str:
    """Put settings in one line, without what hardly decides speed or memory."""
    told = (name for name in TITLES if name not in UNTOLD)
    size = f"batch size {settings['micro_batch_size']}"
    return ", ".join((size, *unusual_settings(settings, told)))


def caching_text(caching: CachingSettings) -> str:
    """Put the settings of encoding in words, to follow their title."""
    stored = caching.text_encoder_quantization
    stored = "streamed" if caching.text_encoder_streamed else FORMATS.get(stored, stored)
    parts = [f"{stored}{_place(caching.text_encoder_device)}"]
    if caching.vae_device != "training":
        parts.append(f"VAE{_place(caching.vae_device)}")
    return ", ".join([*parts, *["kept"] * (caching.residency == "keep")])


def _place(device: str) -> str:
    return "" if device == "training" else f" on {device}"
