"""Configurations in an untrusted model folder: read with bounds, and judged before torch is
imported."""

import importlib.util
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput
from autotune.system.files import read_bounded
from autotune.weights.files import PIPELINE_INDEX, MissingWeights

LIBRARIES = ("diffusers", "transformers")
"""Libraries that component classes may come from: a name in an untrusted folder must not import
anything else."""

PIPELINE_PACKAGE = re.compile(r"[a-z][a-z0-9_]*")
"""Name of one of diffusers' packages of pipelines, where some keep classes of their own."""

MAX_CONFIG_BYTES = 1 << 20
MAX_BLOCKS = 1000
"""Far above any model, as the length of a list too; building so many takes some seconds."""
MAX_INTEGER = 1 << 24
"""Above any size in a configuration: constructors fill tables of so many numbers."""
MAX_TOKENIZER_BYTES = 64 << 20
"""For each file of a tokenizer, which its library reads as a whole; the largest of a known model
has 33 MB."""
BUILT_IN_IMPLEMENTATIONS = (None, "eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
"""Implementations of attention and of experts in transformers itself. Any other name may be that
of a repository, whose native code transformers would fetch and load; so may `flash_attention_2`,
if the package is not installed."""

DOWNLOAD_AGAIN = "download the whole pipeline again, in the diffusers layout"


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON object from an untrusted model folder.

    Raises InvalidInput if it cannot be read, is no JSON object, asks for more of anything than any
    model has, or names code that is not in the libraries.
    """
    hint = (
        "point --model at a folder in the diffusers layout: model_index.json, transformer/, "
        "vae/ "
        "and so on"
    )
    try:
        data = json.loads(read_bounded(path, MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}", hint=hint
        ) from error
    if not isinstance(data, dict):
        raise InvalidInput(f"{path} is not a JSON object", hint=hint)
    for name, value in _walk(data):
        limit = MAX_BLOCKS if re.search("layers|blocks|depth|experts", name) else MAX_INTEGER
        if isinstance(value, int) and abs(value) > limit:
            raise InvalidInput(
                f"{path} asks for {str(value)[:20]} {name}, more than any model has", hint=hint
            )
        if isinstance(value, list) and len(value) > MAX_BLOCKS:
            raise InvalidInput(
                f"{path} lists {len(value)} {name}, more than any model has", hint=hint
            )
        if reason := _find_foreign_code(name, value):
            raise InvalidInput(
                f"{path} {reason}",
                hint=(
                    "delete that line, or use the published model: code from elsewhere is never run"
                ),
            )
    return data


def require_bounded(component: Path) -> None:
    """Look at files that have no weights, before a library reads them as a whole.

    Raises InvalidInput if a scheduler's configuration is damaged, or a file of a tokenizer or
    processor is too large.
    """
    config = component / "scheduler_config.json"
    if os.path.lexists(config):
        read_config(config)
    for path in (
        component.iterdir() if component.name.startswith(("tokenizer", "processor")) else ()
    ):
        if path.is_file() and path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise InvalidInput(f"{path} is larger than any tokenizer's files", hint=DOWNLOAD_AGAIN)


def _walk(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key and value of a configuration, also in the dictionaries inside it and in its
    lists."""
    for name, value in data.items():
        yield name, value
        parts = [value] if isinstance(value, dict) else value if isinstance(value, list) else []
        for part in parts:
            yield from _walk(
                part
                if isinstance(part, dict)
                else {name: part}
                if isinstance(part, list | int)
                else {}
            )


def _find_foreign_code(name: str, value: Any) -> str | None:
    """What in an entry of a configuration would load code, or a configuration that was not looked
    at; None if nothing.

    Classes of an `auto_map` are never imported: `trust_remote_code` is False or not an argument in
    all that we call.
    """
    if name == "configuration_files" and value:
        return "replaces itself by other files"
    if "_implementation" in name:
        for choice in value.values() if isinstance(value, dict) else (value,):
            if choice not in BUILT_IN_IMPLEMENTATIONS:
                return f"asks for {name} {str(choice)[:80]!r}, which is not part of transformers"
    return None


def read_model_index(folder: Path) -> dict[str, Any]:
    """Read a pipeline's `model_index.json`: its class as `_class_name`, (library, class) of each
    component.

    Raises InvalidInput if it cannot be read, or a component comes from a library that is not in
    LIBRARIES, nor from one of diffusers' packages of pipelines, or is of a class that looks for its
    code in the folder.
    """
    index = read_config(folder / PIPELINE_INDEX)
    for name, entry in index.items():
        if not isinstance(entry, list) or (
            entry and all(isinstance(part, int | float) for part in entry)
        ):
            continue  # a setting of the pipeline, such as the layers of Krea 2's text encoder
        if entry[:1] == ["transformers"] and str(entry[-1]).startswith("Auto"):
            raise InvalidInput(
                f"{name} in {folder} is an {entry[-1]}, which takes its code from the files",
                hint=(
                    "write the class that it stands for into model_index.json, or use the "
                    "published pipeline"
                ),
            )
        if entry[:1] not in ([None], *([library] for library in LIBRARIES)) and not _has_pipelines(
            *entry[:1]
        ):
            raise InvalidInput(
                f"{name} in {folder} comes from {entry[0] if entry else 'nowhere'}, not from "
                "diffusers or transformers",
                hint="use the published pipeline: code from elsewhere is never run",
            )
    return index


def _has_pipelines(name: object = None) -> bool:
    """Whether diffusers has a package of pipelines of that name; it is not imported."""
    if not isinstance(name, str) or not PIPELINE_PACKAGE.fullmatch(name):
        return False
    found = importlib.util.find_spec("diffusers")
    places = (found and found.submodule_search_locations) or []
    return any((Path(place) / "pipelines" / name / "__init__.py").is_file() for place in places)


def component_class(folder: Path, name: str) -> tuple[str, str]:
    """(module, class) of a component in `read_model_index`. Raises MissingWeights if the
    pipeline does not have it."""
    match read_model_index(folder).get(name):
        case [str(library), str(class_name)]:
            return library if library in LIBRARIES else f"diffusers.pipelines.{library}", class_name
    raise MissingWeights(
        f"{folder / PIPELINE_INDEX} does not say what {name} is", hint=DOWNLOAD_AGAIN
    )
