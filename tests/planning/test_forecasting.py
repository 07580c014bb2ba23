"""Which predictions a plan keeps of all."""

from autotune.plan.candidate import Candidate
from autotune.plan.forecast import Forecast
from autotune.plan.prediction import PhaseMemory, Prediction, StepTime
from autotune.search.expected import build_forecast
from tests import builders

GIB = 2**30
STEP_TIME = StepTime.model_validate(
    {**dict.fromkeys(StepTime.model_fields, 0.0), "matmul_seconds": 1 / 3}
)


def prediction(candidate: Candidate, seconds: float, gib: float) -> Prediction:
    size = int(gib * GIB)
    return Prediction.model_construct(
        candidate=candidate,
        step_seconds=seconds,
        allocated_memory_bytes=size,
        run_memory_bytes=size + GIB,
        phases=(PhaseMemory.model_construct(name="train", run_memory_bytes=size + GIB),),
    )


def predictions() -> list[Prediction]:
    """More batch is faster and larger; int8 is smaller and slower; fewer checkpointed blocks are
    faster and larger."""
    found = []
    for size in (1, 2, 4, 8):
        for storage in ("none", "torchao-int8"):
            for blocks in range(60):
                weights, penalty = (12, 1.0) if storage == "none" else (7, 1.3)
                seconds = penalty * (1 + blocks / 200) / size**0.2
                found.append(
                    prediction(
                        builders.candidate(
                            micro_batch_size=size, quantization=storage, checkpointed_blocks=blocks
                        ),
                        seconds,
                        weights + size * (1.1 - blocks / 60),
                    )
                )
    return found


def forecast(
    settings: Candidate, budget_gib: float = 17.0, tried: tuple[Prediction, ...] = ()
) -> Forecast:
    return build_forecast(
        predictions(),
        settings,
        int(budget_gib * GIB),
        STEP_TIME,
        {each.candidate: each for each in tried},
    )


SETTINGS = builders.candidate(micro_batch_size=2, checkpointed_blocks=0)


def test_it_has_the_best_with_every_value_and_the_front() -> None:
    made = forecast(SETTINGS)
    kept = {each.candidate(SETTINGS) for each in made.alternatives}
    fitting = [each for each in predictions() if each.run_memory_bytes <= 17 * GIB]
    for knob, values in (("micro_batch_size", (1, 4, 8)), ("quantization", ("torchao-int8",))):
        for value in values:
            having = [each for each in fitting if getattr(each.candidate, knob) == value]
            assert min(having, key=lambda each: each.step_seconds).candidate in kept
    assert min(fitting, key=lambda each: each.step_seconds).candidate in kept
    assert min(fitting, key=lambda each: each.run_memory_bytes).candidate in kept


def test_numbers_are_rounded_so_that_last_bits_change_nothing() -> None:
    made = forecast(SETTINGS)
    assert made.step_time.matmul_seconds == 0.33333
    shifted = build_forecast(
        [each.model_copy(update={"step_seconds": each.step_seconds * (1 + 2**-50)}) for each in predictions()],
        SETTINGS, 17 * GIB, STEP_TIME, {},
    )  # fmt: skip
    assert shifted == made
