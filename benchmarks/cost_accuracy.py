"""Predicted against real: peak memory and step time of some 150 configurations on this CPU.

    python benchmarks/cost_accuracy.py [--memory] [--output
    benchmarks/results/cost_accuracy_<date>.json] [FAMILY…]

Memory: allocation events of PyTorch's profiler during a real optimizer step, plus what was resident
before. Time: the process's own time on one core, the least of three steps. Rates are measured at
the models' shapes first; then one trial per family (its first configuration) calibrates the others.
`--memory` measures no time, so that a machine that others use will do.
"""

import argparse
import datetime
import json
import math
import platform
import statistics
import time
from pathlib import Path
from typing import Any, Literal

from autotune.system.process import silence_libraries

silence_libraries()

import torch
from configs import MID
from cpu_truth import run

from autotune.cost.kernels import kernel_for
from autotune.cost.predict import CostModel
from autotune.machine.probe import probe
from autotune.machine.rates import Meter, kernel_names
from autotune.models.family import Family, build_on_meta
from autotune.models.registry import FAMILIES
from autotune.plan.base import digest_of
from autotune.plan.candidate import Candidate, TrialResult
from autotune.plan.hardware import HardwareProfile, Rate
from autotune.plan.words import label_of
from autotune.plan.workload import Bucket, ModelSpec, Workload

SIDE_PX = 256
TEXT_TOKENS = 32


def timed(call: Any, num_calls: int) -> float:
    """Least seconds of one call, on this process's core."""
    best = math.inf
    for _ in range(3):
        start = time.process_time()
        for _ in range(num_calls):
            call()
        best = min(best, (time.process_time() - start) / num_calls)
    return best


def measured(hardware: HardwareProfile, predictor: CostModel) -> HardwareProfile:
    """`hardware` with rates at the shapes that do most of the work, as a probe would measure
    them."""
    trace = predictor.model.traced("fp32", "none", kernel_for("native", "cpu", False), 2, 0)
    work: dict[tuple[str, tuple[int, ...]], int] = {}
    for segment in (*trace.forward, *trace.backward):
        for (kind, shape, flops, _), count in segment.work.items():
            work[kind, shape] = work.get((kind, shape), 0) + flops * count
    products = sorted((item for item in work if item[0] == "matmul"), key=lambda item: -work[item])[
        :8
    ]
    rates: list[tuple[str, float, Literal["FLOP/s", "B/s"]]] = []
    for _, (m, k, n) in products:
        left, right = torch.randn(m, k), torch.randn(n, k).t()
        seconds = timed(lambda left=left, right=right: left @ right, 5)
        rates.append(("matmul.fp32." + f"{m}x{k}x{n}", 2 * m * k * n / seconds, "FLOP/s"))
        left, right = left.to(torch.int8), right.t().to(torch.int8).t()
        seconds = timed(lambda left=left, right=right: torch._int_mm(left, right), 5)
        rates.append(("matmul.int8." + f"{m}x{k}x{n}", 2 * m * k * n / seconds, "FLOP/s"))
    for kind, shape in work:
        if (
            kind != "attention"
            or shape[2] != shape[3]
            or any(name.endswith(f".{shape[2]}") for name, _, _ in rates)
        ):
            continue
        batch, heads, tokens, _, size = shape
        query = torch.randn(batch, heads, tokens, size, requires_grad=True)
        attend = torch.nn.functional.scaled_dot_product_attention
        seconds = timed(
            lambda q=query, attend=attend: torch.autograd.grad(attend(q, q, q).sum(), q), 3
        )
        rates.append(
            (
                f"attention.native.fp32.{tokens}",
                14 * batch * heads * tokens**2 * size / seconds,
                "FLOP/s",
            )
        )
    source, target = torch.randn(1 << 22), torch.randn(1 << 22)
    rates.append(
        ("memory.bandwidth", 2 * 4 * (1 << 22) / timed(lambda: target.copy_(source), 5), "B/s")
    )
    found = tuple(Rate(name=n, value=v, unit=u, spread=0.0, num_samples=3) for n, v, u in rates)
    meter = Meter(hardware, lambda: None)
    kernels = (meter.kernel(name, "fp32") for name in kernel_names(hardware))
    return hardware.model_copy(update={"rates": (*found, meter.launch(), *kernels)})


def candidates(family: Family, num_blocks: int) -> list[Candidate]:
    """Twelve that every family takes, and up to four with what it can compute ahead, fuse or
    keep of its attention."""
    last, half = num_blocks - 1, num_blocks // 2
    plans: list[tuple[int, int, dict[str, Any]]] = [
        (2, 0, {}), (1, 0, {}), (4, 0, {}), (2, half, {}), (4, last, {}), (2, last,
        {"quantization": "torchao-int8"}),
        (2, last, {"quantization": "bnb-nf4"}),
        (2, 1, {"selective_blocks": last - 1}),
        (2, 0, {"quantization": "int8-rotated"}), (2, half, {"quantization": "torchao-fp8"}),
    ]  # fmt: skip
    newer: dict[str, Any] = {}
    if family.modulation:
        newer["modulation"] = "ahead"
        plans.append((2, half, dict(newer)))
    if family.attention_layouts:
        plans.append((2, 0, {"norm_rope": "fused"}))
        newer["norm_rope"] = "fused"
    if newer:
        plans.append(
            (4, half, {**newer, "selective_blocks": last - half, "quantization": "torchao-int8"})
        )
    return [
        Candidate(micro_batch_size=size, checkpointed_blocks=k, precision="fp32", **others)
        for size, k, others in plans
    ]


