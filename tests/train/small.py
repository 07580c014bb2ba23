"""A small real pipeline, captioned images and a hand-made plan: a training run without a search."""

from autotune.data.dataset import read_dataset
from autotune.data.items import make_options
from autotune.events import StepFinished
from autotune.machine.probe import probe
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import CachingSettings, Candidate
from autotune.plan.job import ModelRef
from autotune.plan.workload import WorkloadRequest
from autotune.train.workload import describe_workload
from tests import builders
from tests.small import draw_images, write_small_pipeline

RESOLUTION_PX = 32
SETTINGS = Candidate(micro_batch_size=2, checkpointed_blocks=0, precision="fp32")


def write_model_and_images(folder, family="qwen-image"):
    captions = draw_images(folder / "images", count=5)
    write_small_pipeline(family, folder / "model", captions)
    return folder / "model", folder / "images"


def machine():
    return probe()


def make_plan(
    model,
    images,
    hardware,
    /,
    *,
    settings=SETTINGS,
    num_processes=1,
    strategy=None,
    caching=None,
    resolution_px=RESOLUTION_PX,
    **job,
):
    resolved, num_frames = resolve_model(ModelRef.of(model)), job.get("num_frames", 1)
    learning = {"num_frames": num_frames, "rank": 2, "optimizer": settings.optimizer}
    size = {"resolution": (resolution_px, resolution_px), "effective_batch_size": 4}
    wishes = WorkloadRequest(**size, **learning)
    dataset = read_dataset(images, make_options(job, resolved.family, num_frames))
    workload = describe_workload(resolved, dataset, wishes)
    strategy = strategy or ("ddp" if num_processes > 1 else "single")
    defaults = {
        "num_steps": 6,
        "learning_rate": 1e-3,
        "seed": 3,
        "preview_steps": 2,
        "report_to": "none",
        "save_dtype": "fp32",
        "preview_prompts": (),
    }
    return builders.plan(
        hardware,
        workload,
        settings,
        {"model": str(model), "data": str(images), **defaults, **job},
        planned={"num_processes": num_processes, "strategy": strategy},
        expected={"step_seconds": 0.1, "peak_memory_bytes": 2**20, "process_memory_bytes": 2**20},
        search_seconds=0.0,
        caching=caching or CachingSettings(),
    )


def finished_step(step):
    rates = {"learning_rate": 1e-4, "gradient_norm": 0.5, "images_per_second": 40.0}
    took = {"seconds": 0.1, "data_seconds": 0.0, "memory_bytes": 2**20}
    return StepFinished(step=step, num_steps=9, loss=1.0 / step, **rates, **took)
