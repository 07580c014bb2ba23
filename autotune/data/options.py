"""How the files of a data folder become training items: what a job says, and what its model's
family makes of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.models.family import Family
from autotune.plan.job import ClipChoice, Crop, LossMask

SHARES = (4, 3, 2, 1)
"""Quarters of a clip's frames that shorter clips are cut to: more lengths would scatter a set
over many shapes."""

COPIED_FIELDS = ("shuffle_tags", "keep_tags", "seed", "crop", "flip", "loss_mask")
"""Fields that a job has under the same names."""


@dataclass(frozen=True)
class DatasetOptions:
    """How the files of a data folder become training items."""

    caption: str | None = None
    """Caption for images that have none."""
    trigger: str | None = None
    """Word put in front of every caption that lacks it."""
    control: Path | None = None
    """Folder of control images for editing, by the same stems: `NAME.*`, or `NAME_1.*`,
    `NAME_2.*` ..."""
    num_frames: int = 1
    """Above 1, videos and subfolders of images are clips of up to so many frames."""
    shorter_clips: tuple[int, ...] = ()
    """Frames that a clip may have as well if it is too short for `num_frames`."""
    frames_per_second: float = 24.0
    """Rate that videos are resampled to."""
    clips: ClipChoice = "head"
    """Which clips are taken of a video: see `choose_spans`."""
    shuffle_tags: int = 0
    """Orders of a caption's tags that it is seen in; 0 or 1 for the written one alone."""
    keep_tags: int = 0
    """Number of first tags that stay in front."""
    seed: int = 0
    """Seed of these orders."""
    crop: Crop = "center"
    """Which part stays of an image that is cropped."""
    flip: bool = False
    """Whether images are seen mirrored, too."""
    loss_mask: LossMask = "none"
    """Where masks of the loss come from."""

    @property
    def clip_lengths(self) -> tuple[int, ...]:
        """Numbers of frames that a clip may have."""
        return (self.num_frames, *self.shorter_clips)


DEFAULT_OPTIONS = DatasetOptions()


def make_options(job: Mapping[str, Any], family: Family, num_frames: int) -> DatasetOptions:
    """The options that a job's values, by the names of `Job`, give with a model of `family`."""
    control = job.get("control")
    return DatasetOptions(
        caption=job.get("caption"),
        trigger=job.get("trigger"),
        control=Path(control) if control else None,
        num_frames=num_frames,
        shorter_clips=_shorter_clips(num_frames, family.frames_per_latent),
        frames_per_second=family.defaults.frames_per_second,
        clips=job.get("clips") or "head",
        **{name: job[name] for name in COPIED_FIELDS if job.get(name) is not None},
    )


def _shorter_clips(num_frames: int, frames_per_latent: int) -> tuple[int, ...]:
    """Three quarters, half and a quarter of a clip, in whole latents after the first, as far as
    they are clips."""
    latents = (num_frames - 1) // frames_per_latent
    lengths = {latents * share // SHARES[0] * frames_per_latent + 1 for share in SHARES[1:]}
    return tuple(sorted(lengths - {1, num_frames}, reverse=True))
