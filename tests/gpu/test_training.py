"""A whole run on the GPU: caching, training, previews and the report; resumed and disturbed."""

import contextlib
import random

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from autotune.plan.candidate import Candidate
from autotune.plan.file import seal
from autotune.train.prepare import SampleRequest, read_sample_inputs
from autotune.train.run import train
from autotune.train.sample import sample_run
from autotune.weights.files import open_weights
from autotune.weights.tensors import LOADERS
from tests.events import notices_to, steps_to
from tests.train.small import make_plan, write_model_and_images


class Stop(Exception):
    """Ends a run in its middle."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_model_and_images(tmp_path_factory.mktemp("data"))


@pytest.fixture
def settings(precision):
    return Candidate(micro_batch_size=2, checkpointed_blocks=1, precision=precision)


@pytest.fixture
def run(data, hardware, settings, tmp_path):
    def run(on_event=lambda event: None, *, name="out", resume=False, **changes):
        fields = Candidate.model_fields
        turned = {key: changes.pop(key) for key in list(changes) if key in fields}
        output, chosen = str(tmp_path / name), settings.changed(**turned)
        plan = make_plan(*data, hardware, settings=chosen, output=output, **changes)
        return train(plan, hardware, tmp_path / "cache", on_event, resume=resume)

    return run


@pytest.mark.values
@pytest.mark.anywhere
@pytest.mark.parametrize("storage", ["none", "torchao-int8"])
def test_run_with_swapped_blocks_samples_later(run, hardware, tmp_path, storage):
    report = run(swapped_blocks=1, quantization=storage, preview_prompts=("a red square",))
    assert report.verdict.num_unmoved == 0
    asked = read_sample_inputs(tmp_path / "out", SampleRequest("a red square", seed=0))
    (written,) = sample_run(asked, hardware, tmp_path / "cache")
    assert Image.open(written).size == Image.open(tmp_path / "out" / "sample_with_adapter.png").size


@pytest.mark.values
@pytest.mark.anywhere
def test_stopped_run_ends_alike(run, tmp_path):
    job = {"num_steps": 6, "checkpointing_steps": 3}
    whole = run(name="whole", **job)

    def stop(event):
        if event.step == 5:
            raise Stop

    with pytest.raises(Stop):
        run(steps_to(stop), name="broken", **job)
    run(name="broken", resume=True, **job)
    one, other = (load_file(tmp_path / name / whole.adapter) for name in ("whole", "broken"))
    for key, value in one.items():  # kernels with atomic additions need not repeat to the bit
        torch.testing.assert_close(value, other[key], rtol=2e-2, atol=1e-4, msg=key)


@pytest.mark.anywhere
@pytest.mark.parametrize("name", LOADERS)
def test_loaders_bring_the_same_bits(data, device, name):
    loader, target = LOADERS[name], torch.device(device)
    if reason := loader.why_not(target):
        pytest.skip(reason)
    source = open_weights(data[0] / "transformer")
    expected = {}
    for path in (data[0] / "transformer").glob("*.safetensors"):
        expected |= load_file(path)
    found = dict(loader.stream(source, target))
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert value.device.type == target.type
        assert torch.equal(value.cpu(), expected[key]), key


@pytest.mark.values
@pytest.mark.parametrize("step", random.Random(0).sample(range(1, 6), 2))
def test_stolen_memory_is_survived(data, hardware, settings, tmp_path, step):
    def plan(name):
        made = make_plan(*data, hardware, settings=settings, output=str(tmp_path / name))
        safer = settings.model_copy(update={"micro_batch_size": 1, "checkpointed_blocks": 2})
        return seal(made.job, made.frozen.model_copy(update={"fallbacks": (safer,)}))

    taken = []

    def take(event):
        if event.step == step:
            torch.cuda.empty_cache()
            # No new segments, and the holes of the old are filled.
            torch.cuda.set_per_process_memory_fraction(1e-6)
            for size in (2**20, 2**14, 512):
                with contextlib.suppress(torch.OutOfMemoryError):
                    while True:
                        taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))

    def give_back(warning="ran out"):
        if "ran out" not in warning:
            return
        taken.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)

    def disturb(event):
        steps_to(take)(event)
        notices_to(give_back)(event)

    try:
        report = train(plan("short"), hardware, tmp_path / "cache", disturb)
    finally:
        give_back()
    assert any(f"memory ran out at step {step + 1}" in warning for warning in report.warnings)
    assert report.settings.micro_batch_size == 1
    undisturbed = train(plan("ample"), hardware, tmp_path / "cache")
    assert report.final_loss == pytest.approx(undisturbed.final_loss, rel=0.02)
