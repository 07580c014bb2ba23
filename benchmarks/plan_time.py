"""What a plan for a GPU by name takes: a fresh process with empty caches for each model and card.

    python benchmarks/plan_time.py PLANS [MODEL ...] [--cards CARD,CARD]

Prints CPU-seconds, seconds by the clock and the peak of resident memory, a line for each; without
names, all models. Plans are kept in the folder PLANS: two versions that predict the same write the
same bytes.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from autotune.models.registry import FAMILIES

CARDS = "nvidia-rtx-3060,nvidia-rtx-4090,nvidia-h100-sxm"


def measure(model: str, card: str, plan: Path) -> str:
    """Plan once; one line of figures."""
    with tempfile.TemporaryDirectory() as home:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("XDG_", "AUTOTUNE_"))
        }
        command = [
            sys.executable,
            "-m",
            "autotune",
            "plan",
            "--model",
            model,
            "--hardware",
            card,
            "-o",
            str(plan),
        ]
        start = time.monotonic()
        process = subprocess.Popen(
            command, env={**environment, "HOME": home}, stdout=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    cpu, mib = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
    failed = f", exit status {process.returncode}" if process.returncode else ""
    return (
        f"{model:24} {card:24} {cpu:5.1f} CPU-s {time.monotonic() - start:6.1f} s {mib:5.0f} "
        f"MiB{failed}"
    )


def main() -> None:
    """All models and cards, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("plans", type=Path)
    known = [model.name for family in FAMILIES.values() for model in family.models]
    parser.add_argument("models", nargs="*", default=known)
    parser.add_argument("--cards", default=CARDS)
    arguments = parser.parse_args()
    arguments.plans.mkdir(parents=True, exist_ok=True)
    for model in arguments.models:
        for card in arguments.cards.split(","):
            print(measure(model, card, arguments.plans / f"{model}-{card}.yaml"), flush=True)


if __name__ == "__main__":
    main()
