"""Brings documents of older versions, as parsed JSON, to this version's names.

Documents are migrated after their digests were checked, and before they are validated.
"""

from collections.abc import Mapping
from typing import Any

KEYS: Mapping[str, str] = {
    "gates": "capabilities",
    "gpu_utilisation": "gpu_utilization",
    "hard_keys": "match_keys",
    "text_encoder_storage": "text_encoder_quantization",
}
"""Fields of schema 1 that have another name since schema 2, wherever they stand in a document."""

VALUES: Mapping[tuple[str, object], object] = {("origin", "catalogue"): "catalog"}
"""Values of a field that have another name since."""

PINS: Mapping[str, str] = {"caching.text_encoder_storage": "caching.text_encoder_quantization"}
"""Names of knobs, as pins and exclusions give them, that have another name since."""


def from_schema_1(value: Any) -> Any:
    """The document under today's names; what has kept its name, and what is unknown, stays as it is."""
    if isinstance(value, dict):
        return {KEYS.get(key, key): _value(key, part) for key, part in value.items()}
    if isinstance(value, list):
        return [from_schema_1(part) for part in value]
    return value


def _value(key: str, part: Any) -> Any:
    if key in ("pins", "exclusions") and isinstance(part, list):
        return [
            [PINS.get(str(pair[0]), pair[0]), *pair[1:]] if isinstance(pair, list) and pair else pair for pair in part
        ]
    if isinstance(part, str | int):
        return VALUES.get((key, part), part)
    return from_schema_1(part)
