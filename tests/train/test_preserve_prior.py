"""Images whose target is the base's own prediction: which they are, and under which settings."""

import time

import pytest
import torch

from autotune.data.dataset import scan_dataset
from autotune.data.items import DatasetOptions
from autotune.knobs.blocks import CompiledBlock
from autotune.search import worker
from autotune.train.folder import ADAPTER_FILE
from autotune.train.model import apply_settings
from autotune.train.step import Noising
from tests.data.pictures import write_pictures
from tests.train.small import SETTINGS
from tests.train.test_processes import Nodes, assert_one_learns_the_same
from tests.train.test_resume import same

STEPS = 3
SHARE = {"preserve_prior": 0.5}


@pytest.fixture(scope="module")
def preserving(bench):
    return bench.changed(**SHARE)


def losses(bench, folder, **plan):
    found = []
    bench.loop(bench.plan(num_steps=STEPS, **plan), folder, on_step=lambda e: found.append(e.loss))
    return found


@pytest.fixture(scope="module")
def usual(preserving, tmp_path_factory):
    return losses(preserving, tmp_path_factory.mktemp("usual"))


@pytest.mark.parametrize("adapter", ["lora", "lokr"])
def test_target_is_the_bases_prediction(bench, adapter):
    preserving = bench.changed(**SHARE, adapter=adapter)
    model, family = preserving.trained, preserving.resolved.family
    for parameter in model.adapter:
        parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    batch = model.collate([preserving.encoded.sample(at, is_prior=True) for at in (0, 1)])
    noising = Noising(seed=5)
    draws = [noising.draw(2, at, batch["latents"].shape[1:]) for at in (0, 1)]
    noise, levels = torch.stack([n for n, _ in draws]), torch.tensor([s for _, s in draws])
    noisy = noising.process.add_noise(batch["latents"], noise, levels)
    with torch.no_grad():
        ours = family.predict(model.transformer, noisy, levels, batch)
        model.transformer.disable_adapters()
        base = family.predict(model.transformer, noisy, levels, batch)
        model.transformer.enable_adapters()
    loss = noising.loss(family, model.transformer, batch, 2, 0)
    assert loss.item() == pytest.approx((ours - base).square().mean().item())
    assert loss.item() > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_size": 1},
        {"micro_batch_size": 4},
        {"checkpointed_blocks": 2},
        {"selective_blocks": 2},
        {"norm_rope": "fused"},
    ],
)
def test_settings_learn_same(preserving, usual, tmp_path, changes):
    settings = SETTINGS.changed(**changes)
    apply_settings(preserving.trained, settings)
    found = losses(preserving, tmp_path, settings=settings)
    apply_settings(preserving.trained, SETTINGS)
    assert found == pytest.approx(usual, rel=1e-5)


@pytest.mark.parametrize("changes", [{"swapped_blocks": 2}, {"modulation": "ahead"}])
def test_loaded_settings_learn_same(bench, usual, tmp_path, changes):
    settings = SETTINGS.changed(**changes)
    found = losses(bench.changed(settings, **SHARE), tmp_path, settings=settings)
    assert found == pytest.approx(usual, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"quantization": "torchao-int8"}, {"compile": "block"}])
def test_other_bases_are_preserved(bench, usual, tmp_path, monkeypatch, changes):
    monkeypatch.setattr(CompiledBlock, "backend", "aot_eager")  # inductor's graphs, without g++
    settings = SETTINGS.changed(**changes)
    found = losses(bench.changed(settings, **SHARE), tmp_path, settings=settings)
    assert found == pytest.approx(usual, rel=0.02)


def test_kills_end_alike(preserving, tmp_path):
    plan = preserving.plan(num_steps=STEPS, checkpointing_steps=1)
    whole = preserving.loop(plan, tmp_path / "whole")
    preserving.loop(plan, tmp_path / "killed", kill_after=2)
    assert same(preserving.loop(plan, tmp_path / "killed"), whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "work"),
    [("ddp", {}), ("fsdp2", {}), ("ddp", {"adapter": "lokr", "ema_decay": 0.5})],
)
def test_processes_preserve_as_one(bench, tmp_path, strategy, work):
    preserving = bench.changed(**SHARE, **work)
    plan = preserving.plan(num_processes=2, strategy=strategy, num_steps=3)
    two = Nodes(tmp_path, plan)
    assert two.finish(two.start()) == [0, 0], two.log()
    assert_one_learns_the_same(preserving, plan, two.output(0) / ADAPTER_FILE)


def test_trials_count_passes_through_base(preserving, monkeypatch):
    def predict(_family, _transformer, noisy, *_others):
        time.sleep(0.3)
        return noisy

    monkeypatch.setattr(worker, "predict_base", predict)
    work, resolved = preserving.plan().frozen.workload, preserving.resolved
    known = resolved.family, resolved.config, work, work.largest_bucket, [4] * 4
    samples = worker.synthetic_samples(*known, torch.float32)
    initial = preserving.initial, None, 0.0, None
    loaded = worker.LoadedModel(preserving.trained, samples, samples, *initial)
    _, seconds = worker.StepRunner(loaded, work, SETTINGS).timed_step()
    assert seconds > 0.5 * 2 * 0.3


def test_prior_captions_lack_the_trigger(tmp_path):
    data = write_pictures(tmp_path, (64, 64), (64, 64))
    texts = zip(sorted(data.glob("*.txt")), ("sks, a fox", "a sks dog, sks"), strict=True)
    for file, text in texts:
        file.write_text(text)
    for options, expected in (
        (DatasetOptions(trigger="sks"), {("a fox",), ("a dog",)}),
        (DatasetOptions(), {("",)}),
        (DatasetOptions(trigger="sks", prior_captions=("a", "b")), {("a", "b")}),
    ):
        assert {item.prior_captions for item in scan_dataset(data, options).items} == expected
