"""The user's part of a plan: what is trained and for how long, never how it fits the machine."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from autotune.errors import InvalidInput
from autotune.plan.base import HIDDEN, Frozen, Option

Schedule = Literal["constant", "constant_with_warmup", "linear", "cosine", "plateau"]
SaveDtype = Literal["bf16", "fp16", "fp32"]
AdapterFormat = Literal["diffusers", "comfyui", "kohya"]
Weighting = Literal["none", "sigma_sqrt", "cosmap", "min_snr"]
TimestepSampling = Literal["logit_normal", "uniform"]
Crop = Literal["center", "top"]
Expert = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,31}$")]
"""Name that a family gives one of several transformers."""
LossMask = Literal["none", "files", "alpha"]
ClipChoice = Literal["head", "all"] | Annotated[int, Field(ge=1, le=64)]


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("it is empty")
    return text


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


Words = Annotated[str, BeforeValidator(_as_text)]  # which pydantic refuses unless it is UTF-8
PathText = Annotated[Words, AfterValidator(_not_empty), Field(pattern=r"^[^\x00]*$")]
"""A path or a name. No file system takes a NUL. An empty one, such as a shell's unset variable,
would mean the current folder, which nobody asked to read or to write."""
Prompt = Annotated[str, Field(max_length=10_000), BeforeValidator(_as_text)]
"""Text far longer than this is not read by any text encoder, but would be drawn."""
DataPlace = str | Path | Sequence[str | Path]
"""A folder of images or a YAML file that lists some, or several of these one after the other."""
PathTexts = Annotated[tuple[PathText, ...], Field(min_length=1, max_length=100)]


def _share_or_folder(text: str) -> str:
    if text.endswith("%") and not (SHARE.fullmatch(text) and 0 < float(text[:-1]) < 100):
        raise ValueError("a share of the images is written like 10%, above 0% and below 100%")
    return text


SHARE = re.compile(r"\d{1,2}(\.\d{1,6})?%")
HeldOut = Annotated[PathText, AfterValidator(_share_or_folder)]
MAX_STEPS = 10**9
"""Years of training on any machine; times of far more are absurd, and of 2^63 would overflow."""
MAX_PREVIEW_PROMPTS = 4  # more would take longer than they tell
PREVIEW_EVERY = 250  # training steps between previews, by default, and between validations

VALIDATION_DRAWS = 32
"""Approximate number of draws (image, noise level, noise) whose mean the held-out loss is."""


class ModelRef(Frozen):
    """A model as the user names it, and the source of what a single file lacks."""

    name: str
    """A folder, a single file, a known name or a hub id; the last two may end in `@REVISION`."""
    revision: str | None = None
    """Commit of the files on the hub; it goes before one in the name or in `base`."""
    base: str | None = None
    """Folder or hub id of the parts that a single file lacks."""
    vae: str | None = None
    text_encoders: tuple[str, ...] = ()
    expert: str | None = None

    @classmethod
    def of(cls, name: str | Path) -> "ModelRef":
        """Name the model that a user calls by its name alone."""
        return cls(name=str(name))


def each_place(data: DataPlace) -> tuple[str, ...]:
    """Return the places one by one."""
    return (str(data),) if isinstance(data, str | Path) else tuple(map(str, data))


def as_job_data(data: Any) -> Any:
    """Return the value of a job's `data`: of one place its name alone."""
    if not isinstance(data, str | Path | Sequence):
        return data
    places = each_place(data)
    return places[0] if len(places) == 1 else places


class ModelFields(Frozen):
    """The model, and parts of it that lie elsewhere."""

    model: PathText | None = None
    """A folder in the diffusers layout, a known name, a hub id, or a single file."""
    base: PathText | None = None
    """For a model in one file: folder or hub id that its other parts come from; by default the
    model that the file is recognized as."""
    vae: Annotated[PathText | None, Option(metavar="FILE|FOLDER")] = None
    """For a model in one file: its VAE; by default the file's own or the base's."""
    text_encoders: Annotated[
        tuple[PathText, ...], Option("--text-encoder", metavar="FILE|FOLDER")
    ] = ()
    """For a model in one file: a text encoder; others are the file's own or the base's."""
    revision: Annotated[Words | None, HIDDEN] = None
    """Commit on the hub that `model`, or `base`, is taken at; None for a folder, or until it is
    first fetched."""
    expert: Expert | None = None
    """For a model of two transformers, as Wan 2.2 14B: train high-noise or low-noise."""

    @property
    def model_ref(self) -> ModelRef:
        """The model with its parts. Raises InvalidInput if none is named."""
        if self.model is None:
            hint = "name a model, or an earlier plan: earlier=, --from"
            raise InvalidInput("no model is named", hint=hint)
        return ModelRef(
            name=self.model,
            revision=self.revision,
            base=self.base,
            vae=self.vae,
            text_encoders=self.text_encoders,
            expert=self.expert,
        )


