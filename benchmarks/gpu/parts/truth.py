"""Measured memory and step time of published architectures at full size, and where the time goes.

Weights are random: memory and time do not depend on them. Nothing is predicted here, for that costs
minutes of a GPU: `compare.py` predicts from the machine's profile and these rows, anywhere.

Each case names a model, its work and settings that are tried one after the other. A setting is
`KNOB=VALUE` pairs; `recompute` is the share of blocks that recompute their activations, and `?`
at the end profiles a step, kernel by kernel.
"""

import statistics
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from typing import Any

from evidence import Evidence, begin, precision_of, workload_of

from autotune.knobs.registry import reload_key
from autotune.machine.probe import cached_profile
from autotune.machine.rates import Meter
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import Candidate
from autotune.plan.hardware import HardwareProfile
from autotune.plan.job import ModelRef
from autotune.plan.workload import Workload
from autotune.search.trials import ProcessTrialRunner
from autotune.search.worker import ChildState, Failure, StepRunner, TrialRequest


@dataclass(frozen=True)
class Case:
    """A model, its work, and settings in the order in which they are tried."""

    model: str
    settings: tuple[str, ...]
    size_px: tuple[int, int] = (1024, 1024)
    num_frames: int = 1
    batch: int = 2
    text_tokens: int | None = None
    padding: str = "exact"
    targets: str = "attention"
    rank: int = 16


PLAIN = ("recompute=1", "recompute=0 ?", "recompute=0.5", "micro=2,recompute=1", "micro=2")
CASES: dict[str, tuple[Case, ...]] = {
    "models": (
        Case("qwen-image", (*PLAIN, "selective=1", "recompute=1,swap=40")),
        Case("sdxl", ("micro=4,recompute=0 ?", "recompute=0", "micro=4,recompute=1"), batch=4),
        Case("z-image", ("recompute=0 ?", "micro=2,recompute=1", "recompute=1,swap=20")),
        Case("krea-2", ("recompute=0 ?", "recompute=1")),
        Case("flux1-dev", ("recompute=0 ?", "recompute=1", "micro=2", "recompute=1,swap=40")),
        Case("wan-2.1", ("recompute=1 ?",), (832, 480), 49, batch=1),
        Case("wan-2.2", ("recompute=1", "recompute=0"), (832, 480), 49, batch=1),
        Case("ltx-2.3", ("recompute=1 ?",), (768, 512), 49, batch=1),
        Case("chroma", ("recompute=0", "recompute=1 ?"), padding="masked"),
        Case("flux2-klein", ("recompute=0 ?", "micro=2,recompute=1")),
        Case("qwen-image-2.1", ("recompute=0", "recompute=1")),
        Case("sd3.5", ("recompute=0", "recompute=1")),
        Case("qwen-image", ("recompute=1", "micro=2,recompute=0"), padding="masked"),
        Case("kandinsky5-image-lite", ("recompute=0", "recompute=1")),
        Case("wan-2.1-14b", ("recompute=1",), (832, 480), 33, batch=1),
        Case("flux2-dev", ("recompute=1",), batch=1),
        Case("qwen-image", ("recompute=1",), (1328, 1328), batch=1),
        Case("qwen-image", ("recompute=1",), targets="attention+mlp", rank=64),
        Case("qwen-image", ("micro=4",), batch=4),
    ),
    "formats": (
        Case(
            "qwen-image",
            (
                "recompute=0",
                *(f"{form},recompute=0 ?" for form in ("int8", "fp8", "nf4", "int8mm", "fp8mm")),
                *(f"{form},micro=2,recompute=1" for form in ("int8", "fp8", "nf4")),
                "int8,recompute=1,swap=40",
            ),
        ),
        Case("flux1-dev", ("int8,recompute=1", "nf4,recompute=0", "fp8mm,recompute=0")),
        Case("z-image", ("int8,recompute=0", "fp8mm,recompute=0 ?")),
        Case("sdxl", ("int8,micro=4",), batch=4),
    ),
    "knobs": (  # each alone and some together, in groups with their own first row
        Case(
            "flux1-dev",
            (
                "recompute=0 ?",
                "norm_rope=fused,recompute=0 ?",
                "norm_rope=compiled,recompute=0 ?",
                "compile=block,recompute=0 ?",
                "ahead,recompute=0",
                "ahead,norm_rope=compiled,recompute=0",
                "recompute=1",
                "selective=1",
                "compile=block,recompute=1",
                "recompute=1,swap=20",
                "fp8mm,recompute=0",
                "fp8mm,compile=block,recompute=0 ?",
                "int8mm,recompute=0",
                "int8mm,compile=block,recompute=0 ?",
                "int8,recompute=0",
                "int8,compile=block,recompute=0",
            ),
            batch=1,
        ),
        Case(
            "flux1-dev",
            (
                "micro=4,recompute=1",
                "micro=4,norm_rope=compiled,recompute=1",
                "micro=4,compile=block,recompute=1 ?",
                "micro=4,selective=1",
                "micro=4,recompute=1,swap=40",
                "micro=4,ahead,recompute=1",
                "micro=4,fp8mm,compile=block,recompute=1",
                "micro=4,int8mm,compile=block,recompute=1",
                "micro=4,int8,compile=block,recompute=1",
            ),
            batch=4,
        ),
        Case("qwen-image", ("recompute=0", "compile=block,recompute=0 ?"), batch=1),
        Case("z-image", ("recompute=0", "compile=block,recompute=0 ?"), batch=1),
        Case("krea-2", ("recompute=0", "compile=block,recompute=0"), batch=1),
        Case("wan-2.1", ("recompute=1", "compile=block,recompute=1"), (832, 480), 49, batch=1),
    ),
}
FORMATS = {
    "int8": "torchao-int8",
    "fp8": "torchao-fp8",
    "nf4": "bnb-nf4",
    "int8mm": "int8-rotated",
    "fp8mm": "fp8-matmul",
}
WORDS = {
    **{word: ("quantization", name) for word, name in FORMATS.items()},
    "cudnn": ("attention", "_native_cudnn"),
    "ahead": ("modulation", "ahead"),
}
SHARES = {"recompute": "checkpointed_blocks", "selective": "selective_blocks"}
COUNTS = {"micro": "micro_batch_size", "swap": "swapped_blocks"}


