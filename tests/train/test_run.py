"""A whole run in process: what it writes, what it reports, and what it refuses."""

import json
import os
import pickle
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import filelock
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from autotune.data.encode import Encoders
from autotune.errors import AutotuneError, DoesNotFit, InvalidInput, Preempted
from autotune.knobs.blocks import BlockSwap
from autotune.plan.candidate import CachingSettings
from autotune.plan.file import save_plan
from autotune.plan.plan import RunReport
from autotune.plan.request import PlanRequest
from autotune.train import run as run_module
from autotune.train.folder import ADAPTER_FILE
from autotune.train.loop import TrainingLoop
from autotune.train.prepare import SampleRequest, prepare, read_sample_inputs
from autotune.train.sample import Preview, PreviewSampler, sample_run
from autotune.weights.tensors import save_file
from tests.events import phases_to
from tests.search.machines import make_plan
from tests.train.conftest import CPU, PROMPT
from tests.train.small import SETTINGS, make_plan as plan_of

PROMPTS = (PROMPT, "something else")
Finished = tuple[Path, RunReport]


@pytest.fixture(scope="module")
def run(bench, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "out"
    job = {"num_train_epochs": 5, "checkpointing_steps": 3, "caption_dropout": 0.1}
    shown = {"preview_prompts": PROMPTS, "preview_every": 3, "report_to": "tensorboard"}
    plan = bench.plan(output=str(folder), **job, **shown)  # 25 images in steps of 4
    return folder, bench.train(plan, trace=True)


@pytest.mark.parametrize("damage", ["cut off", "nan", "another model's", "pickled"])
def test_a_bad_adapter_is_refused(bench, run, tmp_path, damage):
    shutil.copy(run[0] / "run-plan.yaml", tmp_path)
    whole, adapter = (run[0] / ADAPTER_FILE).read_bytes(), tmp_path / ADAPTER_FILE
    weights = load_file(run[0] / ADAPTER_FILE)
    if damage == "cut off":
        adapter.write_bytes(whole[:-1])
    elif damage == "nan":
        save_file(adapter, {name: tensor * float("nan") for name, tensor in weights.items()})
    elif damage == "pickled":
        adapter.write_bytes(pickle.dumps(weights))
    else:
        save_file(adapter, {name.replace("blocks", "layers"): t for name, t in weights.items()})
    words = r"cut off|not finite|not an adapter of this model|claims a header|no JSON"
    with pytest.raises(InvalidInput, match=words):
        bench.sample(tmp_path)
    assert not list(tmp_path.rglob("*.png"))


def test_curves_previews_and_sheets_are_written(run):
    folder, _ = run
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = EventAccumulator(str(folder / "tensorboard"))
    curves.Reload()
    assert [point.step for point in curves.Scalars("loss")] == [1, 2, 3, 4, 5, 6, 7]
    shown = {tag: curves.Images(tag) for tag in curves.Tags()["images"]}
    steps = {tag: [image.step for image in images] for tag, images in shown.items()}
    assert steps == {"preview 1": [3, 6], "preview 2": [3, 6]}
    first = shown["preview 1"][0].encoded_image_string
    assert first == (folder / "previews" / "step-000003-0.png").read_bytes()
    previews = [f"step-{step:06}-{number}.png" for step in (3, 6) for number in (0, 1)]
    names = sorted(path.name for path in (folder / "previews").iterdir())
    assert names == [*previews, "with-1.png", "without-1.png"]
    assert (folder / "samples.png").is_file()
    for file, adapter, number in (
        ("sample_with_adapter.png", "with", 0),
        ("sample_without_adapter.png", "without", 0),
        ("previews/step-000003-1.png", "after step 3", 1),
    ):
        text, facts = Image.open(folder / file).text, (adapter, PROMPTS[number], f"{3 + number}")
        assert (text["adapter"], text["prompt"], text["seed"]) == facts
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]


def test_report_judges_the_adapter(run):
    folder, report = run
    assert RunReport.model_validate_json((folder / "report.json").read_text()) == report
    names = {phase.name for phase in report.phases}
    assert names == {"caching", "loading", "previews", "training", "saving"}
    assert all(phase.host_bytes for phase in report.phases)
    verdict = report.verdict
    assert (verdict.num_layers, verdict.num_unmoved, verdict.num_not_finite) == (24, 0, 0)
    assert verdict.base_loss != verdict.adapter_loss


