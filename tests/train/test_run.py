"""A whole run in process: what it writes, what its report says, and what it refuses before any
long work."""

import errno
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from autotune.data.encode import Encoders
from autotune.errors import AutotuneError, DoesNotFit, InvalidInput, Preempted
from autotune.events import StepFinished
from autotune.knobs.block_swap import BlockSwap
from autotune.plan.candidate import CachingSettings
from autotune.plan.file import write_plan
from autotune.plan.request import PlanRequest
from autotune.plan.run import RunReport
from autotune.report.run import report_lines
from autotune.search.request import ResolvedRequest
from autotune.train import folder as folder_module
from autotune.train import run as run_module
from autotune.train.folder import ADAPTER_FILE
from autotune.train.loop import TrainingLoop
from autotune.train.metrics import Metrics
from autotune.train.prepare import prepare
from autotune.train.preview import MIN_LINE_PX, Preview, PreviewSampler
from autotune.train.run import train
from autotune.train.sample import SampleRequest, read_sample_inputs, sample_run
from autotune.weights.tensors import save_file
from tests.events import notices_to, phases_to, steps_to
from tests.search.machines import make_plan
from tests.train.conftest import CPU, Bench
from tests.train.small import SETTINGS
from tests.train.small import make_plan as plan_of

PROMPTS = ("a red circle on a white background", "something else")


@pytest.fixture(scope="module")
def run(
    bench: Bench, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, RunReport, list[StepFinished]]:
    folder = tmp_path_factory.mktemp("run") / "out"
    plan = bench.plan(
        output=str(folder),
        num_train_epochs=5,  # 25 images in steps of 4
        preview_prompts=PROMPTS,
        preview_every=3,
        checkpointing_steps=3,
        report_to="tensorboard",
        caption_dropout=0.1,
    )
    steps: list[StepFinished] = []
    report = train(plan, bench.hardware, bench.cache, steps_to(steps.append), trace=True)
    return folder, report, steps


@pytest.mark.parametrize("damage", ["cut off", "nan", "another model's", "pickled"])
def test_an_adapter_that_cannot_be_used_is_refused_before_anything_is_sampled(
    bench: Bench, run: tuple[Path, RunReport, list[StepFinished]], tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(run[0] / "run-plan.yaml", folder)
    whole, adapter = (run[0] / ADAPTER_FILE).read_bytes(), folder / ADAPTER_FILE
    weights = load_file(run[0] / ADAPTER_FILE)
    if damage == "cut off":
        adapter.write_bytes(whole[:-1])
    elif damage == "nan":
        save_file(adapter, {name: tensor * float("nan") for name, tensor in weights.items()})
    elif damage == "pickled":
        adapter.write_bytes(pickle.dumps(weights))
    else:
        save_file(
            adapter, {name.replace("blocks", "layers"): tensor for name, tensor in weights.items()}
        )
    with pytest.raises(
        InvalidInput,
        match=r"cut off|not finite|not an adapter of this model|claims a header|no JSON",
    ):
        sample_run(
            read_sample_inputs(folder, SampleRequest(PROMPTS[0], seed=5)),
            bench.hardware,
            bench.cache,
        )
    assert not list(folder.glob("*.png"))


def test_curves_previews_trace_and_grid_are_written(
    run: tuple[Path, RunReport, list[StepFinished]],
) -> None:
    folder, _, _ = run
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = EventAccumulator(str(folder / "tensorboard"))
    curves.Reload()
    assert [point.step for point in curves.Scalars("loss")] == [1, 2, 3, 4, 5, 6, 7]
    shown = {tag: curves.Images(tag) for tag in curves.Tags()["images"]}
    assert {tag: [image.step for image in images] for tag, images in shown.items()} == {
        "preview 1": [3, 6], "preview 2": [3, 6],
    }  # fmt: skip
    first = shown["preview 1"][0].encoded_image_string
    assert first == (folder / "previews" / "step-000003-0.png").read_bytes()
    assert sorted(path.name for path in (folder / "previews").iterdir()) == [
        *(f"step-{step:06}-{number}.png" for step in (3, 6) for number in (0, 1)),
        "with-1.png",
        "without-1.png",
    ], "of each prompt after the first, too"
    assert Image.open(folder / "samples.png").size == (64, 2 * (32 + 2 * MIN_LINE_PX)), (
        "with lines for labels"
    )
    facts = {
        name: Image.open(folder / f"sample_{name}_adapter.png").text for name in ("with", "without")
    }
    assert {
        name: (text["adapter"], text["prompt"], text["seed"]) for name, text in facts.items()
    } == {name: (name, PROMPTS[0], "3") for name in facts}
    preview = Image.open(folder / "previews" / "step-000003-1.png").text
    assert (preview["adapter"], preview["prompt"], preview["seed"]) == (
        "after step 3",
        PROMPTS[1],
        "4",
    )
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]


