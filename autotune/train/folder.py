"""The output folder of a run: what owns it, whether it may be written to, what it holds."""

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from autotune.data.cache import ItemEntries
from autotune.data.dataset import Dataset, list_places
from autotune.data.items import Item
from autotune.errors import AutotuneError, InvalidInput, InvalidPlan, require_free_disk
from autotune.plan.base import digest_of
from autotune.plan.file import RUN_PLAN_FILE, read_plan, write_plan
from autotune.plan.job import Job
from autotune.plan.plan import RunReport, TrainingPlan
from autotune.system.files import PART_FILES

# The name that diffusers looks for.
ADAPTER_FILE = "pytorch_lora_weights.safetensors"
CHECKPOINTS = "checkpoints"
CHECKPOINT_FILE = "checkpoint-{:06}.safetensors"
CHECKPOINT_PATTERN = re.compile(r"checkpoint-(\d{6,})\.safetensors")
REPORT_FILE = "report.json"
PREVIEWS = "previews"
# With the number of steps taken, and of the prompt.
PREVIEW_NAME = re.compile(r"step-(\d{1,9})-(\d{1,2})\.png")
LOCK_FILE = ".lock"
# Fields of a job that may differ when a run is resumed: outputs, and paths whose content other
# digests cover.
CHANGEABLE_FIELDS = frozenset((
    "model", "base", "vae", "text_encoders", "revision", "data", "control", "caption", "trigger",
    "output", "cache", "save_dtype", "adapter_format", "report_to", "preview_prompts",
    "preview_steps", "preview_every", "validation", "validation_every", "keep_best",
    "checkpointing_steps", "checkpointing_epochs", "checkpoints_total_limit",
    "checkpoints_keep_every",
))  # fmt: skip

# Rates that do not depend on the number of steps: such a run may be made longer.
OPEN_ENDED_SCHEDULERS = frozenset({"constant", "constant_with_warmup", "plateau"})


def list_fixed_fields(plan: TrainingPlan) -> dict[str, object]:
    """List what decides the result of training on given data, and must not change on resuming."""
    job = plan.job.model_dump(mode="json")
    if plan.job.lr_scheduler in OPEN_ENDED_SCHEDULERS:
        job |= {"num_steps": None, "num_train_epochs": None}
    fixed = {name: value for name, value in job.items() if name not in CHANGEABLE_FIELDS}
    return {"plan": plan.digest, **fixed}


def compute_run_key(
    plan: TrainingPlan, items: Sequence[Item], entries: Sequence[ItemEntries]
) -> str:
    """Digest everything that decides the result of a run, for its checkpoints."""
    pairs = zip(entries, items, strict=True)
    trained = [[sorted(each.keys), item.repeats, item.weight] for each, item in pairs]
    return digest_of({**list_fixed_fields(plan), "items": trained})


def claim_folder(
    plan: TrainingPlan, *, resume: bool, needed_bytes: int, lock: bool = True
) -> FileLock:
    """Create the output folder, or take over a resumed run's, and lock it.

    The operating system frees the lock of a dead process. With `lock` False the folder is only
    checked, for another process of the run that holds it.
    """
    folder = Path(plan.job.output)
    require_separate_output(plan.job)
    folder_lock = FileLock(folder / LOCK_FILE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if lock:
            folder_lock.acquire(timeout=0)
        check_folder(plan, resume=resume)
        if lock:
            for part in folder.glob(f"**/{PART_FILES}"):  # whoever wrote it is dead
                part.unlink(missing_ok=True)
            write_plan(folder / RUN_PLAN_FILE, plan)
        hint = "free some space, choose another folder with --output, or keep fewer checkpoints"
        needed_bytes -= sum(path.stat().st_size for path in checkpoints_of(folder))
        what = "what a run writes, checkpoints and adapter,"
        require_free_disk(folder, needed_bytes, what, hint=hint)
    except Timeout as error:
        hint = "wait for its end, or choose another folder with --output"
        raise InvalidInput(f"another run is writing to {folder} now", hint=hint) from error
    except OSError as error:
        folder_lock.release()
        message = f"cannot write to the output folder {folder}: {error.strerror}"
        raise InvalidInput(message, hint="choose another with --output") from error
    except AutotuneError:
        folder_lock.release()  # here: who keeps the error keeps what this function had
        raise
    return folder_lock


def require_separate_output(job: Job) -> None:
    """Raise InvalidInput if the output would lie in a folder of images or of the model."""
    folder = Path(job.output)
    named = {"control": job.control, "validation": job.validation_folder, "model": job.model}
    sources = [(source, path) for source, path in named.items() if path]
    sources += [("data", place) for place in (list_places(job.data) if job.data else ())]
    for source, path in sources:
        if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(path)):
            why = f"so what a run writes would be taken for {source}"
            message = f"the output folder {folder} lies in the {source} folder, {why}"
            raise InvalidInput(message, hint="choose another with --output")


