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
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file

from autotune.errors import AutotuneError, InvalidInput, Preempted
from autotune.plan.file import RUN_PLAN_FILE, load_plan, save_plan, seal
from autotune.train import folder as folder_module, validation
from autotune.train.folder import (
    ADAPTER_FILE,
    Checkpoints,
    as_begun,
    claim_folder,
    list_checkpoints,
)
from autotune.train.metrics import read_metrics
from autotune.train.prepare import prepare
from autotune.weights.files import find_weights, open_weights, read_header, weights_digest
from tests.events import steps_to
from tests.forked import autotune_forked, start_forked
from tests.search.machines import wait_until
from tests.train.conftest import Killed, save

STEPS = 4


def same(one, other):
    left, right = one.optimizer.state(), other.optimizer.state()
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def told(event):
    return event.step, event.loss, event.learning_rate, event.validation_loss


def best_of(folder):
    return load_file(folder / "checkpoints" / "best.safetensors")


@pytest.mark.quick("cosine")
@pytest.mark.parametrize("schedule", ["cosine", "plateau"])
def test_any_kills_end_alike(bench, tmp_path, monkeypatch, schedule):
    monkeypatch.setattr(validation, "VALIDATION_DRAWS", 4)
    job = {"num_steps": STEPS, "lr_scheduler": schedule, "caption_dropout": 0.1}
    job |= {"validation": "40%", "validation_every": 2, "keep_best": True}
    whole = bench.loop(bench.plan(**job, checkpointing_steps=1), tmp_path, held_out=2)
    expected = [*read_metrics(tmp_path / "metrics.jsonl")]
    assert [event.validation_loss is not None for event in expected] == [False, True] * 2

    @settings(max_examples=3)
    @given(kills=st.lists(st.integers(1, STEPS), max_size=2), every=st.integers(1, 3))
    def check(kills, every):
        with tempfile.TemporaryDirectory() as name:
            folder, plan = Path(name), bench.plan(**job, checkpointing_steps=every)
            for kill in kills:
                bench.loop(plan, folder, kill_after=kill, held_out=2)
            ended = bench.loop(plan, folder, held_out=2)
            assert same(ended, whole)
            assert ended.validation.history == whole.validation.history
            assert ended.monitor.gradient_state() == whole.monitor.gradient_state()
            found, best = best_of(folder), best_of(tmp_path)
            assert all(torch.equal(value, found[key]) for key, value in best.items())
            steps = read_metrics(folder / "metrics.jsonl")
            for one, other in zip(map(told, steps), map(told, expected), strict=True):
                assert one == other

    check()


@pytest.mark.parametrize("damage", ["truncate", "flip", "state", "run", "part"])
def test_damaged_checkpoints_are_left_out(tmp_path, damage):
    told = []
    with Checkpoints(tmp_path, "sha256:1", keep_last=9) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"a": torch.full((9,), float(step))}, {"rate": 5})
            checkpoints.finish()
        newest = list_checkpoints(tmp_path)[2]
        data = newest.read_bytes()
        if damage == "truncate":
            newest.write_bytes(data[: len(data) // 2])
        elif damage == "flip":
            newest.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        elif damage == "part":
            newest.unlink()
            newest.with_name(f".{newest.name}.x.part").write_bytes(data[:100])
        else:  # in the header, next to what still looks sound
            pattern = rb'\\"rate\\": (\d)' if damage == "state" else rb'"run":"sha256:(\d)'
            found = re.search(pattern, data)
            newest.write_bytes(data[: found.start(1)] + b"7" + data[found.end(1) :])
        loaded = checkpoints.newest(told.append)
    assert (loaded.step, loaded.state) == (1, {"rate": 5, "step": 1})
    assert torch.equal(loaded.tensors["a"], torch.ones(9))
    assert len(told) == (damage != "part")
    assert not list(tmp_path.glob(".*"))


def test_checkpoints_are_what_they_hold(tmp_path):
    with Checkpoints(tmp_path, "key", keep_last=9) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"a": torch.full((9,), float(step))}, {})
        checkpoints.finish()
        first, second = list_checkpoints(tmp_path).values()
        shutil.copy(first, first.with_name(first.name.replace("1", "7")))
        assert checkpoints.newest().step == 2
        second.replace(second.with_name(second.name.replace("2", "9")))
        assert checkpoints.newest().step == 2
    assert list(list_checkpoints(tmp_path)) == [1, 2]


