"""What a step's time goes to: kernels by kind, gaps between them, the same split as predicted;
and its energy.
"""

import contextlib
import re
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accuracy import (
    ALL,
    BLOCKS,
    COMPILED,
    FP8,
    HALF,
    INT8,
    NF4,
    NONE,
    Run,
    told,
    unavailable_choice,
)
from evidence import Evidence, begin, candidate, precision_of, workload_of

from autotune.cost.predict import CostModel
from autotune.families.resolve import resolve_model
from autotune.hardware.energy import EnergyMeter
from autotune.hardware.sources import RealSystem
from autotune.hardware.store import cached_profile
from autotune.hardware.system import Unavailable
from autotune.schema.candidate import Candidate
from autotune.schema.workload import Workload
from autotune.trials.requests import ChildState, TrialRequest
from autotune.trials.runner import ProcessTrialRunner
from autotune.trials.worker import TASKS

if TYPE_CHECKING:
    from autotune.trials.steps import StepRunner

METERED_SECONDS = 3.0
"""Of steps whose energy is read: some counters go on ten times a second."""
KINDS = (
    ("attention", r"flash|fmha|attention|cudnn.*sdpa|mha"),
    ("matmul", r"gemm|gemv|cutlass|cublas|nvjet|xmma|wgmma|matmul|addmm|aten::mm|bmm"),
    ("norm", r"norm"),
    ("quantized weights", r"quant|dequant|kdequantize"),
    ("copy and cast", r"memcpy|memset|copy|cast|_to_copy|cat"),
    ("optimizer", r"adam|multi_tensor"),
    ("reduce", r"reduce|sum|mean"),
    ("elementwise", r"elementwise|vectorized|unrolled|mul|add|gelu|silu"),
)
CASES: tuple[Run, ...] = (
    (1, ALL),
    (1, NONE),
    (2, HALF),
    (1, ALL, INT8),
    (1, ALL, FP8),
    (1, ALL, NF4),
    (1, ALL, "none", "_native_cudnn"),
    (1, NONE, "none", "native", COMPILED),
    (1, NONE, "int8-matmul", "native", COMPILED),
    (1, NONE, "fp8-matmul", "native", COMPILED),
    (1, NONE, "none", "native", BLOCKS),
)


def kind_of(kernel: str) -> str:
    """What a kernel is for, from its name."""
    return next((kind for kind, words in KINDS if re.search(words, kernel, re.IGNORECASE)), "other")


@dataclass(frozen=True)
class ProfiledSteps:
    """A few steps under torch.profiler; wall time is of steps without it."""

    model: str
    workload: Workload
    candidate: Candidate
    device: str


def measure_energy(steps: "StepRunner", device: str) -> dict[str, Any]:
    """Joules of a step by the card's counter, and by the power that it told after each step times
    the seconds.

    Counter and power come from different readings of NVML: that they agree is what is to be shown.
    """
    kind, _, index = device.partition(":")
    taken: list[float] = []
    watts: list[float] = []
    with EnergyMeter(kind, int(index or 0)) as meter:
        first = meter.read()
        while len(taken) < 5 or (first and sum(taken) < METERED_SECONDS):
            taken.append(steps.timed_step()[1])
            with contextlib.suppress(Unavailable):
                watts.append(float(str(RealSystem().query("nvml", "power_watts", int(index or 0)))))
        last = meter.read()
    joules = (last.joules - first.joules) / len(taken) if first and last else None
    by_power = statistics.fmean(watts) * statistics.fmean(taken) if watts else None
    return {"seconds": taken, "step_joules": joules, "watts": watts,
    "step_joules_by_power": by_power,
            "reason": meter.reason}  # fmt: skip


def profile_steps(request: ProfiledSteps, _: ChildState) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    from autotune.trials.steps import StepRunner, load_for_trial

    trial = TrialRequest(request.model, request.workload, request.candidate, request.device, 3)
    steps = StepRunner(load_for_trial(trial), request.workload, request.candidate)
    energy = measure_energy(steps, request.device)
    seconds = statistics.median(energy["seconds"])
    on_gpu = request.device.startswith("cuda")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        started = time.perf_counter()
        steps.step()
        profiled = time.perf_counter() - started
    times: Counter[str] = Counter()
    top: Counter[str] = Counter()
    launches = 0
    for event in profiler.key_averages():
        if on_gpu and (event.device_type.name != "CUDA" or event.is_user_annotation):
            continue  # such as `Optimizer.step`, which spans kernels that are counted
        spent = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        times[kind_of(event.key)] += spent
        top[event.key[:120]] += spent
        launches += event.count
    return {"step_seconds": seconds, "profiled_seconds": profiled, "by_kind": dict(times),
    "launches": launches,
            "energy": energy, "top": top.most_common(25)}  # fmt: skip


TASKS[ProfiledSteps] = profile_steps


def main() -> None:
    """Measure the part."""
    evidence: Evidence = begin("limits", __doc__)
    hardware = cached_profile()
    model = evidence.model("qwen-image")
    resolved = resolve_model(model)
    workload = workload_of(model, evidence.size(1024), rank=16, batch=2)
    predictor = CostModel.build(hardware, workload, resolved.family, resolved.config)
    with ProcessTrialRunner(hardware, model, workload) as runner:
        for number, run in enumerate(evidence.each(evidence.sliced(CASES))):
            chosen = candidate(workload, *run, precision=precision_of(hardware))
            if why := unavailable_choice(hardware, chosen):
                evidence.skip(chosen.label(), why)
                continue
            request = ProfiledSteps(model, workload, chosen, runner.device)
            predicted = told(predictor.predict(chosen))
            answer = evidence.ask(runner, request, (number,))
            evidence.row("kernels", candidate=chosen.model_dump(), predicted=predicted, **answer)


if __name__ == "__main__":
    main()
