"""Which of the settings that spare memory or time a family's models have, and why not the
others: data alone."""

from collections.abc import Mapping

from autotune.models.base import Family

LEVERS: Mapping[str, str] = {
    "modulation": "modulation ahead",
    "norm_rope": "fused norm and RoPE",
    "selective_blocks": "kept attention",
    "swapped_blocks": "block swap",
    "quantization": "quantized weights",
    "compile": "compiled blocks",
}
"""What people call them, by knob."""


def missing_levers(family: Family) -> dict[str, str]:
    """The reason for each lever that the family lacks, by what people call the lever."""
    return {
        title: family.excluded[knob] for knob, title in LEVERS.items() if knob in family.excluded
    }
