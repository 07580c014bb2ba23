"""The model card of a trained adapter, and both on the hub."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from autotune.errors import InvalidInput
from autotune.models.registry import find_published, get_family
from autotune.plan.plan import RunReport
from autotune.report.files import read_run
from autotune.report.page import Subject
from autotune.report.plan import full_settings_lines
from autotune.report.run import report_lines
from autotune.report.text import printable
from autotune.system.files import write_text_atomic
from autotune.train.folder import ADAPTER_FILE, comparison_file
from autotune.weights.hub import upload

# What the hub calls each kind of model.
TASKS = {"image": "text-to-image", "edit": "image-to-image", "video": "text-to-video"}


def _model_card(
    run: Subject, report: RunReport, name: str, pictures: Sequence[tuple[str, str]]
) -> str:
    """Markdown with the hub's header; of the data it tells only the number of items."""
    job, work = run.plan.job, run.plan.frozen.workload
    family = get_family(work.model.family).with_expert(job.expert)
    hub_id = (job.base or job.model) if job.revision is not None else None
    published = find_published(hub_id or work.model.name)
    base_model = published[1].hub_id if published else hub_id
    header = {
        "base_model": base_model,
        "license": published[1].license if published else None,
        "library_name": "diffusers",
        "pipeline_tag": TASKS[family.kind],
        "tags": ["lora", "diffusers", "autotune", TASKS[family.kind]],
        "widget": [{"text": prompt, "output": {"url": file}} for prompt, file in pictures],
    }
    told = {key: value for key, value in header.items() if value}
    base = json.dumps(base_model or "FOLDER OF THE BASE MODEL", ensure_ascii=False)
    options = {"weight_name": ADAPTER_FILE, **family.adapter_options}
    loading = ", ".join(f"{key}={value!r}" for key, value in options.items())
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
            f'pipeline.load_lora_weights("{name}", {loading})',
            "```",
            "",
            "```",
            *full_settings_lines(run.plan),
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
    """Upload a run's adapter, samples and model card, nothing of the data; return the address.

    Raises AutotuneError if the hub cannot be reached, or the token may not write there.
    """
    found = read_run(folder)
    if found.report is None or not (folder / ADAPTER_FILE).is_file():
        hint = "finish it first: autotune train --resume"
        raise InvalidInput(f"{folder} holds no finished run", hint=hint)
    pictures = [
        (prompt, name)
        for at, prompt in enumerate(found.plan.job.preview_prompts)
        if (folder / (name := comparison_file("with", at))).is_file()
    ]
    write_text_atomic(folder / "README.md", _model_card(found, found.report, repo, pictures))
    names = ("README.md", ADAPTER_FILE, *(name for _, name in pictures))
    return upload(repo, {name: folder / name for name in names})