class DataFields(Frozen):
    """The data, and choices of reading it."""

    data: Annotated[PathText | PathTexts | None, BeforeValidator(as_job_data)] = None
    """Folder of images, NAME.jpg with its caption in NAME.txt; or a YAML file of folders."""
    control: PathText | None = None
    """Folder of control images of the same names, for edit models."""
    caption: Words | None = None
    """Caption of images that have none."""
    trigger: Words | None = None
    """Word put in front of every caption that lacks it."""
    slider: Annotated[tuple[Words, ...], Option(metavar="TEXT")] = Field(default=(), max_length=3)
    """Train a slider without pictures: give a positive, a negative and a neutral prompt."""
    prior_captions: Annotated[tuple[Words, ...], HIDDEN] = Field(default=(), max_length=1000)
    """Captions whose predictions by the base model are kept, with `preserve_prior`; by default each
    image's own without the trigger, or none at all if there is no trigger."""
    num_frames: Annotated[int, Option("--frames")] = Field(default=1, ge=1)
    """Frames of a clip; above 1, videos and subfolders of images in the data are clips."""
    clips: Annotated[ClipChoice, Option(metavar="head|all|NUMBER")] = "head"
    """Clips to take from a video: only the first (head), all, or this number, evenly spread."""
    shuffle_tags: int = Field(default=0, ge=0, le=100)
    """Number of random orders of each caption's comma-separated tags; 0 keeps them as written."""
    keep_tags: Annotated[int, HIDDEN] = Field(default=0, ge=0, le=100)
    """Number of first tags that stay in front when tags are shuffled."""
    flip: Annotated[bool, Option("--flip/--no-flip")] = False
    """Mirror images half of the time."""
    crop: Crop = "center"
    """Part of an image to keep where it is cropped to its shape."""
    loss_mask: LossMask = "none"
    """Pixels that the loss counts: all (none), those white in NAME.mask.png (files), or those
    opaque (alpha)."""


class JobFields(DataFields, ModelFields):
    """Choices that a user has of a job. Defaults are the family's, or those written here. Names
    are those of diffusers' training scripts where they have one."""

    output: Annotated[PathText, Option("--run-output")] = "output"
    """Folder that the run writes: adapter, checkpoints, samples and report."""
    from_adapter: Annotated[PathText | None, Option(metavar="FILE")] = None
    """Start from this adapter of diffusers, ComfyUI or kohya."""
    training_adapter: Annotated[PathText | None, Option(metavar="FILE")] = None
    """Frozen adapter that is on in training and off in previews and validation, as people train
    distilled models."""
    save_dtype: SaveDtype = "bf16"
    """Dtype of the adapter's file; training and checkpoints keep fp32."""
    adapter_format: AdapterFormat = "diffusers"
    """Program that is to load the adapter: it is written in its format, too."""
    num_steps: Annotated[int | None, Option("--steps")] = Field(default=None, ge=1, le=MAX_STEPS)
    """Optimizer steps; by default enough to see each image about 100 times."""
    num_train_epochs: Annotated[int | None, Option("--epochs")] = Field(
        default=None, ge=1, le=MAX_STEPS
    )
    """Epochs of the job, instead of steps."""
    learning_rate: float = Field(default=1e-4, gt=0, le=1)
    """Learning rate; by default the family's, or what is usual for the optimizer."""
    lr_scheduler: Schedule = "constant"
    """Course of the learning rate; plateau halves it when the mean loss of an epoch has not fallen
    for a while."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate rises from 0; constant and plateau have none."""
    weight_decay: Annotated[float, HIDDEN] = Field(default=0.01, ge=0, le=1)
    max_grad_norm: Annotated[float, HIDDEN] = Field(default=1.0, gt=0)
    timestep_sampling: TimestepSampling = "logit_normal"
    """Density of the noise levels before they are shifted; by default the family's."""
    timestep_shift: Annotated[
        Annotated[float, Field(gt=0)] | Literal["by_resolution"],
        Option(metavar="NUMBER|by_resolution"),
    ] = 1.0
    """Shift of the noise levels toward noise: 1 leaves them, by_resolution shifts larger images
    more; by default the family's."""
    guidance_scale: Annotated[float | None, Option("--guidance")] = Field(default=None, ge=0)
    """Guidance scale in training, for distilled models; by default the family's."""
    weighting_scheme: Annotated[Weighting, Option("--loss-weighting")] = "none"
    """Weights of noise levels in the loss: none, sigma_sqrt or cosmap; SDXL: none or min_snr."""
    caption_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of captions that are left out, drawn anew each time."""
    mask_floor: Annotated[float, HIDDEN] = Field(default=0.0, ge=0, le=1)
    """Weight of the loss where a mask is black."""
    cache: Literal["disk", "memory"] = "disk"
    """Place of encoded captions and images; those in memory are gone when the run ends."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of initial weights, order and noise."""
    checkpointing_steps: int = Field(default=250, ge=0)
    """Steps between checkpoints; 0: one at the end, or when the run is told to stop."""
    checkpointing_epochs: int | None = Field(default=None, ge=1)
    """Epochs between checkpoints, instead of steps."""
    checkpoints_total_limit: Annotated[int, Option("--keep-last")] = Field(default=2, ge=1)
    """Newest checkpoints to keep."""
    checkpoints_keep_every: Annotated[int, Option("--keep-every")] = Field(default=0, ge=0)
    """Keep one of every so many checkpoints for good; by default none."""
    preview_prompts: Annotated[
        tuple[Prompt, ...] | None, Option("--preview-prompt", metavar="TEXT")
    ] = None
    """Prompts of previews, each always from the same noise; the first four are sampled. By default
    the first caption, which no plan or model card then holds."""
    preview_steps: Annotated[int, HIDDEN] = Field(default=20, ge=1, le=1000)
    """Denoising steps of a preview; models know 1,000 noise levels."""
    preview_every: int = Field(default=PREVIEW_EVERY, ge=0)
    """Steps between previews; 0: only at the end."""
    validation: Annotated[HeldOut | None, Option(metavar="10%|FOLDER")] = None
    """Images that never train, to measure the loss on: a share of the data, or a folder."""
    validation_every: int = Field(default=PREVIEW_EVERY, ge=0)
    """Steps between validations; 0: only at the end."""
    keep_best: bool = False
    """Keep the adapter as it was when the loss on held-out images was lowest."""
    report_to: Annotated[Literal["tensorboard", "wandb", "none"], HIDDEN] = "tensorboard"
    """Tracker that gets the curves besides `metrics.jsonl`."""


