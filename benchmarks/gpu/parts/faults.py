"""What goes wrong on purpose: settings that cannot fit, and two searches at once."""

import subprocess
import time

from accuracy import NONE, tried
from evidence import Evidence, begin, candidate, precision_of, workload_of
from run import autotune

from autotune.schema import HardwareProfile
from autotune.trials.runner import ProcessTrialRunner

def cannot_fit(evidence: Evidence, hardware: HardwareProfile) -> None:
    """Out of memory for real, and a trial afterwards, as a search would go on."""
    model = evidence.model("qwen-image")
    batch = 2 if evidence.small else 16
    workload = workload_of(model, evidence.size(1328), rank=16, batch=batch)
    with ProcessTrialRunner.on(hardware, model, workload) as runner:
        for size, share in ((batch, NONE), (1, 1.0)):
            chosen = candidate(workload, size, share, precision=precision_of(hardware))
            result, _ = tried(runner, chosen, num_steps=1)
            evidence.row("trial", what="beyond the card" if size > 1 else "right after", **result.model_dump(mode="json"))


def two_searches(evidence: Evidence) -> None:
    """Both must end well, one after the other; neither may measure the other."""
    model = evidence.model("flux1-dev")
    command = autotune("plan", "--model", model, "--resolution", evidence.size(512), "--max-trials", 2, "--batch", 1,
                       "--search-time", 60, "--no-profiles")  # fmt: skip
    started = time.monotonic()
    running = [subprocess.Popen([*command, "-o", str(evidence.scratch() / f"two-{number}.yaml")], text=True,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
               for number in range(2)]  # fmt: skip
    for number, process in enumerate(running):
        try:
            said, _ = process.communicate(timeout=max(10.0, min(240.0, evidence.left())))
        except subprocess.TimeoutExpired:
            process.kill()
            said = "did not end"
        evidence.row("search", number=number, status=process.returncode, seconds=time.monotonic() - started,
                     said=said.strip()[-400:])  # fmt: skip


def main() -> None:
    evidence = begin("faults", __doc__)
    hardware = evidence.hardware()
    for fault in (lambda: cannot_fit(evidence, hardware), lambda: two_searches(evidence)):
        try:
            fault()
        except Exception as error:  # the others are still worth having
            evidence.row("error", message=f"{type(error).__name__}: {error}"[:400])


if __name__ == "__main__":
    main()
