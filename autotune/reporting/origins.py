"""Which values of a plan's job and workload are the user's, and which the family's defaults,
with their source.
"""

from autotune.families import VIEWS_PER_IMAGE, get_family
from autotune.knobs import usual_learning_rate
from autotune.reporting.text import wrapped
from autotune.schema import TrainingPlan

DENSITIES = {
    "logit_normal": "Stable Diffusion 3's density",
    "uniform": "the model's own noise schedule",
}


def origin_lines(plan: TrainingPlan) -> list[str]:
    """`you set` and `we set`, a value per line; a value equal to the default counts as ours,
    whoever wrote it.
    """
    lines = []
    for title, ours in (("you set", False), ("we set", True)):
        lines += [
            f"{'' if number else title:<9} {text}"
            for number, text in enumerate(_values(plan, ours=ours))
        ]
    return lines


def user_values_line(plan: TrainingPlan) -> list[str]:
    """What the user set, in one line; nothing if that is nothing."""
    values = ", ".join(_values(plan, ours=False))
    return wrapped(f"{'you set':<15}{values}", 15) if values else []


def _values(plan: TrainingPlan, *, ours: bool) -> list[str]:
    """The values that are ours, with their source, or those that are the user's."""
    job, work = plan.job, plan.frozen.workload
    defaults = get_family(work.model.family).defaults
    images = sum(bucket.num_items for bucket in work.buckets)
    optimizer = work.optimizer
    usual_alpha = defaults.lora_alpha * work.rank / defaults.rank
    values = {
        "resolution": (work.resolution_px, defaults.resolution_px, "the published model's"),
        "adapted layers": (work.targets, "attention", "diffusers' scripts"),
        "blocks": (work.adapted_blocks, "all", "diffusers' scripts"),
        "adapter": (work.adapter, "lora", "diffusers' scripts"),
        "average": (work.ema_decay, 0.0, "diffusers' scripts"),
        "rank": (work.rank, defaults.rank, defaults.sources.get("rank")),
        "alpha": (work.lora_alpha, usual_alpha, "in proportion to the rank"),
        "dropout": (work.lora_dropout, 0.0, "diffusers' scripts"),
        "optimizer": (
            " ".join([optimizer.name, *(f"{n}={v}" for n, v in optimizer.options)]),
            "adamw",
            "AdamW in fp32",
        ),
        "batch": (
            work.effective_batch_size,
            defaults.batch_for(plan.frozen.hardware.num_processes),
            "our choice",
        ),
        "steps": (
            job.num_steps if job.num_train_epochs is None else None,
            defaults.num_steps(images),
            f"{VIEWS_PER_IMAGE} views of each image, 500 in all or more",
        ),
        "epochs": (job.num_train_epochs, None, None),
        "learning rate": (
            job.learning_rate,
            usual_learning_rate(optimizer, defaults.learning_rate),
            defaults.sources.get("learning_rate")
            if optimizer.name == "adamw"
            else f"usual for {optimizer.name}",
        ),
        "weight decay": (
            job.weight_decay,
            defaults.weight_decay,
            "between diffusers' 1e-4 and torch's 1e-2",
        ),
        "noise levels": (
            job.timestep_sampling,
            defaults.timestep_sampling,
            DENSITIES.get(defaults.timestep_sampling),
        ),
        "shift": (
            job.timestep_shift,
            defaults.timestep_shift,
            defaults.sources.get("timestep_shift"),
        ),
        "guidance": (
            job.guidance_scale,
            defaults.training_guidance,
            defaults.sources.get("training_guidance"),
        ),
    }
    chosen = {
        name: (v, why)
        for name, (v, usual, why) in values.items()
        if v is not None and (v == usual) is ours
    }
    shown = []
    for name, (value, why) in chosen.items():
        text = f"{value:g}" if isinstance(value, float) else str(value)
        shown.append(f"{name} {text}" + (f"  ({why})" if ours and why else ""))
    return shown