def candidate_of(text: str, workload: Workload, hardware: HardwareProfile) -> Candidate:
    """The settings that a text stands for; all that it leaves out as a plan without choices."""
    num_blocks = workload.model.num_blocks
    precision = precision_of(hardware)
    fields: dict[str, Any] = {"micro_batch_size": 1, "checkpointed_blocks": 0}
    for word in text.split(","):
        name, _, value = word.partition("=")
        if name in WORDS:
            fields.update([WORDS[name]])
        elif name in SHARES:
            fields[SHARES[name]] = round(float(value) * (num_blocks - 1))
        elif name in COUNTS:
            most = workload.effective_batch_size if name == "micro" else num_blocks - 2
            fields[COUNTS[name]] = min(int(value), most)
        else:
            fields[name] = value
    allocator = "expandable" if precision == "bf16" else "default"
    return Candidate(precision=precision, allocator=allocator, **fields)


def why_closed(hardware: HardwareProfile, chosen: Candidate) -> str | None:
    """Why the machine cannot run the candidate; None when it can."""
    needed = [f"attention.{chosen.attention}", f"quantization.{chosen.quantization}"]
    if chosen.norm_rope == "compiled" or chosen.compile != "off":
        needed.append("compile")
    capabilities = (hardware.capability(name) for name in needed)
    closed = (f"{each.name}: {each.reason}" for each in capabilities if not each.available)
    return next(closed, None)


@dataclass(frozen=True)
class Measured(TrialRequest):
    """A trial that also tells what the allocator reserved, and a step kernel by kernel."""

    hardware: HardwareProfile | None = None
    is_profiled: bool = False

    def perform(self, child: ChildState) -> Any:
        import torch

        on_gpu = self.device.startswith("cuda")
        answer: dict[str, Any] = {"result": super().perform(child)}
        if on_gpu:
            answer["reserved_bytes"] = torch.cuda.max_memory_reserved(self.device)
        if self.is_profiled:
            steps = StepRunner(child.cache["loaded"], self.workload, self.candidate)
            answer["profile"] = profiled_step(steps, on_gpu)
        if on_gpu:  # a next candidate in this process is measured by itself
            assert self.hardware is not None
            answer["launch_seconds"] = Meter(self.hardware, lambda: None).launch().value
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        return answer