@pytest.mark.parametrize("step", ["../a", 1.5, -1, True, None])
def test_steps_of_checkpoints_are_numbers(tmp_path, step):
    with Checkpoints(tmp_path, "key", keep_last=9) as checkpoints:
        checkpoints.save_best(step, {"a": torch.zeros(2)})
        (tmp_path / "best.safetensors").rename(tmp_path / "checkpoint-000003.safetensors")
        with pytest.raises(InvalidInput, match="are damaged"):
            checkpoints.newest()


def test_strange_states_are_refused(bench, tmp_path):
    plan = bench.plan(num_steps=3, checkpointing_steps=1)
    bench.loop(plan, tmp_path, kill_after=2)
    (own,) = list_checkpoints(tmp_path / "checkpoints").values()
    with Checkpoints(own.parent, read_header(own).metadata["run"], keep_last=1) as checkpoints:
        checkpoints.save(1, {}, {"optimizer": 3})
    with pytest.raises(InvalidInput, match="holds no state"):
        bench.loop(plan, tmp_path)


def test_checkpoints_follow_their_steps_to_disk(bench, tmp_path, monkeypatch):
    synced, sync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: (synced.append(os.fstat(file).st_ino), sync(file))
    )
    bench.loop(bench.plan(num_steps=2, checkpointing_steps=1, checkpoints_total_limit=9), tmp_path)
    metrics = (tmp_path / "metrics.jsonl").stat().st_ino
    for step, path in list_checkpoints(tmp_path / "checkpoints").items():
        assert synced[: synced.index(path.stat().st_ino)].count(metrics) > step  # and once empty


def test_deleted_outputs_keep_the_adapter(bench, tmp_path):
    def delete(event):
        if event.step == 2:
            shutil.rmtree(tmp_path / "run")

    plan = bench.plan(num_steps=4, preview_every=0, output=str(tmp_path / "run"))
    report = bench.train(plan, steps_to(delete))
    assert any("was deleted" in warning for warning in report.warnings)
    assert [step.step for step in read_metrics(tmp_path / "run/metrics.jsonl")] == [3, 4]
    assert (tmp_path / "run" / ADAPTER_FILE).is_file()
    assert load_plan(tmp_path / "run" / RUN_PLAN_FILE).digest == plan.digest


def test_checkpoint_of_another_job_is_refused(bench, tmp_path):
    bench.loop(bench.plan(num_steps=1), tmp_path)
    with pytest.raises(InvalidInput, match="another plan, job or data"):
        bench.loop(bench.plan(num_steps=1, seed=4), tmp_path)


def test_constant_rates_can_go_longer(bench, tmp_path):
    bench.loop(bench.plan(num_steps=1), tmp_path / "longer")
    longer = bench.loop(bench.plan(num_steps=2), tmp_path / "longer")
    assert longer.first_step == 1
    assert same(longer, bench.loop(bench.plan(num_steps=2), tmp_path / "whole"))


def test_predicted_plans_resume_what_they_became(bench, tmp_path):
    predicted = bench.plan(num_steps=1, output=str(tmp_path))
    assert as_begun(predicted) == predicted
    frozen = predicted.frozen.changed(predicted_digest=predicted.digest)
    save_plan(seal(predicted.job, frozen), tmp_path / RUN_PLAN_FILE)
    longer = as_begun(bench.plan(num_steps=2, output=str(tmp_path)))
    assert (longer.job.num_steps, longer.frozen) == (2, frozen)


def test_signal_finishes_step_and_writes_checkpoint(bench, tmp_path):
    number, plan = signal.SIGTERM, bench.plan(num_steps=4)

    def stop(event):
        if event.step == 2:
            os.kill(os.getpid(), number)

    outside = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(Preempted, match="after step 2 of 4") as stopped:
            bench.loop(plan, tmp_path, on_step=stop)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, outside)  # the tests themselves may run under nohup
    assert stopped.value.exit_status == 75
    assert "--resume" in stopped.value.hint
    assert list(list_checkpoints(tmp_path / "checkpoints")) == [2]


