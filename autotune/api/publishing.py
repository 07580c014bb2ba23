"""A trained adapter into a repository on the hub, with a card that says how it was made."""

from pathlib import Path

from autotune.api.reports import read_run
from autotune.errors import InvalidInput
from autotune.models.registry import find_published, get_family
from autotune.plan.plan import TrainingPlan
from autotune.report.cards import model_card
from autotune.train.files import ADAPTER_FILE, comparison_file
from autotune.weights.publishing import upload


def publish(run: str | Path, repo: str, *, private: bool = True) -> str:
    """Upload a run's adapter, its samples and a model card written from plan and report; returns
    the address.

    Neither images of the data nor captions nor paths leave this machine; prompts of previews do, in
    the card.

    Args:
        run: output folder of a finished training run.
        repo: `owner/name` on the hub, made if it is not there.
        private: whether a repository that is made can be seen by its owner alone.

    Raises:
        InvalidInput: the folder holds no finished run.
        AutotuneError: the hub cannot be reached, or the token may not write there.

    Example:
        >>> autotune.publish("first-run", "me/my-dog")
    """
    folder = Path(run)
    found = read_run(folder)
    if found.report is None or not (folder / found.report.adapter).is_file():
        raise InvalidInput(
            f"{folder} holds no finished run", hint="finish it first: autotune train --resume"
        )
    named = [
        (prompt, comparison_file("with", at))
        for at, prompt in enumerate(found.plan.job.preview_prompts)
    ]
    shown = [(prompt, name) for prompt, name in named if (folder / name).is_file()]
    family = get_family(found.plan.frozen.workload.model.family).with_expert(found.plan.job.expert)
    base_model, license_name = _base_of(found.plan)
    card = model_card(
        found.plan,
        found.report,
        name=repo,
        adapter=ADAPTER_FILE,
        base_model=base_model,
        adapter_options=family.adapter_options,
        kind=family.kind,
        license_name=license_name,
        pictures=shown,
    )
    adapters = dict.fromkeys((found.report.adapter, ADAPTER_FILE))
    files = {
        name: folder / name
        for name in (*adapters, *(name for _, name in shown))
        if (folder / name).is_file()
    }
    return upload(repo, {"README.md": card.encode(), **files}, private=private)


def _base_of(plan: TrainingPlan) -> tuple[str | None, str | None]:
    """Hub id and license of the model that was adapted, as far as they are known."""
    job = plan.job
    from_hub = (job.base or job.model) if job.revision is not None else None
    published = find_published(from_hub or plan.frozen.workload.model.name)
    if published is None:
        return from_hub, None
    return published[1].hub_id, published[1].license or None
