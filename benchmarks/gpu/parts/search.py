"""`autotune plan` under caps of memory, as a user calls it. The summary holds its choices against the grid that the part
`accuracy` measured of the same work."""

import json
import subprocess
import sys
import time
from collections import Counter

from accuracy import WORKS
from evidence import Evidence, begin

CAPS_GIB = (80, 48, 24, 32, None)


def plan(evidence: Evidence, model: str, cap_gib: int | None) -> None:
    """One search; its plan is a row."""
    if evidence.small and cap_gib:
        cap_gib = max(2, cap_gib // 16)
    cap = [] if cap_gib is None else ["--cap-memory", f"{cap_gib}GiB"]
    path = evidence.folder / f"plan-{cap_gib or 'whole'}.yaml"
    command = [sys.executable, "-m", "autotune", "plan", "--model", model, "--resolution", str(evidence.size(1024)),
               "--rank", str(WORKS[0].rank), "--batch", str(WORKS[0].batch), "--quality", "compact", "--no-profiles", "--json",
               "--search-time", str(max(10, min(200, round(evidence.left() - 20)))), *cap, "-o", str(path)]  # fmt: skip
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    path.unlink(missing_ok=True)  # the row holds it
    if done.returncode:
        evidence.row("plan", cap_gib=cap_gib, status=done.returncode, message=done.stderr.strip()[-400:])
        return
    made = json.loads(done.stdout)
    outcomes = Counter(trial["outcome"] for trial in made["frozen"]["trials"])
    evidence.row("plan", cap_gib=cap_gib, status=0, seconds=time.monotonic() - started, outcomes=outcomes, plan=made)


def main() -> None:
    evidence = begin("search", __doc__)
    model = evidence.model("qwen-image")
    for cap_gib in evidence.each(evidence.sliced(CAPS_GIB), name=lambda cap: f"plan within {cap} GiB"):
        plan(evidence, model, cap_gib)


if __name__ == "__main__":
    main()
