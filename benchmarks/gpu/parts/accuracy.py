"""Predicted against measured memory and step time, before any trial and after one, of real
architectures at full size.

Weights are random: memory and time do not depend on them. A prediction is written down before its
trial starts.
"""

from dataclasses import dataclass
from typing import Any

from evidence import Evidence, Levers, ReservingTrial, begin, candidate, precision_of, workload_of

from autotune.cost.predict import CostModel
from autotune.knobs.registry import reload_key
from autotune.machine.probe import cached_profile
from autotune.models.resolve import resolve_model
from autotune.plan.candidate import Candidate, TrialResult
from autotune.plan.hardware import HardwareProfile
from autotune.plan.job import ModelRef
from autotune.plan.prediction import Prediction
from autotune.plan.words import label_of
from autotune.search.trials import ProcessTrialRunner
from autotune.search.worker import Failure

Run = tuple[Any, ...]
ALL, SOME, HALF, FEW, NONE = 1.0, 0.75, 0.5, 0.25, 0.0
INT8, FP8, NF4 = "torchao-int8", "torchao-fp8", "bnb-nf4"
COMPILED: Levers = (("norm_rope", "compiled"),)
AHEAD: Levers = (*COMPILED, ("modulation", "ahead"))
BLOCKS: Levers = (("compile", "block"),)


@dataclass(frozen=True)
class Work:
    """One workload and the settings to try on it: (micro-batch, share checkpointed, weight format,
    attention, levers).

    The first is also the grid for searches: `autotune plan` without data takes captions of
    different lengths."""

    side_px: int
    rank: int
    batch: int
    runs: tuple[Run, ...]
    targets: str = "attention"
    padding: str = "exact"
    must_fail: bool = False
    """Whether the first run is to run out of memory for real; the next shows that a search goes
    on after it."""


WORKS = (
    Work(1024, 16, 2, ((1, ALL), (1, SOME), (1, HALF), (1, FEW), (1, NONE), (2, ALL), (2, HALF), (2,
    NONE),
                       (1, NONE, "none", "native", COMPILED), (1, NONE, "int8-matmul", "native",
                       COMPILED),
                       (1, NONE, "fp8-matmul", "native", COMPILED), (1, ALL, "none", "native",
                       AHEAD),
                       (1, NONE, "none", "native", BLOCKS),
                       (1, ALL, "none", "_native_cudnn"), (1, NONE, "none", "_native_cudnn"),
                       (1, ALL, INT8), (1, NONE, INT8), (1, ALL, FP8), (1, NONE, FP8), (1, ALL,
                       NF4), (1, NONE, NF4)),
         padding="masked"),
    Work(512, 64, 4, ((4, ALL), (4, NONE), (1, NONE), (4, ALL, INT8), (4, NONE, NF4))),
    Work(1328, 8, 1, ((1, ALL), (1, HALF), (1, NONE), (1, ALL, FP8))),
    Work(1024, 128, 1, ((1, ALL), (1, HALF), (1, ALL, INT8)), targets="attention+mlp"),
    Work(1024, 8, 4, ((4, ALL), (4, SOME), (2, HALF))),
    Work(1024, 16, 2, ((2, ALL), (2, SOME))),
    Work(1328, 16, 16, ((16, NONE), (1, ALL)), must_fail=True),
)  # fmt: skip
MODELS = ("qwen-image", "flux1-dev")


def measure(evidence: Evidence, hardware: HardwareProfile, name: str, work: Work) -> None:
    """Every run of one workload; the first that works calibrates the predictions of the others."""
    model = evidence.model(name)
    resolved = resolve_model(ModelRef.of(model))
    workload = workload_of(model, evidence.size(work.side_px), rank=work.rank, batch=work.batch,
                           targets=work.targets, padding=work.padding)  # fmt: skip
    predictor = CostModel.build(hardware, workload, resolved.family, resolved.config)
    about = {
        "model": name,
        **{key: getattr(work, key) for key in ("side_px", "rank", "targets", "padding", "batch")},
    }
    first: TrialResult | None = None
    with ProcessTrialRunner(hardware, resolve_model(ModelRef.of(model)), workload) as runner:
        runs = tuple({run[2:]: run for run in work.runs}.values()) if evidence.small else work.runs
        for run in evidence.each(runs, name=lambda run: f"{name} {work.side_px} px {run}"):
            chosen = candidate(workload, *run, precision=precision_of(hardware))
            closed = unavailable_choice(hardware, chosen)
            before = predictor.predict(chosen)
            if closed or (
                before.run_memory_bytes > 1.1 * hardware.device.budget_bytes and not work.must_fail
            ):
                evidence.skip(f"{name} {label_of(chosen)}", closed or "predicted not to fit by far")
                continue
            evidence.row("prediction", **about, candidate=chosen.model_dump(), **told(before))
            after = predictor.with_calibration([first] if first else ()).predict(chosen)
            result, reserved = tried(evidence, runner, chosen)
            evidence.row(
                "trial", **about, grid=work is WORKS[0] and name == MODELS[0],
                predicted=told(before), calibrated=told(after) if first else None,
                reserved_bytes=reserved, **result.model_dump(mode="json"),
            )  # fmt: skip
            first = first or (result if result.outcome == "ok" else None)


def tried(
    evidence: Evidence, runner: ProcessTrialRunner, chosen: Candidate, num_steps: int = 3
) -> tuple[TrialResult, int | None]:
    """The trial's result and the bytes that the allocator reserved."""
    request = ReservingTrial(runner.model, runner.workload, chosen, runner.device, num_steps)
    answer = evidence.ask(runner, request, reload_key(chosen))
    result = (
        answer["result"]
        if answer["outcome"] == "ok"
        else Failure(answer["outcome"], answer["message"])
    )
    return runner.classify(chosen, result), answer.get("reserved_bytes")


def unavailable_choice(hardware: HardwareProfile, chosen: Candidate) -> str | None:
    """Why the machine cannot run the candidate; None when it can."""
    needed = [f"attention.{chosen.attention}", f"quantization.{chosen.quantization}"]
    if chosen.norm_rope == "compiled" or chosen.compile != "off":
        needed.append("compile")
    capabilities = (hardware.capability(name) for name in needed)
    return next(
        (f"{each.name}: {each.reason}" for each in capabilities if not each.available), None
    )


def told(prediction: Prediction) -> dict[str, Any]:
    train = prediction.training
    return {
        "allocated_bytes": prediction.allocated_memory_bytes,
        "reserved_bytes": train.run_memory_bytes - train.breakdown.process_overhead_bytes,
        "step_seconds": prediction.step_seconds,
        "step_time": prediction.step_time.model_dump(),
        "memory_uncertainty": prediction.memory_uncertainty,
        "time_uncertainty": prediction.time_uncertainty,
    }


def main() -> None:
    """Measure the part."""
    evidence = begin("accuracy", __doc__)
    hardware = cached_profile()
    for name, work in evidence.sliced(
        [(name, work) for work in WORKS[: 2 if evidence.small else None] for name in MODELS]
    ):
        try:
            measure(evidence, hardware, name, work)
        except Exception as error:  # one workload's trouble is not the others'
            evidence.row(
                "error",
                model=name,
                side_px=work.side_px,
                message=f"{type(error).__name__}: {error}"[:400],
            )


if __name__ == "__main__":
    main()
