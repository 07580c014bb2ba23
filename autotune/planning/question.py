"""What a user asks of a planner, and the job that comes with the answer."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from autotune.families.resolve import ResolvedModel
from autotune.plan_file import job_from
from autotune.schema import Job, TimestepSampling, TrainingPlan
from autotune.search.storage import Place
from autotune.training.data.dataset import Dataset, Reading, read_dataset
from autotune.training.describe import Wishes, check_job, wishes_of


@dataclass(frozen=True)
class Question:
    """What the user asks for; None takes the family's default."""

    model: str
    data: Path | None = None
    control: Path | None = None
    caption: str | None = None
    trigger: str | None = None
    wishes: Wishes = field(default_factory=Wishes)
    output: str = "output"
    num_steps: int | None = None
    learning_rate: float | None = None
    timestep_sampling: TimestepSampling | None = None
    timestep_shift: float | Literal["by_resolution"] | None = None
    guidance_scale: float | None = None
    seed: int = 0
    pins: tuple[tuple[str, str], ...] = ()
    """(knob, value) pairs: only this value may be chosen."""
    exclusions: tuple[tuple[str, str], ...] = ()
    """(knob, value) pairs: this value may not be chosen."""
    here: bool = True
    """Whether the hardware asked about is this machine's: only then can trials run."""
    num_processes: int = 1
    """GPUs that train together, one process each."""
    use_profiles: bool = True
    """Whether what this and other machines measured before may shorten the search."""
    max_trials: int = 8
    price_per_hour: float | None = None
    """Of the machine, for what the job costs."""
    search_seconds: float | None = None
    """None for a share of the planned run's time."""
    study: Place | None = None
    """Where trials are kept and shared under a name."""
    interrupted: Literal["ignored", "resumed", "forgotten"] = "ignored"
    """Without a named study: what becomes of an interrupted search of the same. `ignored` keeps trials in memory."""
    job: Job | None = None
    """What an earlier plan did, where this question is asked again; its other fields go before it."""


def question_of(plan: TrainingPlan) -> Question:
    """The question that `plan` answered."""
    frozen, job = plan.frozen, plan.job
    return Question(
        model=job.pinned_model,
        data=Path(job.data) if job.data else None,
        control=Path(job.control) if job.control else None,
        caption=job.caption,
        trigger=job.trigger,
        wishes=wishes_of(frozen.workload, has_data=job.data is not None),
        output=job.output,
        num_steps=job.num_steps,
        learning_rate=job.learning_rate,
        seed=job.seed,
        num_processes=frozen.hardware.num_processes,
        price_per_hour=frozen.expected.price_per_hour,
        pins=frozen.pins,
        exclusions=frozen.exclusions,
        job=job,
    )


def data_of(question: Question, model: ResolvedModel) -> Dataset | None:
    """The question's data, if it names any."""
    if question.data is None:
        return None
    frames = question.wishes.num_frames or model.family.defaults.num_frames
    reading = Reading(question.caption, question.trigger, question.control, num_frames=frames)
    return read_dataset(question.data, reading)


def job_of(question: Question, model: ResolvedModel, dataset: Dataset | None) -> Job:
    """The job that the plan starts with: the user's words, else the earlier plan's, else the family's defaults.

    Raises:
        InvalidInput, InvalidPlan: a value is out of range, or asks of the model what its family does not have.
    """
    defaults = model.family.defaults
    captions = [item.caption for item in dataset.items] if dataset else []
    asked = {
        "model": question.model.partition("@")[0] if model.revision else question.model,
        "revision": model.revision,
        "data": str(question.data) if question.data else None,
        "control": str(question.control) if question.control else None,
        "caption": question.caption,
        "trigger": question.trigger,
        "num_frames": question.wishes.num_frames or defaults.num_frames,
        "output": question.output,
        "seed": question.seed,
    }
    wishes = {
        "num_steps": question.num_steps,
        "learning_rate": question.learning_rate,
        "timestep_sampling": question.timestep_sampling,
        "timestep_shift": question.timestep_shift,
        "guidance_scale": question.guidance_scale,
    }
    usual = {
        "num_steps": defaults.num_steps(max(1, len(captions))),
        "learning_rate": defaults.learning_rate,
        "weight_decay": defaults.weight_decay,
        "max_grad_norm": 1.0,
        "timestep_shift": defaults.timestep_shift,
        "guidance_scale": defaults.training_guidance,
        "preview_prompts": tuple(captions[:1]),
        "preview_steps": defaults.preview_steps,
    }
    before = dict(question.job) if question.job else usual
    job = job_from({**before, **asked, **{name: value for name, value in wishes.items() if value is not None}})
    check_job(job, model.family)
    return job