def test_sampling_swaps_blocks_that_plan_swaps(bench, run, tmp_path, monkeypatch):
    settings = SETTINGS.changed(swapped_blocks=1, checkpointed_blocks=1)
    save_plan(bench.plan(settings=settings), tmp_path / "run-plan.yaml")
    shutil.copy(run[0] / ADAPTER_FILE, tmp_path)
    visits = []
    fetch = BlockSwap._fetch

    def visit(swap, number):
        visits.append(number)
        fetch(swap, number)

    monkeypatch.setattr(BlockSwap, "_fetch", visit)
    file = tmp_path / "sample.png"
    files = (bench.sample(each, output=file) for each in (run[0], tmp_path))
    one, other = (Image.open(each).tobytes() for each in files)
    assert one == other
    assert set(visits) == {0}


def test_samples_are_the_stock_pipelines(bench, run, tmp_path):
    family, bucket = bench.resolved.family, bench.plan().frozen.workload.largest_bucket
    stock = family.load_pipeline(bench.model_folder)
    plain = family.sample(stock, PROMPT, bucket, num_steps=2, seed=5)[0]
    save_plan(bench.plan(), tmp_path / "plan.yaml")
    written = bench.sample(tmp_path / "plan.yaml")
    assert (written.parent, Image.open(written).tobytes()) == (tmp_path, plain.tobytes())
    stock.load_lora_weights(run[0], weight_name=ADAPTER_FILE)
    expected = family.sample(stock, PROMPT, bucket, num_steps=2, seed=5)[0]
    written = [bench.sample(run[0]), bench.sample(run[0])]
    assert written == [run[0] / "samples" / name for name in ("sample-5.png", "sample-5-2.png")]
    assert {Image.open(path).tobytes() for path in written} == {expected.tobytes()}
    request = SampleRequest(PROMPT, seed=5, output=tmp_path / "x.png", strengths=(0.0, 0.5, 1.0))
    written = sample_run(read_sample_inputs(run[0], request), bench.hardware, bench.cache)
    assert [path.name for path in written] == ["x-at-0.png", "x-at-0.5.png", "x-at-1.png"]
    read_sample_inputs(run[0], request)  # as often as one likes
    with pytest.raises(InvalidInput, match="no earlier file of this command"):
        read_sample_inputs(run[0], SampleRequest(PROMPT, output=run[0] / ADAPTER_FILE))
    none, half, full = (Image.open(path).tobytes() for path in written)
    assert none == plain.tobytes()
    assert full == expected.tobytes() != half


def test_large_preview_is_tiled_then_halved(bench, monkeypatch):
    bucket = bench.plan().frozen.workload.largest_bucket.changed(width_px=512, height_px=512)
    told = []
    tried = []
    encoders = Encoders(bench.resolved, CachingSettings(), CPU, SETTINGS.precision)
    sampler = PreviewSampler(encoders, told.append)
    sampler.encoded[PROMPT, ()] = []
    vae = torch.nn.Module()
    vae.use_tiling = False
    vae.enable_tiling = lambda: setattr(vae, "use_tiling", True)
    sampler.pipeline = SimpleNamespace(vae=vae, transformer=bench.trained.transformer)

    def short(pipeline, preview):
        tried.append((preview.bucket.width_px, vae.use_tiling))
        if preview.bucket.width_px > 256:
            raise torch.OutOfMemoryError
        return ["picture"]

    monkeypatch.setattr(sampler, "_run", short)
    assert sampler.sample(Preview(PROMPT, bucket, 2, 0)) == ["picture"]
    assert tried == [(512, False), (512, True), (256, True)]
    assert told == ["memory is too short for a preview of 512x512 px: it is 256x256"]


def test_no_file_of_run_holds_caption(bench, tmp_path):
    bench.train(bench.plan(num_steps=1, output=str(tmp_path), preview_prompts=None))
    facts = Image.open(tmp_path / "sample_with_adapter.png").text
    assert facts["prompt"] == "the first caption"
    caption = (bench.images / "00.txt").read_text().strip().encode()
    assert caption
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if caption in path.read_bytes()]


