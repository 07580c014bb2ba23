"""A trained adapter and its model card into a repository on the hub."""

from pathlib import Path

from autotune.api.reports import read_run
from autotune.errors import InvalidInput
from autotune.models.registry import find_published, get_family
from autotune.report.cards import model_card
from autotune.system.files import write_text_atomic
from autotune.weights.hub import upload


def push_to_hub(folder: Path, repo: str) -> str:
    """Write a model card into a run's folder, upload it with the adapter and its samples, and
    return the address. Of the data, nothing is uploaded.

    Raises:
        InvalidInput: the folder holds no finished run.
        AutotuneError: the hub cannot be reached, or the token may not write there.
    """
    from autotune.train.folder import ADAPTER_FILE, comparison_file

    found = read_run(folder)
    if found.report is None or not (folder / ADAPTER_FILE).is_file():
        raise InvalidInput(
            f"{folder} holds no finished run", hint="finish it first: autotune train --resume"
        )
    job, work = found.plan.job, found.plan.frozen.workload
    pictures = [
        (prompt, name)
        for at, prompt in enumerate(job.preview_prompts)
        if (folder / (name := comparison_file("with", at))).is_file()
    ]
    family = get_family(work.model.family).with_expert(job.expert)
    hub_id = (job.base or job.model) if job.revision is not None else None
    published = find_published(hub_id or work.model.name)
    card = model_card(
        found.plan,
        found.report,
        name=repo,
        base_model=published[1].hub_id if published else hub_id,
        license_name=published[1].license if published else None,
        kind=family.kind,
        load_options={"weight_name": ADAPTER_FILE, **family.adapter_options},
        pictures=pictures,
    )
    write_text_atomic(folder / "README.md", card)
    names = ("README.md", ADAPTER_FILE, *(name for _, name in pictures))
    return upload(repo, {name: folder / name for name in names})
