"""Brings documents of older versions, as parsed JSON, to this version's names.

Plans, records and recordings share one schema version. A digest or a name covers a document as it
was written, so it is checked on the document itself; what this module returns is what gets
validated.
"""

from collections.abc import Mapping
from typing import Any, Final

from autotune.errors import InvalidInput

SCHEMA_VERSION: Final = 2
"""Version of the documents that are written. Older ones are migrated, newer ones are refused."""

MAX_DEPTH = 32
"""Levels of lists and mappings in a document; real ones have fewer than ten."""

KEYS: Mapping[str, str] = {
    "gates": "capabilities",
    "gpu_utilisation": "gpu_utilization",
    "hard_keys": "match_keys",
    "text_encoder_storage": "text_encoder_quantization",
}
"""Fields of schema 1 that have another name since schema 2, at whatever level of a document."""

VALUES: Mapping[tuple[str, object], object] = {
    ("schema_version", 1): SCHEMA_VERSION,
    ("origin", "catalogue"): "catalog",
    ("pins", "caching.text_encoder_storage"): "caching.text_encoder_quantization",
    ("exclusions", "caching.text_encoder_storage"): "caching.text_encoder_quantization",
}
"""Values of a field, or of the lists in it, that have another name since."""


class NewerSchema(InvalidInput):
    """A document was written by a newer autotune."""


def migrate(document: Any, version: object) -> Any:
    """The document, which says that it has schema `version`, under today's names.

    A version that is neither a known nor a newer one is left to validation.

    Raises:
        NewerSchema: it has a newer schema than this autotune knows.
        InvalidInput: see `from_schema_1`. Both messages go on from the document's name.
    """
    if type(version) is int and version > SCHEMA_VERSION:
        raise NewerSchema(
            f"has schema {version}, and this autotune knows schemas up to {SCHEMA_VERSION}",
            hint="update autotune: pip install --upgrade lora-autotune",
        )
    return from_schema_1(document) if version == 1 else document


def from_schema_1(document: Any) -> Any:
    """A document of schema 1 under today's names; what has kept its name, and what is unknown,
    stays as it is.

    Raises:
        InvalidInput: it has more than `MAX_DEPTH` levels, or a field under both its names.
    """
    return _renamed(document, "", MAX_DEPTH)


def _renamed(value: Any, field: str, levels: int) -> Any:
    if not isinstance(value, dict | list):
        return VALUES.get((field, value), value) if type(value) in (str, int) else value
    if levels == 0:
        raise _damaged(f"it has more than {MAX_DEPTH} levels")
    if isinstance(value, list):
        return [_renamed(part, field, levels - 1) for part in value]
    renamed = {KEYS.get(key, key): _renamed(part, key, levels - 1) for key, part in value.items()}
    if len(renamed) < len(value):
        twice = next(
            f"{old} and {new}" for old, new in KEYS.items() if old in value and new in value
        )
        raise _damaged(f"it has {twice}, which are one field")
    return renamed


def _damaged(why: str) -> InvalidInput:
    return InvalidInput(
        f"is damaged: {why}", hint="undo the edit, or copy the file again from where it was made"
    )