def test_the_adapter_is_saved(bench, tmp_path, monkeypatch):
    def lost(loop):
        raise AutotuneError("the cache lost an entry", hint="run again")

    monkeypatch.setattr(TrainingLoop, "evaluate", lost)
    with pytest.raises(AutotuneError, match="lost an entry"):
        bench.train(bench.plan(num_steps=1, output=str(tmp_path)))
    assert load_file(tmp_path / ADAPTER_FILE)


@pytest.mark.slow
def test_late_signals_end_at_once(bench, tmp_path):
    plan = bench.plan(num_steps=2, output=str(tmp_path), preview_prompts=PROMPTS[:1])

    def stop(phase):
        if phase.startswith("sampling"):
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted, match="after the last step") as stopped:
        bench.train(plan, phases_to(stop))
    assert (stopped.value.exit_status, "--resume" in stopped.value.hint) == (75, True)
    assert signal.getsignal(signal.SIGTERM) is before
    assert not (tmp_path / "samples.png").exists()
    with pytest.raises(InvalidInput, match="did not end"):
        prepare(plan, bench.hardware, resume=False)
    bench.train(plan, resume=True)
    assert (tmp_path / "samples.png").is_file()


def test_resuming_never_replaces_an_adapter(bench, tmp_path):
    plan = bench.plan(num_steps=1, output=str(tmp_path))
    bench.loop(plan, tmp_path)
    (tmp_path / ADAPTER_FILE).write_bytes(b"of hours")
    (tmp_path / "run-plan.yaml").write_text("damaged")
    # Its checkpoints say that it is the same run.
    prepare(plan, bench.hardware, resume=True).lock.release()
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(InvalidInput, match="holds the adapter of another run"):
        prepare(plan, bench.hardware, resume=True)


def test_dropped_captions_need_masks(bench, tmp_path):
    alike = shutil.copytree(bench.images, tmp_path / "images")
    for caption in alike.glob("*.txt"):
        caption.write_text("a red circle")

    def padding(attention, caption_dropout):
        settings = SETTINGS.changed(attention=attention)
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


def test_ended_runs_are_only_finished(bench, tmp_path, monkeypatch):
    plan = bench.plan(num_steps=2, output=str(tmp_path))
    whole = bench.train(plan)
    with pytest.raises(InvalidInput, match="this very run, finished after 2 steps") as ended:
        bench.train(plan)
    assert "train longer" in ended.value.hint
    with monkeypatch.context() as patch:
        patch.delattr(run_module, "load_model")
        assert bench.train(plan, resume=True) == whole
    weights = (tmp_path / ADAPTER_FILE).read_bytes()
    for name in (ADAPTER_FILE, "report.json"):
        (tmp_path / name).unlink()
    finished = bench.train(plan, resume=True)
    assert (finished.resumed_at, finished.verdict) == (2, whole.verdict)
    assert (tmp_path / ADAPTER_FILE).read_bytes() == weights


def test_two_runs_never_share_a_folder(bench, tmp_path):
    plan = bench.plan(num_steps=2, output=str(tmp_path))
    other = filelock.FileLock(tmp_path / ".lock", is_singleton=False)
    other.acquire()
    for resume in (False, True):
        with pytest.raises(InvalidInput, match="another run is writing to"):
            prepare(plan, bench.hardware, resume=resume)
    other.release()
    prepare(plan, bench.hardware, resume=False).lock.release()
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="cannot write to the output folder"):
        prepare(bench.plan(output=f"{tmp_path}/file/run"), bench.hardware, resume=False)


@pytest.mark.parametrize(("part", "is_missing"), [("transformer", False), ("vae", True)])
def test_half_a_model_is_refused(bench, tmp_path, part, is_missing):
    model = shutil.copytree(bench.model_folder, tmp_path / "model")
    (file,) = (model / part).glob("*.safetensors")
    if is_missing:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-100])
    plan = bench.plan(model=str(model), output=str(tmp_path / "out"))
    with pytest.raises(InvalidInput):
        prepare(plan, bench.hardware, resume=False)
    assert not (tmp_path / "out").exists()
    with pytest.raises(InvalidInput):  # and before any trial
        make_plan(PlanRequest(model=str(model), data=str(bench.images)), bench.hardware)
