"""A machine that answers trials by formula, for tests of planning; and planning workers in forked
processes.

Forked, because importing torch again takes seconds: the children inherit it from the test's
process.
"""

import json
import multiprocessing
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path

from autotune.errors import AutotuneError
from autotune.plan.candidate import Candidate
from autotune.plan.file import plan_text
from autotune.plan.request import PlanRequest
from autotune.search import planner
from autotune.search.problem import PlannerBackend, PlanningProblem
from autotune.share.store import shareable_machine
from autotune.share.warm_start import MatchedRecord, StoreMatches, compare, usable_trials
from tests import builders

CAPABILITIES = ("attention.native", "attention._native_cudnn", "precision.bf16")
HARDWARE = builders.hardware(*CAPABILITIES, compute_capability=(9, 0))


def make_plan(*asked, **named):
    """The plan alone, without what a search learns besides."""
    return planner.make_plan(*asked, **named).plan


def request(study=None, **changes):
    values = {
        "model": "kandinsky5-image-lite",
        "resolution": (256, 256),
        "effective_batch_size": 2,
        "max_trials": 8,
        "study": study,
        **changes,
    }
    return PlanRequest(**values)


def answer(candidate):
    seconds = 1.0 + 0.01 * candidate.checkpointed_blocks - 0.2 * (candidate.micro_batch_size == 2)
    seconds *= 0.9 if candidate.attention == "_native_cudnn" else 1.0
    gib = 20 - 0.05 * candidate.checkpointed_blocks + candidate.micro_batch_size
    return builders.trial(candidate, seconds, int(builders.GIB * gib), wall_seconds=2.5)


def surroundings(run=answer):
    @contextmanager
    def trials(model, cost):
        yield run

    return PlannerBackend(
        trials,
        lambda here, workload: StoreMatches((), ()),
        "0.0",
        needs_weights=False,
        check_gradients=lambda context, choices, model: (),
        rehearse=lambda model, cost, candidate, max_seconds: None,
    )


def matches_of(records, here, workload):
    def match(record):
        known = compare(record, here, workload), usable_trials(record, here)
        return MatchedRecord(record.name, record, *known)

    return StoreMatches(tuple(map(match, records)), ())


def replay(asked, hardware, trials, records=(), version="0.0"):
    problem = PlanningProblem.build(asked, hardware, surroundings())
    here = shareable_machine(problem.hardware, problem.budget_bytes)
    found = matches_of(records, here, problem.workload)
    warm_start = planner.start_from(problem, found.records)
    return planner.freeze_plan(problem, version, (), tuple(trials), warm_start)


@dataclass(frozen=True)
class Worker:
    """A process that plans; what it measured is in `log`, its plan or error in `output`."""

    process: ForkProcess
    log: Path
    output: Path


def start_worker(folder, name, asked, *, seconds=0.0, hardware=HARDWARE, hangs_at=None):
    """Plan in a process of its own, which writes files of that name in the folder; `hangs_at` is
    the number of its trial that never ends."""
    worker = Worker(
        multiprocessing.get_context("fork").Process(target=lambda: _work(folder, name, work)),
        folder / "log.jsonl",
        folder / f"{name}.txt",
    )

    def run(candidate):
        run.count += 1
        _append(worker.log, {"worker": name, "begins": candidate.model_dump()})
        time.sleep(3600 if hangs_at == run.count else seconds)
        _append(worker.log, {"worker": name, "ends": candidate.model_dump()})
        return answer(candidate)

    run.count = 0

    def work():
        return plan_text(make_plan(asked, hardware, backend=surroundings(run)))

    worker.process.start()
    return worker


def _work(folder, name, work):
    try:
        text = work()
    except AutotuneError as error:
        text = f"{type(error).__name__}: {error.message} / {error.hint}"
    except BaseException as error:
        text = f"escaped: {error!r}"
    part = folder / f"{name}.part"
    part.write_text(text)
    part.rename(folder / f"{name}.txt")
    os._exit(0)


def _append(path, line):
    with path.open("a") as log:
        log.write(json.dumps(line) + "\n")


def logged(log, what):
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [Candidate.model_validate(line[what]) for line in lines if what in line]


def wait_until(true):
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "it never came to pass"
        time.sleep(0.02)
