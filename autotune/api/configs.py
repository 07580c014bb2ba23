"""Configurations of other trainers, which need neither torch nor a machine."""

from pathlib import Path

from autotune.api.plan_files import load_plan
from autotune.data.dataset import data_text, is_list
from autotune.errors import InvalidInput
from autotune.interop.exporting import ExportedConfig, export_plan
from autotune.interop.importing import ImportedConfig, read_config
from autotune.interop.trainer import get_trainer
from autotune.plan.file import with_job
from autotune.plan.plan import TrainingPlan
from autotune.system.files import write_text_atomic


def import_config(path: str | Path, *, trainer: str | None = None) -> ImportedConfig:
    """Read another trainer's configuration: what carries over, what becomes a pin, and what does
    not carry over.

    Knows ai-toolkit, musubi-tuner, SimpleTuner, sd-scripts and the JSON of its GUI, OneTrainer, and
    command lines of diffusers' scripts. Runs nothing of what the file names, and needs none of
    these programs.

    Args:
        path: the configuration; files that it names are read, too.
        trainer: whose it is, if its content does not tell: `ai-toolkit`, `musubi`, `simpletuner`,
            `diffusers`, `sd-scripts`, `onetrainer`, or one that another package adds.

    Raises:
        InvalidInput: it cannot be read, is no known trainer's, or trains a model that autotune does
            not know.

    Example:
        >>> config = autotune.import_config("train_lora.yaml")
        >>> [line.meaning for line in config.not_carried]
        >>> plan = autotune.plan(config.model, config.data, **config.options)
    """
    return read_config(Path(path), trainer)


def export_config(
    plan: TrainingPlan | str | Path,
    to: str,
    output: str | Path | None = None,
    *,
    strict: bool = False,
    overwrite: bool = False,
) -> ExportedConfig:
    """Turn a plan into the files of another trainer: its configuration, its data sets, and the
    script that starts it.

    What that trainer lacks goes to its nearest setting that needs no more memory; the head of the
    files says so.

    Args:
        plan: a plan, or its file.
        to: `ai-toolkit`, `musubi`, `simpletuner`, `diffusers`, `sd-scripts`, `onetrainer`, or one
            that another package adds.
        output: folder to write the files to; None to write none.
        strict: refuse if anything would differ that changes learning or memory.
        overwrite: replace files that are there.

    Raises:
        InvalidPlan: the file is not a valid plan.
        InvalidInput: the trainer lacks the model, or something that has no such neighbor, or
            anything with `strict`; or a file is there already.

    Example:
        >>> exported = autotune.export_config("plan.yaml", "musubi", "for-musubi")
        >>> exported.files.keys(), exported.differences
    """
    made = plan if isinstance(plan, TrainingPlan) else load_plan(plan)
    if made.job.data is not None and is_list(made.job.data):
        raise InvalidInput(
            f"{data_text(made.job.data)}: this is a list of folders, and only a single folder can "
            "be exported",
            hint="name one folder as the plan's data, export, and add the others to the files",
        )
    folders = {
        name: folder
        for name in ("data", "control")
        if (folder := getattr(made.job, name)) is not None
    }
    places = {
        name: str(Path(one).absolute()) if Path(one).is_dir() else one
        for name, one in folders.items()
    }
    exported = export_plan(with_job(made, **places), get_trainer(to), strict=strict)
    if output is not None:
        folder = Path(output)
        there = next((folder / name for name in exported.files if (folder / name).exists()), None)
        if there is not None and not overwrite:
            raise InvalidInput(
                f"{there} is there already", hint="name another folder, or allow it: --overwrite"
            )
        for name, text in exported.files.items():
            write_text_atomic(folder / name, text)
    return exported
