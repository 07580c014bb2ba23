"""A run that was interrupted, at any point and in any way, ends as one that was not."""

import json
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from autotune.errors import AutotuneError, InvalidInput, Preempted
from autotune.plan.file import read_plan, write_plan
from autotune.train import checkpoint
from autotune.train.checkpoint import Checkpoints, save_trained
from autotune.train.folder import ADAPTER_FILE, claim_folder, list_checkpoints
from autotune.train.loop import TrainingLoop
from autotune.train.metrics import read_metrics
from autotune.train.prepare import prepare
from autotune.weights.files import find_weights, open_weights, weights_digest
from tests.forked import autotune_forked, start_forked
from tests.search.machines import wait_until
from tests.train.conftest import Bench, Killed

STEPS = 5


def same(one: TrainingLoop, other: TrainingLoop) -> bool:
    left, right = one.optimizer.state(), other.optimizer.state()
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


@pytest.mark.quick("cosine")
@pytest.mark.parametrize("schedule", ["cosine", "plateau"])
def test_any_row_of_kills_ends_in_the_same_bits(
    bench: Bench, tmp_path: Path, schedule: str
) -> None:
    plan = bench.plan(
        num_steps=STEPS, checkpointing_steps=1, lr_scheduler=schedule, caption_dropout=0.1
    )
    whole = bench.loop(plan, tmp_path / "whole")

    @settings(max_examples=6)
    @given(kills=st.lists(st.integers(1, STEPS), max_size=3), every=st.integers(1, 3))
    def check(kills: list[int], every: int) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            again = bench.plan(
                num_steps=STEPS,
                checkpointing_steps=every,
                lr_scheduler=schedule,
                caption_dropout=0.1,
            )
            for kill in kills:
                bench.loop(again, folder, kill_after=kill)
            ended = bench.loop(again, folder)
            assert same(ended, whole)
            record, expected = (
                read_metrics(place / "metrics.jsonl") for place in (folder, tmp_path / "whole")
            )
            assert [(e.step, e.loss, e.learning_rate) for e in record] == [
                (e.step, e.loss, e.learning_rate) for e in expected
            ]

    check()


@pytest.mark.quick("flip")
@pytest.mark.parametrize("damage", ["truncate", "flip", "state", "run", "part"])
def test_a_damaged_checkpoint_is_left_out_for_the_one_before(
    bench: Bench, tmp_path: Path, damage: str
) -> None:
    plan = bench.plan(num_steps=4, checkpointing_steps=1)
    whole = bench.loop(plan, tmp_path / "whole")
    bench.loop(plan, tmp_path / "cut", kill_after=4)
    newest = tmp_path / "cut" / "checkpoints" / "checkpoint-000003.safetensors"
    data = newest.read_bytes()
    if damage == "truncate":
        newest.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        newest.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    elif damage in (
        "state",
        "run",
    ):  # both stand in the header, and beside them what still looks sound
        found = re.search(
            {"state": rb'\\"rate\\": .*?(\d)', "run": rb'"run":"sha256:(\w)'}[damage], data
        )
        assert found
        newest.write_bytes(
            data[: found.start(1)] + (b"7" if found[1] != b"7" else b"6") + data[found.end(1) :]
        )
    else:
        newest.unlink()
        newest.with_name(f".{newest.name}.x.part").write_bytes(data[:100])
    ended = bench.loop(plan, tmp_path / "cut")
    assert ended.first_step == 2
    assert same(ended, whole)
    assert not list(newest.parent.glob(".*"))


def test_where_no_checkpoint_is_whole_nothing_is_begun_anew_unasked(
    bench: Bench, tmp_path: Path
) -> None:
    plan = bench.plan(num_steps=2, checkpointing_steps=1)
    bench.loop(plan, tmp_path)
    for path in (tmp_path / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidInput, match="are damaged") as caught:
        bench.loop(plan, tmp_path)
    assert "to start over, delete" in caught.value.hint


