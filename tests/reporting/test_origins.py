"""What the user set and what we set, told apart by the family's defaults."""

import pytest
from autotune.reporting.origins import origin_lines

from autotune.schema.plan import TrainingPlan
from autotune.schema.plan_file import seal, with_job
from tests.schema.test_plan_file import make_plan


@pytest.fixture(scope="module")
def plan() -> TrainingPlan:
    return make_plan()


def _of(plan: TrainingPlan) -> dict[str, bool]:
    """For each value whether the user set it."""
    user, told = True, {}
    for line in origin_lines(plan):
        user = user and not line.startswith("we set")
        told[line[10:].partition("  (")[0]] = user
    return told


def test_values_that_differ_from_the_defaults_are_the_users(plan: TrainingPlan) -> None:
    usual = with_job(plan, learning_rate=1e-4, timestep_shift=2.2)
    assert _of(usual)["learning rate 0.0001"] is False
    assert _of(usual)["shift 2.2"] is False
    own = _of(
        with_job(
            plan, learning_rate=3e-4, timestep_shift="by_resolution", timestep_sampling="uniform"
        )
    )
    assert (
        own["learning rate 0.0003"]
        is own["shift by_resolution"]
        is own["noise levels uniform"]
        is True
    )


def test_a_batch_that_the_gpus_can_share_is_ours_and_another_the_users(plan: TrainingPlan) -> None:
    def told(batch: int) -> bool:
        work = plan.frozen.workload.changed(effective_batch_size=batch)
        eight = plan.frozen.hardware.changed(num_processes=8, strategy="ddp")
        return _of(seal(plan.job, plan.frozen.changed(workload=work, hardware=eight)))[
            f"batch {batch}"
        ]

    assert (told(8), told(16)) == (False, True)


def test_epochs_stand_in_the_place_of_steps(plan: TrainingPlan) -> None:
    told = _of(with_job(plan, num_train_epochs=3))
    assert told["epochs 3"] is True
    assert not any(line.startswith("steps") for line in told)


def test_defaults_name_their_source(plan: TrainingPlan) -> None:
    text = "\n".join(origin_lines(with_job(plan, timestep_shift=2.2)))
    assert "shift 2.2  (musubi-tuner's guide)" in text
    assert "guidance" not in text  # the model takes none
