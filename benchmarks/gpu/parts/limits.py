"""What a step's time goes to: kernels by kind, gaps between them, the same split as predicted."""

import re
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

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
from autotune.machine.probe import cached_profile
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import Candidate
from autotune.plan.job import ModelRef
from autotune.plan.words import label_of
from autotune.plan.workload import Workload
from autotune.search.trials import ProcessTrialRunner
from autotune.search.worker import TASKS, ChildState, TrialRequest

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
    return next((kind for kind, words in KINDS if re.search(words, kernel, re.IGNORECASE)), "other")


@dataclass(frozen=True)
class ProfiledSteps:
    """A few steps under torch.profiler; wall time is of steps without it."""

    model: str
    workload: Workload
    candidate: Candidate
    device: str


def profile_steps(request: ProfiledSteps, _: ChildState) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    from autotune.search.worker import StepRunner, load_for_trial

    trial = TrialRequest(
        resolve_model(ModelRef.of(request.model)),
        request.workload,
        request.candidate,
        request.device,
        3,
    )
    steps = StepRunner(load_for_trial(trial), request.workload, request.candidate)
    seconds = statistics.median(steps.timed_step()[1] for _ in range(5))
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
            "top": top.most_common(25)}  # fmt: skip


TASKS[ProfiledSteps] = profile_steps


def main() -> None:
    """Measure the part."""
    evidence: Evidence = begin("limits", __doc__)
    hardware = cached_profile()
    model = evidence.model("qwen-image")
    resolved = resolve_model(ModelRef.of(model))
    workload = workload_of(model, evidence.size(1024), rank=16, batch=2)
    predictor = CostModel.build(hardware, workload, resolved.family, resolved.config)
    with ProcessTrialRunner(hardware, resolve_model(ModelRef.of(model)), workload) as runner:
        for number, run in enumerate(evidence.each(evidence.sliced(CASES))):
            chosen = candidate(workload, *run, precision=precision_of(hardware))
            if why := unavailable_choice(hardware, chosen):
                evidence.skip(label_of(chosen), why)
                continue
            request = ProfiledSteps(model, workload, chosen, runner.device)
            predicted = told(predictor.predict(chosen))
            answer = evidence.ask(runner, request, (number,))
            evidence.row("kernels", candidate=chosen.model_dump(), predicted=predicted, **answer)


if __name__ == "__main__":
    main()
