"""The user's part of a plan: what is trained and for how long, never how it fits the machine."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from autotune.errors import InvalidInput
from autotune.plan.base import Frozen

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


def _in_utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # a name on disk may hold any bytes
        raise ValueError("it is not UTF-8, which no plan can hold") from error
    return text


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("it is empty")
    return text


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


Words = Annotated[str, BeforeValidator(_as_text), AfterValidator(_in_utf8)]
Place = Annotated[Words, AfterValidator(_not_empty), Field(pattern=r"^[^\x00]*$")]
"""A path or a name: no file system takes a NUL, and an empty one, as of a shell's unset
variable, is the folder that one is in, which nobody asked to read or to write."""
DataPlace = str | Path | Sequence[str | Path]
"""A folder of images or a YAML file that lists some, or several of these one after the other."""
Places = Annotated[tuple[Place, ...], Field(min_length=1, max_length=100)]


def _share_or_folder(text: str) -> str:
    if text.endswith("%") and not (SHARE.fullmatch(text) and 0 < float(text[:-1]) < 100):
        raise ValueError("a share of the images is written like 10%, above 0% and below 100%")
    return text


SHARE = re.compile(r"\d{1,2}(\.\d{1,6})?%")
HeldOut = Annotated[Place, AfterValidator(_share_or_folder)]
MAX_STEPS = 10**9
"""Years of training on any machine; times of far more are absurd, and of 2^63 would overflow."""
MAX_PREVIEW_PROMPTS = 4
"""More would take longer than they tell."""
PREVIEW_EVERY = 250
"""Training steps between previews, by default, and between validations."""

VALIDATION_DRAWS = 32
"""About how many draws of an image, a noise level and noise the loss on held-out images is the
mean of."""


class ModelRef(Frozen):
    """A model as the user names it, and where what a single file lacks comes from."""

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
        """The model that a user calls by its name alone."""
        return cls(name=str(name))


def each_place(data: DataPlace) -> tuple[str, ...]:
    """The places one by one."""
    return (str(data),) if isinstance(data, str | Path) else tuple(map(str, data))


def as_job_data(data: Any) -> Any:
    """Return the value of a job's `data`: of one place its name alone."""
    if data is None:
        return None
    places = each_place(data)
    return places[0] if len(places) == 1 else places


class ModelFields(Frozen):
    """Which model, and which parts of it lie elsewhere."""

    model: Place | None = None
    """Folder in the diffusers layout, a family's name, a hub id, or a file with a DiT or UNet
    alone."""
    base: Place | None = None
    """What such a file's other parts come from: a folder or a hub id; None for the model that
    the file is recognized as."""
    vae: Place | None = None
    """File or folder of its VAE; None for the file's own, if it has one, or the base's."""
    text_encoders: tuple[Place, ...] = ()
    """Files or folders of its text encoders, in any order; others are the file's own or the
    base's."""
    revision: Words | None = None
    """Commit on the hub that `model`, or `base`, is taken at; None for a folder, or until it is
    first fetched."""
    expert: Expert | None = None
    """Which of its transformers is trained, of a model that has one for much noise and one for
    little; None for models with one transformer."""


class DataFields(ModelFields):
    """Which data, and how it is read."""

    data: Annotated[Place | Places | None, BeforeValidator(as_job_data)] = None
    """Folder of images with same-stem `.txt` captions, a YAML file that lists such folders, or
    several of either; None until `train --data` names one."""
    control: Place | None = None
    """Folder of control images for editing, by the same stems."""
    caption: Words | None = None
    """Caption of images that have none."""
    trigger: Words | None = None
    """Word put in front of every caption that lacks it."""
    num_frames: int = Field(default=1, ge=1)
    """Frames of a clip. Above 1, videos and subfolders of images in the data are clips."""
    clips: ClipChoice = "head"
    """Which clips of that length are taken of a video: the first, `all` one after the other, or
    so many, evenly spread from its start to its end."""
    shuffle_tags: int = Field(default=0, ge=0, le=100)
    """Orders of a caption's comma-separated tags that are seen, the written one among them; each
    time one is drawn."""
    keep_tags: int = Field(default=0, ge=0, le=100)
    """Number of first tags that stay in front of any order."""
    flip: bool = False
    """Whether images are seen mirrored half of the time."""
    crop: Crop = "center"
    """Which part stays of an image that is cropped to its shape."""
    loss_mask: LossMask = "none"
    """Whether the loss counts parts of an image alone: those that are white in `NAME.mask.png`
    (`files`) or opaque (`alpha`)."""


