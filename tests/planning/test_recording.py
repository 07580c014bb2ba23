"""Planning from a recording is a pure function of the recording and the question."""

import random
from pathlib import Path

import pytest

from autotune.cost.calibration import Posterior
from autotune.errors import InvalidInput
from autotune.planning.recording import (
    Recording,
    read_recording,
    recording_of,
    replayed,
    write_recording,
)
from autotune.schema.plan import TrainingPlan
from autotune.schema.plan_file import plan_text
from tests.planning.formula import by_formula
from tests.planning.golden import FOLDER, GOLDEN, Golden, replayed_text
from tests.planning.machines import HARDWARE, make_plan, request, surroundings


def made() -> TrainingPlan:
    with by_formula():
        return make_plan(request(), HARDWARE, backend=surroundings())


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.name)
def test_a_recorded_search_gives_its_plan_byte_for_byte(golden: Golden) -> None:
    expected = (FOLDER / f"{golden.name}.yaml").read_text()
    assert replayed_text(golden) == expected, "deliberate? then: python -m tests.planning.golden"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.name)
def test_a_replay_depends_on_no_last_bits(
    golden: Golden, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPUs and libraries compute logarithms, exponentials and products that differ in their last
    bits.
    """
    rng, log_factor, uncertainty = random.Random(seed), Posterior.log_factor, Posterior.uncertainty
    for name, exact in (("log_factor", log_factor), ("uncertainty", uncertainty)):
        monkeypatch.setattr(
            Posterior,
            name,
            lambda *asked, exact=exact: exact(*asked) * (1 + rng.uniform(-1, 1) * 2**-48),
        )
    assert replayed_text(golden) == (FOLDER / f"{golden.name}.yaml").read_text()


def test_what_is_golden_covers_failures_records_and_real_trials() -> None:
    outcomes = {trial.outcome for trial in read_recording(FOLDER / "wall.jsonl").trials}
    assert outcomes == {"ok", "oom"}
    assert read_recording(FOLDER / "known.jsonl").records
    assert "records:\n  - " in (FOLDER / "known.yaml").read_text()
    assert read_recording(FOLDER / "measured.jsonl").hardware.origin == "probe"


def test_a_plan_is_its_own_recording(tmp_path: Path) -> None:
    plan = made()
    write_recording(tmp_path / "r.jsonl", recording_of(plan, HARDWARE, ()))
    recording = read_recording(tmp_path / "r.jsonl")
    assert recording == Recording("0.0", HARDWARE, (), plan.frozen.trials)
    with by_formula():
        again = make_plan(request(), recording.hardware, backend=replayed(recording))
    assert plan_text(again) == plan_text(plan)
    assert again.frozen.search_seconds == 2.5 * len(plan.frozen.trials)


def test_a_question_that_was_not_recorded_is_refused() -> None:
    recording = recording_of(made(), HARDWARE, ())
    other = request(pins=(("attention", "native"), ("micro_batch_size", "2")))
    with by_formula(), pytest.raises(InvalidInput, match="which this request does not allow"):
        make_plan(other, HARDWARE, backend=replayed(recording))


@pytest.mark.parametrize(
    "text", ["", "no json\n", "[]\n", '{"hardware": {}}\n', '{"autotune_version": "1"}\n', "\x00"]
)
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.jsonl").write_text(text)
    with pytest.raises(InvalidInput, match="not a recording of this version"):
        read_recording(tmp_path / "r.jsonl")
    with pytest.raises(InvalidInput, match="cannot read"):
        read_recording(tmp_path / "absent.jsonl")
