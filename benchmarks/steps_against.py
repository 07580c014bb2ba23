"""CPU time of training steps against those of an older commit: what exact levers and compiled
blocks win.

    git worktree add /tmp/older f97d0d4a~1      the last commit before these levers
    taskset -c 1 python benchmarks/steps_against.py /tmp/older [--precision bf16] [--checkpointed 5] [FAMILY…]

The mid-size models of `cost_accuracy.py`, two micro-batches of 2, nothing checkpointed unless asked
for. A process for each tree takes steps in turn with the other's, so that whatever else the machine
does meets both; time is the process's own, on one thread. Printed: the median over all rounds of a
step's ratio to the older step next to it, and the ratio of the least.
"""

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

VARIANTS: tuple[Mapping[str, str], ...] = (
    {},
    {"norm_rope": "fused", "modulation": "ahead"},
    {"compile": "block"},
)
ROUNDS = 9


def prepare(
    name: str, usual: Mapping[str, Any], variant: Mapping[str, str]
) -> Callable[[int], float]:
    """A function that takes one step, by its number, and returns its seconds."""
    import cpu_truth
    from configs import MID
    from cost_accuracy import workload_of

    from autotune.families.registry import FAMILIES
    from autotune.schema.candidate import Candidate
    from autotune.training import step

    family, config, workload = FAMILIES[name], MID[name], workload_of(name)
    settings: dict[str, Any] = {"micro_batch_size": 2, **usual, **variant}
    candidate = Candidate(**settings)
    transformer, parameters = cpu_truth.build(family, config, workload, candidate)
    more = (
        {"choice": workload.optimizer, "ema_decay": workload.ema_decay}
        if hasattr(workload, "optimizer")
        else {}
    )
    try:
        make = importlib.import_module("autotune.training.optimizer").AdapterOptimizer
    except ImportError:  # where it was before it had a module of its own
        make = step.AdapterOptimizer  # type: ignore[attr-defined]
    optimizer = make(parameters, learning_rate=1e-4, weight_decay=1e-3, max_grad_norm=1.0, **more)
    windows = None
    if variant.get("modulation") == "ahead":
        batch = cpu_truth.batches(family, config, workload, candidate)[0]
        windows = cpu_truth._windows(family, transformer, workload, candidate, batch)

    def take(number: int) -> float:
        if windows:
            windows.prepare(number)
        batches = cpu_truth.batches(family, config, workload, candidate)
        start = time.process_time()
        step.optimizer_step(
            family, transformer, optimizer, batches, effective_batch_size=4, step=number
        )
        return time.process_time() - start

    return take


def serve(
    tree: str, name: str, usual: Mapping[str, Any], variants: list[Mapping[str, str]]
) -> None:
    """Read numbers of variants, a line each, and answer with the seconds of a step."""
    sys.path[:0] = [tree, f"{tree}/benchmarks"]
    importlib.import_module("autotune.runtime.quiet").silence_libraries()
    import torch

    torch.set_num_threads(1)
    steps = [prepare(name, usual, variant) for variant in variants]
    for take in steps:
        take(0), take(1)
    print("ready", flush=True)
    for number, line in enumerate(sys.stdin, start=2):
        print(steps[int(line)](number), flush=True)


class Server:
    """A process that takes the steps of one tree."""

    def __init__(
        self, tree: Path, name: str, usual: Mapping[str, Any], variants: list[Mapping[str, str]]
    ) -> None:
        command = [
            sys.executable,
            __file__,
            str(tree),
            name,
            "--serve",
            json.dumps([usual, variants]),
        ]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if not any(line.strip() == "ready" for line in iter(self._read, "")):
            raise SystemExit(f"no steps of {tree}: run {' '.join(command)}")

    def _read(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline()

    def ask(self, variant: int) -> float:
        assert self.process.stdin
        self.process.stdin.write(f"{variant}\n")
        self.process.stdin.flush()
        return float(self._read())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tree", type=Path, help="an older checkout")
    parser.add_argument(
        "families", nargs="*", default=["qwen-image", "flux1-dev", "kandinsky5-image-lite"]
    )
    parser.add_argument("--precision", default="bf16")
    parser.add_argument(
        "--checkpointed", type=int, default=0, help="blocks that recompute everything"
    )
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(str(options.tree), options.families[0], *options.serve)
        return
    usual = {"precision": options.precision, "checkpointed_blocks": options.checkpointed}
    here = Path(__file__).resolve().parents[1]
    for name in options.families:
        older = Server(options.tree.resolve(), name, usual, [{}])
        newer = Server(here, name, usual, list(VARIANTS))
        rounds = [
            (older.ask(0), [newer.ask(number) for number in range(len(VARIANTS))])
            for _ in range(ROUNDS)
        ]
        before = statistics.median(old for old, _ in rounds)
        print(
            f"{name} {options.precision}, {options.checkpointed} checkpointed: {before:.3f} s "
            "before"
        )
        for number, variant in enumerate(VARIANTS):
            ratio = statistics.median(new[number] / old for old, new in rounds)
            least = min(new[number] for _, new in rounds) / min(old for old, _ in rounds)
            print(
                f"    {ratio:.3f} (of the least {least:.3f}) {dict(variant) or 'as it is'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