def check_folder(plan: TrainingPlan, *, resume: bool) -> None:
    """Raise InvalidInput if the output folder holds a run that is not to be resumed."""
    folder, other = Path(plan.job.output), "choose another folder with --output"
    checkpoints = list_checkpoints(folder / CHECKPOINTS)
    changed: list[str] | None = None
    # Absent or damaged: checkpoints carry the run's key, too.
    with contextlib.suppress(InvalidPlan):
        before, now = list_fixed_fields(read_plan(folder / RUN_PLAN_FILE)), list_fixed_fields(plan)
        changed = [name for name in before | now if before.get(name) != now.get(name)]
    if resume and checkpoints:
        if changed:
            hint = f"resume with the plan and options it was started with, or {other}"
            raise InvalidInput(f"{folder} was started with another {', '.join(changed)}", hint=hint)
        return
    if (report := read_report(folder)) and changed == []:
        is_open_ended = plan.job.lr_scheduler in OPEN_ENDED_SCHEDULERS
        longer = "train longer: add --resume --steps NUMBER; " if is_open_ended else ""
        raise InvalidInput(
            f"{folder} holds this very run, finished after {report.num_steps} steps",
            hint=f"look at it: autotune sample {folder} --prompt TEXT; {longer}train anew: {other}",
        )
    if (folder / ADAPTER_FILE).exists() and ((folder / REPORT_FILE).exists() or not checkpoints):
        raise InvalidInput(f"{folder} holds the adapter of another run", hint=other)
    if checkpoints:
        hint = f"go on with it: add --resume; or {other}"
        raise InvalidInput(f"{folder} holds the checkpoints of a run that did not end", hint=hint)


def finished_report(plan: TrainingPlan, dataset: Dataset) -> RunReport | None:
    """Read the report of the run in the output folder, if it has taken all of the plan's steps."""
    report = read_report(Path(plan.job.output))
    num_steps = plan.job.steps_on(dataset.epoch_size, plan.frozen.workload.effective_batch_size)
    return report if report and report.num_steps == num_steps else None


def read_report(folder: Path) -> RunReport | None:
    """Read the report of a finished run whose adapter is still there."""
    try:
        report = RunReport.model_validate_json((folder / REPORT_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return report if (folder / ADAPTER_FILE).is_file() else None


def preview_file(step: int, number: int) -> str:
    """Name a preview, relative to the output folder."""
    return f"{PREVIEWS}/step-{step:06}-{number}.png"


def comparison_file(adapter: str, number: int) -> str:
    """Name the last picture of a prompt `with` or `without` the adapter."""
    return f"{PREVIEWS}/{adapter}-{number}.png" if number else f"sample_{adapter}_adapter.png"


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """List the checkpoints in `folder` by step, oldest first."""
    files = folder.glob("checkpoint-*")
    matches = ((CHECKPOINT_PATTERN.fullmatch(path.name), path) for path in files)
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def checkpoints_of(output: Path) -> set[Path]:
    """List the checkpoints of the run in an output folder."""
    return set(list_checkpoints(output / CHECKPOINTS).values())