@pytest.mark.quick("{'seed': 4}")
@pytest.mark.parametrize(
    "change", [{"learning_rate": 2e-3}, {"seed": 4}, {"lr_scheduler": "linear"}]
)
def test_a_checkpoint_of_another_job_is_refused(
    bench: Bench, tmp_path: Path, change: dict[str, object]
) -> None:
    bench.loop(bench.plan(num_steps=2), tmp_path)
    with pytest.raises(InvalidInput, match="another plan, job or data"):
        bench.loop(bench.plan(num_steps=2, **change), tmp_path)


def test_a_run_with_a_constant_rate_can_be_made_longer(bench: Bench, tmp_path: Path) -> None:
    bench.loop(bench.plan(num_steps=2), tmp_path / "longer")
    longer = bench.loop(bench.plan(num_steps=4), tmp_path / "longer")
    assert longer.first_step == 2
    assert same(longer, bench.loop(bench.plan(num_steps=4), tmp_path / "whole"))


@pytest.mark.quick("SIGTERM")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_finishes_the_step_and_writes_a_checkpoint(
    bench: Bench, tmp_path: Path, number: int
) -> None:
    plan, outside = bench.plan(num_steps=4), signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(Preempted, match="after step 2 of 4") as stopped:
            bench.loop(
                plan,
                tmp_path / "cut",
                on_step=lambda event: os.kill(os.getpid(), number) if event.step == 2 else None,
            )
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, outside)  # the tests themselves may run under nohup
    assert stopped.value.exit_status == 75
    assert "--resume" in stopped.value.hint
    assert same(bench.loop(plan, tmp_path / "cut"), bench.loop(plan, tmp_path / "whole"))