class Job(JobFields):
    """The user's part of a plan, to be edited or overridden within the planned class."""

    model: PathText
    data: Annotated[PathText | PathTexts | None, BeforeValidator(as_job_data)]
    num_steps: int = Field(ge=1, le=MAX_STEPS)

    @property
    def validation_folder(self) -> str | None:
        """The folder of held-out images; None without one, or if they are a share of the data."""
        return None if self.validation is None or self.validation.endswith("%") else self.validation

    @property
    def num_validations(self) -> int:
        """Count measurements of the held-out loss: before, at intervals, and at the end."""
        if self.validation is None:
            return 0
        return 1 + (-(-self.num_steps // self.validation_every) if self.validation_every else 1)

    def steps_on(self, images_per_epoch: int, effective_batch_size: int) -> int:
        """Count optimizer steps if an epoch has so many images; the job may name epochs.
        Raises InvalidInput if they are more than `MAX_STEPS`."""
        if self.num_train_epochs is None:
            return self.num_steps
        num_steps = -(-self.num_train_epochs * images_per_epoch // effective_batch_size)
        if num_steps > MAX_STEPS:
            message = (
                f"{self.num_train_epochs:,} epochs are {num_steps:,} steps, and a job takes "
                f"{MAX_STEPS:,} at most"
            )
            raise InvalidInput(message, hint="give fewer --epochs or --steps")
        return num_steps

    def checkpoint_every(self, images_per_epoch: int, effective_batch_size: int) -> int:
        """Count steps between checkpoints if an epoch has so many images; 0: only the last."""
        if self.checkpointing_epochs is None:
            return self.checkpointing_steps
        return -(-self.checkpointing_epochs * images_per_epoch // effective_batch_size)

    @property
    def preview_titles(self) -> tuple[str, ...]:
        """Name previews in words that hold no caption of the data."""
        given = self.preview_prompts
        return ("the first caption",) if given is None else given[:MAX_PREVIEW_PROMPTS]

    @property
    def num_previews(self) -> int:
        """Number of pictures that the job samples."""
        return num_previews(self.num_steps, self.preview_every, len(self.preview_titles))


def num_previews(num_steps: int, every: int = PREVIEW_EVERY, num_prompts: int = 1) -> int:
    """Count the pictures of a job: every so many steps, a pair for each prompt at the end."""
    rounds = num_steps // every if every else 0
    return num_prompts * (rounds + 2)
