"""Writes docs/compatibility.md from tables: python docs/site/compatibility.py"""

from pathlib import Path

from autotune.interop.trainer import trainers
from autotune.knobs.attention import ATTENTION_BACKENDS
from autotune.knobs.formats import WEIGHT_FORMATS
from autotune.knobs.knob import Entry
from autotune.machine.catalog import load_catalog
from autotune.models.registry import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
INTRODUCTION = """# Compatibility

Which device, compute capability and library each backend and weight format needs, what each family
supports, and which cards can be planned for. The page is generated from the tables of the program.
On your machine, `autotune probe` says what works and why other things do not;
`autotune plan --list` says what a search may choose. Only H200s have run it, for 46 minutes: for
other GPUs this is what the code allows.
"""

CARDS = """## Cards

Published figures, for `--hardware`; [their sources](../profiles/hardware.csv). Peaks are in TFLOPS,
dense, with fp32 accumulation; in brackets fp16, where there is no bf16.

| name | capability | memory | kind | bandwidth | bf16 (fp16) | fp8 |
|---|---|---|---|---|---|---|"""


def markdown() -> str:
    """Write the page."""
    parts = (_attention(), _formats(), _families(), _trainers(), _cards())
    return "\n\n".join([INTRODUCTION.rstrip(), *map("\n".join, parts)]) + "\n"


def _devices(entry: Entry) -> str:
    needs = entry.needs
    titles = {"cuda": "CUDA", "cpu": "CPU", "mps": "Apple"}
    names = [titles[kind] for kind in needs.device_kinds or titles]
    if needs.compute_capability > (0, 0):
        major, minor = needs.compute_capability
        cards = f"CUDA {major}.x" if needs.only_major else f"CUDA from {major}.{minor}"
        names = [cards if name == "CUDA" else name for name in names]
    return ", ".join(names)


def _library(entry: Entry) -> str:
    needs = entry.needs
    if needs.library is None:
        return "-"
    text = needs.library if needs.min_version == "0" else f"{needs.library} {needs.min_version}"
    return f"{text} (CPU: {needs.min_version_on_cpu})" if needs.min_version_on_cpu else text


def _attention() -> list[str]:
    head = "| backend | devices | library | masks | note |"
    lines = ["## Attention", "", head, "|---|---|---|---|---|"]
    for name, backend in ATTENTION_BACKENDS.items():
        if backend.why_not:
            lines.append(f"| {name} | none | {_library(backend)} | - | {backend.why_not} |")
        else:
            masks = "no" if backend.refuses_masks else "yes"
            lines.append(
                f"| {name} | {_devices(backend)} | {_library(backend)} | {masks} | "
                f"{backend.summary} |"
            )
    return lines


def _formats() -> list[str]:
    floor = "quality floor that admits it"
    head = f"| format | devices | library | bytes per weight | {floor} | block swap | sharded |"
    lines = ["## Weight formats", "", head, "|---|---|---|---|---|---|---|"]
    for name, each in WEIGHT_FORMATS.items():
        swap, shard = ("yes" if can else "no" for can in (each.can_offload, each.can_shard))
        size = f"{each.bytes_per_parameter:.3g}"
        lines.append(
            f"| {name} | {_devices(each)} | {_library(each)} | {size} | {each.quality} | {swap} | "
            f"{shard} |"
        )
    return lines


def _families() -> list[str]:
    lines = ["## Families", "", "[Which settings each family has](levers.md).", ""]
    lines.append("| family | pipeline | control images | clips | target sets |")
    lines.append("|---|---|---|---|---|")
    for name, family in FAMILIES.items():
        controls = f"up to {family.max_controls}" if family.max_controls else "-"
        clips = "yes" if family.max_frames > 1 else "-"
        lines.append(
            f"| {name} | {family.pipeline_class} | {controls} | {clips} | "
            f"{', '.join(family.target_sets)} |"
        )
    return lines


def _trainers() -> list[str]:
    each_of = trainers().values()
    known = [{model.family.name for model in trainer.models} for trainer in each_of]
    lines = ["## Other trainers", "", "[What a plan becomes there](other-trainers.md).", ""]
    lines.append(f"| family | {' | '.join(trainer.title for trainer in each_of)} |")
    lines.append("|---" * (len(each_of) + 1) + "|")
    for name in sorted(set().union(*known)):
        cells = ("yes" if name in names else "-" for names in known)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _cards() -> list[str]:
    lines = [CARDS]
    for gpu in load_catalog():
        peak = f"{gpu.bf16_tflops:g}" if gpu.bf16_tflops else f"({gpu.fp16_tflops:g})"
        fp8 = f"{gpu.fp8_tflops:g}" if gpu.fp8_tflops else "-"
        lines.append(
            f"| {gpu.id.removeprefix('nvidia-')} | {gpu.compute_capability} | "
            f"{gpu.memory_nominal_gb:g} GB | {gpu.memory_kind} | "
            f"{gpu.memory_gb_per_second:g} GB/s | {peak} | {fp8} |"
        )
    return lines


if __name__ == "__main__":
    PAGE.write_text(markdown())
