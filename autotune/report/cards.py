"""The model card of a trained adapter: what it is, how it was made, how it is used. Pure."""

import json
import re
from collections.abc import Mapping, Sequence

import yaml

from autotune.plan.plan import TrainingPlan
from autotune.plan.run import RunReport
from autotune.report.plan import full_settings_lines
from autotune.report.run import report_lines
from autotune.report.text import printable

TASKS = {"image": "text-to-image", "edit": "image-to-image", "video": "text-to-video"}
"""What the hub calls each kind of model."""
LINKED = re.compile(
    r"((?:[a-z][a-z0-9+.-]*://|www\.)[^\s`<>]+|[^\s`<>@]+@[^\s`<>@]+\.[^\s`<>@]+)", re.IGNORECASE
)
"""Addresses that stand in a text by themselves."""


def model_card(
    plan: TrainingPlan,
    report: RunReport,
    *,
    name: str,
    adapter: str,
    base_model: str | None,
    adapter_options: Mapping[str, object],
    kind: str,
    license_name: str | None,
    pictures: Sequence[tuple[str, str]],
) -> str:
    """The card as Markdown with the hub's header. Of the data it tells the number of items and
    nothing else.

    Args:
        plan: what was trained.
        report: what came of it.
        name: of the repository.
        adapter: name of the file in it that diffusers loads.
        adapter_options: what diffusers must be told besides, to load it.
        base_model: hub id of the model that was adapted; None if it has none.
        kind: `image`, `edit` or `video`.
        license_name: of the base model, as its card says.
        pictures: prompt and file of samples with the adapter.
    """
    work, job = plan.frozen.workload, plan.job
    items = sum(bucket.num_items for bucket in work.buckets)
    texts = [(_plain(prompt), file) for prompt, file in pictures]
    shown = [
        line
        for text, file in texts
        for line in (f"![{text}]({file})", "", *([f"*{text}*", ""] if text else []))
    ]
    learned = (
        f"Rank {work.rank} on {work.targets}, effective batch {work.effective_batch_size}, "
        f"{report.num_steps} steps "
        f"at a learning rate of {job.learning_rate:g} ({work.optimizer.name}), {items} "
        f"item{'s' * (items != 1)}."
    )
    return "\n".join(
        [
            *_header(base_model, license_name, TASKS[kind], pictures),
            "",
            f"# {name.rpartition('/')[2]}",
            "",
            f"A LoRA for {_plain(base_model or work.model.name)}, trained by autotune.",
            "",
            *shown,
            "## Use",
            "",
            *_usage(base_model, name, {"weight_name": adapter, **adapter_options}),
            "",
            "## How it was trained",
            "",
            _plain(learned),
            "",
            "```",
            *full_settings_lines(plan),
            "",
            *report_lines(report.changed(warnings=())),  # they name files of this machine
            "```",
            "",
        ]
    )


def _usage(base_model: str | None, name: str, options: Mapping[str, object]) -> list[str]:
    base = json.dumps(base_model or "FOLDER OF THE BASE MODEL", ensure_ascii=False)
    given = ", ".join(
        f"{key}={json.dumps(v) if isinstance(v, str) else v}" for key, v in options.items()
    )
    return [
        "```python",
        "from diffusers import DiffusionPipeline",
        "",
        f"pipeline = DiffusionPipeline.from_pretrained({base})",
        f'pipeline.load_lora_weights("{name}", {given})',
        "```",
    ]


def _plain(text: str) -> str:
    """`text` in one line that Markdown and HTML show as it is: prompts and names are anybody's.

    What renderers would make a link of without being told, an escape before it or not, is set as
    code.
    """
    parts = LINKED.split(printable(" ".join(text.split())))
    escaped = [re.sub(r"([\\`*_\[\]<>&~|$!])", r"\\\1", part) for part in parts]
    return "".join(f"`{part}`" if at % 2 else escaped[at] for at, part in enumerate(parts))


def _header(
    base_model: str | None, license_name: str | None, task: str, pictures: Sequence[tuple[str, str]]
) -> list[str]:
    header: dict[str, object] = {
        "base_model": base_model,
        "license": license_name,
        "library_name": "diffusers",
        "pipeline_tag": task,
        "tags": ["lora", "diffusers", "autotune", task],
        "widget": [{"text": prompt, "output": {"url": file}} for prompt, file in pictures],
    }
    told = {key: value for key, value in header.items() if value}
    return ["---", yaml.safe_dump(told, sort_keys=False, allow_unicode=True).rstrip(), "---"]
