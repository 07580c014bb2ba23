"""Imports every configuration and documented command that other trainers ship.

    python benchmarks/trainer_examples.py CHECKOUTS           # counts, as in docs/other-trainers.md
    python benchmarks/trainer_examples.py CHECKOUTS --each    # a line for each file

CHECKOUTS holds a folder `OWNER+NAME` for each repository, at the commit in `autotune/interop/data`.
"""

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from autotune.errors import InvalidInput
from autotune.interop.importing import import_config

SHIPPED = {
    "ai-toolkit": ("ostris+ai-toolkit", "config/examples/**/*.y*ml"),
    "SimpleTuner": ("bghira+SimpleTuner", "simpletuner/examples/**/config*.json"),
    "OneTrainer": ("Nerogar+OneTrainer", "training_presets/**/*.json"),
}
DOCUMENTED = {
    "SimpleTuner": ("bghira+SimpleTuner", "documentation/**/*.md"),
    "musubi-tuner": ("kohya-ss+musubi-tuner", "**/*.md"),
    "sd-scripts": ("kohya-ss+sd-scripts", "**/*.md"),
    "diffusers": ("huggingface+diffusers", "**/*.md"),
}
BLOCK = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"\w*(train|fine_tune)\w*\.py\b.*--", re.DOTALL)
TRANSLATED = re.compile(r"\.(es|hi|ja|pt-BR|zh)\.md$")


def find_examples(checkouts: Path, written: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield trainer, name and path of each example; commands are written to files."""
    for trainer, (repository, pattern) in SHIPPED.items():
        root = checkouts / repository
        for path in sorted(root.glob(pattern)):
            yield trainer, str(path.relative_to(root)), path
    for trainer, (repository, pattern) in DOCUMENTED.items():
        root, seen = checkouts / repository, set[str]()
        for page in sorted(root.glob(pattern)):
            if TRANSLATED.search(page.name):
                continue
            text = page.read_text(encoding="utf-8", errors="replace")
            for found in BLOCK.finditer(text):
                block = found[2]
                is_json = trainer == "SimpleTuner" and '"model_family"' in block
                is_json &= block.lstrip().startswith("{")
                same = " ".join(block.split())
                if same in seen or not (is_json or COMMAND.search(block)):
                    continue
                seen.add(same)
                line = text.count("\n", 0, found.start()) + 1
                kind = "ps1" if re.search(r"`[ \t]*\n", block) else "sh"
                kind = "bat" if re.search(r"\^[ \t]*\n", block) else kind
                path = written / f"{trainer}-{page.stem}-{line}.{'json' if is_json else kind}"
                path.write_text(block, encoding="utf-8")
                yield trainer, f"{page.relative_to(root)}:{line}", path


def main() -> None:
    """Print what becomes of each example, or counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--each", action="store_true")
    options = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for trainer, name, path in find_examples(options.checkouts, Path(folder)):
            try:
                config = import_config(path)
                kind, told = "understood", f"{config.trainer} {config.model}"
                lost = [f"{one.key}={one.value}: {one.meaning}" for one in config.not_carried]
                told += f" {config.options} {config.pins}\n    " + "\n    ".join(lost)
            except InvalidInput as error:
                told = str(error).replace(str(path), "it")
                kind = "no LoRA" if "cannot be taken over" in told else "unknown model"
                kind = "unknown model" if "a model" in told else kind
                kind = kind if "trains" in told or "taken over" in told else "not read"
            counts[trainer, kind] += 1
            if options.each:
                print(f"{trainer}\t{kind}\t{name}\t{told}")
    for trainer in dict.fromkeys(trainer for trainer, _ in counts):
        own = {kind: number for (each, kind), number in counts.items() if each == trainer}
        print(trainer, sum(own.values()), own)


if __name__ == "__main__":
    main()
