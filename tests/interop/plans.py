"""Plans made by hand, for any family and any values."""

from pathlib import Path

import yaml

from autotune.models.registry import find_published
from autotune.plan.candidate import CachingSettings, Candidate
from autotune.plan.job import Job
from autotune.plan.workload import Bucket, ModelSpec, Workload
from tests import builders

NUM_BLOCKS = yaml.safe_load((Path(__file__).parent / "num_blocks.yaml").read_text())
SETTINGS = {"micro_batch_size": 1, "checkpointed_blocks": 0}


def plan_of(model, **changes):
    """A plan with these values, by the names of the job, the workload, the settings or
    `caching.FIELD`."""
    family, published = find_published(model)
    defaults = family.defaults

    def of(kind):
        return {name: value for name, value in changes.items() if name in kind.model_fields}

    side, frames = changes.get("resolution", 1024), changes.get("num_frames", defaults.num_frames)
    job = {"model": model, "data": "photos", "num_steps": 2000, "seed": 42, "preview_steps": 25}
    job |= {"timestep_shift": defaults.timestep_shift, "num_frames": frames}
    job |= {"timestep_sampling": defaults.timestep_sampling}
    job |= {"guidance_scale": defaults.training_guidance, **of(Job)}
    spec = ModelSpec(
        family=family.name,
        architecture="sha256:0",
        name=published.hub_id,
        num_parameters=published.num_parameters,
        num_blocks=next(n for name, n in NUM_BLOCKS.items() if model.startswith(name)),
    )
    bucket = Bucket(width_px=side, height_px=side, num_frames=frames, num_items=20)
    sizes = {"resolution_px": side, "buckets": (bucket,), "max_text_tokens": 256}
    workload = builders.workload(model=spec, **{**sizes, **of(Workload)})
    if "num_train_epochs" in changes and "num_steps" not in changes:
        job["num_steps"] = -(-20 * changes["num_train_epochs"] // workload.effective_batch_size)
    caching = {name[8:]: value for name, value in changes.items() if name.startswith("caching.")}
    return builders.plan(
        builders.hardware(),
        workload,
        Candidate(**{**SETTINGS, **of(Candidate)}),
        job,
        expected={"evidence": "predicted", "peak_memory_bytes": 20 << 30},
        caching=CachingSettings(**caching),
    )