def test_a_full_disk_ends_it(bench, tmp_path, monkeypatch):
    plan = bench.plan(num_steps=4, checkpointing_steps=1)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    def fill(step):
        if step == 2:  # the first is written by a thread
            wait_until(lambda: 1 in list_checkpoints(tmp_path / "checkpoints"))
            monkeypatch.setattr(folder_module, "save_file", full)

    with pytest.raises(AutotuneError, match="No space left"):
        bench.loop(plan, tmp_path, on_step=lambda event: fill(event.step))
    assert list(list_checkpoints(tmp_path / "checkpoints")) == [1]


def test_newest_checkpoints_are_kept(tmp_path):
    with Checkpoints(tmp_path, "key", keep_last=2, keep_every=3) as checkpoints:
        for step in range(1, 8):
            checkpoints.save(step, {"a": torch.ones(1)}, {})
    assert list(list_checkpoints(tmp_path)) == [3, 6, 7]


def test_training_waits_for_the_copy_alone(tmp_path, monkeypatch):
    released, written = threading.Event(), []

    def slow(path, tensors, metadata):
        released.wait(20)
        written.append(tensors["weight"].clone())

    monkeypatch.setattr(folder_module, "save_file", slow)
    weight = torch.ones(4)
    with Checkpoints(tmp_path, "key", keep_last=1) as checkpoints:
        checkpoints.save(1, {"weight": weight}, {})
        assert not written
        weight += 1  # training goes on
        released.set()
    assert torch.equal(written[0], torch.ones(4))


def test_sigkill_and_resume_as_processes(bench, tmp_path):
    plan_file, output = tmp_path / "plan.yaml", tmp_path / "cut"
    save_plan(bench.plan(num_steps=12, checkpointing_steps=1, output=str(output)), plan_file)
    process = start_forked(("train", plan_file), tmp_path / "log")
    deadline = time.monotonic() + 120
    while not list(output.glob("checkpoints/checkpoint-00000[3-9]*")):
        assert process.is_alive(), (tmp_path / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    left_over = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # accelerate would meet others
    resumed = autotune_forked("train", plan_file, "--resume", "--json", environment=left_over)
    assert resumed.returncode == 0, resumed.stderr
    assert 3 <= json.loads(resumed.stdout)["resumed_at"] < 12
    whole = bench.loop(load_plan(plan_file), tmp_path / "whole")
    expected = load_file(save(whole, tmp_path / "whole.safetensors"))
    found = load_file(output / ADAPTER_FILE)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_other_base_weights_are_refused(bench, tmp_path):
    output = tmp_path / "out"
    weights = weights_digest(open_weights(bench.model_folder / "transformer"))
    moved = shutil.copytree(bench.model_folder, tmp_path / "moved")
    other = shutil.copytree(bench.model_folder, tmp_path / "other")
    file = find_weights(other / "transformer")
    save_file({name: 1.001 * tensor for name, tensor in load_file(file).items()}, file)
    with Checkpoints(output / "checkpoints", "key", keep_last=1, weights=weights) as checkpoints:
        checkpoints.save(1, {"a": torch.zeros(1)}, {})
    same_weights = bench.plan(model=str(moved), output=str(output))
    prepare(same_weights, bench.hardware, resume=True).lock.release()
    with pytest.raises(InvalidInput, match="other weights of the base model"):
        prepare(bench.plan(model=str(other), output=str(output)), bench.hardware, resume=True)


def test_prevented_previews_are_made_later(bench, tmp_path):
    plan = bench.plan(num_steps=3, checkpointing_steps=1, preview_every=2)
    previews = []

    def killed(step):
        raise Killed

    bench.loop(plan, tmp_path, preview=killed)
    bench.loop(plan, tmp_path, preview=previews.append)
    assert previews == [2]


def test_only_the_first_process_clears_up(bench, tmp_path):
    """Others would take what it writes for leftovers."""
    plan, name = bench.plan(output=str(tmp_path)), ".file.0123456789abcdef.part"
    parts = [tmp_path / folder / name for folder in ("", "previews", "checkpoints")]
    for part in parts:
        part.parent.mkdir(exist_ok=True)
        part.write_bytes(b"half")
    first = claim_folder(plan, resume=False, needed_bytes=0)
    assert not any(part.exists() for part in parts)
    parts[1].write_bytes(b"half")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    claim_folder(plan, resume=False, needed_bytes=0, lock=False)
    first.release()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
