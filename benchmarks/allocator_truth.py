"""Memory at full size: what the cost model predicts against what torch's CUDA allocator holds.

It runs on the stand-in for NVIDIA's libraries (CONTRIBUTING, "Without a GPU"), where models of full
size need no memory of the host:

    export FAKEGPU=4090 FAKEGPU_COPIES=0
    tests/fakegpu/run benchmarks/allocator_truth.py ROWS.jsonl MODEL SIDE_PX [KNOB=VALUE,...]...

Each setting is a process of its own and gives a line; those that the file has are left out.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def measure(name: str, side_px: int, text: str) -> dict[str, Any]:
    import torch

    from autotune.cost.predict import CostModel
    from autotune.knobs.settings import configure_allocator
    from autotune.machine.probe import probe
    from autotune.models.resolve import resolve_model
    from autotune.plan.candidate import Candidate
    from autotune.plan.job import ModelRef
    from autotune.plan.workload import WorkloadRequest
    from autotune.search.worker import StepRunner, TrialRequest, load_for_trial
    from autotune.train import model as building
    from autotune.train.processes import set_device
    from autotune.train.workload import describe_workload

    building.require_quality = lambda *_: None  # of what no kernel computed
    pairs = (pair.split("=") for pair in text.split(",") if pair)
    changes = {key: int(value) if value.isdigit() else value for key, value in pairs}
    candidate = Candidate.model_validate(
        {"micro_batch_size": 1, "checkpointed_blocks": 0, **changes}
    )
    hardware, resolved = probe(), resolve_model(ModelRef.of(name))
    configure_allocator(candidate.allocator)
    set_device(torch.device("cuda", 0))
    size: Any = {
        "resolution": (side_px, side_px),
        "text_tokens": min(512, resolved.family.max_text_tokens),
    }
    asked = WorkloadRequest(rank=16, effective_batch_size=candidate.micro_batch_size, **size)
    work = describe_workload(resolved, None, asked).changed(quality="compact")
    predicted = CostModel.build(hardware, work, resolved.family, resolved.config).predict(candidate)
    row = {"machine": os.environ["FAKEGPU"], "model": name, "side_px": side_px, "settings": text}
    row |= {"torch": torch.__version__, "predicted_bytes": predicted.allocated_memory_bytes}
    reserved = predicted.training.run_memory_bytes - hardware.process_overhead_bytes
    row |= {"predicted_reserved_bytes": reserved}
    try:
        loaded = load_for_trial(TrialRequest(resolved, work, candidate, "cuda:0", num_steps=2))
        runner = StepRunner(loaded, work, candidate)
        runner.timed_step()
        peak, _ = runner.memory_step()
    except torch.OutOfMemoryError as error:
        return row | {"out_of_memory": str(error).split(". ")[0]}
    reserved, stats = torch.cuda.max_memory_reserved(), torch.cuda.memory_stats()
    row |= {"allocated_bytes": peak, "reserved_bytes": reserved}
    row |= {"retries": stats["num_alloc_retries"]}
    return row | {"error": round(predicted.allocated_memory_bytes / peak - 1, 4)}


def main() -> None:
    if sys.argv[1] == "--row":
        row = measure(sys.argv[2], int(sys.argv[3]), sys.argv[4])
        sys.stdout.write(json.dumps(row) + "\n")
        return
    file, name, side_px, *settings = sys.argv[1:]
    lines = Path(file).read_text().splitlines() if Path(file).exists() else []
    rows = map(json.loads, lines)
    known = [tuple(row[key] for key in ("machine", "model", "side_px", "settings")) for row in rows]
    for text in settings:
        if (os.environ["FAKEGPU"], name, int(side_px), text) in known:
            continue
        command = [sys.executable, __file__, "--row", name, side_px, text]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0:
            with Path(file).open("a") as results:
                results.write(done.stdout.splitlines()[-1] + "\n")


if __name__ == "__main__":
    main()
