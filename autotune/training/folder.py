"""The output folder of a run: whose it is, whether it may be written, and what identifies the run.

run-plan.yaml   the plan with the job as it was run     metrics.jsonl, tensorboard/    one line and point per step
checkpoints/    to go on from with --resume             previews/                      samples on the way
pytorch_lora_weights.safetensors, samples.png, report.json: written at the end
"""

from pathlib import Path

from filelock import FileLock, Timeout

from autotune.data import EncodedDataset
from autotune.errors import InvalidInput, InvalidPlan
from autotune.runtime import require_free_disk
from autotune.schema import TrainingPlan, digest_of, read_plan, write_plan
from autotune.training.checkpoint import CHECKPOINTS, checkpoints_in
from autotune.training.save import ADAPTER_FILE

PLAN_FILE = "run-plan.yaml"
REPORT_FILE = "report.json"
LOCK_FILE = ".lock"

NOT_LEARNED = frozenset(
    {"model", "revision", "data", "control", "caption", "trigger", "output", "preview_prompts", "report_to"}
    | {"preview_steps", "preview_every", "checkpointing_steps", "checkpoints_total_limit", "checkpoints_keep_every"}
)
"""Fields of a job that may differ when a run goes on: places, which the data's digest covers, and comforts."""

FREE_OF_LENGTH = frozenset({"constant", "constant_with_warmup", "plateau"})
"""Learning rates that do not depend on the number of steps, so that a run may be made longer."""


def learned(plan: TrainingPlan) -> dict[str, object]:
    """Everything in a plan that decides what a run learns from given data."""
    job = plan.job.model_dump(mode="json")
    if plan.job.lr_scheduler in FREE_OF_LENGTH:
        job |= {"num_steps": None, "num_train_epochs": None}
    return {"plan": plan.identity, **{name: value for name, value in job.items() if name not in NOT_LEARNED}}


def run_key(plan: TrainingPlan, encoded: EncodedDataset) -> str:
    """Digest of everything that decides what a run learns: a checkpoint with another one is not this run's."""
    pairs = zip(encoded.recipes, encoded.items, strict=True)
    items: list[object] = [[sorted(recipe.keys), item.repeats] for recipe, item in pairs]
    return digest_of({**learned(plan), "items": items})


def claim_folder(plan: TrainingPlan, *, resume: bool, needed_bytes: int, lock: bool = True) -> FileLock:
    """Make the output folder, or take the one that is there; it is this run's while the lock is held.

    The system frees the lock when its process ends in whatever way, so a dead run never blocks. With `lock` False the
    folder is looked at but not held: for a process that belongs to the one that holds it.

    Raises:
        InvalidInput: it holds another run, or this one and `resume` was not asked for; another run is writing to it
            now; it lies in the folder of the data, the control images or the model, or cannot be written.
        AutotuneError: its disk has less free than is still to be written of `needed_bytes`.
    """
    folder = Path(plan.job.output)
    for what in ("data", "control", "model"):
        place = getattr(plan.job, what)
        if place and folder.resolve().is_relative_to(Path(place).resolve()):
            raise InvalidInput(
                f"the output folder {folder} lies in the {what} folder, so what a run writes would be taken for {what}",
                hint="choose another with --output",
            )
    claim = FileLock(folder / LOCK_FILE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if lock:
            claim.acquire(timeout=0)
        (_require_same if resume and checkpoints_in(folder / CHECKPOINTS) else _require_unused)(folder, plan)
        write_plan(folder / PLAN_FILE, plan)
    except Timeout as error:
        raise InvalidInput(
            f"another run is writing to {folder} now", hint="wait for its end, or choose another folder with --output"
        ) from error
    except OSError as error:
        raise InvalidInput(
            f"cannot write to the output folder {folder}: {error.strerror}", hint="choose another with --output"
        ) from error
    hint = "free some space, choose another folder with --output, or keep fewer checkpoints"
    written_bytes = sum(path.stat().st_size for path in checkpoints_in(folder / CHECKPOINTS).values())
    require_free_disk(folder, needed_bytes - written_bytes, "what a run writes, checkpoints and adapter,", hint=hint)
    return claim


def _require_unused(folder: Path, plan: TrainingPlan) -> None:
    begun = checkpoints_in(folder / CHECKPOINTS)
    if (folder / ADAPTER_FILE).exists() and ((folder / REPORT_FILE).exists() or not begun):
        raise InvalidInput(f"{folder} holds the adapter of another run", hint="choose another folder with --output")
    if begun:
        raise InvalidInput(
            f"{folder} holds the checkpoints of a run that did not end",
            hint="go on with it: add --resume; or choose another folder with --output",
        )


def _require_same(folder: Path, plan: TrainingPlan) -> None:
    """Compare with the plan that the folder was begun with: sooner than its checkpoints can be."""
    try:
        before, now = learned(read_plan(folder / PLAN_FILE)), learned(plan)
    except InvalidPlan:  # absent or damaged: its checkpoints tell whose they are, too
        return
    changed = [name for name in now if before.get(name) != now[name]]
    if changed:
        raise InvalidInput(
            f"{folder} was begun with another {', '.join(changed)}",
            hint="resume with the plan and options it was begun with, or choose another folder with --output",
        )
