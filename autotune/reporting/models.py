"""The model families as a table of text."""

from collections.abc import Sequence

from autotune.families import FAMILIES
from autotune.schema import ModelSpec


def model_lines(models: Sequence[ModelSpec]) -> list[str]:
    """One line for each family: size, blocks, and what a job has by default."""
    lines = [f"{'family':<24}{'parameters':>11}{'blocks':>8}  by default"]
    for model in models:
        defaults = FAMILIES[model.family].defaults
        size = f"{model.num_parameters / 1e9:>10.2f}B{model.num_blocks:>8}"
        doubt = "" if FAMILIES[model.family].models[0].source else "  (unverified: built from diffusers' classes)"
        lines.append(f"{model.family:<24}{size}  rank {defaults.rank}, {defaults.resolution_px} px{doubt}")
    return lines
