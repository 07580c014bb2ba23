"""Learning rates, loss weights, precision, record, watch and verdict: each against what it says of itself."""

import contextlib
import math
import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from autotune.errors import AutotuneError, InvalidInput
from autotune.families.registry import get_family
from autotune.runtime.memory import library_bytes, resident_bytes
from autotune.runtime.resources import reraise_oom
from autotune.schema.candidate import Candidate
from autotune.schema.plan import FrozenPart
from autotune.schema.plan_file import seal, with_job
from autotune.training.adapter_file import update_norm
from autotune.training.describe import check_job
from autotune.training.files import list_checkpoints
from autotune.training.loop import TrainingLoop
from autotune.training.metrics import TRACKERS, Metrics, Tracker, read_metrics
from autotune.training.monitor import NUM_WINDOWS, WINDOW_STEPS, MemoryWatch, PhaseWatch, leak_bytes_per_step
from autotune.training.optimizer import AdapterOptimizer
from autotune.training.schedule import PLATEAU_PATIENCE, LearningRate
from autotune.training.step import Noising, optimizer_step
from autotune.weights.lora_layer import LoraLayer
from tests.training.conftest import CPU, Bench
from tests.training.small import finished_step


def rates(bench: Bench, num_steps: int, losses: list[float] | None = None, **job: object) -> list[float]:
    adamw = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1e-3)
    rate = LearningRate(adamw, bench.plan(num_steps=num_steps, **job).job, num_steps, epoch_steps=2)
    seen = []
    for number in range(num_steps):
        seen.append(rate.value)
        adamw.step()
        rate.step(losses[number] if losses else 1.0)
    return seen