def test_a_full_disk_ends_the_run_with_the_last_checkpoint_whole(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = bench.plan(num_steps=4, checkpointing_steps=1)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    def fill(step: int) -> None:
        if step == 2:
            wait_until(
                lambda: 1 in list_checkpoints(tmp_path / "checkpoints")
            )  # written by a thread
            monkeypatch.setattr(checkpoint, "save_file", full)

    with pytest.raises(AutotuneError, match="No space left"):
        bench.loop(plan, tmp_path, on_step=lambda event: fill(event.step))
    monkeypatch.undo()
    assert bench.loop(plan, tmp_path).first_step == 1


def test_newest_and_every_mth_checkpoint_are_kept(bench: Bench, tmp_path: Path) -> None:
    kept = {"checkpoints_total_limit": 2, "checkpoints_keep_every": 3}
    bench.loop(bench.plan(num_steps=7, checkpointing_steps=1, **kept), tmp_path)
    assert list(list_checkpoints(tmp_path / "checkpoints")) == [3, 6, 7]


def test_training_waits_for_the_copy_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released, written = threading.Event(), []

    def slow(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
        released.wait(20)
        written.append(tensors["weight"].clone())

    monkeypatch.setattr(checkpoint, "save_file", slow)
    weight = torch.ones(4)
    with Checkpoints(tmp_path, "key", keep_last=1) as checkpoints:
        checkpoints.save(1, {"weight": weight}, {})
        assert not written
        weight += 1  # training goes on
        released.set()
    assert torch.equal(written[0], torch.ones(4))


def test_sigkill_and_resume_as_processes(bench: Bench, tmp_path: Path) -> None:
    plan_file = tmp_path / "plan.yaml"
    write_plan(
        plan_file, bench.plan(num_steps=24, checkpointing_steps=1, output=str(tmp_path / "cut"))
    )
    process = start_forked(("train", plan_file), tmp_path / "log")
    deadline = time.monotonic() + 120
    while not list((tmp_path / "cut").glob("checkpoints/checkpoint-00000[3-9]*")):
        assert process.is_alive(), (tmp_path / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    ranks = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }  # left over: accelerate would meet others
    resumed = autotune_forked("train", plan_file, "--resume", "--json", environment=ranks)
    assert resumed.returncode == 0, resumed.stderr
    assert 3 <= json.loads(resumed.stdout)["resumed_at"] < 24
    plan = read_plan(plan_file)
    whole = bench.loop(plan, tmp_path / "whole")
    save_trained(
        tmp_path / "whole.safetensors",
        whole.model,
        whole.optimizer,
        plan.frozen.workload,
        plan.digest,
        24,
    )
    left, right = (
        load_file(tmp_path / "cut" / ADAPTER_FILE),
        load_file(tmp_path / "whole.safetensors"),
    )
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_other_base_weights_of_the_same_architecture_are_refused(
    bench: Bench, tmp_path: Path
) -> None:
    """Moved, resharded or started by an older version, the same weights go on."""
    output = tmp_path / "out"
    weights = weights_digest(open_weights(bench.model_folder / "transformer"))
    moved = shutil.copytree(bench.model_folder, tmp_path / "moved")
    other = shutil.copytree(bench.model_folder, tmp_path / "other")
    changed = load_file(find_weights(other / "transformer"))
    save_file(
        {name: 1.001 * tensor for name, tensor in changed.items()},
        find_weights(other / "transformer"),
    )
    for known in (weights, None):
        with Checkpoints(output / "checkpoints", "key", keep_last=1, weights=known) as checkpoints:
            checkpoints.save(1, {"a": torch.zeros(1)}, {})
        with Checkpoints(output / "checkpoints", "key", keep_last=1) as checkpoints:
            assert checkpoints.newest()
        for model in (bench.model_folder, moved):
            prepare(
                bench.plan(model=str(model), output=str(output)), bench.hardware, resume=True
            ).lock.release()
        if known:
            with pytest.raises(InvalidInput, match="other weights of the base model"):
                prepare(
                    bench.plan(model=str(other), output=str(output)), bench.hardware, resume=True
                )


def test_a_preview_that_a_kill_prevented_is_made_on_resuming(bench: Bench, tmp_path: Path) -> None:
    plan = bench.plan(num_steps=4, checkpointing_steps=1, preview_every=2)
    previews: list[int] = []

    def killed(step: int) -> None:
        raise Killed

    bench.loop(plan, tmp_path, preview=killed)
    bench.loop(plan, tmp_path, preview=previews.append)
    assert previews == [2]


def test_what_a_killed_run_left_half_written_is_removed(bench: Bench, tmp_path: Path) -> None:
    parts = [
        tmp_path / "out" / folder / ".file.0123456789abcdef.part"
        for folder in ("", "previews", "checkpoints")
    ]
    for part in parts:
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(b"half")
    prepare(bench.plan(output=str(tmp_path / "out")), bench.hardware, resume=False).lock.release()
    assert not any(part.exists() for part in parts)


def test_a_further_process_of_a_run_writes_nothing_and_sweeps_nothing(
    bench: Bench, tmp_path: Path
) -> None:
    """Else the first process, which sweeps while others check, would take what they write for
    leftovers."""
    plan = bench.plan(output=str(tmp_path))
    first = claim_folder(plan, resume=False, needed_bytes=0)
    (tmp_path / ".run-plan.yaml.0123456789abcdef.part").write_bytes(b"half")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    claim_folder(plan, resume=False, needed_bytes=0, lock=False)
    first.release()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_equal_runs_write_equal_bytes(bench: Bench, tmp_path: Path) -> None:
    plan, work = bench.plan(num_steps=2), bench.plan().frozen.workload
    files = [tmp_path / name / ADAPTER_FILE for name in ("one", "other")]
    for file in files:
        loop = bench.loop(plan, file.parent)
        save_trained(file, loop.model, loop.optimizer, work, plan.digest, loop.num_steps)
    assert files[0].read_bytes() == files[1].read_bytes()
    checkpoints = [list_checkpoints(file.parent / "checkpoints")[2].read_bytes() for file in files]
    assert checkpoints[0] == checkpoints[1]
