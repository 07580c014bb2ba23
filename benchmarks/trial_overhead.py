"""What a trial costs beyond its own work: from asking to answer, less loading and steps, cold and
warm.

    python benchmarks/trial_overhead.py [--trials 6] [--side-px 64]

Cold is a command's first trial: the fork server imports the libraries. A reload starts a fresh
child from it; a shared child has the model in memory already. `left` is what a user waits for
nothing: starting, sending, measuring, ending.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from autotune.families.resolve import resolve_model
from autotune.hardware.store import cached_profile
from autotune.runtime.quiet import silence_libraries, silence_progress_bars
from autotune.schema.candidate import Candidate
from autotune.schema.workload import Bucket, Workload
from autotune.trials.runner import ProcessTrialRunner
from tests.small import draw_images, write_small_pipeline


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--trials", type=int, default=6, help="of each kind")
    arguments.add_argument("--side-px", type=int, default=64)
    options = arguments.parse_args()
    silence_libraries()
    silence_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        write_small_pipeline("qwen-image", Path(folder) / "model", draw_images(Path(folder) / "i"))
        model = str(Path(folder) / "model")
        machine = cached_profile()
        rows: dict[str, list[tuple[float, float]]] = {"cold": [], "reload": [], "shared": []}
        with ProcessTrialRunner(machine, model, workload(model, options.side_px)) as runner:
            for number in range(options.trials):
                for kind, candidate in (("reload", settings(0)), ("shared", settings(1))):
                    if kind == "reload":
                        runner.close_child()
                    started = time.perf_counter()
                    result = runner.run(candidate)
                    whole = time.perf_counter() - started
                    if result.outcome != "ok":
                        raise SystemExit(f"a trial failed: {result.message}")
                    steps = sum(result.step_seconds) + sum(result.warmup_seconds)
                    work = steps + ((result.load_seconds or 0.0) if kind == "reload" else 0.0)
                    rows["cold" if number == 0 and kind == "reload" else kind].append(
                        (whole, whole - work)
                    )
    print(
        f"{machine.device.name}, {machine.host.logical_cores} cores; small Qwen-Image at "
        f"{options.side_px} px"
    )
    for kind, times in rows.items():
        left = sorted(over for _, over in times)
        if left:
            whole = statistics.median(whole for whole, _ in times)
            print(f"{kind:<8} n={len(left)}  whole {whole:.2f} s  left "
                  f"{statistics.median(left):.3f} s"
                  f"  (from {left[0]:.3f} to {left[-1]:.3f})")  # fmt: skip


def settings(blocks: int) -> Candidate:
    return Candidate(micro_batch_size=1, checkpointed_blocks=blocks, precision="fp32")


def workload(model: str, side_px: int) -> Workload:
    return Workload(
        model=resolve_model(model).spec,
        resolution_px=side_px,
        buckets=(Bucket(width_px=side_px, height_px=side_px, num_frames=1, num_items=12),),
        max_text_tokens=12,
        text_padding="masked",
        rank=4,
        lora_alpha=4.0,
        targets="attention",
        effective_batch_size=4,
    )


if __name__ == "__main__":
    main()