def test_each_schedule_has_its_shape(bench: Bench) -> None:
    assert rates(bench, 4, lr_scheduler="constant") == [1e-3] * 4
    assert rates(bench, 4, lr_scheduler="constant_with_warmup", lr_warmup_steps=2) == [0, 5e-4, 1e-3, 1e-3]
    assert rates(bench, 4, lr_scheduler="linear") == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    cosine = [1e-3 * 0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    assert rates(bench, 4, lr_scheduler="cosine") == pytest.approx(cosine)


@pytest.mark.parametrize(("workers", "memory"), [(0, "pageable"), (3, "pinned")])
def test_batches_are_loaded_as_the_settings_say(bench: Bench, workers: int, memory: str) -> None:
    plan = bench.plan()
    changed = {"data_workers": workers, "batch_memory": memory}
    settings = Candidate.model_validate({**dict(plan.frozen.settings), **changed})
    plan = seal(plan.job, FrozenPart.model_validate({**dict(plan.frozen), "settings": settings}))
    context = SimpleNamespace(processes=SimpleNamespace(rank=0, world_size=1), budget_bytes=1)
    loader = TrainingLoop(plan, bench.trained, bench.encoded, None, context)._make_loader()  # type: ignore[arg-type]
    assert (loader.num_workers, loader.pin_memory) == (workers, memory == "pinned")


def test_plateau_halves_the_rate_when_epochs_no_longer_improve(bench: Bench) -> None:
    steps = 2 * (PLATEAU_PATIENCE + 3)
    falling = [1.0 - number / 100 for number in range(steps)]
    assert rates(bench, steps, falling, lr_scheduler="plateau") == [1e-3] * steps
    flat = rates(bench, steps, lr_scheduler="plateau")
    assert flat[-1] == 5e-4
    assert flat.count(1e-3) == 2 * (PLATEAU_PATIENCE + 2)


@pytest.mark.parametrize(("scheme", "weight"), [("none", lambda s: 1.0), ("sigma_sqrt", lambda s: s**-2)])
def test_loss_weights_are_those_of_diffusers(bench: Bench, scheme: str, weight: object) -> None:
    family, transformer = bench.resolved.family, bench.trained.transformer
    batch = family.collate([bench.encoded.sample(0)])
    with torch.no_grad():
        plain = Noising(3, 2.2).loss(family, transformer, batch, 0, 0)
        weighted = Noising(3, 2.2, weighting=scheme).loss(family, transformer, batch, 0, 0)  # type: ignore[arg-type]
    _, sigma = Noising(3, 2.2).draw(0, 0, batch["latents"].shape[1:])
    assert float(weighted) == pytest.approx(float(plain) * weight(sigma), rel=1e-5)  # type: ignore[operator]


class Replica(torch.nn.Module):
    """Stands for a model wrapped for several processes: counts the passes that it may not average."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.unsynchronized = 0

    def forward(self, *values: Any, **named: Any) -> Any:
        return self.module(*values, **named)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.unsynchronized += 1
        yield


def test_gradients_are_averaged_once_per_step_however_many_micro_batches(bench: Bench) -> None:
    averaged: list[torch.Tensor] = []
    optimizer = AdapterOptimizer(bench.trained.adapter, learning_rate=0.0, weight_decay=0.0, max_grad_norm=1.0)
    family, replica = bench.resolved.family, Replica(bench.trained.transformer)
    batches = [family.collate([bench.encoded.sample(index)]) for index in (0, 0, 0)]
    optimizer_step(
        family,
        replica,
        optimizer,
        batches,
        effective_batch_size=3,
        step=0,
        average=averaged.append,
    )
    assert replica.unsynchronized == 2
    assert len(averaged) == 1  # the loss


HUGE = finished_step(2).changed(seconds=1e308).model_dump_json().encode() + b"\n"
DAMAGES = (b"\xff\n", b"\0" * 40, b'{"step": "2"}\n', b"null\n", b"[" * 9999, b"{}", b"NaN\n", b" " * (1 << 17), HUGE)


@pytest.mark.parametrize("damage", [*DAMAGES, HUGE.replace(b"1e308", b"1e999"), HUGE.replace(b"1e308", b"NaN")])
def test_a_damaged_record_ends_where_the_damage_begins(tmp_path: Path, damage: bytes) -> None:
    first = Metrics(tmp_path, resumed_at=0, report_to="none")
    first.add(finished_step(1))
    first.close()
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + damage + whole)
    Metrics(tmp_path, resumed_at=3, report_to="none").close()
    assert path.read_bytes() == whole


def test_a_pipe_in_place_of_a_record_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert read_metrics(tmp_path / "metrics.jsonl") == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("is_there", [True, False])
def test_curves_that_cannot_be_written_end_no_run(tmp_path: Path, is_there: bool) -> None:
    """The folder is replaced by a file: TensorBoard's thread finds it gone, and raises at one of the next points."""
    warnings: list[str] = []
    curves = tmp_path / "tensorboard"
    if not is_there:
        curves.write_text("")
    metrics = Metrics(tmp_path, resumed_at=0, report_to="tensorboard", on_warning=warnings.append)
    metrics.add(finished_step(1))
    if is_there:
        shutil.rmtree(curves)
    metrics.add(finished_step(2))
    metrics.close()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
    assert len(warnings) <= 1
    assert all("no more curves" in warning for warning in warnings)


def test_a_tracker_that_fails_is_told_once_and_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise FileNotFoundError("the folder is gone")

    warnings: list[str] = []
    monkeypatch.setitem(TRACKERS, "wandb", lambda *_: Tracker(fail, fail, fail))
    metrics = Metrics(tmp_path, resumed_at=0, report_to="wandb", on_warning=warnings.append)
    for step in (1, 2):
        metrics.add(finished_step(step))
    metrics.close()
    assert warnings == ["no more curves: the folder is gone; metrics.jsonl has all numbers"]
    assert metrics.losses == [1.0, 0.5]


def test_a_record_cut_short_by_a_kill_is_continued_from_the_checkpoint(tmp_path: Path) -> None:
    first = Metrics(tmp_path, resumed_at=0, report_to="none")
    for step in (1, 2, 3):
        first.add(finished_step(step))
    first.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "nu')
    second = Metrics(tmp_path, resumed_at=2, report_to="none")
    second.add(finished_step(3))
    second.close()
    assert read_metrics(path) == [finished_step(1), finished_step(2), finished_step(3)]
    assert second.losses == [1.0, 0.5, 1 / 3]


def test_a_step_that_was_skipped_stays_on_record(tmp_path: Path) -> None:
    """Its gradient overflowed, so it has no norm."""
    told = [finished_step(1), finished_step(2).changed(gradient_norm=None, overflowed_gradients=1), finished_step(3)]
    first = Metrics(tmp_path, resumed_at=0, report_to="none")
    for event in told:
        first.add(event)
    first.close()
    Metrics(tmp_path, resumed_at=3, report_to="none").close()
    assert read_metrics(tmp_path / "metrics.jsonl", pytest.fail) == told


def test_a_leak_is_noticed_once_and_the_budget_once() -> None:
    watch = MemoryWatch(budget_bytes=10**9, planned_bytes=10**8)
    told = [watch.check(10**8 + step * 10**5, 10**8) for step in range(WINDOW_STEPS * (NUM_WINDOWS + 3))]
    assert [message for message in told if message] == ["memory grows by 0.10 MiB per step"]
    told = [watch.check(10**8, 9 * 10**8) for _ in range(3)]
    assert [message is not None for message in told] == [True, False, False]
    assert "90% of what a run may take" in str(told[0])


def test_a_leak_is_noticed_in_a_run_that_is_near_its_budget() -> None:
    watch = MemoryWatch(budget_bytes=10**9, planned_bytes=10**8)
    told = [watch.check(8 * 10**8 + step * 10**5, 9 * 10**8) for step in range(WINDOW_STEPS * (NUM_WINDOWS + 3))]
    assert [message.split()[1] for message in told if message] == ["is", "grows"]
    assert len(watch.window) < WINDOW_STEPS


def test_a_run_that_was_planned_to_fill_the_budget_is_no_alarm_until_it_takes_more() -> None:
    watch = MemoryWatch(budget_bytes=10**9, planned_bytes=9 * 10**8)
    assert watch.check(10**8, 9 * 10**8) is None
    assert "96% of what a run may take" in str(watch.check(10**8, int(9.6 * 10**8)))


@given(st.integers(10**6, 10**9), st.lists(st.integers(-5000, 5000), min_size=NUM_WINDOWS, max_size=NUM_WINDOWS))
def test_noise_is_no_leak(level: int, noise: list[int]) -> None:
    assert leak_bytes_per_step([level + one for one in noise]) == 0.0 or max(noise) - min(noise) > level * 0.02


def test_memory_that_a_preview_raises_once_is_no_leak() -> None:
    floors = [950 + window + (30 if window >= NUM_WINDOWS - 1 else 0) for window in range(NUM_WINDOWS)]
    assert leak_bytes_per_step(floors) == 0.0
    assert leak_bytes_per_step([950 + 5 * window for window in range(NUM_WINDOWS)]) == 5 / WINDOW_STEPS


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell a phase's peak")
def test_a_phase_inside_another_counts_its_memory_apart() -> None:
    watch = PhaseWatch(CPU)
    with watch.phase("outer"), watch.phase("inner"):
        block = b"x" * (300 * 2**20)
        del block
    outer, inner = watch.peaks["outer"].host_bytes, watch.peaks["inner"].host_bytes
    assert outer is not None
    assert inner is not None
    assert inner - outer > 200 * 2**20


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.floats(0.5, 32))
def test_norm_of_an_update_is_that_of_the_product(rank: int, inputs: int, outputs: int, alpha: float) -> None:
    generator = torch.Generator().manual_seed(rank * 100 + inputs * 10 + outputs)
    down, up = torch.randn(rank, inputs, generator=generator), torch.randn(outputs, rank, generator=generator)
    expected = float((up.double() @ down.double()).norm()) * alpha / rank
    assert update_norm(LoraLayer(down, up, alpha)) == pytest.approx(expected, rel=1e-6)
    assert math.isnan(update_norm(LoraLayer(down * math.nan, up, alpha)))
    assert update_norm(LoraLayer(down, up * 0, alpha)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_carries_an_optimizer_over_to_the_bit(dtype: torch.dtype) -> None:
    def fresh() -> AdapterOptimizer:
        parameter = nn.Parameter(torch.linspace(-1, 1, 8).to(dtype))
        return AdapterOptimizer([parameter], learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1.0)

    def steps(optimizer: AdapterOptimizer, numbers: range) -> None:
        for number in numbers:
            (optimizer.parameters[0] * number).square().sum().backward()
            optimizer.step()

    whole, first, second = fresh(), fresh(), fresh()
    steps(whole, range(1, 7))
    steps(first, range(1, 4))
    second.load_state({name: tensor.clone() for name, tensor in first.state().items()})
    steps(second, range(4, 7))
    assert all(torch.equal(tensor, second.state()[name]) for name, tensor in whole.state().items())
    assert torch.equal(whole.parameters[0], second.parameters[0])


def test_a_step_that_ran_out_between_two_moments_can_be_taken_again() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = AdapterOptimizer([parameter], learning_rate=1e-2, weight_decay=0.0, max_grad_norm=1.0)
    optimizer.inner.state[parameter]["step"] = torch.tensor(
        0.0
    )  # as torch leaves it when there is no room for the rest
    optimizer.discard_step()
    parameter.square().sum().backward()
    optimizer.step()
    assert (parameter != 1).all()


def test_resident_memory_is_what_the_system_says() -> None:
    """Without shared libraries, which other processes have, too."""
    before = resident_bytes()
    with mmap.mmap(-1, 64 * 2**20) as block:  # fresh pages, whatever was freed before
        for _ in range(64):
            block.write(b"x" * 2**20)
        assert resident_bytes() - before == pytest.approx(len(block), rel=0.1)
        assert resident_bytes() == pytest.approx(psutil.Process().memory_info().rss - library_bytes(), rel=0.01)


@pytest.mark.slow
def test_memory_stays_flat(bench: Bench, tmp_path: Path) -> None:
    held: list[int] = []
    bench.loop(
        bench.plan(num_steps=120, checkpointing_steps=20),
        tmp_path,
        on_step=lambda event: held.append(event.memory_bytes),
    )
    assert max(held[-20:]) < 1.01 * max(held[40:60])


def test_what_a_family_lacks_is_refused(bench: Bench) -> None:
    family = bench.resolved.family
    check_job(bench.plan(timestep_shift="by_resolution").job, family)
    with pytest.raises(InvalidInput, match="takes no guidance"):
        check_job(bench.plan(guidance_scale=1.0).job, family)
    with pytest.raises(InvalidInput, match="not a clip of 9"):  # the job's, edited by hand
        check_job(bench.plan(num_frames=9).job, family)
    with pytest.raises(InvalidInput, match="no timestep shift by resolution"):
        check_job(bench.plan(timestep_shift="by_resolution").job, get_family("kandinsky5-image-lite"))


@pytest.mark.parametrize(("name", "tokens", "shift"), [("flux1-dev", 4096, 3.1582), ("qwen-image", 8192, 2.4596)])
def test_shift_by_resolution_is_the_pipelines(name: str, tokens: int, shift: float) -> None:
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    defaults = get_family(name).defaults
    assert defaults.shift_at(tokens) == pytest.approx(shift, rel=1e-3)
    (low, start), (high, end) = defaults.shift_by_tokens or ((0, 0.0), (0, 0.0))
    assert math.log(defaults.shift_at(1024)) == pytest.approx(calculate_shift(1024, low, high, start, end))


def test_a_plans_guidance_reaches_the_model() -> None:
    seen: list[float] = []
    family = get_family("flux1-dev")
    model = SimpleNamespace(config=SimpleNamespace(guidance_embeds=True))

    class Stub:
        config = model.config

        def __call__(self, **inputs: Any) -> tuple[torch.Tensor]:
            seen.append(float(inputs["guidance"][0]))
            return (inputs["hidden_states"],)

    batch = {"prompt_embeds": torch.zeros(1, 4, 8), "pooled_prompt_embeds": torch.zeros(1, 8)}
    for more in ({}, {"guidance": torch.tensor([3.5])}):
        family.predict(Stub(), torch.zeros(1, 16, 1, 4, 4), torch.zeros(1), {**batch, **more})  # type: ignore[arg-type]
    assert seen == [1.0, 3.5]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried"), MemoryError("cannot allocate")])
def test_memory_that_runs_out_outside_of_steps_is_no_bug_of_ours(error: Exception) -> None:
    with pytest.raises(AutotuneError, match="memory ran out") as told, reraise_oom():
        raise error
    assert "--reserve" in told.value.hint


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), InvalidInput("out of memory?", hint="no")])
def test_other_errors_are_not_taken_for_short_memory(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, reraise_oom():
        raise error
    assert raised.value is error


def test_trackers_draw_what_is_known_of_a_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics(tmp_path, resumed_at=0, report_to="tensorboard")
    metrics.add(finished_step(1))
    metrics.add(finished_step(2).changed(gpu_utilization=0.9, validation_loss=0.4, base_validation_loss=0.5))
    metrics.close()
    curves = EventAccumulator(str(tmp_path / "tensorboard"))
    curves.Reload()
    assert [point.step for point in curves.Scalars("loss")] == [1, 2]
    for name, value in (("gpu_utilization", 0.9), ("validation_loss", 0.4), ("base_validation_loss", 0.5)):
        assert [(point.step, point.value) for point in curves.Scalars(name)] == [(2, pytest.approx(value))]


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format: blocks of 32 KiB, each part with checksum, length and kind."""
    at, record = 7, b""  # after wandb's own header
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, or last
            yield record
            record = b""


def test_wandb_keeps_curves_and_previews_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    picture = tmp_path / "preview.png"
    Image.new("RGB", (32, 32), "red").save(picture)
    told: list[str] = []
    metrics = Metrics(tmp_path, resumed_at=0, report_to="wandb", on_warning=told.append)
    for step in (1, 2):
        metrics.add(finished_step(step))
    metrics.add_previews(2, [picture])
    metrics.close()
    assert told == []
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = [Record.FromString(content) for content in leveldb_records(log.read_bytes())]
    rows = [
        {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [row["loss"] for row in rows] == ["1", "0.5"], [str(record)[:300] for record in records]
    assert rows[0]["learning_rate"] == "0.0001"
    assert rows[1]["preview 1/format"] == '"png"'
    assert len(list(log.parent.glob("files/media/images/preview 1_2_*.png"))) == 1


def test_checkpoints_go_by_epochs(bench: Bench, tmp_path: Path) -> None:
    plan = bench.plan(num_steps=5, checkpointing_epochs=1, checkpoints_total_limit=5)
    bench.loop(plan, tmp_path)
    every = -(-sum(item.repeats for item in bench.encoded.items) // 4)
    assert sorted(list_checkpoints(tmp_path / "checkpoints")) == sorted({*range(every, 6, every), 5})
    assert with_job(plan, checkpointing_steps=3).job.checkpoint_every(5, 4) == 3
