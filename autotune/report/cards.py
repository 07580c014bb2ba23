"""Model card of a trained adapter."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from autotune.errors import InvalidInput
from autotune.models.registry import find_published, get_family
from autotune.plan.plan import TrainingPlan
from autotune.plan.run import RunReport
from autotune.report.pages import read_run
from autotune.report.plan import full_settings_lines
from autotune.report.run import report_lines
from autotune.report.text import printable
from autotune.system.files import write_text_atomic
from autotune.weights.hub import upload

TASKS = {"image": "text-to-image", "edit": "image-to-image", "video": "text-to-video"}
"""What the hub calls each kind of model."""


def model_card(
    plan: TrainingPlan,
    report: RunReport,
    *,
    name: str,
    base_model: str | None,
    license_name: str | None,
    kind: str,
    load_options: Mapping[str, object],
    pictures: Sequence[tuple[str, str]],
) -> str:
    """Return the card as Markdown with the hub's header; of the data it tells only the number.

    Args:
        plan: what was trained.
        report: what came of it.
        name: of the repository.
        base_model: hub id, if it has one.
        license_name: of the base model.
        kind: a key of `TASKS`.
        load_options: what diffusers is told to load the adapter.
        pictures: prompt and file of samples with the adapter.
    """
    work, job = plan.frozen.workload, plan.job
    header = {
        "base_model": base_model,
        "license": license_name,
        "library_name": "diffusers",
        "pipeline_tag": TASKS[kind],
        "tags": ["lora", "diffusers", "autotune", TASKS[kind]],
        "widget": [{"text": prompt, "output": {"url": file}} for prompt, file in pictures],
    }
    told = {key: value for key, value in header.items() if value}
    base = json.dumps(base_model or "FOLDER OF THE BASE MODEL", ensure_ascii=False)
    options = ", ".join(f"{key}={value!r}" for key, value in load_options.items())
    num_items = sum(bucket.num_items for bucket in work.buckets)
    return "\n".join(
        [
            "---",
            yaml.safe_dump(told, sort_keys=False, allow_unicode=True).rstrip(),
            "---",
            f"# {name.rpartition('/')[2]}",
            "",
            f"A LoRA for {_escaped(base_model or work.model.name)}, trained by autotune: rank "
            f"{work.rank} on {_escaped(work.targets)}, effective batch "
            f"{work.effective_batch_size}, {report.num_steps} steps at a learning rate of "
            f"{job.learning_rate:g} ({work.optimizer.name}), on {num_items} items.",
            "",
            *(f"![{_escaped(prompt)}]({file})\n" for prompt, file in pictures),
            "```python",
            "from diffusers import DiffusionPipeline",
            "",
            f"pipeline = DiffusionPipeline.from_pretrained({base})",
            f'pipeline.load_lora_weights("{name}", {options})',
            "```",
            "",
            "```",
            *full_settings_lines(plan),
            "",
            *report_lines(report.changed(warnings=())),  # they name files of this machine
            "```",
            "",
        ]
    )


def _escaped(text: str) -> str:
    """One line that Markdown shows as it is: a prompt may hold anything."""
    return re.sub(r"([\\`*_\[\]<>&~|$!])", r"\\\1", printable(" ".join(text.split())))


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
