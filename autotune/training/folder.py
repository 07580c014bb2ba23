"""The output folder of a run: whose it is, whether it may be written, and what identifies the run.

plan.yaml       the plan with the job as it was run     metrics.jsonl, tensorboard/    one line and point per step
checkpoints/    to go on from with --resume             previews/                      samples on the way
pytorch_lora_weights.safetensors, samples.png, report.json: written at the end
"""

import shutil
from pathlib import Path

from autotune.errors import AutotuneError, InvalidInput
from autotune.plan_file import write_plan
from autotune.schema import TrainingPlan, digest_of
from autotune.training.data.encoded import EncodedDataset
from autotune.training.save import ADAPTER_FILE

PLAN_FILE = "plan.yaml"
REPORT_FILE = "report.json"
CHECKPOINTS = "checkpoints"

NOT_LEARNED = frozenset(
    {"model", "data", "control", "caption", "trigger", "output", "num_steps", "num_train_epochs", "preview_prompts"}
    | {"preview_steps", "preview_every", "checkpointing_steps", "checkpoints_total_limit", "checkpoints_keep_every"}
    | {"report_to"}
)
"""Fields of a job that may differ when a run goes on: places, which the data's digest covers, and comforts."""

FREE_OF_LENGTH = frozenset({"constant", "constant_with_warmup", "plateau"})
"""Learning rates that do not depend on the number of steps, so that a run may be made longer."""


def run_key(plan: TrainingPlan, encoded: EncodedDataset, num_steps: int) -> str:
    """Digest of everything that decides what a run learns: a checkpoint with another one is not this run's."""
    job = {name: value for name, value in plan.job.model_dump(mode="json").items() if name not in NOT_LEARNED}
    if plan.job.lr_scheduler not in FREE_OF_LENGTH:
        job["num_steps"] = num_steps
    pairs = zip(encoded.recipes, encoded.items, strict=True)
    items: list[object] = [[sorted(recipe.keys), item.repeats] for recipe, item in pairs]
    return digest_of({"plan": plan.digest, "job": job, "items": items})


def claim_folder(plan: TrainingPlan, *, resume: bool, needed_bytes: int) -> Path:
    """Make the output folder, or take the one that is there.

    Raises:
        InvalidInput: it holds another run and `resume` was not asked for, or cannot be written.
        AutotuneError: its disk has less than `needed_bytes` free.
    """
    folder = Path(plan.job.output)
    if not resume:
        _require_unused(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_plan(folder / PLAN_FILE, plan)
    except OSError as error:
        raise InvalidInput(
            f"cannot write to the output folder {folder}: {error.strerror}", hint="choose another with --output"
        ) from error
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise AutotuneError(
            f"checkpoints and adapter need {needed_bytes / 1e9:.2f} GB in {folder}, where {free / 1e9:.2f} GB is free",
            hint="free some space, choose another folder with --output, or keep fewer checkpoints",
        )
    return folder


def _require_unused(folder: Path) -> None:
    if (folder / ADAPTER_FILE).exists():
        raise InvalidInput(f"{folder} holds the adapter of another run", hint="choose another folder with --output")
    if any((folder / CHECKPOINTS).glob("checkpoint-*.safetensors")):
        raise InvalidInput(
            f"{folder} holds the checkpoints of a run that did not end",
            hint="go on with it: add --resume; or choose another folder with --output",
        )