class JobFields(DataFields):
    """What a user may say of a job. What is not given is the family's or as written here.

    Names are those of diffusers' training scripts where they have one.
    """

    output: Place = "output"
    from_adapter: Place | None = None
    """File of an adapter, in any format that is known, whose training goes on; None begins a new
    one."""
    save_dtype: SaveDtype = "bf16"
    """Dtype of the adapter's file; training and checkpoints keep fp32."""
    adapter_format: AdapterFormat = "diffusers"
    """Whose names of layers the adapter is also written under, beside diffusers'."""
    num_steps: int | None = Field(default=None, ge=1, le=MAX_STEPS)
    """Number of optimizer steps, each of the effective batch."""
    num_train_epochs: int | None = Field(default=None, ge=1, le=MAX_STEPS)
    """Number of epochs; if it is given, it decides the number of steps instead of `num_steps`."""
    learning_rate: float = Field(default=1e-4, gt=0, le=1)
    lr_scheduler: Schedule = "constant"
    """`plateau` halves the rate when the mean loss of an epoch has not fallen for a while."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate rises from 0; `constant` and `plateau` have none."""
    weight_decay: float = Field(default=0.01, ge=0, le=1)
    max_grad_norm: float = Field(default=1.0, gt=0)
    timestep_sampling: TimestepSampling = "logit_normal"
    """Density of the noise levels before they are shifted."""
    timestep_shift: Annotated[float, Field(gt=0)] | Literal["by_resolution"] = 1.0
    """Shift of the noise levels toward noise; 1 leaves them as sampled. `by_resolution` shifts
    larger images more, as the family's pipeline does."""
    guidance_scale: float | None = Field(default=None, ge=0)
    """What a guidance-distilled model is told while it trains; None for models that take none,
    or the family's."""
    weighting_scheme: Weighting = "none"
    """How the loss weighs images by their noise."""
    caption_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of captions that are replaced by the empty one, drawn anew each time."""
    mask_floor: float = Field(default=0.0, ge=0, le=1)
    """Weight of the loss where a mask is black."""
    cache: Literal["disk", "memory"] = "disk"
    """Where encoded captions and images are kept; from `memory` they are gone when the run ends."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of initial weights, order and noise. torch's generators take 63 bits."""
    checkpointing_steps: int = Field(default=250, ge=0)
    """Steps between checkpoints; 0 writes one only at the end or when the run is told to stop."""
    checkpointing_epochs: int | None = Field(default=None, ge=1)
    """Epochs between checkpoints; if it is given, it takes the place of `checkpointing_steps`."""
    checkpoints_total_limit: int = Field(default=2, ge=1)
    """Number of newest checkpoints that are kept."""
    checkpoints_keep_every: int = Field(default=0, ge=0)
    """One of every so many checkpoints is kept for good; 0 keeps none."""
    preview_prompts: tuple[Words, ...] = ()
    """Prompts of previews. The first `MAX_PREVIEW_PROMPTS` are sampled, each always from the
    same noise."""
    preview_steps: int = Field(default=20, ge=1, le=1000)
    """Denoising steps of a preview; models know 1,000 noise levels."""
    preview_every: int = Field(default=PREVIEW_EVERY, ge=0)
    """Training steps between previews; 0 samples only at the end."""
    validation: HeldOut | None = None
    """Images that never train, to measure the loss on: a share of the data such as `10%`, or a
    folder of others."""
    validation_every: int = Field(default=PREVIEW_EVERY, ge=0)
    """Training steps between validations; 0 validates only at the end."""
    keep_best: bool = False
    """Whether the adapter is kept as it was when the loss on held-out images was lowest."""
    report_to: Literal["tensorboard", "wandb", "none"] = "tensorboard"
    """Tracker that gets the curves besides `metrics.jsonl`."""


class Job(JobFields):
    """The user's part of a plan: may be edited or overridden while shapes stay in the planned
    class.

    Example:
        >>> autotune.load_plan("plan.yaml").job.output
    """

    model: Place
    data: Annotated[Place | Places | None, BeforeValidator(as_job_data)]
    num_steps: int = Field(ge=1, le=MAX_STEPS)

    @property
    def validation_folder(self) -> str | None:
        """The folder of held-out images; None if there are none, or if they are a share of the
        data."""
        return None if self.validation is None or self.validation.endswith("%") else self.validation

    @property
    def num_validations(self) -> int:
        """How often the loss on held-out images is measured: without the adapter, at intervals,
        and at the end."""
        if self.validation is None:
            return 0
        return 1 + (-(-self.num_steps // self.validation_every) if self.validation_every else 1)

    @property
    def model_ref(self) -> ModelRef:
        """The model at its revision."""
        return ModelRef(
            name=self.model,
            revision=self.revision,
            base=self.base,
            vae=self.vae,
            text_encoders=self.text_encoders,
            expert=self.expert,
        )

    def steps_on(self, images_per_epoch: int, effective_batch_size: int) -> int:
        """Number of optimizer steps if an epoch has so many images: by its epochs if it names any,
        else `num_steps`.

        Raises:
            InvalidInput: its epochs are more than `MAX_STEPS` steps.
        """
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
        """Steps between checkpoints if an epoch has so many images; 0 for none but the last."""
        if self.checkpointing_epochs is None:
            return self.checkpointing_steps
        return -(-self.checkpointing_epochs * images_per_epoch // effective_batch_size)

    @property
    def num_previews(self) -> int:
        """Number of pictures that the job samples."""
        return num_previews(self.num_steps, self.preview_every, len(self.preview_prompts))


def num_previews(num_steps: int, every: int = PREVIEW_EVERY, num_prompts: int = 1) -> int:
    """Number of pictures of a job: each prompt every so many steps, and at the end with and
    without the adapter."""
    rounds = num_steps // every if every else 0
    return min(num_prompts, MAX_PREVIEW_PROMPTS) * (rounds + 2)
