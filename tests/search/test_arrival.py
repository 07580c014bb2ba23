"""A predicted plan is measured on arrival, turns to its fallbacks, or does not fit."""

from dataclasses import replace

import pytest

from autotune.errors import DoesNotFit
from autotune.knobs.knob import gradient_capability
from autotune.machine.probe import hardware_named
from autotune.models.registry import get_family
from autotune.plan.candidate import CachingSettings
from autotune.plan.file import save_plan, seal, with_job
from autotune.plan.hardware import Capability
from autotune.plan.prediction import AdapterPractice, Overheads
from autotune.plan.request import PlanRequest
from autotune.plan.workload import WorkloadRequest
from autotune.search.arrival import load_measured, measure_prediction, measured_path
from autotune.search.request import complete
from autotune.train.workload import check_overrides
from tests import builders
from tests.search.formula import KEPT_BYTES
from tests.search.machines import answer, make_plan, request, surroundings

HERE = builders.hardware("attention.native", "precision.bf16", compute_capability=(8, 9))

pytestmark = pytest.mark.usefixtures("_by_formula")


@pytest.fixture(scope="module")
def predicted(_by_formula):
    asked = request(pins=(("quantization", "none"),), hardware="another")
    return make_plan(asked, hardware_named("nvidia-rtx-4090"))


def test_held_settings_make_a_measured_plan(predicted):
    measured = measure_prediction(predicted, HERE, backend=surroundings())
    frozen = measured.frozen
    assert frozen.expected.evidence == "measured"
    assert frozen.settings == predicted.frozen.settings
    assert frozen.expected.step_seconds == answer(frozen.settings).median_step_seconds
    assert frozen.hardware.fingerprint == HERE.fingerprint
    assert len(frozen.trials) == 1
    assert measured.frozen.predicted_digest == predicted.digest


def test_next_start_finds_the_measured_plan(predicted, tmp_path):
    path = tmp_path / "plan.yaml"
    assert load_measured(path, predicted, HERE) is None
    measured = measure_prediction(predicted, HERE, backend=surroundings())
    save_plan(measured, measured_path(path))
    longer = with_job(predicted, num_steps=7)
    found = load_measured(path, longer, HERE)
    assert (found.job.num_steps, found.frozen) == (7, measured.frozen)
    newer_driver = HERE.changed(versions=HERE.versions.changed(driver="595.10"))
    assert newer_driver.fingerprint != HERE.fingerprint
    assert load_measured(path, longer, newer_driver) == found
    other = builders.hardware("attention.native", compute_capability=(9, 0))
    assert load_measured(path, predicted, other) is None
    measured_path(path).write_text("damaged")
    assert load_measured(path, predicted, HERE) is None


def test_the_same_work_is_asked_for_again(predicted):
    work = predicted.frozen.workload.changed(resolution_px=78)  # of 96x64
    bucket = check_overrides(get_family("sdxl"), WorkloadRequest.again(work))
    assert (bucket.width_px, bucket.height_px) == (78, 78)
    other = complete(PlanRequest(earlier=predicted, model="sdxl")).given
    assert (other["effective_batch_size"], other["resolution"]) == (2, (256, 256))
    assert other.keys().isdisjoint({"guidance_scale", "timestep_shift", "learning_rate", "rank"})


def test_what_a_plan_was_asked_stays(predicted):
    practice = AdapterPractice(precision="fp32", optimizer_bytes=8, step_bytes=2)
    theirs = Overheads(program="musubi", version="1", source="its code", adapter=practice)
    limits = {"max_memory_bytes": 20 * 2**30, "reserve_memory_bytes": 2**30}
    plan = seal(predicted.job, predicted.frozen.changed(**limits, overheads=theirs))
    again = complete(PlanRequest(earlier=plan))
    assert (again.memory_limits, again.for_trainer) == ((20 * 2**30, 2**30), "musubi")
    other = complete(PlanRequest(earlier=plan, for_trainer="simpletuner"))
    assert other.for_trainer == "simpletuner"


def test_failing_settings_give_way(predicted):
    assert predicted.frozen.fallbacks
    bad = predicted.frozen.settings

    def run(candidate):
        if candidate == bad:
            return builders.trial(candidate, None, message="by design")
        return answer(candidate)

    measured = measure_prediction(predicted, HERE, backend=surroundings(run)).frozen
    assert measured.settings == predicted.frozen.fallbacks[0]
    assert measured.fallbacks == predicted.frozen.fallbacks[1:]
    assert [trial.outcome for trial in measured.trials] == ["oom", "ok"]
    changed = [reason for reason in measured.reasons if "by design" in reason.why]
    assert changed
    assert measured.workload == predicted.frozen.workload


def test_what_cannot_fit_is_not_tried(predicted):
    small = builders.hardware("attention.native", budget_bytes=4 * 2**30, compute_capability=(8, 9))
    untouched = surroundings(lambda candidate: pytest.fail("tried"))
    with pytest.raises(DoesNotFit, match=r"a run may take 4\.0 GiB"):
        measure_prediction(predicted, small, backend=untouched)


def edited(plan, **changes):
    return seal(plan.job, plan.frozen.model_copy(update=changes))


def test_kept_encoders_count_on_arrival(predicted):
    released = measure_prediction(predicted, HERE, backend=surroundings()).frozen.expected
    keeping = edited(predicted, caching=CachingSettings(residency="keep"))
    kept = measure_prediction(keeping, HERE, backend=surroundings()).frozen
    assert kept.expected.run_memory_bytes == released.run_memory_bytes + KEPT_BYTES
    assert kept.hardware.budget_bytes == HERE.device.budget_bytes
    most = predicted.frozen.expected.run_memory_bytes
    tight = HERE.changed(device=HERE.device.changed(budget_bytes=most))
    alone = edited(predicted, fallbacks=())
    measure_prediction(alone, tight, backend=surroundings())
    with pytest.raises(DoesNotFit, match="a run may take"):
        measure_prediction(edited(keeping, fallbacks=()), tight, backend=surroundings())


def test_wrong_computations_are_not_tried(predicted):
    usual = predicted.frozen.settings
    unproven = usual.changed(attention="_native_cudnn")
    asked = []

    def check_gradients(context, choices, model):
        asked.append(choices["attention"])
        name = gradient_capability("attention", "_native_cudnn")
        wrong = Capability(name=name, available=False, reason="differs by 3")
        return (wrong,)

    backend = replace(surroundings(), check_gradients=check_gradients)
    reasons = tuple(
        reason.changed(chosen="_native_cudnn") if reason.knob == "attention" else reason
        for reason in predicted.frozen.reasons
    )
    plan = edited(predicted, settings=unproven, fallbacks=(usual,), reasons=reasons)
    measured = measure_prediction(plan, HERE, backend=backend).frozen
    assert asked == [("_native_cudnn", "native")]
    assert [trial.candidate for trial in measured.trials] == [usual]
    (why,) = (reason.why for reason in measured.reasons if reason.knob == "attention")
    assert "differs by 3" in why
    with pytest.raises(DoesNotFit, match="differs by 3"):
        measure_prediction(edited(plan, fallbacks=()), HERE, backend=backend)