def test_report_judges_the_adapter_and_names_memory_by_phase(
    run: tuple[Path, RunReport, list[StepFinished]],
) -> None:
    folder, report, _ = run
    assert RunReport.model_validate_json((folder / "report.json").read_text()) == report
    assert {phase.name for phase in report.phases} == {
        "caching",
        "loading",
        "previews",
        "training",
        "saving",
    }
    assert all(phase.host_bytes for phase in report.phases)
    verdict = report.verdict
    assert verdict is not None
    assert (verdict.num_layers, verdict.num_unmoved, verdict.num_not_finite) == (24, 0, 0)
    assert verdict.base_loss != verdict.adapter_loss
    promised = tuple(
        peak.model_copy(update={"host_bytes": 2**30, "device_bytes": None})
        for peak in report.phases[:1]
    )
    text = "\n".join(report_lines(report.model_copy(update={"expected_phases": promised})))
    assert re.search(r"  caching +1\.00 GiB +[\d.]+ [MG]iB", text)
    assert re.search(r"  saving +- +[\d.]+ [MG]iB", text)
    assert "24 layers, all moved, all finite" in text
    assert "loss on fresh noise" in text


def test_sampling_swaps_the_blocks_that_the_plan_swaps(
    bench: Bench, run: tuple[Path, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SETTINGS.model_copy(update={"swapped_blocks": 1, "checkpointed_blocks": 1})
    write_plan(tmp_path / "run-plan.yaml", bench.plan(settings=settings))
    shutil.copy(run[0] / ADAPTER_FILE, tmp_path)
    visits: list[int] = []
    fetch = BlockSwap._fetch
    monkeypatch.setattr(
        BlockSwap, "_fetch", lambda swap, number: (visits.append(number), fetch(swap, number))
    )
    pictures, request = [], SampleRequest(PROMPTS[0], seed=5, output=tmp_path / "sample.png")
    for folder in (run[0], tmp_path):
        inputs = read_sample_inputs(folder, request)
        (written,) = sample_run(inputs, bench.hardware, bench.cache)
        pictures.append(Image.open(written).tobytes())
    assert set(visits) == {0}
    assert pictures[0] == pictures[1]


def test_previews_are_what_the_stock_pipeline_with_its_text_encoder_samples(
    bench: Bench, run: tuple[Path, RunReport, list[StepFinished]], tmp_path: Path
) -> None:
    preview = Preview(PROMPTS[0], bench.plan().frozen.workload.largest_bucket, 2, seed=5)
    stock = bench.resolved.family.load_pipeline(bench.model_folder)
    plain = bench.resolved.family.sample(
        stock, preview.prompt, preview.bucket, num_steps=2, seed=5
    )[0]
    write_plan(tmp_path / "plan.yaml", bench.plan())
    (as_it_is,) = sample_run(
        read_sample_inputs(tmp_path / "plan.yaml", SampleRequest(PROMPTS[0], seed=5)),
        bench.hardware,
        bench.cache,
    )
    assert (as_it_is.parent, Image.open(as_it_is).tobytes()) == (tmp_path, plain.tobytes())
    stock.load_lora_weights(run[0], weight_name=ADAPTER_FILE)
    expected = bench.resolved.family.sample(
        stock, preview.prompt, preview.bucket, num_steps=2, seed=5
    )[0]
    (written,) = sample_run(
        read_sample_inputs(run[0], SampleRequest(PROMPTS[0], seed=5)), bench.hardware, bench.cache
    )
    assert Image.open(written).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "short_of_memory",
    [
        torch.OutOfMemoryError(),
        RuntimeError("GET was unable to find an engine to execute this computation"),
    ],
)
def test_a_preview_too_large_for_memory_is_tiled_then_halved(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, short_of_memory: Exception
) -> None:
    bucket = bench.plan().frozen.workload.largest_bucket.model_copy(
        update={"width_px": 512, "height_px": 512}
    )
    told: list[str] = []
    sampler, tried = (
        PreviewSampler(Encoders(bench.resolved, CachingSettings(), SETTINGS, CPU), told.append),
        [],
    )
    sampler.encoded[PROMPTS[0], ()] = []
    vae = torch.nn.Module()
    vae.use_tiling = False
    vae.enable_tiling = lambda: setattr(vae, "use_tiling", True)
    sampler.pipeline = SimpleNamespace(vae=vae, transformer=bench.trained.transformer)

    def short(pipeline: Any, preview: Preview) -> list[Any]:
        tried.append((preview.bucket.width_px, vae.use_tiling))
        if preview.bucket.width_px > 256:
            raise short_of_memory
        return ["picture"]

    monkeypatch.setattr(sampler, "_run", short)
    assert sampler.sample(Preview(PROMPTS[0], bucket, 2, 0)) == ["picture"]
    assert tried == [(512, False), (512, True), (256, True)]
    assert told == ["memory is too short for a preview of 512x512 px: it is 256x256"]


@pytest.mark.quick("memory is too short for a preview")
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError(), "memory is too short for a preview"),
        (RuntimeError("shape '[1, 16]' is invalid\nmore"), "shape '[1, 16]' is invalid"),
        (InvalidInput("a control image is gone", hint="check"), "a control image is gone"),
    ],
)
def test_where_no_preview_can_be_made_the_run_goes_on_without(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def short(sampler: PreviewSampler, preview: Preview) -> list[Any]:
        raise error

    monkeypatch.setattr(PreviewSampler, "_sample", short)
    told: list[str] = []
    plan = bench.plan(num_steps=4, output=str(tmp_path), preview_every=2, preview_prompts=PROMPTS)
    report = train(plan, bench.hardware, bench.cache, notices_to(told.append))
    assert report.num_steps == 4
    assert [line for line in told if "preview" in line] == list(report.warnings)
    assert report.warnings == (f"{words}; the run goes on without previews",)
    assert (tmp_path / "report.json").is_file()


def test_the_adapter_is_written_before_anything_that_may_still_fail(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(loop: Any) -> float:
        raise AutotuneError("the cache lost an entry", hint="run again")

    monkeypatch.setattr(TrainingLoop, "evaluate", lost)
    with pytest.raises(AutotuneError, match="lost an entry"):
        train(bench.plan(num_steps=1, output=str(tmp_path)), bench.hardware, bench.cache)
    assert load_file(tmp_path / ADAPTER_FILE)


@pytest.mark.slow
@pytest.mark.quick("SIGTERM")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_after_the_last_step_ends_at_once_and_the_rest_can_be_had_later(
    bench: Bench, tmp_path: Path, number: int
) -> None:
    plan = bench.plan(num_steps=2, output=str(tmp_path), preview_prompts=PROMPTS[:1])

    def stop(phase: str) -> None:
        if phase.startswith("sampling"):
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(Preempted, match="after the last step") as stopped:
        train(plan, bench.hardware, bench.cache, phases_to(stop))
    assert (stopped.value.exit_status, "--resume" in stopped.value.hint) == (75, True)
    assert signal.getsignal(number) is before
    assert not (tmp_path / "samples.png").exists()
    with pytest.raises(InvalidInput, match="did not end"):
        prepare(plan, bench.hardware, resume=False)
    train(plan, bench.hardware, bench.cache, resume=True)
    assert (tmp_path / "samples.png").is_file()


@pytest.mark.parametrize(("schedule", "can_be_longer"), [("constant", True), ("cosine", False)])
def test_a_finished_run_that_is_started_again_is_recognized(
    bench: Bench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    schedule: str,
    can_be_longer: bool,
) -> None:
    plan = bench.plan(num_steps=1, output=str(tmp_path), lr_scheduler=schedule)
    report = train(plan, bench.hardware, bench.cache)
    with pytest.raises(InvalidInput, match="this very run, finished after 1 steps") as refused:
        train(plan, bench.hardware, bench.cache)
    assert f"autotune sample {tmp_path} --prompt TEXT" in refused.value.hint
    assert ("--resume --steps" in refused.value.hint) == can_be_longer
    monkeypatch.setattr(
        run_module, "load_model", lambda *_, **__: pytest.fail("it is being loaded")
    )
    told: list[str] = []
    assert train(plan, bench.hardware, bench.cache, notices_to(told.append), resume=True) == report
    assert told == ["this run has taken all of its 1 steps: nothing is left to do"]


def test_resuming_never_replaces_an_adapter_by_one_from_the_first_step_on(
    bench: Bench, tmp_path: Path
) -> None:
    plan = bench.plan(num_steps=1, output=str(tmp_path))
    bench.loop(plan, tmp_path)
    (tmp_path / ADAPTER_FILE).write_bytes(b"of hours")
    (tmp_path / "run-plan.yaml").write_text("damaged")
    prepare(
        plan, bench.hardware, resume=True
    ).lock.release()  # its checkpoints say that it is the same run
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(InvalidInput, match="holds the adapter of another run"):
        prepare(plan, bench.hardware, resume=True)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the disk that each start asks for."""
    sizes: list[int] = []
    monkeypatch.setattr(
        folder_module, "require_free_disk", lambda folder, needed, what, hint: sizes.append(needed)
    )
    return sizes


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_an_incomplete_model_is_refused_before_any_work(
    bench: Bench, tmp_path: Path, part: str, damage: str
) -> None:
    model = shutil.copytree(bench.model_folder, tmp_path / "model")
    (file,) = (model / part).glob("*.safetensors")
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InvalidInput):
        prepare(
            bench.plan(model=str(model), output=str(tmp_path / "out")), bench.hardware, resume=False
        )
    assert not (tmp_path / "out").exists()
    with pytest.raises(InvalidInput):  # and before any trial
        make_plan(PlanRequest(model=str(model), **{"data": str(bench.images)}), bench.hardware)


@pytest.fixture
def alike(bench: Bench, tmp_path: Path) -> Path:
    """Images whose captions have one length."""
    images = shutil.copytree(bench.images, tmp_path / "images")
    for caption in images.glob("*.txt"):
        caption.write_text("a red circle")
    return images


def test_a_plan_without_masks_is_refused_where_captions_are_dropped_among_ones_of_one_length(
    bench: Bench, alike: Path, tmp_path: Path
) -> None:
    def padding(attention: str, caption_dropout: float) -> str:
        settings = SETTINGS.model_copy(update={"attention": attention})
        job = {"output": str(tmp_path / "out"), "caption_dropout": caption_dropout}
        plan = plan_of(bench.model_folder, alike, bench.hardware, settings=settings, **job)
        assert plan.frozen.workload.text_padding == "exact"
        prepared = prepare(plan, bench.hardware, resume=False)
        prepared.lock.release()
        return prepared.workload.text_padding

    assert padding("_native_flash", 0.0) == "exact"
    assert padding("native", 0.1) == "masked"
    with pytest.raises(DoesNotFit, match=r"_native_flash refuses masks.* dropped"):
        padding("_native_flash", 0.1)


def test_dropped_captions_are_planned_with_masks(bench: Bench, alike: Path) -> None:
    asked = PlanRequest(
        model=str(bench.model_folder), data=str(alike), resolution=(32, 32), effective_batch_size=2
    )
    dropping = asked.changed(caption_dropout=0.1)
    again = asked.over(bench.plan(caption_dropout=0.1))
    for question, masked in ((asked, False), (dropping, True), (again, True)):
        candidates = (
            ResolvedRequest.build(question, needs_weights=False).space(bench.hardware).candidates
        )
        pairs = {
            candidate.micro_batch_size
            for candidate in candidates
            if candidate.attention == "_native_flash"
        }
        assert pairs == ({1} if masked else {1, 2})


def test_a_run_killed_after_its_last_step_is_only_finished(bench: Bench, tmp_path: Path) -> None:
    plan = bench.plan(num_steps=2, output=str(tmp_path))
    whole = train(plan, bench.hardware, bench.cache)
    weights = load_file(tmp_path / ADAPTER_FILE)
    for name in (ADAPTER_FILE, "report.json"):
        (tmp_path / name).unlink()
    finished = train(plan, bench.hardware, bench.cache, resume=True)
    assert (finished.resumed_at, finished.verdict) == (2, whole.verdict)
    again = load_file(tmp_path / ADAPTER_FILE)
    assert all(torch.equal(weights[name], again[name]) for name in weights)


@pytest.mark.quick("save_trained")
@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (Metrics, "add", OSError(errno.ENOSPC, "No space left on device")),
        (run_module, "save_trained", OSError(errno.EDQUOT, "Disk quota exceeded")),
    ],
)
def test_a_disk_that_fills_up_says_how_to_go_on_and_the_run_then_ends(
    bench: Bench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    error: Exception,
) -> None:
    def full(*arguments: Any) -> None:
        raise error

    plan = bench.plan(num_steps=2, output=str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        with pytest.raises(AutotuneError, match="is full") as caught:
            train(plan, bench.hardware, bench.cache)
    assert "--resume" in caught.value.hint
    assert not (tmp_path / ADAPTER_FILE).exists()
    assert train(plan, bench.hardware, bench.cache, resume=True).num_steps == 2


def test_two_runs_never_share_a_folder_and_a_dead_one_blocks_nothing(
    bench: Bench, tmp_path: Path
) -> None:
    plan = bench.plan(num_steps=2, output=str(tmp_path / "out"))
    running = prepare(plan, bench.hardware, resume=False)
    for resume in (False, True):
        with pytest.raises(InvalidInput, match="another run is writing to"):
            prepare(plan, bench.hardware, resume=resume)
    running.lock.release()
    holder = "import sys, filelock\nlock = filelock.FileLock(sys.argv[1])\nlock.acquire()\n"
    holder += "print('held', flush=True)\nsys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path / "out" / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == b"held\n"
    with pytest.raises(InvalidInput, match="another run is writing to"):
        prepare(plan, bench.hardware, resume=False)
    other.kill()
    other.communicate()
    assert train(plan, bench.hardware, bench.cache).num_steps == 2


def test_prompts_of_previews_are_encoded_once_for_all_starts(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"num_steps": 1, "preview_prompts": PROMPTS, "caption_dropout": 0.1}
    first = train(bench.plan(output=str(tmp_path / "one"), **job), bench.hardware, bench.cache)
    monkeypatch.setattr(
        Encoders, "_load_text_encoder", lambda *_: pytest.fail("a text encoder was loaded")
    )
    train(bench.plan(output=str(tmp_path / "two"), **job), bench.hardware, bench.cache)
    assert first.num_steps == 1
    left, right = (Image.open(tmp_path / name / "samples.png").tobytes() for name in ("one", "two"))
    assert left == right
