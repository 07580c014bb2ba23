"""Plans made by hand, for any family and any values."""

from typing import Any

from autotune.models.registry import find_published
from autotune.plan.candidate import CachingSettings, Candidate
from autotune.plan.job import Job
from autotune.plan.plan import TrainingPlan
from autotune.plan.workload import Bucket, ModelSpec, Workload
from tests import builders

NUM_BLOCKS = {
    **{"qwen": 60, "flux1": 57, "flux2-klein-9b": 32, "flux2": 25, "kandinsky5-image": 52},
    **{"kandinsky5-video": 34, "z-": 34, "krea": 28, "wan-2.1-14b": 40, "wan": 30, "sdxl": 86},
    **{"anima": 28, "ideogram": 34, "chroma": 57, "sd3.5-medium": 24, "sd3.5": 38},
}
SETTINGS = {"micro_batch_size": 1, "checkpointed_blocks": 0}


def plan_of(model: str, **changes: Any) -> TrainingPlan:
    """A plan with these values, by the names of the job, the workload, the settings or
    `caching.FIELD`."""
    family, published = find_published(model)
    defaults = family.defaults

    def of(kind: Any) -> dict[str, Any]:
        return {name: value for name, value in changes.items() if name in kind.model_fields}

    side, frames = changes.get("resolution", 1024), changes.get("num_frames", defaults.num_frames)
    job = {
        **{"model": model, "data": "photos", "num_steps": 2000, "seed": 42, "preview_steps": 25},
        **{name: getattr(defaults, name) for name in ("timestep_shift", "timestep_sampling")},
        **{"guidance_scale": defaults.training_guidance, "num_frames": frames, **of(Job)},
    }
    spec = ModelSpec(
        **{"family": family.name, "architecture": "sha256:0", "name": published.hub_id},
        num_parameters=published.num_parameters,
        num_blocks=next(n for name, n in NUM_BLOCKS.items() if model.startswith(name)),
    )
    bucket = Bucket(width_px=side, height_px=side, num_frames=frames, num_items=20)
    workload = {
        **{"model": spec, "resolution_px": side, "buckets": (bucket,), "targets": "attention"},
        **{"max_text_tokens": 256, "text_padding": "masked", "rank": 16, "lora_alpha": 16.0},
        **{"effective_batch_size": 4, **of(Workload)},
    }
    caching = {name[8:]: value for name, value in changes.items() if name.startswith("caching.")}
    return builders.plan(
        builders.hardware(), Workload(**workload), Candidate(**{**SETTINGS, **of(Candidate)}), job,
        expected={"evidence": "predicted", "peak_memory_bytes": 20 << 30},
        caching=CachingSettings(**caching),
    )  # fmt: skip