def profiled_step(steps: StepRunner, on_gpu: bool) -> dict[str, Any]:
    """Seconds without the profiler, and of each kernel under it."""
    from torch.profiler import ProfilerActivity, profile

    seconds = statistics.median(steps.timed_step()[1] for _ in range(4)[1:])
    kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiler:
        started = time.perf_counter()
        steps.step()
        profiled = time.perf_counter() - started
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in profiler.key_averages():
        if on_gpu and (event.device_type.name != "CUDA" or event.is_user_annotation):
            continue  # such as `Optimizer.step`, which spans kernels that are counted
        times[event.key[:200]] += (
            event.self_device_time_total if on_gpu else event.self_cpu_time_total
        ) / 1e6
        counts[event.key[:200]] += event.count
    top = [(name, round(spent, 6), counts[name]) for name, spent in times.most_common(60)]
    sums = {"kernel_seconds": sum(times.values()), "launches": sum(counts.values())}
    return {"step_seconds": seconds, "profiled_seconds": profiled, **sums, "kernels": top}


def tried(evidence: Evidence, case: Case, hardware: HardwareProfile, texts: list[str]) -> None:
    """Every setting of one case."""
    model = resolve_model(ModelRef.of(evidence.model(case.model)))
    about = {
        "model": case.model,
        "size_px": case.size_px,
        "num_frames": case.num_frames,
        "rank": case.rank,
        "targets": case.targets,
    }
    workload = workload_of(
        evidence.model(case.model),
        (evidence.size(case.size_px[0]), evidence.size(case.size_px[1])),
        num_frames=5 if evidence.small and case.num_frames > 1 else case.num_frames,
        rank=case.rank,
        batch=case.batch,
        targets=case.targets,
        padding=case.padding,
        text_tokens=case.text_tokens,
    )
    evidence.row("work", **about, workload=workload.model_dump(mode="json"))
    with ProcessTrialRunner(hardware, model, workload) as runner:
        for text in evidence.each(texts, name=lambda text: f"{case.model} {text}"):
            chosen = candidate_of(text.removesuffix(" ?"), workload, hardware)
            if why := why_closed(hardware, chosen):
                evidence.skip(f"{case.model} {text}", why)
                continue
            started = time.monotonic()
            request = Measured(
                *(model, workload, chosen, runner.device, 3),
                hardware=hardware,
                is_profiled=text.endswith("?"),
            )
            answer = runner.send(request, reload_key(chosen), max(1.0, evidence.left()))
            extra: dict[str, Any] = {}
            if isinstance(answer, Failure):
                extra["log"] = runner._log.read_text(errors="replace")[-3000:]
                result = runner.classify(chosen, answer)
            else:
                extra = {key: value for key, value in answer.items() if key != "result"}
                result = runner.classify(chosen, answer["result"])
            wall = round(time.monotonic() - started, 2)
            evidence.row(
                "trial",
                **about,
                setting=text.removesuffix(" ?"),
                batch=case.batch,
                padding=workload.text_padding,
                **{**result.model_dump(mode="json"), "wall_seconds": wall},
                **extra,
            )


def main() -> None:
    """Measure the part; OUT of time, what is left is named."""
    evidence = begin("truth", __doc__, more={"--cases": "models"})
    hardware = cached_profile()
    evidence.row("profile", profile=hardware.model_dump(mode="json"))
    wanted, _, only = evidence.options.cases.partition(":")
    for case in evidence.sliced(CASES[wanted]):
        if only and case.model not in only.split("+"):
            continue
        try:
            tried(evidence, case, hardware, list(case.settings))
        except Exception as error:  # one case's trouble is not the others'
            message = f"{type(error).__name__}: {error}"[:400]
            log = traceback.format_exc()[-3000:]
            evidence.row("error", model=case.model, message=message, log=log)


if __name__ == "__main__":
    main()
