"""`autotune plan` under caps of memory, as a user calls it."""

import json
import subprocess
import sys
import time
from collections import Counter
from typing import Any

from evidence import Evidence, begin

CAPS_GIB = (80, 48, 24, 32, None)
PIPES: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def plan_command(
    evidence: Evidence, model: str, rank: int, batch: int, seconds: float, *options: str
) -> list[str]:
    """The command line of a search."""
    return [sys.executable, "-m", "autotune", "plan", "--model", model, "--resolution",
    str(evidence.size(1024)),
            "--rank", str(rank), "--batch-size", str(batch), "--quality", "compact",
            "--no-profiles", "--fresh",
            "--search-time", str(max(10, round(seconds))), "-o",
            str(evidence.scratch() / "plan.yaml"), "--json",
            *(["--max-trials", "2"] if evidence.small else []), *options]  # fmt: skip


def plan(
    evidence: Evidence, command: list[str], cap_gib: int | None = None, share_of_time: float = 1.0
) -> dict[str, object] | None:
    """One search as a row, with its plan; None where it failed, or took more than that share of
    the time left."""
    if evidence.small and cap_gib:
        cap_gib = max(2, cap_gib // 16)
    command = [*command, *([] if cap_gib is None else ["--max-memory", f"{cap_gib}GiB"])]
    started = time.monotonic()
    with subprocess.Popen(command, text=True, **PIPES) as process:
        try:
            told, said = process.communicate(timeout=max(5.0, share_of_time * evidence.left()))
        except subprocess.TimeoutExpired:
            process.kill()
            told, said = process.communicate()
    seconds = time.monotonic() - started
    if process.returncode:  # below zero: ended here, out of time
        evidence.row(
            "plan",
            cap_gib=cap_gib,
            status=process.returncode,
            seconds=seconds,
            message=said.strip()[-400:],
        )
        return None
    made: dict[str, object] = json.loads(told)
    outcomes = Counter(trial["outcome"] for trial in made["frozen"]["trials"])  # type: ignore[index]
    evidence.row("plan", cap_gib=cap_gib, status=0, seconds=seconds, outcomes=outcomes, plan=made)
    return made


def main() -> None:
    """Plan under each cap."""
    evidence = begin("search", __doc__)
    model = evidence.model("qwen-image")
    for cap_gib in evidence.each(
        evidence.sliced(CAPS_GIB), name=lambda cap: f"plan within {cap} GiB"
    ):
        plan(
            evidence, plan_command(evidence, model, 16, 2, min(180, evidence.left() - 20)), cap_gib
        )


if __name__ == "__main__":
    main()
