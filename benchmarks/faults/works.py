"""The works that are struck: a search, a cache, a run, its end, a report and a push, all small."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from autotune.data.cache import Cache
from autotune.data.dataset import read_dataset
from autotune.data.encode import Encoders, encode_dataset
from autotune.plan.candidate import CachingSettings
from autotune.plan.file import load_plan, save_plan
from autotune.records import merge_stores
from autotune.report.files import report as write_report
from autotune.search import study
from autotune.share.store import Store
from autotune.train.folder import ADAPTER_FILE, REPORT_FILE
from autotune.train.metrics import read_metrics
from benchmarks.faults.strike import Work
from tests.search.formula import by_formula
from tests.search.machines import HARDWARE, make_plan, request, surroundings
from tests.share.examples import record
from tests.train.conftest import CPU, make_bench


def digests(folder: Path, pattern: str) -> dict[str, str]:
    """Digest the content of files by their names."""
    files = (path for path in sorted(folder.rglob(pattern)) if not path.name.startswith("."))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def make_works(scratch: Path) -> dict[str, Work]:
    """Prepare all that forks share: the model, its data, records and a simulated machine."""
    os.environ |= {name: str(scratch / name) for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME")}
    torch.set_num_threads(1)
    study.HEARTBEAT_SECONDS, study.GRACE_SECONDS = 1, 2  # a worker is dead after two seconds
    bench, source = make_bench(scratch / "bench"), Store(str(scratch / "own"))
    source.add(*(record(search_seconds=60.0 + index) for index in range(12)))
    job: dict[str, Any] = {"num_steps": 4, "checkpointing_steps": 1, "preview_every": 2}
    job |= {"preview_steps": 1, "validation": "40%", "validation_every": 2, "keep_best": True}

    def plan(folder: Path) -> None:
        asked = request("struck", storage=f"sqlite:///{folder}/study.db", max_trials=3)
        with by_formula(num_blocks=12):
            save_plan(make_plan(asked, HARDWARE, backend=surroundings()), folder / "plan.yaml")

    def planned(folder: Path) -> object:
        trials = load_plan(folder / "plan.yaml").frozen.trials
        return sorted(trial.model_dump_json() for trial in trials)

    def cache(folder: Path) -> None:
        made = bench.plan()
        settings, work = made.frozen.settings, made.frozen.workload
        encoders = Encoders(bench.resolved, CachingSettings(), CPU, settings.precision)
        dataset = read_dataset(bench.images)
        encode_dataset(encoders, dataset, work.buckets, Cache(folder), caption_dropout=0.1)

    def train(folder: Path) -> None:
        made = bench.plan(**job, output=str(folder / "run"))
        bench.train(made, resume=True)

    def trained(folder: Path) -> object:
        run = folder / "run"
        losses = [(step.step, step.loss) for step in read_metrics(run / "metrics.jsonl")]
        assert (run / REPORT_FILE).is_file()
        return losses, digests(run, ADAPTER_FILE), digests(run, "*.png")

    whole = scratch / "trained"
    train(whole)  # all that a fork shares is read once

    def begin_save(folder: Path) -> None:
        shutil.copytree(whole / "run", folder / "run", dirs_exist_ok=True)
        for name in (ADAPTER_FILE, REPORT_FILE, "run-plan.yaml"):
            (folder / "run" / name).unlink()
        save_plan(bench.plan(**job, output=str(folder / "run")), folder / "run/run-plan.yaml")

    def push(folder: Path) -> None:
        merge_stores(source, Store(str(folder / "team")))

    def report(folder: Path) -> None:
        write_report(whole / "run", path=folder / "report.html")

    return {
        "report": Work(report, lambda folder: digests(folder, "*.html")),
        "push": Work(push, lambda folder: digests(folder, "*.json")),
        "cache": Work(cache, lambda folder: digests(folder, "*.safetensors")),
        "save": Work(train, trained, begin_save),
        "train": Work(train, trained),
        "plan": Work(plan, planned),
    }