def workload_of(name: str) -> Workload:
    family, config = FAMILIES[name], MID[name]
    transformer = build_on_meta(family, config)
    spec = ModelSpec(
        family=name,
        architecture=digest_of({"config": json.loads(json.dumps(config))}),
        num_parameters=sum(p.numel() for p in transformer.parameters()),
        num_blocks=len(family.blocks(transformer)),
        name=f"{name} mid-size",
    )
    frames = 5 if family.can_train_clips else 1
    return Workload(
        model=spec,
        resolution_px=SIDE_PX,
        buckets=(Bucket(width_px=SIDE_PX, height_px=SIDE_PX, num_frames=frames, num_items=20),),
        max_text_tokens=TEXT_TOKENS,
        num_control_images=family.min_controls,
        text_padding="exact",
        rank=8,
        lora_alpha=8.0,
        targets="attention",
        effective_batch_size=4,
    )


def measure_family(
    name: str, hardware: HardwareProfile, *, with_time: bool
) -> list[dict[str, Any]]:
    family, config, workload = FAMILIES[name], MID[name], workload_of(name)
    predictor = CostModel.build(hardware, workload, family, config)
    if with_time:
        predictor = CostModel.build(measured(hardware, predictor), workload, family, config)
    rows: list[dict[str, Any]] = []
    for candidate in candidates(family, workload.model.num_blocks):
        before = predictor.predict_uncalibrated(candidate)
        truth = run(family, config, workload, candidate, num_timed=3 if with_time else 0)
        row = {
            "family": name,
            "candidate": label_of(dict(candidate)),
            "peak_bytes": truth.peak_bytes,
        }
        row["predicted_peak_bytes"] = before.allocated_memory_bytes
        if with_time:
            seconds = min(truth.step_seconds)
            if not rows:
                peak = truth.peak_bytes
                trial = TrialResult(
                    candidate=candidate,
                    outcome="ok",
                    step_seconds=(seconds,),
                    peak_memory_bytes=peak,
                )
                predictor = predictor.with_calibration([trial])
            row |= {
                "step_seconds": seconds,
                "predicted_step_seconds_before": before.step_seconds,
                "predicted_step_seconds": predictor.predict(candidate).step_seconds,
                "calibrated_on": not rows,
            }
        rows.append(row)
        print(_line(row), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    memory = row["predicted_peak_bytes"] / row["peak_bytes"] - 1
    line = (
        f"{row['family']:22} {row['candidate']:42} {row['peak_bytes'] / 1e6:8.1f} MB "
        f"{100 * memory:+6.2f}%"
    )
    if "step_seconds" not in row:
        return line
    before = row["predicted_step_seconds_before"] / row["step_seconds"] - 1
    after = row["predicted_step_seconds"] / row["step_seconds"] - 1
    return f"{line}  {row['step_seconds']:6.3f} s {100 * before:+6.1f}% -> {100 * after:+6.1f}%"


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Mean and 95th percentile of absolute relative errors, and how many of the five fastest are
    found."""
    memory = sorted(abs(r["predicted_peak_bytes"] / r["peak_bytes"] - 1) for r in rows)
    found = {
        "num_configurations": len(rows),
        "memory_mean_error": statistics.mean(memory),
        "memory_p95_error": memory[math.ceil(0.95 * len(memory)) - 1],
        "memory_max_error": memory[-1],
    }
    if "step_seconds" not in rows[0]:
        return found
    classify = [r for r in rows if not r["calibrated_on"]]
    times = sorted(abs(r["predicted_step_seconds"] / r["step_seconds"] - 1) for r in classify)
    real = sorted(range(len(rows)), key=lambda i: rows[i]["step_seconds"])[:5]
    told = sorted(range(len(rows)), key=lambda i: rows[i]["predicted_step_seconds"])[:5]
    return {
        **found,
        "time_mean_error": statistics.mean(times),
        "time_p95_error": times[math.ceil(0.95 * len(times)) - 1],
        "top5_recall": len(set(real) & set(told)) / 5,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    default = Path(__file__).parent / "results" / f"cost_accuracy_{today}.json"
    parser.add_argument("--output", type=Path, default=default)
    parser.add_argument("families", nargs="*", default=list(MID), help="all by default")
    parser.add_argument("--memory", action="store_true", help="measure no time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hardware, with_time = probe(), not arguments.memory
    rows = [
        row
        for name in arguments.families
        for row in measure_family(name, hardware, with_time=with_time)
    ]
    result = summary(rows)
    for key, value in result.items():
        print(f"{key:24}{value:.4g}")
    context = {
        "date": today,
        "cpu": platform.processor() or hardware.host.cpu,
        "torch": torch.__version__,
        "threads": 1,
    }
    arguments.output.write_text(
        json.dumps({"context": context, "summary": result, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
